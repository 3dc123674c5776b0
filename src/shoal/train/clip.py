"""The gradient norm over parameters on any mix of meshes and placements, and clipping by it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import overload

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from shoal.mesh.collectives import all_gather_objects


def gradient_norm(parameters: Iterable[nn.Parameter], norm_type: float = 2.0) -> Tensor:
    """The norm of all gradients together, as one process holding the whole model would compute it.

    A shard is counted once and a replica once, whatever the mesh. torch's own `get_total_norm` refuses gradients
    on different meshes, so each (mesh, placement) is reduced on its own and the results are combined.

    Args:
        parameters: Trainable parameters; a missing gradient counts as zero.
        norm_type: 2, 1, any p > 0, or inf.

    Returns:
        fp64 scalar, identical on every rank.
    """
    # Grouped by the parameters and not by the gradients that exist: the collectives must not depend on the rank.
    groups: dict[object, list[nn.Parameter]] = {}
    for parameter in parameters:
        groups.setdefault(_place(parameter), []).append(parameter)
    norms = [_norm_of_one_place(group, norm_type) for group in groups.values()]
    if not norms:
        return torch.zeros((), dtype=torch.float64)
    return _vector_norm(torch.stack(norms), norm_type)


def scale_gradients(parameters: Iterable[nn.Parameter], norm: Tensor, max_norm: float) -> None:
    """Scales gradients in place by min(1, max_norm / norm)."""
    factor = float(max_norm) / (float(norm) + 1e-6)
    gradients = [_local(parameter.grad) for parameter in parameters if parameter.grad is not None]
    if factor < 1.0 and gradients:
        torch._foreach_mul_(gradients, factor)


def refuse_non_finite(norm: Tensor, module: nn.Module, group: ProcessGroup | None, step: int) -> None:
    """Stops the run on every rank when the gradient norm is not finite, naming the parameters.

    Raises:
        FloatingPointError: On all ranks together, before the optimizer step; weights are untouched.
    """
    if math.isfinite(float(norm)):  # identical on all ranks, so all take the same branch
        return
    local = [name for name, parameter in module.named_parameters() if not _is_finite(parameter.grad)]
    by_rank = all_gather_objects(local, group)
    names = list(dict.fromkeys(name for names in by_rank for name in names))
    shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
    raise FloatingPointError(
        f"step {step}: the gradient norm is {float(norm)}; non-finite gradients in: {shown or 'their sum only'}. "
        "The optimizer has not stepped. Repair: lower the learning rate, or train in float32 (precision: 32-true) to "
        "find the layer that overflows"
    )


def _place(tensor: Tensor) -> object:
    return (tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else None


def _norm_of_one_place(parameters: list[nn.Parameter], norm_type: float) -> Tensor:
    """fp64 norm, on the CPU, of the gradients of parameters that share a mesh and placements."""
    norm = _local_norm(parameters, norm_type)
    first = parameters[0]
    if not isinstance(first, DTensor):
        return norm.cpu()
    power = norm if math.isinf(norm_type) else norm**norm_type
    power = power.to(first.device_mesh.device_type)  # offloaded gradients live on the host, the group may not
    operation = dist.ReduceOp.MAX if math.isinf(norm_type) else dist.ReduceOp.SUM
    for axis, placement in enumerate(first.placements):
        # A replica is complete on its own: counting it again would inflate the norm. A strided shard, which is what
        # FSDP2 makes of a parameter that tensor parallelism has cut, does not call itself a shard.
        if not placement.is_replicate():
            dist.all_reduce(power, op=operation, group=first.device_mesh.get_group(axis))
    total: Tensor = power if math.isinf(norm_type) else power ** (1.0 / norm_type)
    return total.cpu()


def _local_norm(parameters: list[nn.Parameter], norm_type: float) -> Tensor:
    """fp64 norm of this rank's parts of the gradients; sums run in fp64, fp32 ones lose four digits."""
    # The shard of a small parameter can be empty.
    gradients = [g for p in parameters if (g := _local(p.grad)) is not None and g.numel() > 0]
    if not gradients:
        return torch.zeros((), dtype=torch.float64, device=_local(parameters[0].detach()).device)
    norms = torch._foreach_norm(gradients, norm_type, dtype=torch.float64)
    return _vector_norm(torch.stack(norms), norm_type)


def _vector_norm(values: Tensor, norm_type: float) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(values, norm_type, dtype=torch.float64)
    return norm


def _is_finite(gradient: Tensor | None) -> bool:
    local = _local(gradient)
    return local is None or bool(torch.isfinite(local).all())


@overload
def _local(tensor: Tensor) -> Tensor: ...
@overload
def _local(tensor: None) -> None: ...
def _local(tensor: Tensor | None) -> Tensor | None:
    if isinstance(tensor, DTensor):
        local: Tensor = tensor.to_local()
        return local
    return tensor
