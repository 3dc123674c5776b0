"""Lets a module compute with this rank's part of its parameters, whatever class of module it is.

A parameter that tensor parallelism has cut is a DTensor, and stays one for FSDP2, checkpoints and norms. The module's
own forward, however, reads ``self.weight`` and gets a plain tensor with this rank's rows. For that the module's class
is replaced by a subclass of the same name with a property for each such parameter; nothing is wrapped, and names of
parameters do not change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

View = Callable[[Tensor], Tensor]
"""What a module sees of one of its parameters; differentiable."""

_VIEWS = "_shoal_views"


def local_part(parameter: Tensor) -> Tensor:
    """This rank's part of a DTensor over one axis, with gradient.

    Outside a forward FSDP2 has sharded it over further axes, and reads it itself: then it is left as it is.
    """
    return (
        parameter.to_local()
        if isinstance(parameter, DTensor) and parameter.device_mesh.ndim == 1
        else parameter
    )


def show(module: nn.Module, views: Mapping[str, View]) -> None:
    """From now on reading ``module.NAME`` gives ``views[NAME]`` of that parameter."""
    views = {**getattr(module, _VIEWS, {}), **views}
    module.__dict__[_VIEWS] = views
    original = _original(type(module))
    module.__class__ = _with_views(original, tuple(sorted(views)))


@contextmanager
def whole_parameters(module: nn.Module) -> Iterator[None]:
    """Reading a parameter gives the parameter itself inside; for code that fills it with values."""
    views = module.__dict__.get(_VIEWS, {})
    shown, module.__dict__[_VIEWS] = views, {name: _itself for name in views}
    try:
        yield
    finally:
        if views:
            module.__dict__[_VIEWS] = shown
        else:
            del module.__dict__[_VIEWS]


def _itself(parameter: Tensor) -> Tensor:
    return parameter


@cache
def _with_views(cls: type, names: tuple[str, ...]) -> type:
    namespace: dict[str, Any] = {name: property(_reader(name)) for name in names}
    namespace |= {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "_shoal_original": cls}
    return type(cls.__name__, (cls,), namespace)


def _original(cls: type) -> type:
    return getattr(cls, "_shoal_original", cls)


def _reader(name: str) -> Callable[[nn.Module], Tensor | None]:
    def read(module: nn.Module) -> Tensor | None:
        parameter = module._parameters[name]
        if parameter is None:
            return None
        view: View = module.__dict__[_VIEWS][name]
        return view(parameter)

    return read


__all__ = ["View", "local_part", "show", "whole_parameters"]
