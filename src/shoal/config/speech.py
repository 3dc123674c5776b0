"""The whole surface of the speech recipe on one page: model, trainer, data, exp_manager.

Field names are the keys of the YAML; they follow NeMo's speechlm2 collection and Lightning's Trainer. A key
that is not here is refused with the nearest one that is. A key whose feature arrives later is refused by a
rule (`shoal.config.pending`) as soon as it is set to anything but the value shown.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from shoal.config.options import LoadOptions
from shoal.config.schema import (
    CheckpointingMode,
    DDPConfig,
    DtypeName,
    FSDP2Config,
    MegatronFSDPConfig,
    MoEParallelizerConfig,
    ParallelismSizes,
)
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

# --------------------------------------------------------------------------------------------------- model


PromptFormatName = Literal["plain", "llama2", "llama3", "chatml", "qwen"]


@dataclass(frozen=True)
class LoraConfig:
    """Low-rank adapters in the LLM; keys of PEFT's LoraConfig (dim, alpha, dropout are read too)."""

    r: PositiveInt = 8
    lora_alpha: PositiveFloat = 32
    lora_dropout: Fraction = 0.0
    target_modules: tuple[str, ...] | str | None = None
    exclude_modules: tuple[str, ...] | str | None = None
    task_type: Literal["CAUSAL_LM"] = "CAUSAL_LM"
    bias: Literal["none", "all", "lora_only"] = "none"
    use_rslora: bool = False
    use_dora: bool = False
    layers_to_transform: tuple[CountInt, ...] | None = None


@dataclass(frozen=True)
class ModalityAdapterConfig:
    """What stands between encoder and projection: nothing (identity), an MLP or a few Conformer layers.

    stack_frames first concatenates that many encoder frames into one (4 turns Whisper's 50 Hz into 12.5 Hz).
    d_model None is the stacked width. The Conformer attends over the whole audio (no streaming mask); xscaling
    multiplies its input by sqrt(d_model). feat_in is a check: the width of the frames that come in.
    """

    kind: Literal["identity", "mlp", "conformer"] = "identity"
    stack_frames: PositiveInt = 1
    feat_in: PositiveInt | None = None
    d_model: PositiveInt | None = None
    n_layers: PositiveInt = 2
    n_heads: PositiveInt = 8
    ff_expansion_factor: PositiveInt = 4
    conv_kernel_size: PositiveInt = 9
    dropout: Fraction = 0.0
    xscaling: bool = False


@dataclass(frozen=True)
class SpecAugmentConfig:
    """Masks on the log-mel features in training, seeded per sample; time_width < 1 is a fraction."""

    freq_masks: CountInt = 0
    time_masks: CountInt = 0
    freq_width: CountInt = 10
    time_width: PositiveFloat = 10


@dataclass(frozen=True)
class PerceptionConfig:
    """The speech front: feature settings and encoder come with `pretrained_asr`; these keys adjust them.

    `encoder` overrides keys of the transformers configuration of the encoder (``num_hidden_layers``, ...).
    output_dim None is the LLM's hidden size; another number is refused once that size is known.
    """

    encoder: Mapping[str, Any] = field(default_factory=FrozenDict)
    modality_adapter: ModalityAdapterConfig = ModalityAdapterConfig()
    spec_augment: SpecAugmentConfig | None = None
    output_dim: PositiveInt | None = None


@dataclass(frozen=True)
class BackendConfig:
    """Which kernels the LLM runs on; ``auto`` picks, and logs what it picked and why."""

    attn: Literal["auto", "sdpa", "flash", "te", "eager", "flex"] = "auto"
    linear: Literal["torch", "te"] = "torch"
    rms_norm: Literal["torch", "torch_fp32", "te"] = "torch"
    rope_fusion: bool = False
    experts: Literal["auto", "torch", "torch_mm", "te", "gmm"] = "auto"
    dispatcher: Literal["auto", "torch", "deepep", "hybridep"] = "auto"


@dataclass(frozen=True)
class MoEMetricsConfig:
    """Logging of expert load."""

    enabled: bool = False
    mode: Literal["brief", "detailed"] = "brief"
    detailed_every_steps: PositiveInt | None = None
    top_k_experts: PositiveInt = 5


@dataclass(frozen=True)
class SalmConfig:
    """The ``model`` section of SALM and SALMAutomodel, which share one implementation.

    freeze_params and prevent_freeze_params are regular expressions matched from the start of the full
    parameter name; the second list wins. A pattern that matches nothing is named in a warning when the model
    is built: lists written for NeMo name modules that do not exist here.
    """

    pretrained_llm: str
    pretrained_asr: str
    prompt_format: PromptFormatName
    audio_locator_tag: str
    optimizer: TargetConfig
    lr_scheduler: TargetConfig | None = None
    pretrained_weights: bool = True
    tokenizer_path: str | None = None
    trust_remote_code: bool = False
    encoder_chunk_size_seconds: PositiveFloat | None = None
    freeze_params: tuple[str, ...] = ()
    prevent_freeze_params: tuple[str, ...] = ()
    lora: LoraConfig | None = None
    perception: PerceptionConfig = PerceptionConfig()
    init_from_checkpoint: str | None = None
    torch_dtype: DtypeName | None = None
    automodel_backend: BackendConfig = BackendConfig()
    use_nemo_automodel: bool = False
    init_configure_model: bool = False
    packed_sequences: bool = False
    aux_loss_coeff: NonNegativeFloat = 0.0
    train_gate: bool = False
    moe_metrics: MoEMetricsConfig = MoEMetricsConfig()
    compile: Mapping[str, Any] | None = None
    sdpa_method: tuple[str, ...] | None = None
    pretrained_perception_from_s2s: str | None = None
    pretrained_s2s_model: str | None = None
    incremental_loading: bool = False


