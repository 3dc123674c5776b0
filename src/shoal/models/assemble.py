"""THE order in which a model is built, changed and spread over the mesh.

    build on meta -> LoRA -> freeze -> dropout -> tensor and sequence parallelism -> activation checkpointing ->
    compile -> FSDP2 / HSDP -> materialise and load this rank's shards -> initialise what no checkpoint provides ->
    check ties and leftovers -> DDP

`requires_grad` is final after freezing, and names stay Hugging Face's throughout. DDP comes last because it
broadcasts and buckets real parameters; FSDP2 comes before loading so that no rank ever holds the whole model.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from shoal.config.llm import CompileConfig
from shoal.config.schema import DDPConfig, FSDP2Config, MixedPrecisionConfig
from shoal.mesh.axes import MeshAxisName
from shoal.models.dropout import refuse_generator_dropout, replace_dropout
from shoal.models.freeze import freeze_parameters
from shoal.models.init import initialise
from shoal.models.load import WeightSource, check_ties, conversions_of, load_pretrained
from shoal.models.lora import ADAPTER_PATTERN, add_lora
from shoal.models.meta import cast_stored, parameters_on_meta, replace_parameters
from shoal.parallel.activation_checkpointing import ContextFn, checkpoint_activations
from shoal.parallel.compile import compile_layers
from shoal.parallel.context.mamba import share_mamba_tokens
from shoal.parallel.context.share import attach_context_parallel
from shoal.parallel.ddp import autocasting, replicate_in_place, wrap_ddp
from shoal.parallel.fsdp2 import fsdp2_model, shard_fsdp2
from shoal.parallel.model import ParallelModel, no_gradient_sync, single_process
from shoal.parallel.setup import DistributedSetup, refuse_unimplemented
from shoal.parallel.tensor import TensorParallel, shard_tensor_parallel

if TYPE_CHECKING:
    from peft import LoraConfig

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ModelPlan:
    """What to build, before anything is said about devices.

    Attributes:
        build: Makes the trainable module; called with parameters going to the meta device.
        weights: Which submodules come from which folders; everything else starts from `seed`.
        llm: Name of the submodule that LoRA and `checkpoint_llm` apply to; empty for the module itself.
        lora: A `peft.LoraConfig`, or its arguments, or None.
        lora_key: Where the user names the modules to adapt, for messages.
        freeze: Regular expressions of parameter names that do not train.
        keep: Regular expressions that win over `freeze`.
        checkpoint_llm: Recompute the layers of the LLM in backward.
        perception: Name of the submodule with `set_activation_checkpointing`, or None.
        checkpoint_perception: Recompute the speech encoder's layers in backward.
        compile: How to compile the layers of the LLM, or None.
        seed: Seed of initial values.
    """

    build: Callable[[], nn.Module]
    weights: Sequence[WeightSource] = ()
    llm: str = "llm"
    lora: Mapping[str, Any] | LoraConfig | None = None
    lora_key: str = "target_modules"
    freeze: Sequence[str] = ()
    keep: Sequence[str] = ()
    checkpoint_llm: bool = False
    perception: str | None = None
    checkpoint_perception: bool = False
    compile: CompileConfig | None = None
    seed: int = 0


@dataclass(frozen=True)
class Numerics:
    """dtypes of a run: what is stored, what FSDP2 computes in, what autocast computes in."""

    stored: torch.dtype = torch.float32
    policy: MixedPrecisionConfig | None = None
    autocast: torch.dtype | None = None


def assemble(
    plan: ModelPlan, setup: DistributedSetup | None, numerics: Numerics, device: torch.device
) -> ParallelModel:
    """Builds, shards and loads the trainable module that `plan` describes.

    Args:
        plan: What to build.
        setup: Strategy and mesh; None for one process without a process group.
        numerics: dtypes.
        device: The device of this rank.

    Raises:
        ValueError: Weights do not fit, a setting would do nothing, or the mesh has an axis that is not
            implemented yet.
    """
    module = _build_and_fill(plan, setup, numerics, device)
    if setup is None:
        return _plain(module, numerics, device)
    strategy, group = setup.strategy_config, setup.mesh_context.group(MeshAxisName.DP)
    if isinstance(strategy, DDPConfig):
        return wrap_ddp(module, group, device, strategy, numerics.autocast)
    assert isinstance(module, FSDPModule) and isinstance(strategy, FSDP2Config)
    return fsdp2_model(module, group, device, strategy, _tensor_parallel(module), _loss_group(setup))


def assemble_in_place(
    plan: ModelPlan, setup: DistributedSetup | None, numerics: Numerics, device: torch.device
) -> ParallelModel:
    """Like `assemble`, for a module that is called directly: no wrapper stands between it and its caller.

    `gradient_sync` of the result has to surround forward and backward. Autocast is left to the caller.
    """
    module = _build_and_fill(plan, setup, numerics, device)
    if setup is None:
        return single_process(module, device)
    strategy, group = setup.strategy_config, setup.mesh_context.group(MeshAxisName.DP)
    if isinstance(strategy, DDPConfig):
        return replicate_in_place(module, group, device, strategy)
    assert isinstance(module, FSDPModule) and isinstance(strategy, FSDP2Config)
    return fsdp2_model(module, group, device, strategy, _tensor_parallel(module))


def _build_and_fill(
    plan: ModelPlan, setup: DistributedSetup | None, numerics: Numerics, device: torch.device
) -> nn.Module:
    """Everything up to the interface to the training step."""
    strategy = None if setup is None else setup.strategy_config
    if setup is not None:
        refuse_unimplemented(setup)
    if not isinstance(strategy, FSDP2Config | DDPConfig | None):
        raise ValueError(
            f"strategy = {type(strategy).__name__}: not implemented yet; repair: use fsdp2 or ddp"
        )
    module = _build(plan, numerics, setup)
    conversions = {
        source.module: conversions_of(_submodule(module, source.module)) for source in plan.weights
    }
    if setup is not None and isinstance(strategy, FSDP2Config):
        shard_fsdp2(module, setup.mesh_context.fsdp_mesh(), strategy, strategy.mp_policy or numerics.policy)
    fill(module, plan, conversions, _storage_device(strategy, device))
    return module


def _build(plan: ModelPlan, numerics: Numerics, setup: DistributedSetup | None) -> nn.Module:
    """The module on the meta device with everything in it that changes its parameters or its layers."""
    with parameters_on_meta():
        module = plan.build()
    llm = module.get_submodule(plan.llm)
    if plan.lora is not None:
        add_lora(_submodule(module, plan.llm), plan.lora, plan.lora_key)
    cast_stored(module, numerics.stored)  # adapters too: the parameters of one sharding unit share a dtype
    keep = [*plan.keep, ADAPTER_PATTERN] if plan.lora is not None else plan.keep
    for pattern in freeze_parameters(module, plan.freeze, keep):
        log.warning("pattern %r of freeze_params / prevent_freeze_params matches no parameter", pattern)
    context_fn = _place_dropout(module, plan, setup)
    if setup is not None and setup.mesh_context.tp_size > 1:
        _cut(module, plan, setup)
    if setup is not None and setup.mesh_context.cp_size > 1:
        _share_tokens(module, plan, setup)
    if plan.checkpoint_llm:
        checkpoint_activations(llm, context_fn)
    if plan.checkpoint_perception and plan.perception is not None:
        module.get_submodule(plan.perception).set_activation_checkpointing(True)  # type: ignore[operator]
    if plan.compile is not None:
        compile_layers(llm, plan.compile)
    return module


def _place_dropout(module: nn.Module, plan: ModelPlan, setup: DistributedSetup | None) -> ContextFn | None:
    """Gives dropout masks that no layout changes; returns what recomputation needs to repeat them.

    A bare language model is called by its user, who says nothing about steps and samples: its dropout stays torch's,
    and is refused where ranks would have to agree on it.
    """
    sizes = () if setup is None else setup.mesh_context.sizes
    axes = [
        f"{axis}_size = {getattr(sizes, axis)}" for axis in ("tp", "cp", "pp") if getattr(sizes, axis, 1) > 1
    ]
    state = None
    if plan.llm:
        state = replace_dropout(module, perception=plan.perception, data_parallel_only=not axes)
    if axes:
        refuse_generator_dropout(module, ", ".join(axes))
    return None if state is None else state.replaying


def _cut(module: nn.Module, plan: ModelPlan, setup: DistributedSetup) -> None:
    """Cuts the language model over the tensor-parallel ranks; the rest of the module is whole on each of them."""
    strategy = setup.strategy_config
    assert isinstance(strategy, FSDP2Config)  # rules refuse the axis for every other strategy
    state = shard_tensor_parallel(
        _submodule(module, plan.llm),
        setup.mesh_context.mesh(MeshAxisName.TP),
        sequence_parallel=strategy.sequence_parallel,
        plan=strategy.tp_plan,
    )
    # Nobody stands between a bare language model and its caller, who expects whole logits.
    state.full_logits = plan.llm == ""
    module.tensor_parallel = state  # type: ignore[assignment]


def _share_tokens(module: nn.Module, plan: ModelPlan, setup: DistributedSetup) -> None:
    """Lets the context-parallel ranks share the tokens of every micro-batch."""
    mesh, strategy = setup.mesh_context, setup.strategy_config
    assert isinstance(strategy, FSDP2Config)  # rules refuse the axis for every other strategy
    llm = _submodule(module, plan.llm)
    attach_context_parallel(module, llm, mesh.group(MeshAxisName.CP), strategy.cp_method, mesh.tp_size)
    share_mamba_tokens(llm, strategy.mamba_cp, mesh.cp_size)


def _loss_group(setup: DistributedSetup) -> ProcessGroup | None:
    """Ranks that see different tokens, where those are more than the data-parallel ones."""
    return setup.mesh_context.group(MeshAxisName.DP_CP) if setup.mesh_context.cp_size > 1 else None


def _tensor_parallel(module: nn.Module) -> TensorParallel | None:
    state = getattr(module, "tensor_parallel", None)
    return state if isinstance(state, TensorParallel) else None


def fill(
    module: nn.Module,
    plan: ModelPlan,
    conversions: Mapping[str, list[Any]],
    device: torch.device,
) -> None:
    """Gives every parameter memory and its value: from a checkpoint, or from the seed."""
    materialise(module, device)
    loaded: set[str] = set()
    for source in plan.weights:
        submodule = _submodule(module, source.module)
        load_pretrained(submodule, source, conversions[source.module])
        prefix = f"{source.module}." if source.module else ""
        loaded.update(prefix + name for name, _ in submodule.named_parameters() if ".lora_" not in name)
    names = {name for name, _ in module.named_parameters()}
    initialise(module, names - loaded, plan.seed)
    for source in plan.weights:
        check_ties(_submodule(module, source.module))


def materialise(module: nn.Module, device: torch.device) -> None:
    """Allocates meta parameters on `device` (only this rank's shards) and moves real buffers there, values kept."""

    def allocate(parameter: nn.Parameter) -> nn.Parameter:
        if not parameter.is_meta:
            return parameter
        return nn.Parameter(torch.empty_like(parameter, device=device), requires_grad=parameter.requires_grad)

    replace_parameters(module, allocate)
    for submodule in module.modules():
        for name, buffer in submodule.named_buffers(recurse=False):
            submodule._buffers[name] = buffer.to(device)


def _plain(module: nn.Module, numerics: Numerics, device: torch.device) -> ParallelModel:
    return ParallelModel(
        module, autocasting(module, device, numerics.autocast), no_gradient_sync, None, device
    )


def _storage_device(strategy: object, device: torch.device) -> torch.device:
    offloaded = isinstance(strategy, FSDP2Config) and strategy.offload_policy is not None
    return torch.device("cpu") if offloaded else device


def _submodule(module: nn.Module, name: str) -> PreTrainedModel:
    submodule = module.get_submodule(name)
    if not isinstance(submodule, PreTrainedModel):
        raise ValueError(f"{name or 'the model'}: {type(submodule).__name__} is not a transformers model")
    return submodule
