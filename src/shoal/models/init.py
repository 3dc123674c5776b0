"""Initial values that depend on the run's seed and the module's name, and on nothing else.

Each module's parameters are drawn in full on every rank and then sliced, one module at a time. Drawing sharded
values directly would give every shard the same numbers on CPU, and numbers that change with the layout elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Collection

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from shoal.config.seeds import derive_seed
from shoal.parallel.tensor.local import whole_parameters


def initialise(model: nn.Module, names: Collection[str], seed: int) -> None:
    """Fills the named parameters of a materialised model, in place, in any layout.

    Args:
        model: Parameters are plain tensors or DTensors of the right dtype and placement.
        names: Full names of the parameters that no checkpoint provides.
        seed: Seed of the run.
    """
    owner: nn.Module = model
    for module_name, module in model.named_modules():
        owner = _owner(model, module_name)
        wanted = [n for n, _ in module.named_parameters(recurse=False) if _join(module_name, n) in names]
        if wanted:
            _initialise_module(owner, module, module_name, wanted, seed)


def _initialise_module(owner: nn.Module, module: nn.Module, name: str, wanted: list[str], seed: int) -> None:
    """Draws all parameters of one module in full, then keeps this rank's part of the wanted ones."""
    placed = dict(module._parameters)
    full = {
        n: nn.Parameter(torch.empty(p.shape, dtype=torch.float32), requires_grad=False)
        for n, p in placed.items()
        if p is not None
    }
    module._parameters.update(full)
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad(), whole_parameters(module):
            torch.manual_seed(derive_seed(seed, name))
            _draw(owner, module, name)
    finally:
        module._parameters.update(placed)
    for n in wanted:
        target = placed[n]
        assert target is not None
        store(full[n].detach(), target)


def _draw(owner: nn.Module, module: nn.Module, name: str) -> None:
    """The values a fresh module would have: LoRA's own rule, then Hugging Face's, then torch's."""
    if ".lora_B." in f".{name}.":
        for parameter in module.parameters(recurse=False):
            nn.init.zeros_(parameter)
    elif ".lora_A." in f".{name}.":
        for parameter in module.parameters(recurse=False):
            nn.init.kaiming_uniform_(parameter, a=math.sqrt(5))
    elif hasattr(owner, "_init_weights"):
        for parameter in module.parameters(recurse=False):
            nn.init.zeros_(
                parameter
            )  # a rule that leaves a parameter out must not leave memory garbage in it
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()  # type: ignore[operator]
        owner._init_weights(module)  # type: ignore[operator]
    elif hasattr(module, "reset_parameters"):
        module.reset_parameters()  # type: ignore[operator]
    else:
        raise ValueError(
            f"{name}: {type(module).__name__} owns parameters but says nowhere how they start; "
            "repair: give the class a reset_parameters method"
        )


def store(value: Tensor, target: Tensor) -> None:
    """Copies a whole tensor into a parameter in any layout; each rank keeps its own part, without traffic."""
    with torch.no_grad():
        if isinstance(target, DTensor):
            # src_data_rank=None: every rank holds the same values, so nothing needs to be sent.
            value = value.to(target.device_mesh.device_type, target.dtype)
            part = distribute_tensor(value, target.device_mesh, target.placements, src_data_rank=None)
            target.to_local().copy_(part.to_local())
        else:
            target.copy_(value)


def _owner(model: nn.Module, module_name: str) -> nn.Module:
    """The innermost enclosing module that has Hugging Face's `_init_weights`, or the model itself."""
    owner: nn.Module = model
    current: nn.Module = model
    for part in module_name.split(".") if module_name else ():
        if hasattr(current, "_init_weights"):
            owner = current
        current = getattr(current, part)
    return current if hasattr(current, "_init_weights") else owner


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name
