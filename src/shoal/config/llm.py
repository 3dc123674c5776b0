"""The whole surface of the LLM recipe on one page; the sections follow NeMo AutoModel's YAML.

The sections parse and are checked. Training from such a file is refused by one rule until the recipe exists.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from shoal.config.schema import DistEnvConfig, DistributedConfig
from shoal.config.values import (
    CountInt,
    FrozenDict,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    SeedInt,
    TargetConfig,
)


@dataclass(frozen=True)
class StepSchedulerConfig:
    """Batch sizes and periods; global_batch_size = local_batch_size * dp_size * accumulation."""

    global_batch_size: PositiveInt = 32
    local_batch_size: PositiveInt = 1
    num_epochs: PositiveInt = 10
    max_steps: PositiveInt | None = None
    ckpt_every_steps: PositiveInt = 100
    save_checkpoint_every_epoch: bool = True
    val_every_steps: PositiveInt | None = None
    log_remote_every_steps: PositiveInt = 1
    gc_every_steps: PositiveInt | None = None


@dataclass(frozen=True)
class RngConfig:
    """The run's seed; ranked False gives every rank the same generator."""

    seed: SeedInt = 42
    ranked: bool = True


@dataclass(frozen=True)
class CheckpointConfig:
    """Where and how checkpoints are written."""

    enabled: bool = True
    checkpoint_dir: str = "checkpoints/"
    restore_from: str | None = None
    model_save_format: Literal["safetensors", "torch_save"] = "safetensors"
    save_consolidated: bool | Literal["final", "every"] = "final"
    is_async: bool = False
    max_recent_checkpoints: PositiveInt | None = None


@dataclass(frozen=True)
class PackedSequenceConfig:
    """Several documents in one sequence of packed_sequence_size tokens; 0 switches packing off."""

    packed_sequence_size: CountInt = 0
    packing_strategy: Literal["thd"] = "thd"
    max_packs: PositiveInt | None = None


@dataclass(frozen=True)
class DataloaderConfig:
    """Options of the data loader; shuffle None means True for training."""

    shuffle: bool | None = None
    num_workers: CountInt = 0
    pin_memory: bool = False
    drop_last: bool = False


@dataclass(frozen=True)
class LRSchedulerConfig:
    """Warm-up and decay in optimizer steps; None is derived from the length of the run."""

    lr_warmup_steps: CountInt | None = None
    lr_decay_steps: PositiveInt | None = None
    lr_decay_style: Literal["cosine", "constant", "linear", "inverse-square-root", "WSD"] = "cosine"
    init_lr: NonNegativeFloat | None = None
    min_lr: NonNegativeFloat | None = None


@dataclass(frozen=True)
class ClipGradNormConfig:
    """Largest gradient norm; None switches clipping off."""

    max_norm: PositiveFloat | None = 1.0


@dataclass(frozen=True)
class PeftConfig:
    """Low-rank adapters, AutoModel's spelling."""

    dim: PositiveInt = 8
    alpha: PositiveFloat = 32
    dropout: NonNegativeFloat = 0.0
    target_modules: tuple[str, ...] | str = ()
    exclude_modules: tuple[str, ...] = ()
    match_all_linear: bool = False
    use_dora: bool = False


@dataclass(frozen=True)
class CompileConfig:
    """torch.compile of each block."""

    enabled: bool = False
    mode: str = "default"
    fullgraph: bool = False
    dynamic: bool = False
    backend: str | None = None


@dataclass(frozen=True)
class LLMConfig:
    """A whole run of the LLM recipe; `to_dict` gives it back as plain YAML data."""

    model: TargetConfig | None = None
    step_scheduler: StepSchedulerConfig = StepSchedulerConfig()
    dist_env: DistEnvConfig = DistEnvConfig()
    rng: RngConfig = RngConfig()
    compile: CompileConfig = CompileConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    distributed: DistributedConfig = DistributedConfig()
    loss_fn: TargetConfig | None = None
    dataset: TargetConfig | None = None
    validation_dataset: TargetConfig | None = None
    packed_sequence: PackedSequenceConfig = PackedSequenceConfig()
    dataloader: DataloaderConfig = DataloaderConfig()
    validation_dataloader: DataloaderConfig = DataloaderConfig()
    optimizer: TargetConfig | None = None
    lr_scheduler: LRSchedulerConfig | None = None
    clip_grad_norm: ClipGradNormConfig = ClipGradNormConfig()
    peft: PeftConfig | None = None
    wandb: Mapping[str, Any] = field(default_factory=FrozenDict)
    mlflow: Mapping[str, Any] = field(default_factory=FrozenDict)

    def to_dict(self) -> dict[str, Any]:
        """Returns the resolved configuration as plain YAML data; loading it gives an equal configuration."""
        from shoal.config.dump import plain

        return plain(self)
