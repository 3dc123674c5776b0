"""Loaders: the steps of a rank, decoded in workers one step at a time, for training and validation."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch.utils.data import DataLoader

from shoal.config.speech import DatasetConfig
from shoal.data.audio import AudioOptions
from shoal.data.batch import StepBatch
from shoal.data.conversation import PromptEncoder
from shoal.data.dataset import PlanDataset, StepDataset
from shoal.data.micro_batches import MicroBatchStream
from shoal.data.position import START, StreamPosition
from shoal.data.seeds import worker_init
from shoal.data.steps import StepSampler
from shoal.data.worker_deaths import awaited

logger = logging.getLogger(__name__)


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
        """Yields step batches; a failure of the sampler or of a worker becomes the last one's `error`.

        It may be a failure of this rank alone (a file that one node lacks, a worker that ran out of memory),
        and raising it here would leave the other ranks waiting.
        """
        try:
            for batch in awaited(super().__iter__):
                self.sampler.position = batch.position
                yield batch
        except Exception as error:
            logger.exception("%s", error)
            yield self._failed_step(f"{type(error).__name__}: {error}")

    def _failed_step(self, error: str) -> StepBatch:
        assert isinstance(self.dataset, PlanDataset)
        empty = [self.dataset.empty() for _ in range(self.sampler.micro_batches_per_rank)]
        return StepBatch(empty, self.position, error)


class ValidationLoader(StepLoader):
    """A loader that passes over the same finite data each time, one micro-batch per rank and step."""

    def __iter__(self) -> Iterator[StepBatch]:  # type: ignore[override]
        """Yields the step batches of all data, from its start."""
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
    packed: bool = False,
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
        packed: The model packs the conversations of a micro-batch, so that its tokens are counted without padding.
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
        packed=packed,
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
    packed: bool = False,
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
        packed: As for `build_train_loader`.
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
            packed=packed,
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
    return loader_options(config.num_workers, config.pin_memory)


def loader_options(num_workers: int, pin_memory: bool) -> dict[str, Any]:
    """Returns the arguments of torch's DataLoader that every loader of steps has."""
    # batch_size None switches torch's own batching off: the sampler hands out whole steps.
    return {
        "batch_size": None,
        "num_workers": num_workers,
        "pin_memory": pin_memory,
        "collate_fn": _as_it_is,
        "worker_init_fn": worker_init if num_workers else None,
        # Otherwise each iteration draws from torch's global generator, and a resumed run, which iterates
        # anew, would go on with other dropout than an uninterrupted one.
        "generator": torch.Generator(),
    }


def _as_it_is(batch: StepBatch) -> StepBatch:
    return batch
