"""Which token of which document lies on which rank of context parallelism.

Each document is cut into 2 * size chunks of equal length, the last ones filled up with padding; rank r holds chunks r
and 2 * size - 1 - r of *every* document, one document after the other. A late chunk, whose queries see many keys, goes
with an early one, so that causal attention is the same work on every rank. A document shorter than 2 * size tokens
has chunks of one token or none.

All ranks hold equally many tokens. The real tokens of a document on a rank come before its padding there: when any
token of the later chunk is real, the earlier one has no padding.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate

import torch
from torch import Tensor


@dataclass(frozen=True)
class DualChunks:
    """The tokens of one micro-batch on the ranks of a group.

    Attributes:
        lengths: Real tokens of each document.
        size: Number of ranks.
        rank: This rank.
    """

    lengths: tuple[int, ...]
    size: int
    rank: int

    @cached_property
    def chunks(self) -> tuple[int, ...]:
        """Tokens of one chunk of each document, padding included."""
        return tuple(-(-length // (2 * self.size)) for length in self.lengths)

    @property
    def num_local(self) -> int:
        """Tokens on each rank, padding included; one token of padding when there is no document at all."""
        return max(1, 2 * sum(self.chunks))

    @property
    def num_real(self) -> int:
        """Real tokens on all ranks."""
        return sum(self.lengths)

    def halves(self, rank: int) -> tuple[int, int]:
        """Which two of the 2 * size chunks a rank holds, the earlier one first."""
        return rank, 2 * self.size - 1 - rank

    def real(self, rank: int, half: int) -> tuple[int, ...]:
        """Real tokens of each document in the earlier (0) or later (1) chunk of a rank."""
        index = self.halves(rank)[half]
        pairs = zip(self.lengths, self.chunks, strict=True)
        return tuple(min(max(length - index * chunk, 0), chunk) for length, chunk in pairs)


Places = Tensor | slice
"""Where tokens stand: at these indices int64, or in a row."""


@lru_cache(maxsize=64)
def local_places(layout: DualChunks, rank: int, half: int | None, device: torch.device) -> Places:
    """Where the real tokens of a rank stand among its own, document by document; of one half, or of both."""
    ranges = []
    start = 0
    for chunk, first, second in zip(layout.chunks, layout.real(rank, 0), layout.real(rank, 1), strict=True):
        if half is None:
            ranges.append(range(start, start + first + second))
        else:
            begin = start + half * chunk
            ranges.append(range(begin, begin + (first, second)[half]))
        start += 2 * chunk
    return _places(ranges, device)


@lru_cache(maxsize=64)
def gathered_places(layout: DualChunks, device: torch.device) -> Tensor:
    """Where each real token stands when the tokens of all ranks are joined in rank order, [num_real] int64.

    The real tokens are in the order of the documents, so that indexing with this undoes the split.
    """
    return torch.cat([*_gathered(layout), torch.zeros(0, dtype=torch.int64)]).to(device)


def _gathered(layout: DualChunks) -> list[Tensor]:
    starts = accumulate(layout.chunks, initial=0)
    parts = []
    for start, chunk, length in zip(starts, layout.chunks, layout.lengths, strict=False):
        position = torch.arange(length)
        index = position // max(chunk, 1)
        late = index >= layout.size
        rank = torch.where(late, 2 * layout.size - 1 - index, index)
        within = position - index * chunk + torch.where(late, chunk, 0)
        parts.append(rank * layout.num_local + 2 * start + within)
    return parts


def local_index(layout: DualChunks, starts: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """Which tokens of a micro-batch this rank holds.

    Args:
        layout: Of the micro-batch's documents.
        starts: Where each document begins among the flattened tokens of the micro-batch.
        device: Of the results.

    Returns:
        index int64 [num_local], the place of each local token in the flattened micro-batch; padding repeats the last
        token of its document, so that ids and positions stay in range. is_real bool [num_local].
    """
    index = torch.zeros(layout.num_local, dtype=torch.int64)
    is_real = torch.zeros(layout.num_local, dtype=torch.bool)
    at = 0
    for start, length, chunk in zip(starts, layout.lengths, layout.chunks, strict=True):
        for half in layout.halves(layout.rank):
            position = torch.arange(half * chunk, (half + 1) * chunk)
            index[at : at + chunk] = start + position.clamp(max=length - 1)
            is_real[at : at + chunk] = position < length
            at += chunk
    return index.to(device), is_real.to(device)


def borders_of(lengths: tuple[int, ...]) -> tuple[int, ...]:
    """Running sum of lengths with a 0 in front.

    >>> borders_of((3, 0, 2))
    (0, 3, 3, 5)
    """
    return tuple(accumulate(lengths, initial=0))


def take(x: Tensor, places: Places) -> Tensor:
    """The tokens of x [T, ...] at `places`."""
    return x[places] if isinstance(places, slice) else x.index_select(0, places)


def put(x: Tensor, places: Places, values: Tensor) -> None:
    """Sets the tokens of x [T, ...] at `places`, in place."""
    if isinstance(places, slice):
        x[places] = values
    else:
        x.index_copy_(0, places, values)


def add(x: Tensor, places: Places, values: Tensor) -> None:
    """Adds to the tokens of x [T, ...] at `places`, which are distinct, in place."""
    if isinstance(places, slice):
        x[places] += values
    else:
        x.index_add_(0, places, values.to(x.dtype))


def _places(ranges: list[range], device: torch.device) -> Places:
    """A slice when the ranges that are not empty follow each other, else indices."""
    ranges = [one for one in ranges if len(one)]
    if not ranges:
        return slice(0, 0)
    if all(one.stop == other.start for one, other in zip(ranges, ranges[1:], strict=False)):
        return slice(ranges[0].start, ranges[-1].stop)
    return torch.cat([torch.arange(one.start, one.stop) for one in ranges]).to(device)


__all__ = [
    "DualChunks",
    "Places",
    "add",
    "borders_of",
    "gathered_places",
    "local_index",
    "local_places",
    "put",
    "take",
]
