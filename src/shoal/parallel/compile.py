"""torch.compile, one transformer layer at a time.

A layer's own `forward` is compiled and put back on the instance. What stands around it stays eager: the hooks that
gather and free sharded parameters, and those that recompute activations. No module is wrapped, so parameters keep
Hugging Face's names, and layers of one class share one graph.
"""

from __future__ import annotations

import torch
from torch import nn

from shoal.config.llm import CompileConfig
from shoal.parallel.layers import transformer_layers


def compile_layers(module: nn.Module, config: CompileConfig) -> int:
    """Compiles every transformer layer below `module` in place; returns their number.

    Runs after activation checkpointing and before sharding. Compilation itself happens at the first forward of
    each shape; with `dynamic` None, the second shape of a dimension makes it dynamic.

    Raises:
        ValueError: `module` has no repeated layers, the backend is unknown, or it has no modes.
    """
    layers = transformer_layers(module)
    if not layers:
        raise ValueError(
            f"compile.enabled = True: {type(module).__name__} has no list of layers to compile; "
            "repair: compile.enabled=false"
        )
    backend = config.backend or "inductor"
    known = torch.compiler.list_backends(exclude_tags=())
    if backend not in known:
        raise ValueError(f"compile.backend = {backend!r}: one of {', '.join(sorted(known))}")
    if config.mode != "default" and backend != "inductor":
        raise ValueError(
            f"compile.mode = {config.mode!r}: default with compile.backend = {backend!r}, which has no modes; "
            "repair: compile.mode=default"
        )
    for layer in layers:
        layer.forward = torch.compile(
            layer.forward,
            fullgraph=config.fullgraph,
            dynamic=config.dynamic,
            backend=backend,
            mode=None if config.mode == "default" else config.mode,
        )
    return len(layers)
