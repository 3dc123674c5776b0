"""FSDP2 and hybrid sharding: parameters, gradients and optimizer state sharded over the data-parallel ranks.

Every transformer layer is one unit of `torch.distributed.fsdp.fully_shard`; what lies outside the layers
(embedding, final norm, head, projections) belongs to the root. The root is the whole trainable module: it has
one forward, and nothing touches a sharded weight outside it.

Gradients follow the sum rule: the loss of a micro-batch is already divided by the number of supervised tokens
of the whole step, so ranks are summed, never averaged.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

from shoal.config.schema import FSDP2Config, MixedPrecisionConfig, OffloadConfig
from shoal.parallel.layers import transformer_layers
from shoal.parallel.model import GradientSync, ParallelModel, surrounded
from shoal.parallel.tensor import TensorParallel


def shard_fsdp2(
    module: nn.Module, mesh: DeviceMesh, config: FSDP2Config, policy: MixedPrecisionConfig | None
) -> FSDPModule:
    """Shards `module` in place: one unit per transformer layer, the rest with the root.

    Args:
        module: The whole trainable module, on the meta device or materialised; `requires_grad` is final.
        mesh: One axis (shard), or two (replicate, shard) for hybrid sharding.
        config: Options of the strategy.
        policy: Compute, reduction and output dtypes; None keeps the stored dtype everywhere.

    Returns:
        `module`, whose parameters are now DTensors over `mesh`; their gradients are sharded alike.
    """
    offload = _offload_policy(config.offload_policy, mesh.device_type)
    reshard = True if config.reshard_after_forward is None else config.reshard_after_forward
    inner, outer = _precision_policies(policy)
    for layer in transformer_layers(module):
        fully_shard(layer, mesh=mesh, mp_policy=inner, offload_policy=offload, reshard_after_forward=reshard)
    # The root gathers first and is needed again at once in backward: resharding it would only add traffic.
    fully_shard(module, mesh=mesh, mp_policy=outer, offload_policy=offload, reshard_after_forward=False)
    assert isinstance(module, FSDPModule)  # narrows the type: fully_shard swaps the class in place
    module.register_forward_hook(_reshard_without_backward)
    _sum_gradients(module, mesh)
    return module


def fsdp2_model(
    module: FSDPModule,
    group: ProcessGroup,
    device: torch.device,
    config: FSDP2Config,
    tensor_parallel: TensorParallel | None = None,
    loss_group: ProcessGroup | None = None,
) -> ParallelModel:
    """The interface of a sharded module to the training step; see `ParallelModel` for the groups."""

    def gradient_sync(last: bool) -> AbstractContextManager[None]:
        return _synchronised(module, last or not config.defer_fsdp_grad_sync, last)

    assert isinstance(module, nn.Module)
    sync: GradientSync = gradient_sync
    if tensor_parallel is not None:
        sync = surrounded(
            sync, tensor_parallel.share_partial_gradients, tensor_parallel.sum_partial_gradients
        )
    return ParallelModel(module, module, sync, group, device, loss_group)


def _reshard_without_backward(module: nn.Module, inputs: object, output: object) -> None:
    """Gives the root's gathered parameters up after a forward that no backward follows.

    Otherwise they would stay in place of the shards, and a checkpoint taken after validation would not find them.
    """
    if not torch.is_grad_enabled():
        assert isinstance(module, FSDPModule)
        module.reshard()


@contextmanager
def _synchronised(module: FSDPModule, reduce: bool, last: bool) -> Iterator[None]:
    # Without reduction the unsharded gradients accumulate in reduce_dtype until the last micro-batch.
    module.set_requires_gradient_sync(reduce)
    module.set_is_last_backward(last)
    yield


def _sum_gradients(module: FSDPModule, mesh: DeviceMesh) -> None:
    """Makes every unit sum gradients instead of averaging them; the one place that owns gradient scaling.

    A divide factor needs forced SUM reductions, because gloo has no pre-multiplied sum. On one rank there is
    nothing to reduce, and torch 2.13 would apply the factor twice there; 1.0 is harmless either way.
    """
    assert isinstance(module, nn.Module)  # FSDPModule is a mix-in and does not say so
    for unit in module.modules():
        if isinstance(unit, FSDPModule):
            unit.set_gradient_divide_factor(1.0)
            if mesh.size() > 1:
                unit.set_force_sum_reduction_for_comms(True)


def _precision_policies(
    policy: MixedPrecisionConfig | None,
) -> tuple[MixedPrecisionPolicy, MixedPrecisionPolicy]:
    """Policies of the inner units and of the root.

    The root leaves its inputs alone: audio samples and log-mel features stay fp32 until the encoder casts them.
    Only the root may cast outputs, and its outputs are loss sums, which stay fp32.
    """
    if policy is None:
        keep = MixedPrecisionPolicy(cast_forward_inputs=False)
        return keep, keep
    param, reduce = _dtype(policy.param_dtype), _dtype(policy.reduce_dtype)
    inner = MixedPrecisionPolicy(param, reduce, None, cast_forward_inputs=policy.cast_forward_inputs)
    return inner, MixedPrecisionPolicy(param, reduce, None, cast_forward_inputs=False)


def _offload_policy(config: OffloadConfig | None, device_type: str) -> OffloadPolicy:
    if config is None:
        return OffloadPolicy()
    # Pinned memory needs an accelerator: without one torch refuses to allocate it.
    return CPUOffloadPolicy(pin_memory=config.pin_memory and device_type != "cpu")


def _dtype(name: str | None) -> torch.dtype | None:
    if name is None:
        return None
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype
