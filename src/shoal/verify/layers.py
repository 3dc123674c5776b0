"""The first module, in the order of the forward, that puts out something else on a layout than in one process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.verify.capture import Captured, TokenShare
from shoal.verify.parity import RankRecord
from shoal.verify.record import error_of, largest_entry


@dataclass(frozen=True)
class Difference:
    """Where a layout first differs.

    Attributes:
        module: Name of the module.
        micro_batch: Number of the global micro-batch.
        rank: The rank that saw it.
        error: Relative error.
        tokens: Tokens that are left, and that there should be, when these differ.
    """

    module: str
    micro_batch: int
    rank: int
    error: float
    tokens: tuple[int, int] | None = None

    def __str__(self) -> str:
        return f"{self.module} (micro-batch {self.micro_batch}, rank {self.rank}, error {self.error:.1e})"


def first_output(
    ranks: Sequence[RankRecord], plain: Sequence[Captured], axes: Mapping[str, int], tolerance: float
) -> Difference | None:
    """The first module whose output differs, over all ranks and micro-batches of the first step; None without one."""
    found: list[tuple[int, Difference]] = []
    tp_size, cp_size = axes["tp"], axes["cp"]
    for rank, index, captured in _runs(ranks, len(plain), axes["dp"]):
        expected = plain[index].outputs
        order = list(expected)
        largest = largest_entry(expected)
        for name in order:
            lost = None if cp_size > 1 else _lost_tokens(captured.outputs, expected, name, tp_size)
            if lost is not None:
                found.append((order.index(name), Difference(name, index, rank, float("inf"), lost)))
                break
            pair = _comparable(
                captured.outputs, expected, name, captured.share, ranks[rank].coordinate.tp, tp_size
            )
            if pair is not None and not (error := error_of(*pair, largest)) <= tolerance:
                found.append((order.index(name), Difference(name, index, rank, error)))
                break
    return min(found, key=lambda item: item[0])[1] if found else None


def _lost_tokens(
    actual: Mapping[str, Tensor], expected: Mapping[str, Tensor], name: str, tp_size: int
) -> tuple[int, int] | None:
    """Tokens of a rank's output [B, T, ...] and of the whole one, when they are neither all nor a rank's share."""
    if name not in actual or actual[name].dim() != 3 or expected[name].dim() != 3:
        return None
    have, want = actual[name].shape[1], expected[name].shape[1]
    return None if have in (want, -(-want // tp_size)) or have > want else (have, want)


def last_gradient(
    ranks: Sequence[RankRecord],
    plain: Sequence[Captured],
    layers: Sequence[str],
    axes: Mapping[str, int],
    tolerance: float,
) -> Difference | None:
    """The first of `layers` in the order of the *backward* to whose output a wrong gradient comes back."""
    found: list[tuple[int, Difference]] = []
    for rank, index, captured in _runs(ranks, len(plain), axes["dp"]):
        expected = plain[index].gradients
        largest = largest_entry(expected)
        order = [name for name in reversed(list(plain[index].outputs)) if name in layers]
        for name in order:
            pair = _comparable(
                captured.gradients, expected, name, captured.share, ranks[rank].coordinate.tp, axes["tp"]
            )
            if pair is not None and not (error := error_of(*pair, largest)) <= tolerance:
                found.append((order.index(name), Difference(name, index, rank, error)))
                break
    return min(found, key=lambda item: item[0])[1] if found else None


def _runs(
    ranks: Sequence[RankRecord], num_micro_batches: int, dp_size: int
) -> list[tuple[int, int, Captured]]:
    """(rank, number of the global micro-batch, what was captured) of every run but those of empty micro-batches."""
    return [
        (rank, index, captured)
        for rank, record in enumerate(ranks)
        for turn, captured in enumerate(record.captured)
        if (index := turn * dp_size + record.coordinate.dp) < num_micro_batches
    ]


def _comparable(
    actual: Mapping[str, Tensor],
    expected: Mapping[str, Tensor],
    name: str,
    share: TokenShare | None,
    tp_rank: int,
    tp_size: int,
) -> tuple[Tensor, Tensor] | None:
    """A rank's tensor and the part of the whole one that it should be; None where that is not known.

    Tokens (the second dim) are dealt to the context-parallel ranks as `share` says, and these spread over
    the tensor-parallel ranks in equal runs, the last one padded. Tensors cut along features are left out: families
    order the parts differently.
    """
    if name not in actual or name not in expected:
        return None
    mine, whole = actual[name], expected[name]
    if mine.shape == whole.shape:
        return mine, whole
    is_real = whole.new_ones(whole.shape[1:2], dtype=torch.bool) if whole.dim() > 1 else None
    if share is not None and _has_tokens(whole, share):
        is_real = share.is_real
        whole = whole.flatten(0, 1)[share.index][None]
    if (
        is_real is None
        or mine.dim() < 3
        or (mine.shape[0], *mine.shape[2:]) != (whole.shape[0], *whole.shape[2:])
    ):
        return None
    if mine.shape[1] not in (whole.shape[1], -(-whole.shape[1] // tp_size)):
        return None
    start = tp_rank * mine.shape[1] if mine.shape[1] != whole.shape[1] else 0
    span = slice(start, start + mine.shape[1])
    kept = is_real[span]
    return (mine[:, : len(kept)][:, kept], whole[:, span][:, kept]) if kept.any() else None


def _has_tokens(whole: Tensor, share: TokenShare) -> bool:
    """Whether a tensor of the plain process begins with the dims of the micro-batch."""
    return whole.dim() > 2 and whole.shape[0] * whole.shape[1] > int(share.index.max())
