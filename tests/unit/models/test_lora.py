"""Adapters are refused with what the model has."""

from __future__ import annotations

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from shoal.models.lora import add_lora


def test_modules_that_are_not_there_are_refused_with_those_that_are() -> None:
    config = LlamaConfig(
        vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2
    )
    words = (
        "q_prj.* Linear layers here: down_proj, gate_proj, k_proj, lm_head, o_proj, q_proj, up_proj, v_proj$"
    )
    with pytest.raises(ValueError, match=f"^peft.target_modules: .*{words}"):
        add_lora(LlamaForCausalLM(config), {"r": 2, "target_modules": ["q_prj"]}, "peft.target_modules")
