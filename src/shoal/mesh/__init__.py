"""The device mesh: names of axes, arithmetic of ranks, process groups.

The names are imported on first use, so that the arithmetic (`shoal.mesh.sizes`) stays free of torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shoal.mesh.axes import MeshAxisName
    from shoal.mesh.context import MeshContext
    from shoal.mesh.init import DistInfo, initialize_distributed
    from shoal.mesh.sizes import MeshCoordinate, ResolvedSizes, resolve_sizes

_WHERE = {
    "MeshAxisName": "axes",
    "MeshContext": "context",
    "DistInfo": "init",
    "initialize_distributed": "init",
    "MeshCoordinate": "sizes",
    "ResolvedSizes": "sizes",
    "resolve_sizes": "sizes",
}


def __getattr__(name: str) -> object:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_WHERE[name]}"), name)


__all__ = [
    "DistInfo",
    "MeshAxisName",
    "MeshContext",
    "MeshCoordinate",
    "ResolvedSizes",
    "initialize_distributed",
    "resolve_sizes",
]
