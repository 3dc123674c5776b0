"""SALM over language models with windows, sinks, latent attention and Mamba-2 layers: packed equals padded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from shoal.kernels.attention_hf import PACKED_ATTENTION, register_attention
from shoal.models.mamba import substitute_mamba
from shoal.speech.salm import SALM
from tests.tiny import PLACEHOLDER, ragged_micro_batches, tiny_salm
from tests.unit.kernels.families import InDouble, tiny_model

MAMBA: dict[str, Any] = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 8}
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt_oss": {},
    "gemma3_text": {},
    "deepseek_v3": {},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"], **MAMBA},
    "bamba": {"attn_layer_indices": [1], **MAMBA},
}


def salm(family: str, packed: bool) -> SALM:
    register_attention()
    llm = tiny_model(family, torch.float64, **FAMILIES[family])
    substitute_mamba(llm)
    if packed:
        llm.set_attn_implementation(PACKED_ATTENTION)
    in_double(llm)
    perception = tiny_salm("whisper", torch.float64).perception
    return SALM(llm, perception, placeholder_id=PLACEHOLDER, packed=packed).eval()


def in_double(llm: PreTrainedModel) -> None:
    """Keeps the language model, and nothing else, from casting to float32."""
    mode = InDouble()

    def enter(*_: Any) -> None:
        mode.__enter__()

    def leave(*_: Any) -> None:
        mode.__exit__(None, None, None)

    llm.base_model.register_forward_pre_hook(enter)
    llm.base_model.register_forward_hook(leave)


def sums_and_gradients(model: SALM, batch: dict[str, Any]) -> dict[str, Tensor]:
    out = model(batch)
    out["loss_sum"].backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return {name: out[name].detach() for name in ("loss_sum", "num_tokens", "num_correct")} | gradients


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_equals_padded(family: str) -> None:
    batch = ragged_micro_batches(3, seed=5)[2]
    ours, expected = (sums_and_gradients(salm(family, packed), batch) for packed in (True, False))
    assert ours.keys() == expected.keys()
    tolerance = 1e-8 if MAMBA.keys() <= FAMILIES[family].keys() else 1e-10
    largest = max(float(value.abs().max()) for name, value in expected.items() if "." in name)
    for name, value in expected.items():
        error = float((ours[name] - value).abs().max())
        assert error <= tolerance * max(float(value.abs().max()), 1e-3 * largest), name
