"""Fields of a model's configuration: known ones are taken, others refused with the nearest."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import AutoConfig

from shoal.models.fields import configuration_of
from tests.verify.test_shrink import LARGE


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"model_type": "llama", "hiden_size": 8}, ["model.config.hiden_size", "repair: hidden_size"]),
        ({"model_type": "lama"}, ["model.config.model_type = 'lama'", "repair: llama"]),
        (
            {"model_type": "gpt2", "n_layers": 2, "n_heds": 4},
            ["model.config.n_layers", "repair: n_layer", "model.config.n_heds", "repair: n_head"],
        ),
        ({"model_type": "llama", "zzzz": 8}, ["model.config.zzzz", "leave it out"]),
    ],
)
def test_unknown_fields_are_refused_together(fields: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ValueError) as refused:
        configuration_of(fields, "model.config")
    assert all(word in str(refused.value) for word in words), refused.value


@pytest.mark.parametrize("model_type", [*LARGE, "bamba", "mamba2", "gemma2", "llama4_text", "qwen3_next"])
def test_every_field_that_transformers_saves_is_known(model_type: str) -> None:
    saved = AutoConfig.for_model(model_type, **LARGE.get(model_type, {})).to_dict()
    assert configuration_of(saved, "model.config").to_dict() == saved


def test_fields_that_a_class_reads_from_its_arguments_are_known() -> None:
    rope = configuration_of({"model_type": "llama", "rope_theta": 5e5, "torch_dtype": "bfloat16"}, "config")
    assert rope.rope_parameters["rope_theta"] == 5e5
    pattern = configuration_of({"model_type": "nemotron_h", "hybrid_override_pattern": "M*-"}, "config")
    assert pattern.num_hidden_layers == 3
