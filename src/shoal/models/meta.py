"""A model without memory for its parameters, but with its buffers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.modules import module as torch_module


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Every parameter registered inside goes to the meta device at once; buffers stay real.

    Buffers that are not part of a checkpoint (rotary frequencies, mel filters, positions) are thereby right by
    construction on every rank; a model built on the meta device as a whole would have to recompute them.
    """

    def to_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        del module, name
        if parameter is None or parameter.is_meta:
            return parameter
        return nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)

    handle = torch_module.register_module_parameter_registration_hook(to_meta)  # type: ignore[arg-type]
    try:
        yield
    finally:
        handle.remove()


def cast_stored(model: nn.Module, dtype: torch.dtype) -> None:
    """Gives floating-point parameters the dtype they are stored in, in place.

    Buffers keep theirs: rotary frequencies and filter banks stay fp32 under every precision. Only the statistics
    of a model in float64 follow, since its batch norms refuse to mix.
    """

    def cast(parameter: nn.Parameter) -> nn.Parameter:
        if not parameter.is_floating_point() or parameter.dtype == dtype:
            return parameter
        return nn.Parameter(parameter.detach().to(dtype), requires_grad=parameter.requires_grad)

    replace_parameters(model, cast)
    if dtype == torch.float64:
        for module in model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                if buffer.is_floating_point() and name not in module._non_persistent_buffers_set:
                    module._buffers[name] = buffer.to(dtype)


def replace_parameters(model: nn.Module, replace: Callable[[nn.Parameter], nn.Parameter]) -> None:
    """Puts ``replace(p)`` in the place of every parameter p, once per parameter, so that ties survive."""
    replaced: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            if parameter not in replaced:
                replaced[parameter] = replace(parameter)
            module._parameters[name] = replaced[parameter]
