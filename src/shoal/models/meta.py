"""Builds a model without memory for its parameters, but with its buffers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import nn
from torch.nn.modules import module as torch_module

Built = TypeVar("Built", bound=nn.Module)


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

    handle = torch_module.register_module_parameter_registration_hook(to_meta)
    try:
        yield
    finally:
        handle.remove()


def build_on_meta(build: Callable[[], Built], dtype: torch.dtype) -> Built:
    """Runs `build` with parameters on the meta device, then gives floating-point parameters the stored dtype.

    Buffers keep their dtype: rotary frequencies and filter banks stay fp32 under every precision.
    """
    with parameters_on_meta():
        model = build()
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter.is_floating_point() and parameter.dtype != dtype:
                cast = nn.Parameter(parameter.detach().to(dtype), requires_grad=parameter.requires_grad)
                module._parameters[name] = cast
    retie(model)
    return model


def retie(model: nn.Module) -> None:
    """Ties again what Hugging Face models declare as tied; parameters moved one by one lose their ties."""
    for module in model.modules():
        if hasattr(module, "tie_weights") and hasattr(module, "all_tied_weights_keys"):
            module.tie_weights()
