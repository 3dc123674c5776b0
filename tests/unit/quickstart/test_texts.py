"""The quickstart's texts: what is said, which split it belongs to, and that nothing held out is synthesized."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

SCRIPTS = Path(__file__).parents[3] / "scripts" / "quickstart"


@pytest.fixture(scope="module")
def scripts() -> Iterator[Any]:
    """Imports modules of the scripts' folder, which Python finds by itself only when one of them is run."""
    before = set(sys.modules)
    sys.path.insert(0, str(SCRIPTS))
    yield importlib.import_module
    sys.path.remove(str(SCRIPTS))
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(SCRIPTS)):
            del sys.modules[name]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Please press 1, or 42.", "please press one or forty two"),
        ("at [@]", "at"),
        ("10 A.M.", "ten a m"),
        ("I'm sorry...", "i'm sorry"),
        ("Call-Forward", "call forward"),
        ("fourtieth", "fortieth"),
        ("press # to exit", None),  # pound or hash
        ("dial 500", None),  # five hundred or five zero zero
        ("USB Radio", None),
        ("visit www.example", None),
        ("(10 seconds of silence)", None),
    ],
)
def test_spoken_words(scripts: Any, text: str, words: str | None) -> None:
    assert scripts("transcripts").spoken_words(text) == words


def test_split_depends_on_the_text_alone_and_has_the_stated_shares(scripts: Any) -> None:
    split_of = scripts("transcripts").split_of
    counts = {"train": 0, "dev": 0, "heldout": 0}
    for index in range(20_000):
        counts[split_of(f"text {index}")] += 1
    assert counts["heldout"] / 20_000 == pytest.approx(0.15, abs=0.01)
    assert counts["dev"] / 20_000 == pytest.approx(0.08, abs=0.01)


def _speeches(folder: Path) -> Path:
    (folder / "1961-Someone.txt").write_text(
        "We stand here today. In 1961 we had 5 of them. Ask what you can do."
    )
    (folder / "1900-Older.txt").write_text("Verily this is too old.")
    return folder


def test_phrases_leave_reserved_texts_out(scripts: Any, tmp_path: Path) -> None:
    make_phrases = scripts("phrases").make_phrases
    training = ["please press one", "please hold", "thank you"]
    speeches = _speeches(tmp_path)
    free = make_phrases(500, training, speeches, reserved=(), seed=3)
    assert len(free) == len(set(free)) == 500
    reserved = set(free[::2])
    phrases = make_phrases(500, training, speeches, reserved, seed=3)
    assert reserved.isdisjoint(phrases)
    assert phrases == make_phrases(500, training, speeches, reserved, seed=3)
    assert not any("verily" in phrase or "them" in phrase.split() for phrase in phrases)


def test_walks_use_words_of_the_training_texts_only(scripts: Any, tmp_path: Path) -> None:
    import random

    walk = scripts("phrases")._prompt_walk(["press now", "hold now please"])
    rng = random.Random(0)
    said = {word for _ in range(200) for word in walk(rng).split()}
    assert said == {"press", "now", "hold", "please"}
