"""A small LightningModule with manual optimisation, a data position and a history of everything it did."""

import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

STEPS_PER_EPOCH = 5


@dataclass(frozen=True)
class Position:
    """Stands for the real stream's position: more fields than one, plain values."""

    epoch: int = 0
    consumed: int = 0


class Stream:
    """Yields (seed, position after it) from a position to the end of its epoch, then starts the next one."""

    def __init__(self, position: Position, sized: bool) -> None:
        self.position = position
        if sized:
            self.__class__ = SizedStream

    def set_position(self, position: Position) -> None:
        """Make the next iteration start there."""
        self.position = position

    def __iter__(self) -> Iterator[tuple[int, Position]]:
        at = self.position
        if at.consumed == STEPS_PER_EPOCH:
            at = Position(at.epoch + 1, 0)
        while at.consumed < STEPS_PER_EPOCH:
            self.position = Position(at.epoch, at.consumed + 1)
            yield 1000 * at.epoch + at.consumed, self.position
            at = Position(at.epoch, at.consumed + 1)


class SizedStream(Stream):
    """The same with a length, as a loader with a fixed number of steps per epoch has it."""

    def __len__(self) -> int:
        return STEPS_PER_EPOCH


class Toy(pl.LightningModule):
    """Linear regression on random data that depends on seed and rank, with dropout from the global generator.

    Args:
        sized: the training loader has a length.
        kill_self_at: (step, rank): that rank sends itself SIGTERM in the middle of that step's backward.
    """

    def __init__(self, sized: bool = True, kill_self_at: tuple[int, int] | None = None) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.sized = sized
        self.kill_self_at = kill_self_at
        self.stream_position = Position()
        self.history: list[tuple[Any, ...]] = []

    def configure_model(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 5), nn.Dropout(0.3), nn.Linear(5, 1))
        self.runner: Any = [self.model]
        if isinstance(self.trainer.strategy, ModelParallelStrategy):
            fully_shard(self.model, mesh=self.device_mesh["data_parallel"])
        elif self.trainer.world_size > 1:
            self.runner = [DistributedDataParallel(self.model)]

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.05, total_steps=100)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_train_start(self) -> None:
        torch.manual_seed(7 + self.global_rank)

    def train_dataloader(self) -> Stream:
        return Stream(self.stream_position, self.sized)

    def val_dataloader(self) -> list[int]:
        return [0, 1, 2]

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        return batch

    def training_step(self, batch: tuple[int, Position], batch_idx: int) -> Tensor:
        seed, position = batch
        data = torch.Generator().manual_seed(seed + 100 * self.global_rank)
        loss = self.runner[0](torch.randn(3, 4, generator=data)).square().sum()
        if self.kill_self_at == (self.global_step, self.global_rank):
            loss.register_hook(lambda gradient: os.kill(os.getpid(), signal.SIGTERM))
        self.manual_backward(loss)
        optimizer = self.optimizers()
        optimizer.step()
        optimizer.zero_grad()
        self.lr_schedulers().step()
        self.stream_position = position
        where = (self.global_step, self.current_epoch, batch_idx)
        self.history.append(("train", *where, seed, loss.item(), self.lr_schedulers().get_last_lr()[0]))
        return loss

    def validation_step(self, batch: int, batch_idx: int) -> None:
        total = sum(_full(p).square().sum() for p in self.model.parameters())
        if not self.trainer.sanity_checking:
            self.history.append(("val", self.global_step, self.current_epoch, batch_idx, float(total)))
        # Zigzags, so that best checkpoints are not simply the newest ones.
        self.log("val_loss", total + 10 * (self.global_step % 3), sync_dist=True, batch_size=1)


def _full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def strategy(kind: str, world_size: int) -> Any:
    """`auto`, Lightning's `ddp` without wrapping the module, or its `model_parallel`."""
    if kind == "ddp":
        return _InnerDDP(process_group_backend="gloo")
    if kind == "model_parallel":
        return ModelParallelStrategy(world_size, 1, process_group_backend="gloo")
    return "auto"


class _InnerDDP(DDPStrategy):
    """The module wraps its own model; the strategy must not wrap the module again."""

    def configure_ddp(self) -> None:
        pass


def trainer(
    kind: str, world_size: int, directory: Path, callbacks: list[pl.Callback], **options: Any
) -> pl.Trainer:
    """A silent Trainer on CPU."""
    return pl.Trainer(
        accelerator="cpu", devices=world_size, strategy=strategy(kind, world_size), logger=False, callbacks=callbacks,
        default_root_dir=directory, enable_progress_bar=False, enable_model_summary=False,
        use_distributed_sampler=False, **options,
    )  # fmt: skip
