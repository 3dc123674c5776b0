"""Steps: windows of the global stream dealt out over data-parallel ranks, replayable from any position.

This runs in the main process on metadata only and is the same on every rank, apart from which micro-batches a
rank keeps.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import Protocol

from torch.utils.data import Sampler

from shoal.config.seeds import derive_seed
from shoal.data.position import START, Named, StepPlan, StreamPosition

logger = logging.getLogger(__name__)

MicroBatchItems = tuple[Named, ...]


@dataclass
class EpochStream:
    """One pass over the micro-batches; `skipped` counts, by reason, what was left out so far."""

    batches: Iterator[MicroBatchItems]
    skipped: Counter[str]


class GlobalStream(Protocol):
    """A stream of global micro-batches, a function of (configuration, order seed, epoch) alone.

    `key` is the key path of its configuration, for messages; `drop_last` leaves an unfinished last step out.
    """

    key: str
    drop_last: bool

    def epoch(self, epoch: int, order_seed: int) -> EpochStream:
        """Returns the micro-batches of one epoch in their order."""


class StepSampler(Sampler[StepPlan]):
    """Deals windows of `global_micro_batches` micro-batches round-robin over data-parallel ranks.

    Rank r takes micro-batches r, r + dp_size, ... of each window; every rank gets ceil(global_micro_batches /
    dp_size) of them, filled up with empty ones. The last window of an epoch may be partial.

    Args:
        stream: The global micro-batches.
        dp_rank: This rank's data-parallel coordinate.
        dp_size: Number of data-parallel coordinates.
        global_micro_batches: Micro-batches of one step over all ranks.
        order_seed: Orders the epochs to come; None (``shard_seed: trng``) keeps the one saved in the
            position.
        position: Where to start.
        steps_per_epoch: Number of steps of one iteration, over ends of data epochs if need be; None iterates
            to the end of the data epoch.

    Raises:
        ValueError: for impossible sizes, or without any order seed.
    """

    def __init__(
        self,
        stream: GlobalStream,
        *,
        dp_rank: int,
        dp_size: int,
        global_micro_batches: int,
        order_seed: int | None,
        position: StreamPosition,
        steps_per_epoch: int | None,
    ) -> None:
        if not 0 <= dp_rank < dp_size:
            raise ValueError(f"dp_rank: {dp_rank} must be in [0, dp_size), and dp_size is {dp_size}")
        if global_micro_batches < 1 or (steps_per_epoch is not None and steps_per_epoch < 1):
            raise ValueError(
                f"global_micro_batches {global_micro_batches} and steps_per_epoch {steps_per_epoch} must "
                "be positive"
            )
        self._stream = stream
        self._dp_rank = dp_rank
        self._dp_size = dp_size
        self._window = global_micro_batches
        self._order_seed = order_seed
        self._steps_per_epoch = steps_per_epoch
        self._num_steps: int | None = steps_per_epoch
        self._left_out: Counter[str] = Counter()
        self.position = position
        self._seed_of(position)  # refuses now what would fail in the first step

    def __iter__(self) -> Iterator[StepPlan]:
        """Yields step plans from `position` on; whoever consumes the steps moves that attribute."""
        position, remaining = self.position, self._steps_per_epoch
        while True:
            taken = 0
            for plan in self._epoch(position):
                yield plan
                taken, position = taken + 1, plan.position
                if remaining is not None and taken == remaining:
                    return
            if taken == 0 and position.consumed == 0:
                raise ValueError(
                    f"{self._stream.key}: not one step in epoch {position.epoch}; the sources are empty, "
                    f"or every example was left out: {dict(self._left_out)}"
                )
            if remaining is None and taken > 0:
                return
            if taken == 0:  # the position was the exact end of an epoch
                position = self._next_epoch(position)
            elif remaining is not None:
                remaining -= taken

    @property
    def micro_batches_per_rank(self) -> int:
        """The number of micro-batches of every step on every rank, empty ones included."""
        return -(-self._window // self._dp_size)

    def __len__(self) -> int:
        """Returns the number of steps of one iteration from the start of a data epoch.

        Raises:
            TypeError: without `steps_per_epoch`, as for any loader whose length only a pass over the data
                tells; `count_steps` makes that pass.
        """
        if self._num_steps is None:
            raise TypeError("the number of steps of a data epoch is not known before it was iterated")
        return self._num_steps

    def count_steps(self) -> int:
        """Returns the number of steps of epoch 0 after a pass over the metadata, and keeps it for `len`."""
        batches = self._stream.epoch(0, self._seed_of(START)).batches
        self._num_steps = -(-sum(1 for _ in batches) // self._window)
        return self._num_steps

    def _seed_of(self, position: StreamPosition) -> int:
        """Returns the seed that orders the epoch of `position`: the saved one once some was consumed."""
        saved, configured = position.order_seed, self._order_seed
        if saved is not None and (configured is None or position.consumed > 0):
            return saved
        if configured is None:
            raise ValueError(
                f"{self._stream.key}.shard_seed: trng, and no entropy was drawn; draw it on one rank with "
                "draw_entropy(), broadcast it, and pass position=StreamPosition(order_seed=...)"
            )
        return configured

    def _next_epoch(self, position: StreamPosition) -> StreamPosition:
        """Returns the start of the next epoch; an order seed lasts only if drawn, not configured."""
        return StreamPosition(
            position.epoch + 1, 0, position.order_seed if self._order_seed is None else None
        )

    def _epoch(self, position: StreamPosition) -> Iterator[StepPlan]:
        """Yields the steps that are left of one data epoch."""
        seed = self._seed_of(position)
        stream = self._stream.epoch(position.epoch, seed)
        stream.batches = _rest(stream.batches, position, self._stream.key)
        if position.consumed and self._order_seed not in (None, seed):
            logger.info(
                "%s: epoch %d goes on in the order of seed %d; seed %d orders the epochs after it",
                self._stream.key, position.epoch, seed, self._order_seed,
            )  # fmt: skip
        reported = Counter(stream.skipped)
        position = replace(position, order_seed=seed)
        window = self._next_window(stream)
        while window:
            # One window ahead, because the position after the last step is the start of the next epoch.
            following = self._next_window(stream)
            position = _advanced(position, window)
            after = position if following else self._next_epoch(position)
            skipped = dict(stream.skipped - reported) if self._dp_rank == 0 else {}
            reported = Counter(stream.skipped)
            yield StepPlan(self._mine(window), position.epoch, after, skipped)
            window = following
        self._left_out = stream.skipped

    def _next_window(self, stream: EpochStream) -> list[MicroBatchItems]:
        window = list(islice(stream.batches, self._window))
        if self._stream.drop_last and len(window) < self._window:
            stream.skipped["drop_last"] += sum(len(items) for items in window)
            return []
        return window

    def _mine(self, window: Sequence[MicroBatchItems]) -> tuple[MicroBatchItems, ...]:
        mine = tuple(window[self._dp_rank :: self._dp_size])
        return mine + ((),) * (self.micro_batches_per_rank - len(mine))


def _advanced(position: StreamPosition, window: Sequence[MicroBatchItems]) -> StreamPosition:
    digest = position.digest
    for items in window:
        digest = _digest(digest, items)
    return replace(position, consumed=position.consumed + sum(map(len, window)), digest=digest)


def _digest(digest: int, items: MicroBatchItems) -> int:
    """Takes in one example after the other, so that it does not depend on their micro-batches."""
    for item in items:
        digest = derive_seed(digest, item.id)
    return digest


def _rest(
    batches: Iterator[MicroBatchItems], position: StreamPosition, key: str
) -> Iterator[MicroBatchItems]:
    """Returns the micro-batches behind what was consumed before `position`, reading metadata only.

    Micro-batches may have been of another size then: of one that was consumed in part, the rest is left.

    Raises:
        ValueError: if the epoch is shorter than that.
    """
    digest = passed = 0
    rest: MicroBatchItems = ()
    while passed < position.consumed and (items := next(batches, None)) is not None:
        taken, rest = items[: position.consumed - passed], items[position.consumed - passed :]
        digest = _digest(digest, taken)
        passed += len(taken)
    if passed < position.consumed:
        raise ValueError(
            f"{key}: the checkpoint consumed {position.consumed} examples of epoch {position.epoch}, "
            f"and the epoch now has {passed}; the data changed. Restore them, or start the "
            f"next epoch with StreamPosition(epoch={position.epoch + 1})"
        )
    if position.consumed and digest != position.digest:
        logger.warning(
            "%s: the first %d examples of epoch %d are not the ones that were consumed before the "
            "checkpoint: the data, or how it is ordered or packed, changed, so some examples of this epoch may "
            "come twice or not at all",
            key, position.consumed, position.epoch,
        )  # fmt: skip
    return chain([rest] if rest else [], batches)
