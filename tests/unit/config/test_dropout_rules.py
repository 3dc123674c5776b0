"""Dropout that draws from a generator is refused from YAML and config.json alone where ranks share a micro-batch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shoal.config import ConfigError, Finding, load_config
from tests.unit.config.base import base, merged

_STRATEGY = "shoal.train.strategy.AutomodelParallelStrategy"
_FIELDS = {"model_type": "llama", "vocab_size": 64, "attention_dropout": 0.1}


def refused(data: dict[str, Any], rule: str, world: int = 2) -> list[Finding]:
    with pytest.raises(ConfigError) as caught:
        load_config(data, world_size=world)
    return [finding for finding in caught.value.findings if finding.rule == rule]


def speech(folder: Path | str, **sizes: int) -> dict[str, Any]:
    change = {"model": {"pretrained_llm": str(folder)}}
    if sizes:
        change["trainer"] = {"strategy": {"_target_": _STRATEGY, **sizes}}  # type: ignore[dict-item]
    return merged(base("speech"), change)


def folder_with(tmp_path: Path, fields: dict[str, Any]) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(fields))
    return tmp_path


@pytest.mark.parametrize("axis", ["tp_size", "cp_size", "pp_size"])
def test_the_folder_of_a_model_with_attention_dropout(axis: str, tmp_path: Path) -> None:
    folder = folder_with(tmp_path, {"text_config": {"attn_pdrop": 0.1}, "hidden_dropout": 0.5})
    (finding,) = refused(speech(folder, **{axis: 2}), "attention-dropout")
    assert (finding.key, finding.value) == ("model.pretrained_llm", str(folder))
    assert "attn_pdrop: 0 (this one: 0.1)" in finding.limit
    assert f"trainer.strategy.{axis} = 2" in finding.limit
    assert finding.repair == f"set attn_pdrop to 0 in {folder / 'config.json'}"


def test_fields_in_the_file_itself() -> None:
    data = {**base("llm"), "model": {"config": _FIELDS}, "distributed": {"tp_size": 2}}
    (finding,) = refused(data, "attention-dropout")
    assert (finding.key, finding.value) == ("model.config.attention_dropout", 0.1)
    assert finding.limit == "0 with distributed.tp_size = 2"
    assert finding.repair == "model.config.attention_dropout: 0"


def test_the_conformer_between_encoder_and_language_model() -> None:
    adapter = {"model": {"perception": {"modality_adapter": {"kind": "conformer", "dropout": 0.1}}}}
    (finding,) = refused(merged(speech("a-public/llm", tp_size=2), adapter), "adapter-dropout")
    assert (finding.key, finding.value) == ("model.perception.modality_adapter.dropout", 0.1)
    assert finding.repair == "model.perception.modality_adapter.dropout: 0"
    load_config(merged(speech("a-public/llm"), adapter), world_size=2)


def test_data_parallel_layouts_and_models_without_it_pass(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, {"attention_dropout": 0.1})
    load_config(speech(folder), world_size=2)
    load_config(speech(folder_with(tmp_path, {"attention_dropout": 0.0}), tp_size=2), world_size=2)