# ------------------------------------------------------------------------------------------------- trainer


@dataclass(frozen=True)
class StrategyConfig:
    """The ``trainer.strategy`` block: stock DDP, our mesh strategy, or Lightning's ModelParallelStrategy.

    In YAML the sizes stand flat in the block, spelled as the class named by ``_target_`` spells them, and the
    flags of the DDP wrapper stand flat in a DDPStrategy block.
    """

    kind: Literal["ddp", "automodel", "model_parallel"] = "ddp"
    sizes: ParallelismSizes = ParallelismSizes()
    distributed_config: FSDP2Config | MegatronFSDPConfig | None = None
    moe_config: MoEParallelizerConfig | None = None
    activation_checkpointing_llm: CheckpointingMode = False
    activation_checkpointing_perception: bool = False
    save_distributed_checkpoint: bool = True
    process_group_backend: Literal["nccl", "gloo"] | None = None
    timeout_seconds: PositiveFloat | None = None
    ddp: DDPConfig = DDPConfig()


PrecisionName = Literal["32-true", "bf16-mixed", "bf16-true", "bf16-flash", "16-mixed", "64-true"]


@dataclass(frozen=True)
class TrainerConfig:
    """The ``trainer`` section: Lightning's keys, plus the micro-batches of a step over the whole job.

    Counts keep Lightning's meaning: limit_*_batches and an integer val_check_interval count micro-batches per
    data-parallel rank, max_steps counts optimizer steps. global_micro_batches fixes a step for every layout;
    accumulate_grad_batches alone resolves to accumulate_grad_batches * dp_size.
    """

    devices: PositiveInt | Literal[-1, "auto"] = "auto"
    num_nodes: PositiveInt = 1
    accelerator: Literal["auto", "cpu", "gpu", "cuda"] = "auto"
    precision: PrecisionName = "32-true"
    strategy: StrategyConfig = StrategyConfig()
    max_steps: PositiveInt | Literal[-1] = -1
    max_epochs: PositiveInt | Literal[-1] | None = None
    max_time: str | None = None
    limit_train_batches: PositiveInt | None = None
    limit_val_batches: CountInt | None = None
    limit_test_batches: CountInt | None = None
    limit_predict_batches: CountInt | None = None
    val_check_interval: PositiveInt | None = None
    check_val_every_n_epoch: PositiveInt | None = 1
    num_sanity_val_steps: CountInt | Literal[-1] = 2
    log_every_n_steps: PositiveInt = 50
    global_micro_batches: PositiveInt | None = None
    accumulate_grad_batches: PositiveInt = 1
    gradient_clip_val: PositiveFloat | None = None
    gradient_clip_algorithm: Literal["norm", "value"] = "norm"
    logger: bool = False
    enable_checkpointing: bool = False
    enable_progress_bar: bool = True
    enable_model_summary: bool = False
    callbacks: tuple[TargetConfig, ...] = ()
    default_root_dir: str | None = None
    use_distributed_sampler: bool | None = None
    deterministic: bool | Literal["warn"] = False
    benchmark: bool | None = None
    detect_anomaly: bool = False


# ---------------------------------------------------------------------------------------------------- data


@dataclass(frozen=True)
class InputConfig:
    """One source of examples, or a weighted group of them (``type: group`` with a nested ``input_cfg``)."""

    type: Literal[
        "lhotse",
        "lhotse_shar",
        "lhotse_as_conversation",
        "nemo",
        "nemo_tarred",
        "multimodal_conversation",
        "txt",
        "group",
    ]
    weight: PositiveFloat | None = None
    tags: Mapping[str, Any] = field(default_factory=FrozenDict)
    cuts_path: str | None = None
    shar_path: str | tuple[str, ...] | None = None
    manifest_filepath: str | tuple[str, ...] | None = None
    tarred_audio_filepaths: str | tuple[str, ...] | None = None
    paths: str | tuple[str, ...] | None = None
    audio_locator_tag: str | None = None
    input_cfg: tuple[InputConfig, ...] | None = None


