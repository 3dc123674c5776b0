"""LightningDataModules: loaders that know where the run stands in its data."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import replace

import lightning.pytorch as pl
from typing_extensions import override

from shoal.config.speech import DataConfig
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
        """Returns the training loader of this rank, from a position on."""

    @abstractmethod
    def validation_loaders(self, model: ParallelModel) -> Mapping[str, ValidationLoader]:
        """Returns the validation loaders of this rank by name, in the same order on every rank."""

    def start_position(self, position: StreamPosition) -> StreamPosition:
        """Returns where training starts, given what the module knows."""
        return position

    @override
    def train_dataloader(self) -> StepLoader:
        module = self._module()
        module.stream_position = self.start_position(module.stream_position)
        model = module.parallel
        return self.train_loader(model, self.global_micro_batches or model.dp_size, module.stream_position)

    @override
    def val_dataloader(self) -> list[ValidationLoader]:
        return list(self.validation_loaders(self._module().parallel).values())

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
        allow_commands: The user said --allow-commands.
    """

    def __init__(
        self,
        config: DataConfig,
        prompts: PromptEncoder,
        *,
        global_micro_batches: int | None = None,
        steps_per_epoch: int | None = None,
        allow_commands: bool = False,
    ) -> None:
        super().__init__(global_micro_batches)
        self.config = config
        self.prompts = prompts
        self.steps_per_epoch = steps_per_epoch
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
            allow_commands=self.allow_commands,
        )

    @override
    def validation_loaders(self, model: ParallelModel) -> Mapping[str, ValidationLoader]:
        if self.config.validation_ds is None:
            return {}
        return build_validation_loaders(
            self.config.validation_ds,
            self.prompts,
            dp_rank=model.dp_rank,
            dp_size=model.dp_size,
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
