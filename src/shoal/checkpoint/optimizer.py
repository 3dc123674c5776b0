"""Optimizer state by parameter name, read and set without touching the optimizer otherwise.

torch's own helpers step an optimizer that has no state yet with zero gradients, on saving as on loading: the
step counter of a run that saved before its first step is off by one for ever, and a trainable parameter that
never had a gradient gets state that the uninterrupted run does not have. Here what exists is saved, and
exactly that exists after loading.

Tensors travel through torch's distributed checkpoint as `optimizer.PARAMETER.STATE` and follow their
parameter to any layout; everything else (hyper-parameters of the groups, plain numbers) is plain data.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from shoal.checkpoint.plain import decode, encode

PREFIX = "optimizer."
# How a step is executed is the running program's choice, not part of the state.
_EXECUTION = {"params", "fused", "foreach", "capturable", "differentiable"}
_WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")


@dataclass(frozen=True)
class OptimizerState:
    """State of all optimizers: `tensors` by checkpoint key, `plain` one JSON-able entry per optimizer."""

    tensors: dict[str, Tensor]
    plain: list[dict[str, Any]]


def parameter_names(model: nn.Module) -> dict[nn.Parameter, str]:
    """Parameter -> its name as in the checkpoint: without activation-checkpointing and compile wrappers."""
    names: dict[nn.Parameter, str] = {}
    for name, parameter in model.named_parameters():
        for wrapper in _WRAPPERS:
            name = name.replace(wrapper, "")
        names[parameter] = name
    return names


def collect(model: nn.Module, optimizers: Sequence[Optimizer]) -> OptimizerState:
    """Read the state of `optimizers` (all over parameters of `model`); nothing is created or stepped.

    Raises:
        ValueError: a parameter outside the model or in two optimizers, or a state tensor that cannot follow
            its sharded parameter to another layout.
    """
    names = parameter_names(model)
    tensors: dict[str, Tensor] = {}
    plain: list[dict[str, Any]] = []
    seen: set[str] = set()
    for optimizer in optimizers:
        groups, numbers = [], {}
        for group in optimizer.param_groups:
            owned = [_name(names, parameter, optimizer) for parameter in group["params"]]
            if repeated := seen.intersection(owned):
                raise ValueError(f"parameters in more than one optimizer group: {sorted(repeated)}")
            seen.update(owned)
            options = {key: value for key, value in group.items() if key not in _EXECUTION}
            groups.append({"params": owned, "options": encode(options, "param_group")})
            for name, parameter in zip(owned, group["params"], strict=True):
                numbers[name] = _collect_parameter(name, parameter, optimizer, tensors)
        kept = {name: values for name, values in numbers.items() if values}
        plain.append({"class": type(optimizer).__qualname__, "groups": groups, "numbers": kept})
    return OptimizerState(tensors, plain)


def templates(
    model: nn.Module, optimizers: Sequence[Optimizer], saved: Mapping[str, TensorStorageMetadata]
) -> dict[str, Tensor]:
    """Allocate a zero tensor for every saved state of this rank's parameters, laid out like its parameter.

    Args:
        saved: every tensor of the checkpoint (`TensorReader.tensors()`).

    Raises:
        ValueError: a saved state has neither its sharded parameter's shape nor one element.
    """
    by_parameter: dict[str, list[str]] = {}
    for key in saved:
        if key.startswith(PREFIX):
            by_parameter.setdefault(key[len(PREFIX) :].rpartition(".")[0], []).append(key)
    names = parameter_names(model)
    result: dict[str, Tensor] = {}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                for key in by_parameter.get(_name(names, parameter, optimizer), ()):
                    result[key] = _template(key, parameter, group, saved[key])
    return result


def assign(
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    tensors: Mapping[str, Tensor],
    plain: Sequence[Mapping[str, Any]],
) -> None:
    """Give the optimizers the loaded state; state that was not saved is removed.

    Args:
        tensors: the filled `templates`.
        plain: `OptimizerState.plain` as read from the checkpoint.

    Raises:
        ValueError: another number or class of optimizers, or groups that split the parameters differently.
    """
    found = [type(optimizer).__qualname__ for optimizer in optimizers]
    wanted = [str(entry["class"]) for entry in plain]
    if found != wanted:
        raise ValueError(f"the checkpoint holds the state of optimizers {wanted}, this run has {found}")
    names = parameter_names(model)
    by_parameter: dict[str, dict[str, Any]] = {}
    for key, tensor in tensors.items():
        name, _, state = key[len(PREFIX) :].rpartition(".")
        by_parameter.setdefault(name, {})[state] = tensor
    for optimizer, entry in zip(optimizers, plain, strict=True):
        optimizer.state.clear()
        for group in optimizer.param_groups:
            owned = [_name(names, parameter, optimizer) for parameter in group["params"]]
            group.update(_options_of(owned, entry["groups"]))
            for name, parameter in zip(owned, group["params"], strict=True):
                state = by_parameter.get(name, {}) | decode(entry["numbers"].get(name, {}))
                if state:
                    optimizer.state[parameter] = state


def merge_plain(parts: Iterable[Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """Join the plain data of ranks that hold different parameters (pipeline stages) into the whole model's.

    Raises:
        ValueError: ranks disagree on a group's hyper-parameters or on the optimizers.
    """
    merged: list[dict[str, Any]] = []
    for part in parts:
        if not merged:
            merged = [{**one, "groups": list(one["groups"]), "numbers": dict(one["numbers"])} for one in part]
            continue
        for whole, one in zip(merged, part, strict=True):
            whole["numbers"] |= one["numbers"]
            whole["groups"] = [_join(*pair) for pair in zip(whole["groups"], one["groups"], strict=True)]
    return merged


def _join(whole: Mapping[str, Any], one: Mapping[str, Any]) -> dict[str, Any]:
    # An empty group is a pipeline stage without parameters of that kind; its options still agree.
    if whole["options"] != one["options"]:
        raise ValueError(f"ranks disagree on optimizer options: {whole['options']} and {one['options']}")
    params = list(dict.fromkeys([*whole["params"], *one["params"]]))
    return {"params": params, "options": whole["options"]}


def _name(names: Mapping[nn.Parameter, str], parameter: nn.Parameter, optimizer: Optimizer) -> str:
    if parameter not in names:
        raise ValueError(
            f"{type(optimizer).__qualname__} has a parameter of shape {tuple(parameter.shape)} that is not "
            "in the model being saved: build the optimizer after the model is sharded"
        )
    return names[parameter]


def _collect_parameter(
    name: str, parameter: nn.Parameter, optimizer: Optimizer, tensors: dict[str, Tensor]
) -> dict[str, Any]:
    numbers: dict[str, Any] = {}
    # `.get`: the state is a defaultdict and reading it by key would create an entry.
    for state, value in optimizer.state.get(parameter, {}).items():
        if isinstance(value, Tensor):
            _check_follows(f"{name}.{state}", value.shape, isinstance(value, DTensor), parameter)
            tensors[f"{PREFIX}{name}.{state}"] = value
        else:
            numbers[state] = encode(value, f"optimizer state {name}.{state}")
    return numbers


def _check_follows(where: str, shape: torch.Size, sharded: bool, parameter: nn.Parameter) -> None:
    if not isinstance(parameter, DTensor):
        return
    if shape != parameter.shape if sharded else shape.numel() != 1:
        raise ValueError(
            f"optimizer state {where} has shape {tuple(shape)}, its sharded parameter "
            f"{tuple(parameter.shape)}: such a state cannot be moved to another layout; use an optimizer "
            "whose states have their parameter's shape"
        )


def _template(
    key: str, parameter: nn.Parameter, group: Mapping[str, Any], saved: TensorStorageMetadata
) -> Tensor:
    dtype, shape = saved.properties.dtype, torch.Size(saved.size)
    is_counter = shape.numel() == 1 and key.endswith(".step")
    if shape == parameter.shape and not is_counter:
        return torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
    _check_follows(key, shape, False, parameter)
    # torch keeps step counters on the CPU unless the step itself runs on the device.
    on_device = group.get("capturable") or group.get("fused") or shape.numel() > 1
    return torch.zeros(shape, dtype=dtype, device=parameter.device if on_device else "cpu")


def _options_of(owned: Sequence[str], groups: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    if not owned:
        return {}
    for group in groups:
        if owned[0] in group["params"]:
            strangers = set(owned) - set(group["params"])
            if strangers:
                raise ValueError(
                    f"optimizer groups differ from the checkpoint's: {owned[0]} and {sorted(strangers)} "
                    "are in one group now and were not when it was saved"
                )
            return dict(decode(group["options"]))
    raise ValueError(f"the checkpoint holds no optimizer group with parameter {owned[0]}")
