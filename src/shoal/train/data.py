"""LightningDataModules: loaders that know where the run stands in its data.

Where tensor, context or pipeline parallelism is on, the first rank of each data-parallel coordinate loads, and its
peers get every batch from it; see `shoal.data.broadcast`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import cache

import lightning.pytorch as pl
from typing_extensions import override

from shoal.checkpoint.agree import agreed
from shoal.config.speech import DataConfig
from shoal.data.batch import StepBatch
from shoal.data.broadcast import broadcast_loader
from shoal.data.conversation import PromptEncoder
from shoal.data.position import StreamPosition
from shoal.data.seeds import draw_entropy
from shoal.data.stream import (
    StepLoader,
    ValidationLoader,
    build_train_loader,
    build_validation_loaders,
    order_seed_of,
)
from shoal.parallel.model import ParallelModel
from shoal.train.modules import ShoalModule
from shoal.train.strategy import distributed_setup


class StreamData(pl.LightningDataModule, ABC):
    """Training and validation data of a `ShoalModule`, split over its data-parallel ranks.

    Args:
        global_micro_batches: Micro-batches of one optimizer step over all ranks; None means one per rank.
    """

    def __init__(self, global_micro_batches: int | None = None) -> None:
        super().__init__()
        self.global_micro_batches = global_micro_batches

    @abstractmethod
    def train_loader(
        self, model: ParallelModel, global_micro_batches: int, position: StreamPosition
    ) -> StepLoader:
        """Returns the training loader of this rank's data-parallel coordinate, from a position on.

        Called on the ranks that load: the first of each coordinate.
        """

    @abstractmethod
    def validation_names(self) -> tuple[str, ...]:
        """Returns the names of the validation sets in the order of their loaders, on every rank."""

    @abstractmethod
    def validation_loaders(self, model: ParallelModel) -> Mapping[str, ValidationLoader]:
        """Returns the validation loaders of this rank's data-parallel coordinate by name.

        Called on the ranks that load: the first of each coordinate.
        """

    def start_position(self, position: StreamPosition) -> StreamPosition:
        """Returns where training starts, given what the module knows."""
        return position

    @override
    def train_dataloader(self) -> Iterable[StepBatch]:
        module = self._module()
        position = module.stream_position = self.start_position(module.stream_position)
        model = module.parallel
        window = self.global_micro_batches or model.dp_size
        return self._shared(lambda: self.train_loader(model, window, position), "training data")

    @override
    def val_dataloader(self) -> list[Iterable[StepBatch]]:
        model = self._module().parallel
        loaders = cache(lambda: self.validation_loaders(model))

        def one(name: str) -> Iterable[StepBatch]:
            return self._shared(lambda: loaders()[name], f"validation data {name}")

        return [one(name) for name in self.validation_names()]

    def _shared(self, build: Callable[[], Iterable[StepBatch]], name: str) -> Iterable[StepBatch]:
        """The loader that `build` gives, shared by the peers of a data-parallel coordinate. Collective.

        Raises:
            ValueError: `build` failed somewhere (a file that one node lacks); on every rank of the job.
        """
        assert self.trainer is not None
        setup = distributed_setup(self.trainer.strategy)
        if setup is None:
            return build()
        return agreed(lambda: broadcast_loader(build, setup.mesh_context, name=name), None, ValueError)

    def _module(self) -> ShoalModule:
        assert self.trainer is not None
        module = self.trainer.lightning_module
        if not isinstance(module, ShoalModule):
            raise ValueError(f"{type(self).__name__} feeds a ShoalModule, not a {type(module).__name__}")
        return module


class SpeechData(StreamData):
    """The data of a speech run.

    Args:
        config: The ``data`` section.
        prompts: Encodes conversations.
        global_micro_batches: Micro-batches of one optimizer step over all ranks; None means one per rank.
        steps_per_epoch: Optimizer steps of one Lightning epoch; None goes to the end of the data epoch.
        packed: The model packs the conversations of a micro-batch, `model.packed_sequences`.
        allow_commands: The user said --allow-commands.
    """

    def __init__(
        self,
        config: DataConfig,
        prompts: PromptEncoder,
        *,
        global_micro_batches: int | None = None,
        steps_per_epoch: int | None = None,
        packed: bool = False,
        allow_commands: bool = False,
    ) -> None:
        super().__init__(global_micro_batches)
        self.config = config
        self.prompts = prompts
        self.steps_per_epoch = steps_per_epoch
        self.packed = packed
        self.allow_commands = allow_commands

    @override
    def train_loader(
        self, model: ParallelModel, global_micro_batches: int, position: StreamPosition
    ) -> StepLoader:
        return build_train_loader(
            self.config.train_ds,
            self.prompts,
            dp_rank=model.dp_rank,
            dp_size=model.dp_size,
            global_micro_batches=global_micro_batches,
            position=position,
            steps_per_epoch=self.steps_per_epoch,
            packed=self.packed,
            allow_commands=self.allow_commands,
        )

    @override
    def validation_names(self) -> tuple[str, ...]:
        return validation_set_names(self.config)

    @override
    def validation_loaders(self, model: ParallelModel) -> Mapping[str, ValidationLoader]:
        if self.config.validation_ds is None:
            return {}
        return build_validation_loaders(
            self.config.validation_ds,
            self.prompts,
            dp_rank=model.dp_rank,
            dp_size=model.dp_size,
            packed=self.packed,
            allow_commands=self.allow_commands,
        )

    @override
    def start_position(self, position: StreamPosition) -> StreamPosition:
        """``shard_seed: trng`` draws entropy once, on rank 0; it then lasts through every resumption."""
        config = self.config.train_ds
        if order_seed_of(config, config.seed) is not None or position.order_seed is not None:
            return position
        assert self.trainer is not None
        return replace(position, order_seed=self.trainer.strategy.broadcast(draw_entropy()))


def validation_set_names(config: DataConfig) -> tuple[str, ...]:
    """Names of the validation sets, in the order of their loaders on every rank."""
    if config.validation_ds is None:
        return ()
    return tuple(sorted(config.validation_ds.datasets)) or ("default",)
