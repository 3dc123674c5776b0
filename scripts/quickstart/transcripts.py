"""Turns prompt texts into the words that are spoken, and splits them by text."""

from __future__ import annotations

import gzip
import hashlib
import re
from pathlib import Path

SPLITS = ("train", "dev", "heldout")
_HELDOUT_PERCENT = 15
_DEV_PERCENT = 8


def words(text: str, separator: str | None = None) -> list[str]:
    """The parts of a list written as one string, which reads better than a column of quoted words."""
    return text.split(separator)


_UNITS = words(
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen "
    "seventeen eighteen nineteen"
)
_TENS = words("twenty thirty forty fifty sixty seventy eighty ninety")
# Spellings of the source that are not words; the speaker says the word on the right.
_CORRECTIONS = {
    "fourtieth": "fortieth",
    "exclaimation": "exclamation",
    "umute": "unmute",
    "un indentified": "unidentified",
}


def number_words(value: int) -> str:
    """The English words of 0 <= value < 100."""
    if not 0 <= value < 100:
        raise ValueError(f"number_words: {value} is outside 0 to 99")
    if value < 20:
        return _UNITS[value]
    tens, unit = divmod(value, 10)
    return _TENS[tens - 2] + (f" {_UNITS[unit]}" if unit else "")


def spoken_words(text: str) -> str | None:
    """Lower-case words without punctuation, or None where the text does not determine what is said.

    Notes in brackets go. Numbers below 100 become words. Symbols, longer numbers and acronyms can be read in
    several ways (`#` is "pound" or "hash"), so a text with one of them has no certain reference.
    """
    text = re.sub(r"\[[^\]]*\]|<[^>]*>|\([^)]*\)", " ", text)
    text = re.sub(r"\b([AP])\.M\.", r"\1 m", text)
    text = re.sub(r"\b(\d{1,2})\b", lambda match: number_words(int(match[1])), text)
    if re.search(r"[0-9#*@$%=+]|\b[A-Z]{2,}|[A-Za-z]\.[A-Za-z]", text):
        return None
    said = " ".join(re.sub(r"[^a-z']", " ", text.lower()).split())
    for wrong, right in _CORRECTIONS.items():
        said = re.sub(rf"\b{wrong}\b", right, said)
    return said or None


def split_of(said: str) -> str:
    """The split a text belongs to, from a hash of the text alone: every voice that reads it lands there."""
    bucket = int.from_bytes(hashlib.sha256(said.encode()).digest()[:4], "big") % 100
    if bucket < _HELDOUT_PERCENT:
        return "heldout"
    return "dev" if bucket < _HELDOUT_PERCENT + _DEV_PERCENT else "train"


def read_prompt_texts(path: Path) -> dict[str, str]:
    """The `key: text` lines of a core-sounds text file; `;` starts a comment."""
    with gzip.open(path, "rt", encoding="utf-8") as stream:
        pairs = (line.split(":", 1) for line in stream if ":" in line and not line.startswith(";"))
        return {key.strip(): text.strip() for key, text in pairs}