@dataclass(frozen=True)
class DatasetConfig:
    """A data loader: where examples come from, how micro-batches are composed and in which order.

    Durations are seconds. With use_multimodal_sampling lengths are tokens: text tokens plus
    duration / token_equivalent_duration. The order never depends on the layout.
    """

    input_cfg: tuple[InputConfig, ...] | None = None
    cuts_path: str | None = None
    shar_path: str | tuple[str, ...] | None = None
    manifest_filepath: str | tuple[str, ...] | None = None
    tarred_audio_filepaths: str | tuple[str, ...] | None = None
    datasets: Mapping[str, DatasetConfig] = field(default_factory=FrozenDict)
    sample_rate: PositiveInt = 16000
    prompt_format: PromptFormatName | None = None
    audio_locator_tag: str | None = None
    token_equivalent_duration: PositiveFloat = 0.08
    batch_size: PositiveInt | None = None
    batch_duration: PositiveFloat | None = None
    batch_tokens: PositiveInt | None = None
    quadratic_duration: PositiveFloat | None = None
    quadratic_factor: PositiveFloat | None = None
    use_multimodal_sampling: bool = False
    measure_total_length: bool = True
    use_bucketing: bool = False
    num_buckets: PositiveInt = 30
    num_cuts_for_bins_estimate: PositiveInt = 10000
    bucket_duration_bins: tuple[PositiveFloat, ...] | None = None
    bucket_batch_size: tuple[PositiveInt, ...] | None = None
    bucket_buffer_size: PositiveInt = 10000
    shuffle: bool = False
    shuffle_buffer_size: PositiveInt = 10000
    drop_last: bool = False
    seed: SeedInt = 0
    shard_seed: SeedInt | Literal["randomized", "trng"] = "randomized"
    min_duration: NonNegativeFloat | None = None
    max_duration: PositiveFloat | None = None
    min_tokens: CountInt | None = None
    max_tokens: PositiveInt | None = None
    oversize: Literal["skip", "alone"] = "skip"
    on_bad_audio: Literal["skip", "error"] = "skip"
    channel_selector: CountInt | Literal["average"] = 0
    num_workers: CountInt = 0
    pin_memory: bool = False


@dataclass(frozen=True)
class DataConfig:
    """The ``data`` section; the sets of validation, test and predict are named in ``datasets``."""

    train_ds: DatasetConfig
    validation_ds: DatasetConfig | None = None
    test_ds: DatasetConfig | None = None
    predict_ds: DatasetConfig | None = None


# --------------------------------------------------------------------------------------------- exp_manager


@dataclass(frozen=True)
class CheckpointCallbackConfig:
    """When to save, how, and what to keep.

    The model's shards are written by torch or as safetensors; save_consolidated adds Hugging Face folders to the
    final or to every checkpoint.
    """

    filename: str | None = None
    monitor: str = "val_loss"
    mode: Literal["min", "max"] = "min"
    save_top_k: CountInt | Literal[-1] = 3
    save_last: bool = True
    every_n_epochs: PositiveInt | None = None
    every_n_train_steps: PositiveInt | None = None
    always_save_nemo: bool = False
    save_nemo_on_train_end: bool = False
    async_save: bool = False
    model_save_format: Literal["safetensors", "torch_save"] = "torch_save"
    save_consolidated: bool | Literal["final", "every"] = False


@dataclass(frozen=True)
class ExpManagerConfig:
    """Where a run writes, which loggers it has, when it saves and from what it resumes."""

    explicit_log_dir: str | None = None
    exp_dir: str | None = None
    name: str | None = None
    version: str | None = None
    use_datetime_version: bool = True
    resume_if_exists: bool = False
    resume_past_end: bool = False
    resume_ignore_no_checkpoint: bool = False
    resume_from_checkpoint: str | None = None
    create_tensorboard_logger: bool = True
    create_wandb_logger: bool = False
    wandb_logger_kwargs: Mapping[str, Any] = field(default_factory=FrozenDict)
    create_mlflow_logger: bool = False
    mlflow_logger_kwargs: Mapping[str, Any] = field(default_factory=FrozenDict)
    create_csv_logger: bool = False
    create_checkpoint_callback: bool = True
    checkpoint_callback_params: CheckpointCallbackConfig = CheckpointCallbackConfig()
    create_preemption_callback: bool = True
    max_time_per_run: str | None = None
    log_step_timing: bool = True
    disable_validation_on_resume: bool = False
    seconds_to_sleep: NonNegativeFloat = 0
    create_early_stopping_callback: bool = False
    files_to_copy: tuple[str, ...] = ()


@dataclass(frozen=True)
class SpeechConfig:
    """A whole run of the speech recipe, validated; `to_dict` gives it back as plain YAML data.

    `options` is not a section: it records what the command line allowed, for the parts that run later.
    """

    model: SalmConfig
    trainer: TrainerConfig
    data: DataConfig
    exp_manager: ExpManagerConfig | None = None
    options: LoadOptions = field(default=LoadOptions(), metadata={"internal": True})

    def to_dict(self) -> dict[str, Any]:
        """Returns the resolved configuration as plain YAML data; loading it gives an equal configuration."""
        from shoal.config.dump import plain

        return plain(self)
