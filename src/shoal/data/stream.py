"""Loaders: the global stream dealt out in steps over data-parallel ranks, resumable at any step.

The sampler runs in the main process on metadata only and is the same on every rank apart from which
micro-batches it keeps; workers load one step at a time.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

from torch.utils.data import DataLoader, Sampler

from shoal.config.speech import DatasetConfig
from shoal.data.audio import AudioOptions
from shoal.data.conversation import PromptEncoder
from shoal.data.dataset import StepBatch, StepDataset
from shoal.data.micro_batches import EpochStream, MicroBatchItems, MicroBatchStream
from shoal.data.position import START, StepPlan, StreamPosition
from shoal.data.seeds import derive_seed, worker_init

logger = logging.getLogger(__name__)


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
        stream: MicroBatchStream,
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
                    "or every "
                    f"example was left out: {dict(self._left_out)}"
                )
            if remaining is None and taken > 0:
                return
            if taken == 0:  # the position was the exact end of an epoch
                position = self._next_epoch(position)
            elif remaining is not None:
                remaining -= taken

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
        _replay(stream.batches, position, self._stream.key)
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
        if self._stream.config.drop_last and len(window) < self._window:
            stream.skipped["drop_last"] += sum(len(items) for items in window)
            return []
        return window

    def _mine(self, window: Sequence[MicroBatchItems]) -> tuple[MicroBatchItems, ...]:
        mine = tuple(window[self._dp_rank :: self._dp_size])
        return mine + ((),) * (-(-self._window // self._dp_size) - len(mine))


def _advanced(position: StreamPosition, window: Sequence[MicroBatchItems]) -> StreamPosition:
    digest = position.digest
    for items in window:
        digest = _digest(digest, items)
    return replace(position, consumed=position.consumed + len(window), digest=digest)


def _digest(digest: int, items: MicroBatchItems) -> int:
    return derive_seed(digest, *(item.id for item in items))


def _replay(batches: Iterator[MicroBatchItems], position: StreamPosition, key: str) -> None:
    """Passes over the micro-batches that were consumed before `position`, reading metadata only.

    Raises:
        ValueError: if the epoch is shorter than that.
    """
    digest = passed = 0
    for items in islice(batches, position.consumed):
        digest = _digest(digest, items)
        passed += 1
    if passed < position.consumed:
        raise ValueError(
            f"{key}: the checkpoint consumed {position.consumed} micro-batches of epoch {position.epoch}, "
            "and the "
            f"epoch now has {passed}; the data or its batching changed. Restore them, or start the next "
            "epoch with "
            f"StreamPosition(epoch={position.epoch + 1})"
        )
    if position.consumed and digest != position.digest:
        logger.warning(
            "%s: the first %d micro-batches of epoch %d are not the ones that were consumed before the "
            "checkpoint: "
            "the data or its batching changed, so some examples of this epoch may come twice or not at all",
            key, position.consumed, position.epoch,
        )  # fmt: skip


class StepLoader(DataLoader[StepBatch]):
    """A DataLoader of step batches that continues where it was consumed, not where its sampler is."""

    sampler: StepSampler

    @property
    def position(self) -> StreamPosition:
        """The position after the last step batch that was handed out."""
        return self.sampler.position

    def set_position(self, position: StreamPosition) -> None:
        """Makes the next iteration start at `position`; call it before iterating."""
        self.sampler.position = position

    def __iter__(self) -> Iterator[StepBatch]:  # type: ignore[override]
        for batch in super().__iter__():
            self.sampler.position = batch.position
            yield batch


class ValidationLoader(StepLoader):
    """A loader that passes over the same finite data each time, one micro-batch per rank and step."""

    def __iter__(self) -> Iterator[StepBatch]:  # type: ignore[override]
        self.set_position(START)
        return super().__iter__()

    def __len__(self) -> int:
        """Returns the number of steps, the same on every rank; the first call passes over the metadata."""
        try:
            return len(self.sampler)
        except TypeError:
            return self.sampler.count_steps()


def order_seed_of(config: DatasetConfig, seed: int) -> int | None:
    """Returns the seed that orders the data: an integer `shard_seed`, else `seed`; None for ``trng``."""
    if config.shard_seed == "trng":
        return None
    return seed if config.shard_seed == "randomized" else int(config.shard_seed)


def build_train_loader(
    config: DatasetConfig,
    prompts: PromptEncoder,
    *,
    dp_rank: int,
    dp_size: int,
    global_micro_batches: int,
    seed: int | None = None,
    position: StreamPosition = START,
    steps_per_epoch: int | None = None,
    allow_commands: bool = False,
) -> StepLoader:
    """Builds the training loader of one data-parallel rank.

    Args:
        config: The ``data.train_ds`` section.
        prompts: Encodes conversations.
        dp_rank: This rank's data-parallel coordinate; peers in tensor, context and pipeline groups share it.
        dp_size: Number of data-parallel coordinates.
        global_micro_batches: Micro-batches of one optimizer step over all ranks.
        seed: The run's seed; None takes config.seed.
        position: Where to start; with ``shard_seed: trng`` its order_seed is the entropy that one rank drew.
        steps_per_epoch: Steps of one iteration of the loader; None iterates to the end of the data epoch.
        allow_commands: True after the user said --allow-commands.

    Returns:
        A loader of `StepBatch`.

    Raises:
        ValueError: for a configuration or sources that are refused; the same on every rank.
    """
    seed = config.seed if seed is None else seed
    stream = MicroBatchStream(
        config,
        prompts,
        shuffle=config.shuffle,
        key="data.train_ds",
        report_skips=dp_rank == 0,
        allow_commands=allow_commands,
    )
    sampler = StepSampler(
        stream,
        dp_rank=dp_rank,
        dp_size=dp_size,
        global_micro_batches=global_micro_batches,
        order_seed=order_seed_of(config, seed),
        position=position,
        steps_per_epoch=steps_per_epoch,
    )
    return StepLoader(_dataset(config, prompts, seed), sampler=sampler, **_loader_options(config))


def build_validation_loaders(
    config: DatasetConfig,
    prompts: PromptEncoder,
    *,
    dp_rank: int,
    dp_size: int,
    key: str = "data.validation_ds",
    prompt_only: bool = False,
    allow_commands: bool = False,
) -> dict[str, ValidationLoader]:
    """Builds one loader for each named set, in the order of their names on every rank.

    Each step is one micro-batch per rank, unshuffled; the last step of a set is filled up with empty ones, so
    all ranks take the same number of steps and every example is seen once. `drop_last` is not applied.

    Args:
        config: The ``data.validation_ds`` (or test or predict) section. Without ``datasets`` it is one set
            named ``default``; each entry of ``datasets`` is a whole configuration, the shared keys merged in.
        prompts: Encodes conversations.
        dp_rank: This rank's data-parallel coordinate.
        dp_size: Number of data-parallel coordinates.
        key: Key path of `config`, for messages.
        prompt_only: Leaves the final assistant turn out of the token ids, for generation.
        allow_commands: True after the user said --allow-commands.

    Raises:
        ValueError: for a configuration or sources that are refused; the same on every rank.
    """
    named = {f"{key}.datasets.{name}": (name, one) for name, one in sorted(config.datasets.items())}
    loaders = {}
    for path, (name, one) in (named or {key: ("default", config)}).items():
        stream = MicroBatchStream(
            replace(one, drop_last=False),
            prompts,
            shuffle=False,
            key=path,
            report_skips=dp_rank == 0,
            allow_commands=allow_commands,
        )
        sampler = StepSampler(
            stream,
            dp_rank=dp_rank,
            dp_size=dp_size,
            global_micro_batches=dp_size,
            order_seed=one.seed,
            position=START,
            steps_per_epoch=None,
        )
        dataset = _dataset(one, prompts, one.seed, prompt_only=prompt_only)
        loaders[name] = ValidationLoader(dataset, sampler=sampler, **_loader_options(one))
    return loaders


def _dataset(
    config: DatasetConfig, prompts: PromptEncoder, seed: int, *, prompt_only: bool = False
) -> StepDataset:
    options = AudioOptions(config.sample_rate, config.channel_selector)
    return StepDataset(prompts, options, seed=seed, on_bad_audio=config.on_bad_audio, prompt_only=prompt_only)


def _loader_options(config: DatasetConfig) -> dict[str, Any]:
    # batch_size None switches torch's own batching off: the sampler hands out whole steps.
    return {
        "batch_size": None,
        "num_workers": config.num_workers,
        "pin_memory": config.pin_memory,
        "collate_fn": _as_it_is,
        "worker_init_fn": worker_init if config.num_workers else None,
    }


def _as_it_is(batch: StepBatch) -> StepBatch:
    return batch
