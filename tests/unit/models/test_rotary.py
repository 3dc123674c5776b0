"""Rotary embeddings that follow lengths: packs and rows get the same, and no micro-batch leaves a trace."""

from __future__ import annotations

import pytest
import torch

from shoal.data.text_batches import packed, padded
from shoal.kernels.attention_hf import register_attention
from shoal.models.causal_lm import CausalLM
from shoal.models.rotary import steady_rotation
from tests.families import tiny_lm
from tests.unit.models.test_causal_lm import PAD, documents

FAMILIES = ("phi3-long", "llama-dynamic")
SHORT, LONG = (5, 9), (5, 14, 12)
"""To either side of 10 and of 13, the lengths from which these models change."""


def loss(model: CausalLM, lengths: tuple[int, ...], *, pack_size: int = 0) -> float:
    rows = documents(lengths)
    model.llm.set_attn_implementation("shoal" if pack_size else "sdpa")
    return float(model(packed(rows, pack_size, PAD) if pack_size else padded(rows, PAD))["loss_sum"].detach())


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("lengths", [SHORT, LONG])
def test_packed_as_in_rows_however_long_the_padding_is(family: str, lengths: tuple[int, ...]) -> None:
    register_attention()
    model = CausalLM(tiny_lm(family, torch.float64))
    assert loss(model, lengths, pack_size=60) == pytest.approx(loss(model, lengths), rel=1e-10)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_micro_batch_is_rotated_as_if_it_were_the_first(family: str) -> None:
    model = CausalLM(tiny_lm(family, torch.float64))
    alone = loss(CausalLM(tiny_lm(family, torch.float64)), (11, 12))
    loss(model, (20, 3))  # longer; transformers' own would stay stretched for it
    assert loss(model, (11, 12)) == alone


def test_other_models_are_left_alone() -> None:
    assert steady_rotation(tiny_lm("llama")) == steady_rotation(tiny_lm("gpt2")) == 0
    assert steady_rotation(tiny_lm("phi3-long")) == 1
