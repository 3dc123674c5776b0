"""The tensors of a model that are saved: parameters and persistent buffers, each once, by name."""

from __future__ import annotations

from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel


def resharded(model: nn.Module) -> nn.Module:
    """The module itself, without DDP's wrapper and with the parameters that the optimizer has."""
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    assert isinstance(inner, nn.Module)
    for module in inner.modules():
        if isinstance(module, FSDPModule):
            # After a forward without backward the modules still hold the gathered parameters, which are not the
            # ones the optimizer has.
            module.reshard()
    return inner


def aliases_of(module: nn.Module) -> dict[str, str]:
    """Further names of tied parameters -> the name under which they are saved."""
    first: dict[nn.Parameter, str] = {}
    aliases: dict[str, str] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if first.setdefault(parameter, name) != name:
            aliases[name] = first[parameter]
    return aliases


def model_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Name -> parameter or persistent buffer, sharing memory with the module; a tied one under its first name.

    Raises:
        ValueError: some state of the module is not a tensor.
    """
    aliases = aliases_of(module)
    tensors: dict[str, Tensor] = {}
    for name, value in get_model_state_dict(module).items():
        if not isinstance(value, Tensor):
            raise ValueError(
                f"state {name} of the model is a {type(value).__qualname__}; only tensors are saved"
            )
        if name not in aliases:
            tensors[name] = value
    return tensors
