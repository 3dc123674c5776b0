"""What a rank gets for one optimizer step, once it is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from shoal.data.position import StreamPosition

MicroBatch = dict[str, Any]
"""See `shoal.data.dataset.collate` for its entries."""


@dataclass(frozen=True)
class StepBatch:
    """What one rank gets for one optimizer step.

    Args:
        micro_batches: The same number on every rank; see `collate` for their entries.
        position: Where the job stands after this step.
        error: Origin of a failure (sample and exception), to be agreed on by all ranks; None without one.
        skipped: Number of examples left out, by reason.
    """

    micro_batches: list[MicroBatch]
    position: StreamPosition
    error: str | None = None
    skipped: Mapping[str, int] = field(default_factory=dict)

    def pin_memory(self) -> StepBatch:
        """Returns a copy with pinned tensors; torch's DataLoader calls this when pin_memory is set."""
        pinned = [
            {key: value.pin_memory() if isinstance(value, Tensor) else value for key, value in batch.items()}
            for batch in self.micro_batches
        ]
        return replace(self, micro_batches=pinned)


def empty_micro_batch(pad_id: int) -> MicroBatch:
    """Returns a micro-batch of the smallest shape and no supervised token, which keeps peers in lockstep.

    Its one row has two tokens, because a row of one leaves nothing after the shift of the labels.
    """
    return {
        "audios": torch.zeros(0, 0),
        "audio_lens": torch.zeros(0, dtype=torch.int64),
        "input_ids": torch.full((1, 2), pad_id, dtype=torch.int64),
        "loss_mask": torch.zeros(1, 2, dtype=torch.bool),
        "text_lens": torch.tensor([2]),
        "sample_ids": [""],
        "sample_seeds": torch.zeros(1, dtype=torch.int64),
        "is_empty": True,
    }
