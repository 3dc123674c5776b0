"""The experiment of an LLM run: everything it writes lies in ``checkpoint.checkpoint_dir``.

The directory holds one folder per checkpoint, ``training.jsonl`` and ``validation.jsonl`` (one line per step and
validation), and the records of how the run was made that a speech run has too.
"""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.loggers import Logger
from typing_extensions import override

from shoal.checkpoint.store import CheckpointStore, stored
from shoal.config.llm import CheckpointConfig, LLMConfig
from shoal.mesh.sizes import resolve_sizes
from shoal.train.callbacks import ModelCheckpoint, ProgressBar
from shoal.train.experiment import Experiment, RunRecord, StepTiming, logger_of
from shoal.train.history import StepHistory, ValidationHistory
from shoal.train.resume import ResumeRun
from shoal.train.run_lock import RunLock
from shoal.train.stop import SignalStop

LATEST = "latest"


def llm_experiment(config: LLMConfig, world_size: int) -> Experiment:
    """Prepares the experiment; needs no process group and writes nothing yet.

    Raises:
        ValueError: A logger's package is missing.
    """
    folder, steps = Path(config.checkpoint.checkpoint_dir).expanduser().absolute(), config.step_scheduler
    callbacks: list[pl.Callback] = [ProgressBar(), StepTiming()]
    if steps.gc_every_steps is not None:
        callbacks.append(GarbageCollection(steps.gc_every_steps))
    if config.checkpoint.enabled:
        layout = {
            "strategy": config.distributed.strategy,
            **dataclasses.asdict(resolve_sizes(config.distributed.sizes, world_size)),
        }
        saving = _saving(config, folder)
        callbacks += [
            RunLock(folder, "checkpoint.checkpoint_dir"),
            ResumeRun(lambda: restore_path(config.checkpoint, folder)),
            RunRecord(folder, config.to_dict(), layout),
            StepHistory(str(folder / "training.jsonl")),
            ValidationHistory(folder / "validation.jsonl"),
            SignalStop(),
        ]
        if steps.save_checkpoint_every_epoch:
            callbacks.append(SaveEveryEpoch(saving))
        callbacks.append(saving)
    return Experiment(folder, _loggers(config, folder), tuple(callbacks))


def restore_path(config: CheckpointConfig, folder: Path) -> Path | None:
    """The checkpoint to start from, or None.

    Raises:
        ValueError: The named one is not complete, or a fresh run would write into a directory that holds another's.
    """
    latest = CheckpointStore(folder).latest()
    if config.restore_from is None:
        if latest is not None:
            raise ValueError(
                f"checkpoint.checkpoint_dir = {str(folder)!r} holds {latest.name} of an earlier run; repair: "
                "checkpoint.restore_from=latest to go on with it, or another directory"
            )
        return None
    if config.restore_from == LATEST:
        return latest
    path = Path(config.restore_from).expanduser().absolute()
    if stored(path) is None:
        raise ValueError(
            f"checkpoint.restore_from = {str(path)!r} is not a complete checkpoint; repair: name one of the folders "
            f"in checkpoint.checkpoint_dir, or {LATEST}"
        )
    return path


class SaveEveryEpoch(pl.Callback):
    """Saves at the end of every epoch but the last, whose end is saved anyway; in the background if `saving` does.

    Only the newest such checkpoint is kept beside the periodic ones.
    """

    def __init__(self, saving: ModelCheckpoint) -> None:
        self._saving = saving

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        stops = 0 < trainer.max_steps <= trainer.global_step
        if not stops and trainer.current_epoch + 1 != trainer.max_epochs:
            self._saving.save_now(trainer, in_background=True)


class GarbageCollection(pl.Callback):
    """Collects garbage every few steps, on all ranks at the same time, and never in between."""

    def __init__(self, every_steps: int) -> None:
        self.every_steps = every_steps

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        gc.disable()

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step % self.every_steps == 0:
            gc.collect()

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        gc.enable()


def _saving(config: LLMConfig, folder: Path) -> ModelCheckpoint:
    section = config.checkpoint
    keep = section.keep_last
    return ModelCheckpoint(
        dirpath=folder,
        filename="{step}",
        monitor=None if keep is None else "step",
        mode="max",
        save_top_k=-1 if keep is None else keep,
        save_last=True,
        every_n_train_steps=config.step_scheduler.ckpt_every_steps,
        model_save_format=section.model_save_format,
        save_consolidated=section.save_consolidated,
        async_save=section.is_async,
        model_part="all" if config.peft is None else "trainable",
    )


def _loggers(config: LLMConfig, folder: Path) -> tuple[Logger, ...]:
    sections: Mapping[str, Mapping[str, Any] | None] = {
        "tensorboard": config.tensorboard,
        "wandb": config.wandb,
        "mlflow": config.mlflow,
    }
    return tuple(
        logger_of(name, options, folder, key=name)
        for name, options in sections.items()
        if options is not None
    )
