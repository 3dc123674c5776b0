"""Makes the texts that are synthesized for training: numbers, spelling, prompt-like phrases and plain English.

Nothing here has seen a held-out text. Prompt-like phrases are random walks over the word pairs of the *training*
prompts, plain English is cut from speeches, the rest are closed lists of the language. A phrase that equals a
reserved text as a whole is discarded.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from transcripts import number_words, words

Maker = Callable[[random.Random], str]

_ORDINALS = words(
    "first second third fourth fifth sixth seventh eighth ninth tenth eleventh twelfth thirteenth fourteenth "
    "fifteenth sixteenth seventeenth eighteenth nineteenth twentieth thirtieth fortieth fiftieth sixtieth "
    "seventieth eightieth ninetieth hundredth thousandth millionth billionth"
)
_MONTHS = words("january february march april may june july august september october november december")
_DAYS = words("monday tuesday wednesday thursday friday saturday sunday today tomorrow yesterday")
_LETTERS = list("abcdefghijklmnopqrstuvwxyz")
_SPELLING = words(
    "alpha bravo charlie delta echo foxtrot golf hotel india juliet kilo lima mike november oscar papa quebec "
    "romeo sierra tango uniform victor whiskey xray yankee zulu niner zed"
)
_SYMBOLS = words(
    "at|dot|dash|slash|backslash|star|pound|plus|minus|equals|space|comma|colon|semicolon|quote|tick|backtick|"
    "underscore|percent|dollar|dollar sign|ampersand|asterisk|question mark|exclamation point|open parenthesis|"
    "close parenthesis|left bracket|right bracket|left brace|right brace|less than|greater than|tilde|caret|pipe",
    separator="|",
)
_UNITS = words("seconds|minutes|hours|days|dollars|cents|percent|messages|callers|calls", separator="|")
_MAX_WORDS = 12


def make_phrases(
    count: int, training_texts: Collection[str], speeches: Path, reserved: Collection[str], seed: int
) -> list[str]:
    """`count` different phrases, none of them in `reserved`; the same ones for the same arguments."""
    rng = random.Random(seed)
    walk = _prompt_walk(sorted(training_texts))
    english = _english(speeches)
    makers: Sequence[tuple[Maker, float]] = (
        (_number, 0.12),
        (_date_or_time, 0.08),
        (_spelling, 0.12),
        (walk, 0.38),
        (english, 0.30),
    )
    functions, weights = zip(*makers, strict=True)
    refused = set(reserved)
    phrases: dict[str, None] = {}
    while len(phrases) < count:
        phrase = rng.choices(functions, weights)[0](rng)
        if phrase not in refused and 0 < len(phrase.split()) <= _MAX_WORDS:
            phrases[phrase] = None
    return list(phrases)


def _cardinal(rng: random.Random) -> str:
    value = rng.randrange(100)
    kind = rng.random()
    if kind < 0.6:
        return number_words(value)
    scale = rng.choice(("hundred", "thousand", "million", "billion"))
    head = f"{number_words(rng.randrange(1, 20))} {scale}"
    return head if kind < 0.75 else f"{head} {number_words(rng.randrange(1, 100))}"


def _number(rng: random.Random) -> str:
    kind = rng.random()
    if kind < 0.35:
        return " ".join(number_words(rng.randrange(10)) for _ in range(rng.randint(2, 6)))
    if kind < 0.5:
        tens = number_words(10 * rng.randrange(2, 10))
        return rng.choice(_ORDINALS) if rng.random() < 0.5 else f"{tens} {rng.choice(_ORDINALS[:9])}"
    if kind < 0.75:
        return f"{_cardinal(rng)} {rng.choice(_UNITS)}"
    return ("minus " if rng.random() < 0.1 else "") + _cardinal(rng)


def _date_or_time(rng: random.Random) -> str:
    kind = rng.random()
    if kind < 0.25:
        return rng.choice(_DAYS + _MONTHS)
    if kind < 0.6:
        date = f"{rng.choice(_MONTHS)} {rng.choice(_ORDINALS[:20])}"
        return f"{rng.choice(_DAYS)} {date}" if rng.random() < 0.5 else date
    hour = number_words(rng.randrange(1, 13))
    minutes = rng.choice(
        ("o'clock", "oh " + number_words(rng.randrange(1, 10)), number_words(rng.randrange(10, 60)))
    )
    half = rng.choice((" a m", " p m", ""))
    return f"{rng.choice(('at ', ''))}{hour} {minutes}{half}"


def _spelling(rng: random.Random) -> str:
    names = rng.choices((_LETTERS, _SPELLING, _SYMBOLS), (0.4, 0.3, 0.3))[0]
    return " ".join(rng.choice(names) for _ in range(rng.choice((1, 1, 2, 3, 4))))


def _prompt_walk(texts: Sequence[str]) -> Maker:
    """Random walks: start as some prompt does, continue as any prompt does after the last word, end likewise."""
    following: dict[str, list[str]] = {}
    for text in texts:
        path = ["", *text.split(), ""]
        for word, successor in zip(path, path[1:], strict=False):
            following.setdefault(word, []).append(successor)

    def walk(rng: random.Random) -> str:
        said: list[str] = []
        # Half of the walks start in the middle, so that rare words come up as often as openings do.
        word = "" if rng.random() < 0.5 else rng.choice(sorted(following))
        if word:
            said.append(word)
        while len(said) < _MAX_WORDS:
            word = rng.choice(following[word])
            if not word:
                break
            said.append(_vary_number(word, rng))
        return " ".join(said)

    return walk


def _vary_number(word: str, rng: random.Random) -> str:
    digits = [number_words(value) for value in range(10)]
    return rng.choice(digits) if word in digits and rng.random() < 0.5 else word


def _english(speeches: Path) -> Maker:
    """Runs of 1 to 8 words from the speeches since 1950, cut inside sentences without digits."""
    sentences: list[list[str]] = []
    for path in sorted(speeches.glob("*.txt")):
        if path.name >= "1950":
            text = path.read_text(encoding="utf-8").replace("\u2019", "'")
            for sentence in re.split(r"[.!?;:\n\u2014]+", text):
                if re.fullmatch(r"[A-Za-z' ,]+", sentence.strip()):
                    sentences.append(re.sub(r"[^a-z']", " ", sentence.lower()).split())

    def english(rng: random.Random) -> str:
        sentence = rng.choice(sentences)
        length = rng.randint(1, 8)
        start = rng.randrange(max(1, len(sentence) - length + 1))
        return " ".join(sentence[start : start + length])

    return english
