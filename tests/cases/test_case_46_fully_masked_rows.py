"""Case 46: a fully masked query row turns all gradients into NaN in some attention kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.parity.harness import relative_errors
from tests.tiny import ragged_micro_batches, tiny_salm


def gradients(attention: str, micro_batches: list[dict[str, Any]]) -> dict[str, Tensor]:
    model = tiny_salm(dtype=torch.float64, attn_implementation=attention)
    for micro_batch in micro_batches:
        model(micro_batch)["loss_sum"].backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def row(micro_batch: dict[str, Any], index: int) -> dict[str, Any]:
    """One row of a micro-batch without any padding."""
    text, audio = int(micro_batch["text_lens"][index]), int(micro_batch["audio_lens"][index])
    return {
        **micro_batch,
        "audios": micro_batch["audios"][index : index + 1, :audio],
        "audio_lens": micro_batch["audio_lens"][index : index + 1],
        "input_ids": micro_batch["input_ids"][index : index + 1, :text],
        "loss_mask": micro_batch["loss_mask"][index : index + 1, :text],
        "text_lens": micro_batch["text_lens"][index : index + 1],
        "sample_ids": micro_batch["sample_ids"][index : index + 1],
        "sample_seeds": micro_batch["sample_seeds"][index : index + 1],
    }


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_padding_changes_no_gradient(attention: str) -> None:
    padded = ragged_micro_batches(3, seed=46)[2]
    assert len(padded["text_lens"].unique()) > 1 and len(padded["audio_lens"].unique()) > 1
    together = gradients(attention, [padded])
    assert all(torch.isfinite(gradient).all() for gradient in together.values())
    alone = gradients(attention, [row(padded, index) for index in range(len(padded["text_lens"]))])
    # The log-mel features are fp32 and depend on the width of the window batch in the last bits.
    assert max(relative_errors(together, alone).values()) < 1e-5


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_row_that_is_all_padding_is_finite(attention: str) -> None:
    padded = ragged_micro_batches(3, seed=47, without_audio=(2,))[2]
    padded["text_lens"][1] = 0
    padded["loss_mask"][1] = False
    assert all(torch.isfinite(gradient).all() for gradient in gradients(attention, [padded]).values())
