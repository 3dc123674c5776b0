"""Minimal valid configurations that the tests vary."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

_SPEECH: dict[str, Any] = {
    "model": {
        "pretrained_llm": "a-public/llm",
        "pretrained_asr": "a-public/asr",
        "prompt_format": "llama2",
        "audio_locator_tag": "<|audio|>",
        "optimizer": {"_target_": "torch.optim.AdamW", "lr": 1e-4},
    },
    "trainer": {"accelerator": "cpu", "max_steps": 10},
    "data": {
        "train_ds": {
            "input_cfg": [{"type": "lhotse_as_conversation", "cuts_path": "train.jsonl.gz"}],
            "batch_size": 4,
        },
    },
}

_LLM: dict[str, Any] = {"step_scheduler": {"global_batch_size": 32, "local_batch_size": 1}}


def base(recipe: str) -> dict[str, Any]:
    """Returns a fresh copy of the smallest valid configuration of a recipe."""
    return deepcopy(_SPEECH if recipe == "speech" else _LLM)


def merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `below` with the keys of `above` written over it, block by block."""
    result = dict(below)
    for key, value in above.items():
        both = isinstance(value, Mapping) and isinstance(result.get(key), Mapping)
        result[key] = merged(result[key], value) if both else value
    return result
