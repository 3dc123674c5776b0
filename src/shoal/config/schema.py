"""The parallel surface: every dataclass that says how a model is spread over a mesh of devices.

Field names are the names users write in YAML. dtypes are strings, so that nothing here needs torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from shoal.config.values import FunctionName, PositiveInt

DtypeName = Literal["float32", "bfloat16", "float16", "float64"]
CheckpointingMode = bool | Literal["full", "selective"]
ContextMethod = Literal["ring", "allgather", "ulysses"]
MambaContextMethod = Literal["auto", "all_to_all", "state"]


@dataclass(frozen=True)
class ParallelismSizes:
    """Degrees of the parallel axes; None means "infer from the world size".

    dp_size = world / (tp_size * pp_size * cp_size). dp_replicate_size splits dp for hybrid sharding.
    ep_size divides dp_size * cp_size: experts reuse those ranks instead of adding an axis.
    """

    dp_size: PositiveInt | None = None
    dp_replicate_size: PositiveInt | None = None
    tp_size: PositiveInt = 1
    pp_size: PositiveInt = 1
    cp_size: PositiveInt = 1
    ep_size: PositiveInt = 1


@dataclass(frozen=True)
class MixedPrecisionConfig:
    """dtypes of the compute copy of the parameters, of the gradient reduction and of the root's output.

    None keeps the stored dtype. Gradients reduce in fp32 unless the user says otherwise. The root of a training
    module returns fp32 sums, so its output has no dtype to choose.
    """

    param_dtype: DtypeName | None = "bfloat16"
    reduce_dtype: DtypeName | None = "float32"
    output_dtype: DtypeName | None = None
    cast_forward_inputs: bool = True


@dataclass(frozen=True)
class OffloadConfig:
    """Keeps sharded parameters, gradients and optimizer state on the host; pinning needs an accelerator."""

    pin_memory: bool = True


@dataclass(frozen=True)
class FSDP2Config:
    """Options of the ``fsdp2`` strategy.

    mp_policy None means "from trainer.precision" (speech) or the default policy (LLM).
    reshard_after_forward None means automatic: True, or False under pipeline parallelism.
    cp_method says how attention reaches the tokens of other ranks, and mamba_cp how Mamba-2 layers do; both need
    cp_size > 1.
    """

    sequence_parallel: bool = False
    tp_plan: Mapping[str, str] | FunctionName | None = None
    mp_policy: MixedPrecisionConfig | None = None
    offload_policy: OffloadConfig | None = None
    activation_checkpointing: CheckpointingMode = False
    defer_fsdp_grad_sync: bool = True
    reshard_after_forward: bool | None = None
    cp_method: ContextMethod = "ring"
    mamba_cp: MambaContextMethod = "auto"


@dataclass(frozen=True)
class MegatronFSDPConfig:
    """Options of the ``megatron_fsdp`` strategy, under the names of the megatron-fsdp package."""

    megatron_fsdp_unit_modules: tuple[str, ...] | None = None
    zero_dp_strategy: Literal[0, 1, 2, 3] = 3
    init_fsdp_with_meta_device: bool = False
    grad_reduce_in_fp32: bool = True
    preserve_fp32_weights: bool = True
    overlap_grad_reduce: bool = True
    overlap_param_gather: bool = True
    check_for_nan_in_grad: bool = True
    report_nan_in_param_grad: bool = False
    average_in_collective: bool = False
    disable_bucketing: bool = False
    calculate_per_token_loss: bool = False
    keep_fp8_transpose_cache: bool = False
    nccl_ub: bool = False
    fsdp_double_buffer: bool = False
    activation_checkpointing: CheckpointingMode = False


@dataclass(frozen=True)
class DDPConfig:
    """Options of the ``ddp`` strategy: activation checkpointing and the flags of torch's DDP wrapper."""

    activation_checkpointing: CheckpointingMode = False
    broadcast_buffers: bool = False
    find_unused_parameters: bool = False
    static_graph: bool = False
    bucket_cap_mb: PositiveInt | None = None
    gradient_as_bucket_view: bool = False


@dataclass(frozen=True)
class MoEParallelizerConfig:
    """How expert layers are sharded and recomputed; only meaningful with ep_size > 1."""

    reshard_after_forward: bool = False
    ignore_router_for_ac: bool = True
    wrap_outer_model: bool = True
    lm_head_precision: DtypeName | None = None
    mp_policy: MixedPrecisionConfig | None = None


@dataclass(frozen=True)
class PipelineConfig:
    """The pipeline schedule and the split of the layers into stages; only meaningful with pp_size > 1."""

    pp_schedule: str = "1f1b"
    pp_schedule_csv: str | None = None
    pp_microbatch_size: PositiveInt = 1
    layers_per_stage: PositiveInt | None = None
    round_virtual_stages_to_pp_multiple: Literal["up", "down"] | None = None
    module_fqns_per_stage: tuple[tuple[str, ...], ...] | None = None
    scale_grads_in_schedule: bool = False


StrategyOptions = FSDP2Config | MegatronFSDPConfig | DDPConfig
StrategyName = Literal["fsdp2", "megatron_fsdp", "ddp"]

STRATEGY_OPTIONS: Mapping[str, type[FSDP2Config] | type[MegatronFSDPConfig] | type[DDPConfig]] = {
    "fsdp2": FSDP2Config,
    "megatron_fsdp": MegatronFSDPConfig,
    "ddp": DDPConfig,
}


@dataclass(frozen=True)
class DistributedConfig:
    """The ``distributed`` section of the LLM recipe, parsed.

    In YAML the sizes and the options of the strategy stand flat in the section; pipeline, moe are blocks.
    """

    strategy: StrategyName = "fsdp2"
    sizes: ParallelismSizes = ParallelismSizes()
    options: StrategyOptions = FSDP2Config()
    pipeline: PipelineConfig | None = None
    moe: MoEParallelizerConfig | None = None
    activation_checkpointing: CheckpointingMode = False


@dataclass(frozen=True)
class DistEnvConfig:
    """How the process group opens: backend None is chosen from the device."""

    backend: Literal["nccl", "gloo"] | None = None
    timeout_minutes: PositiveInt = 10


__all__ = [
    "STRATEGY_OPTIONS",
    "CheckpointingMode",
    "ContextMethod",
    "MambaContextMethod",
    "DDPConfig",
    "DistEnvConfig",
    "DistributedConfig",
    "DtypeName",
    "FSDP2Config",
    "MegatronFSDPConfig",
    "MixedPrecisionConfig",
    "MoEParallelizerConfig",
    "OffloadConfig",
    "ParallelismSizes",
    "PipelineConfig",
    "StrategyName",
    "StrategyOptions",
]
