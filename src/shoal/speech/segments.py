"""Cuts the rows of a batch into segments and joins the encoded segments again, in order, by true length."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.speech.log_mel import frame_mask


@dataclass(frozen=True)
class Segments:
    """Consecutive pieces of the rows of a batch, row after row.

    Attributes:
        row: Which row each piece comes from, [N] int64, ascending.
        start: First element of each piece, [N] int64.
        length: Elements of each piece, [N] int64; 0 only for an empty row.
        num_rows: Rows of the batch.
    """

    row: Tensor
    start: Tensor
    length: Tensor
    num_rows: int

    @property
    def ordinal(self) -> Tensor:
        """Returns the index of each piece within its row, [N] int64."""
        first = torch.searchsorted(self.row, torch.arange(self.num_rows, device=self.row.device))
        return torch.arange(len(self.row), device=self.row.device) - first[self.row]


def cut(lengths: Tensor, size: int, shortest: int = 1) -> Segments:
    """Cuts rows into pieces of `size`; a last piece below `shortest` is folded into the one before it.

    Args:
        lengths: Elements of each row, [B] int64. A row of 0 elements gives one piece of length 0.
        size: Elements of a piece; the last of a row holds the rest (up to size + shortest - 1 elements).
        shortest: Least length of a last piece that is not the only one of its row.
    """
    counts = (lengths + size - 1) // size
    tails = lengths - (counts - 1) * size
    counts = (counts - ((counts > 1) & (tails < shortest)).to(counts.dtype)).clamp(min=1)
    row = torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), counts)
    pieces = Segments(row, torch.empty_like(row), torch.empty_like(row), len(lengths))
    ordinal = pieces.ordinal
    start = ordinal * size
    is_last = ordinal == counts[row] - 1
    length = torch.where(is_last, lengths[row] - start, size)
    return Segments(row, start, length, len(lengths))


def take(values: Tensor, segments: Segments, width: int) -> Tensor:
    """Returns the segments [N, width, ...] of values [B, T, ...], zero after the end of each segment."""
    offsets = torch.arange(width, device=values.device)
    index = (segments.start[:, None] + offsets).clamp(max=values.shape[1] - 1)
    mask = frame_mask(segments.length, width)
    mask = mask.reshape(*mask.shape, *[1] * (values.dim() - 2))
    return values[segments.row[:, None], index] * mask


def join(values: Tensor, lengths: Tensor, segments: Segments) -> tuple[Tensor, Tensor]:
    """Joins encoded segments to rows again.

    Args:
        values: Encoded segments [N, L, D]; what lies behind a segment's length is dropped.
        lengths: True lengths of the encoded segments, [N] int64.
        segments: Where they came from.

    Returns:
        Rows [B, L_max, D], zero after their ends, and their lengths [B] int64.
    """
    ends = lengths.cumsum(0)
    row_lengths = torch.zeros(segments.num_rows, dtype=lengths.dtype, device=lengths.device)
    row_lengths = row_lengths.index_add(0, segments.row, lengths)
    row_starts = row_lengths.cumsum(0) - row_lengths
    width = int(row_lengths.max())
    starts = segments.row * width + (ends - lengths - row_starts[segments.row])
    kept = frame_mask(lengths, values.shape[1])
    target = (starts[:, None] + torch.arange(values.shape[1], device=values.device))[kept]
    rows = values.new_zeros(segments.num_rows * width, values.shape[2]).index_copy(0, target, values[kept])
    return rows.reshape(segments.num_rows, width, values.shape[2]), row_lengths
