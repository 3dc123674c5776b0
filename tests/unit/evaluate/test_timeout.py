"""Ranks of an evaluation wait for each other as long as the user says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import shoal.evaluate.llm as llm
import shoal.evaluate.run as speech
from shoal.config import LoadOptions, load_arguments
from shoal.config.evaluate import EvaluateConfig


class Opened(Exception):
    """Carries the timeout that the process group would have been opened with."""


@pytest.mark.parametrize(
    ("module", "open_model"), [(llm, llm.open_llm), (speech, speech._open)], ids=["llm", "speech"]
)
@pytest.mark.parametrize(("words", "minutes"), [([], 10.0), (["timeout_minutes=90"], 90.0)])
def test_the_timeout_reaches_the_process_group(
    monkeypatch: pytest.MonkeyPatch,
    module: Any,
    open_model: Callable[[EvaluateConfig], Any],
    words: list[str],
    minutes: float,
) -> None:
    def opened(backend: str | None, timeout_minutes: float) -> None:
        raise Opened(timeout_minutes)

    monkeypatch.setattr(module, "initialize_distributed", opened)
    config = load_arguments(EvaluateConfig, ["pretrained_name=somewhere", *words], options=LoadOptions())
    with pytest.raises(Opened) as caught:
        open_model(config)
    assert caught.value.args == (minutes,)
