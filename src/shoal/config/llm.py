"""The whole surface of the LLM recipe on one page; the sections follow NeMo AutoModel's YAML."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from shoal.config.options import LoadOptions
from shoal.config.schema import DistEnvConfig, DistributedConfig, DtypeName
from shoal.config.speech import BackendConfig, PrecisionName
from shoal.config.text import DataloaderConfig, PackedSequenceConfig, TextDatasetConfig
from shoal.config.values import (
    CountInt,
    Fraction,
    FrozenDict,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    SeedInt,
    TargetConfig,
)


@dataclass(frozen=True)
class CausalLMConfig:
    """The model: weights of a folder or hub model, or an architecture that starts from random weights.

    `config` is a folder or hub model whose config.json is taken, or the fields of a transformers configuration
    with their ``model_type``. torch_dtype is the dtype the weights are stored in while training, see `precision`.
    """

    pretrained_model_name_or_path: str | None = None
    config: str | Mapping[str, Any] | None = None
    torch_dtype: Literal["auto"] | DtypeName | None = None
    attn_implementation: Literal["auto", "sdpa", "eager", "flash_attention_2", "shoal"] = "auto"
    trust_remote_code: bool = False
    backend: BackendConfig = BackendConfig()


@dataclass(frozen=True)
class StepSchedulerConfig:
    """Batch sizes and periods; global_batch_size = local_batch_size * dp_size * accumulation.

    Batch sizes count documents, or packs with packed sequences. The run ends after num_epochs or max_steps,
    whichever comes first. Validation runs every val_every_steps, None means at the end of each epoch.
    """

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
    """The run's seed; what is random derives from it and from names, never from a rank."""

    seed: SeedInt = 42
    ranked: bool = True


@dataclass(frozen=True)
class CheckpointConfig:
    """Where and how checkpoints are written.

    restore_from is a checkpoint, or ``latest`` for the newest complete one in checkpoint_dir (the beginning when
    there is none yet). keep_last (AutoModel: max_recent_checkpoints) is the number of periodic ones to keep, beside
    the one of the run's last step; None keeps all.
    """

    enabled: bool = True
    checkpoint_dir: str = "checkpoints/"
    restore_from: str | None = None
    model_save_format: Literal["safetensors", "torch_save"] = "safetensors"
    save_consolidated: bool | Literal["final", "every"] = "final"
    is_async: bool = False
    keep_last: PositiveInt | None = None


@dataclass(frozen=True)
class LossConfig:
    """Cross-entropy: ``chunked`` never holds the logits of all tokens at once, ``full`` does; same numbers."""

    kind: Literal["chunked", "full"] = "chunked"
    label_smoothing: Fraction = 0.0
    z_loss: NonNegativeFloat = 0.0


@dataclass(frozen=True)
class LRSchedulerConfig:
    """Warm-up from init_lr to the optimizer's rate and decay to min_lr, in optimizer steps.

    None means: lr_decay_steps the whole run, lr_warmup_steps a tenth of the run but at most 1000, init_lr a tenth
    and min_lr a hundredth of the optimizer's rate. WSD stays at the rate until the last wsd_decay_steps.
    """

    lr_warmup_steps: CountInt | None = None
    lr_decay_steps: PositiveInt | None = None
    lr_decay_style: Literal["cosine", "constant", "linear", "inverse-square-root", "WSD"] = "cosine"
    init_lr: NonNegativeFloat | None = None
    min_lr: NonNegativeFloat | None = None
    wsd_decay_steps: PositiveInt | None = None
    lr_wsd_decay_style: Literal["linear", "cosine", "exponential", "minus_sqrt"] = "exponential"


@dataclass(frozen=True)
class ClipGradNormConfig:
    """Largest gradient norm; None, also in place of the whole section, switches clipping off."""

    max_norm: PositiveFloat | None = 1.0


@dataclass(frozen=True)
class PeftConfig:
    """Low-rank adapters, AutoModel's spelling; a module name may hold ``*``. adapter_path starts from saved ones."""

    dim: PositiveInt = 8
    alpha: PositiveFloat = 32
    dropout: Fraction = 0.0
    target_modules: tuple[str, ...] | str = ()
    exclude_modules: tuple[str, ...] | str = ()
    match_all_linear: bool = False
    use_dora: bool = False
    use_triton: bool = False
    adapter_path: str | None = None


@dataclass(frozen=True)
class CompileConfig:
    """torch.compile of each transformer layer; the keys are torch's.

    backend None is inductor. dynamic None compiles the second size of a dimension for all sizes; false compiles
    each anew, and torch gives up after a few, so it suits packs and fixed lengths only.
    """

    enabled: bool = False
    mode: Literal["default", "lite", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] = (
        "default"
    )
    fullgraph: bool = False
    dynamic: bool | None = None
    backend: str | None = None


_ADAMW = TargetConfig("torch.optim.AdamW", FrozenDict({"lr": 1e-4, "weight_decay": 0.01}), key="optimizer")


@dataclass(frozen=True)
class LLMConfig:
    """A whole run of the LLM recipe; `to_dict` gives it back as plain YAML data.

    precision None follows from model.torch_dtype: bf16-true for bfloat16, 64-true for float64, else bf16-mixed.
    tokenizer None is that of the model; ``bytes`` has one token per byte and needs no file. The main validation
    set is named ``default``; ``validation_dataset_NAME: {...}`` in YAML adds one under its own name. A logger runs
    when its section is there; its keys are those of Lightning's logger.
    """

    model: CausalLMConfig | None = None
    tokenizer: str | None = None
    precision: PrecisionName | None = None
    step_scheduler: StepSchedulerConfig = StepSchedulerConfig()
    dist_env: DistEnvConfig = DistEnvConfig()
    rng: RngConfig = RngConfig()
    compile: CompileConfig = CompileConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    distributed: DistributedConfig = DistributedConfig()
    loss_fn: LossConfig = LossConfig()
    dataset: TextDatasetConfig | None = None
    validation_datasets: Mapping[str, TextDatasetConfig] = field(default_factory=FrozenDict)
    packed_sequence: PackedSequenceConfig = PackedSequenceConfig()
    dataloader: DataloaderConfig = DataloaderConfig()
    validation_dataloader: DataloaderConfig = DataloaderConfig()
    optimizer: TargetConfig = _ADAMW
    lr_scheduler: LRSchedulerConfig | None = None
    clip_grad_norm: ClipGradNormConfig = ClipGradNormConfig()
    peft: PeftConfig | None = None
    wandb: Mapping[str, Any] | None = None
    mlflow: Mapping[str, Any] | None = None
    tensorboard: Mapping[str, Any] | None = None
    ci: Mapping[str, Any] | None = None
    options: LoadOptions = field(default=LoadOptions(), metadata={"internal": True})

    def to_dict(self) -> dict[str, Any]:
        """Returns the resolved configuration as plain YAML data; loading it gives an equal configuration."""
        from shoal.config.dump import plain

        return plain(self)
