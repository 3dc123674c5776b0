"""The quickstart fails for a model that does not listen."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shoal.evaluate.listening import Listening
from shoal.evaluate.metrics import WordErrors

SCRIPTS = Path(__file__).parents[3] / "scripts" / "quickstart"


@pytest.fixture
def module() -> Iterator[Any]:
    sys.path.insert(0, str(SCRIPTS))
    yield importlib.import_module("evaluation")
    sys.path.remove(str(SCRIPTS))
    del sys.modules["evaluation"]


def _failures(
    module: Any, *, clips: int = 60, own: float = 0.5, low: float = 0.1, errors: int = 5, others: int = 50
) -> list[str]:
    found: list[str] = module.Evaluation(
        references=("word",) * clips,
        hypotheses=("word",) * clips,
        durations=(1.0,) * clips,
        own_audio=WordErrors(hits=100 - errors, substitutions=errors),
        other_audio=WordErrors(hits=100 - others, substitutions=others),
        listening=Listening(own=own, exchanged=1.0, low=low, high=0.9, level=0.95),
    ).failures()
    return found


def test_a_listening_model_passes(module: Any) -> None:
    assert _failures(module) == []
    assert _failures(module, own=0.8) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"clips": 49}, "49 held-out clips"),
        ({"own": 0.81}, "0.81"),
        ({"low": 0.0}, "includes 0"),
        ({"errors": 21}, "21.0%, above 20%"),
        ({"others": 5}, "no more word errors"),
    ],
)
def test_each_condition_fails_by_itself(module: Any, change: dict[str, Any], message: str) -> None:
    (failure,) = _failures(module, **change)
    assert message in failure
