"""Cuts packed attention into blocks of queries with the keys they can see, so that masks stay small."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

MASKED_ROWS = 512
"""Queries per block where a mask is needed, so that a mask takes 512 x keys numbers and not queries x keys."""


@dataclass(frozen=True)
class Mask:
    """Which of `num_keys` keys each of `num_queries` queries sees; query 0 stands at key `position`."""

    num_queries: int
    num_keys: int
    position: int
    causal: bool
    window: int | None

    @property
    def hides(self) -> bool:
        """Whether some query does not see some key."""
        last = self.position + self.num_queries - 1
        later = self.causal and self.position < self.num_keys - 1
        far = self.window is not None and max(last, self.num_keys - 1 - self.position) >= self.window
        return later or far

    def additive(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Returns 0 where a key is seen and minus infinity elsewhere, [num_queries, num_keys]."""
        rows = torch.arange(self.num_queries, device=device)[:, None] + self.position
        distance = rows - torch.arange(self.num_keys, device=device)
        hidden = distance < 0 if self.causal else torch.zeros_like(distance, dtype=torch.bool)
        if self.window is not None:
            hidden |= distance.abs() >= self.window
        return torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, -torch.inf)


@dataclass(frozen=True)
class Block:
    """Queries [q_start, q_stop) over keys [k_start, k_stop); every query sees at least one of the keys.

    `lower_triangle` says that query i sees keys 0 to i of equally many; otherwise `mask` says it, or all are seen.
    """

    q_start: int
    q_stop: int
    k_start: int
    k_stop: int
    lower_triangle: bool = False
    mask: Mask | None = None

    @property
    def queries(self) -> slice:
        return slice(self.q_start, self.q_stop)

    @property
    def keys(self) -> slice:
        return slice(self.k_start, self.k_stop)


@lru_cache(maxsize=64)
def blocks(
    cu_q: tuple[int, ...],
    cu_k: tuple[int, ...],
    causal: bool,
    window: int | None,
    max_rows: int | None = None,
    positions: tuple[int, ...] | None = None,
) -> tuple[Block, ...]:
    """Returns blocks that cover every query that sees a key, exactly once.

    Args:
        cu_q: Borders of the documents among the queries [N+1].
        cu_k: Borders among the keys [N+1].
        causal: A query sees no later key.
        window: A query sees keys nearer than this.
        max_rows: Largest number of queries in a block; without it only masked blocks are cut.
        positions: At which key each document's first query stands [N]; without it the last query of a document
            stands where its last key does.
    """
    found: list[Block] = []
    for index in range(len(cu_q) - 1):
        q_start, k_start = cu_q[index], cu_k[index]
        num_queries, num_keys = cu_q[index + 1] - q_start, cu_k[index + 1] - k_start
        position = num_keys - num_queries if positions is None else positions[index]
        for block in _of_document(num_queries, num_keys, position, causal, window, max_rows):
            found.append(
                Block(
                    q_start + block.q_start,
                    q_start + block.q_stop,
                    k_start + block.k_start,
                    k_start + block.k_stop,
                    block.lower_triangle,
                    block.mask,
                )
            )
    return tuple(found)


def _of_document(
    num_queries: int, num_keys: int, position: int, causal: bool, window: int | None, max_rows: int | None
) -> Iterator[Block]:
    """Yields the blocks of one document, counted from its beginning; its first query stands at key `position`."""
    farthest = max(position + num_queries - 1, 0 if causal else num_keys - 1 - position)
    if window is not None and window > farthest:
        window = None
    # The first and the last query that see a key: less than a window before key 0, or after the last key.
    first = max(0, -position) if causal else 0 if window is None else max(0, 1 - window - position)
    end = num_queries if window is None else min(num_queries, num_keys + window - 1 - position)
    if num_keys == 0 or first >= end:
        return
    if max_rows is None and window is None:
        if not causal or first + position >= num_keys - 1:
            yield Block(first, end, 0, num_keys)
            return
        if first + position == 0 and end - first == num_keys:
            yield Block(first, end, 0, num_keys, lower_triangle=True)
            return
    # Rows as wide as the window waste at most half of a block's scores.
    rows = MASKED_ROWS if window is None else min(MASKED_ROWS, max(window, 64))
    rows = rows if max_rows is None else min(rows, max_rows)
    for start in range(first, end, rows):
        stop = min(start + rows, end)
        k_start = 0 if window is None else max(0, start + position - window + 1)
        k_stop = num_keys
        if causal:
            k_stop = min(num_keys, stop + position)
        elif window is not None:
            k_stop = min(num_keys, stop - 1 + position + window)
        mask = Mask(stop - start, k_stop - k_start, start + position - k_start, causal, window)
        yield Block(start, stop, k_start, k_stop, mask=mask if mask.hides else None)
