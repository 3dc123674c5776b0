"""From the ``trainer`` section to a Lightning Trainer: counts translated, strategy built.

Lightning's batch is one optimizer step here, so counts that users give in micro-batches per data-parallel rank
(limit_train_batches, val_check_interval) become steps; max_steps already counts steps. Accumulation and clipping
belong to our step and never reach Lightning, which refuses them under manual optimisation.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, Strategy
from torch.distributed.constants import default_pg_timeout

from shoal.config.schema import DDPConfig
from shoal.config.speech import StrategyConfig, TrainerConfig
from shoal.config.steps import global_micro_batches
from shoal.config.targets import resolve_target
from shoal.mesh.sizes import resolve_sizes
from shoal.train.callbacks import ModelCheckpoint
from shoal.train.precision import ShoalPrecision
from shoal.train.run_lock import RunLock
from shoal.train.strategy import AutomodelParallelStrategy


@dataclass(frozen=True)
class World:
    """How many processes there are, as the launcher says."""

    size: int
    local_size: int
    rank: int = 0

    @property
    def num_nodes(self) -> int:
        """Number of machines."""
        return self.size // self.local_size


@dataclass(frozen=True)
class StepPlanning:
    """What the trainer's counts mean in optimizer steps.

    Attributes:
        global_micro_batches: Micro-batches of one step over all ranks.
        accumulation: Micro-batches of one step on one rank.
        steps_per_epoch: Steps of one Lightning epoch; None goes to the end of the data.
        val_check_interval: Steps between validations; None validates at the end of each epoch.
    """

    global_micro_batches: int
    accumulation: int
    steps_per_epoch: int | None
    val_check_interval: int | None


def launched_world(environment: Mapping[str, str], config: TrainerConfig) -> World:
    """The number of processes: from torchrun's or Slurm's variables, else from the configuration.

    >>> launched_world({"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4", "RANK": "0", "LOCAL_RANK": "0"}, TrainerConfig())
    World(size=8, local_size=4, rank=0)
    """
    if "WORLD_SIZE" in environment and "LOCAL_RANK" in environment:
        size = int(environment["WORLD_SIZE"])
        local_size = int(environment.get("LOCAL_WORLD_SIZE", size))
        return World(size, local_size, int(environment.get("RANK", environment["LOCAL_RANK"])))
    if "SLURM_NTASKS" in environment and "SLURM_PROCID" in environment:
        size = int(environment["SLURM_NTASKS"])
        local_size = max(1, size // int(environment.get("SLURM_NNODES", "1")))
        return World(size, local_size, int(environment["SLURM_PROCID"]))
    local = config.devices if isinstance(config.devices, int) and config.devices > 0 else 1
    return World(local * config.num_nodes, local)


def plan_steps(config: TrainerConfig, dp_size: int) -> StepPlanning:
    """Resolves accumulation and converts counts of micro-batches per rank to steps.

    Raises:
        ValueError: A count is not a multiple of the accumulation.
    """
    total = global_micro_batches(config, dp_size)
    accumulation = -(-total // dp_size)

    def steps(key: str, count: int | None) -> int | None:
        if count is None:
            return None
        if count % accumulation:
            raise ValueError(
                f"trainer.{key} = {count}: counts micro-batches per data-parallel rank, of which a step takes "
                f"{accumulation}; repair: a multiple of {accumulation}"
            )
        return count // accumulation

    return StepPlanning(
        total,
        accumulation,
        steps("limit_train_batches", config.limit_train_batches),
        steps("val_check_interval", config.val_check_interval),
    )


def dp_size_of(config: TrainerConfig, world: World) -> int:
    """Data-parallel size of the job."""
    return resolve_sizes(config.strategy.sizes, world.size).dp


def build_strategy(config: StrategyConfig, world: World) -> Strategy | str:
    """The Lightning strategy; plain DDP on one process needs none."""
    timeout = (
        default_pg_timeout if config.timeout_seconds is None else timedelta(seconds=config.timeout_seconds)
    )
    common: dict[str, Any] = {"process_group_backend": config.process_group_backend, "timeout": timeout}
    if config.kind == "automodel":
        sizes = {field.name: getattr(config.sizes, field.name) for field in fields(config.sizes)}
        return AutomodelParallelStrategy(
            **sizes,
            distributed_config=config.distributed_config,
            moe_config=config.moe_config,
            activation_checkpointing_llm=config.activation_checkpointing_llm,
            activation_checkpointing_perception=config.activation_checkpointing_perception,
            save_distributed_checkpoint=config.save_distributed_checkpoint,
            **common,
        )
    if config.kind == "model_parallel":
        data = config.sizes.dp_size or world.size // config.sizes.tp_size
        return ModelParallelStrategy(
            data_parallel_size=data, tensor_parallel_size=config.sizes.tp_size, **common
        )
    if world.size == 1:
        return "auto"
    return DDPStrategy(**_ddp_flags(config.ddp), **common)


def build_trainer(
    config: TrainerConfig,
    world: World,
    planning: StepPlanning,
    *,
    loggers: Sequence[Any] = (),
    callbacks: Sequence[pl.Callback] = (),
) -> pl.Trainer:
    """The Lightning Trainer of a run; `loggers` and `callbacks` come from the experiment."""
    own = [resolve_target(target.target, target.allow)(**target.kwargs) for target in config.callbacks]
    limits: dict[str, Any] = {
        "limit_val_batches": config.limit_val_batches,
        "limit_test_batches": config.limit_test_batches,
        "limit_predict_batches": config.limit_predict_batches,
        "val_check_interval": planning.val_check_interval,
    }
    trainer = pl.Trainer(
        accelerator=_accelerator(config.accelerator),
        devices=world.local_size,
        num_nodes=world.num_nodes,
        strategy=build_strategy(config.strategy, world),
        plugins=[ShoalPrecision(config.precision)],
        max_steps=config.max_steps,
        max_epochs=config.max_epochs,
        max_time=config.max_time,
        check_val_every_n_epoch=config.check_val_every_n_epoch,
        num_sanity_val_steps=config.num_sanity_val_steps,
        log_every_n_steps=config.log_every_n_steps,
        logger=list(loggers) or config.logger,
        callbacks=[*callbacks, *own],
        # Only our own callback saves: Lightning would add one that writes an unsharded, pickled state.
        enable_checkpointing=any(isinstance(callback, ModelCheckpoint) for callback in callbacks),
        enable_progress_bar=config.enable_progress_bar,
        enable_model_summary=False,  # the layout table counts parameters, also when they are sharded
        default_root_dir=config.default_root_dir,
        use_distributed_sampler=False,  # our sampler deals micro-batches over ranks
        deterministic=config.deterministic,
        benchmark=config.benchmark,
        detect_anomaly=config.detect_anomaly,
        **{name: value for name, value in limits.items() if value is not None},
    )
    for callback in callbacks:
        if isinstance(callback, RunLock):
            callback.attach(trainer)
    return trainer


def _ddp_flags(config: DDPConfig) -> dict[str, Any]:
    names = (field.name for field in fields(config) if field.name != "activation_checkpointing")
    return {name: value for name in names if (value := getattr(config, name)) is not None}


def _accelerator(name: str) -> str:
    return "cpu" if name == "auto" and not _cuda() else name


def _cuda() -> bool:
    import torch

    return torch.cuda.is_available() and os.environ.get("SHOAL_DEVICE", "") != "cpu"
