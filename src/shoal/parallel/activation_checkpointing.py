"""Activation checkpointing: a layer's activations are recomputed in backward instead of kept.

torch's composable `checkpoint` works in place, so parameter names stay those of Hugging Face. Random numbers of torch's
generators are replayed in the recomputation; what else it has to see as the forward did is up to `ContextFn`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

from torch import nn
from torch.distributed._composable.checkpoint_activation import checkpoint

from shoal.parallel.layers import transformer_layers

ContextFn = Callable[[], tuple[AbstractContextManager[None], AbstractContextManager[None]]]
"""Called once per forward; makes what surrounds that forward, and what surrounds its recomputation."""


def checkpoint_module(module: nn.Module, context_fn: ContextFn | None = None) -> None:
    """Recomputes the activations of one module in backward, in place; its forward must be called as a module."""
    checkpoint(module, context_fn=context_fn)


def checkpoint_activations(module: nn.Module, context_fn: ContextFn | None = None) -> int:
    """Recomputes every transformer layer below `module` in backward; returns their number.

    Must run before sharding, and only once. Gradients are those of the module without checkpointing.

    Raises:
        ValueError: `module` has no repeated layers, so the setting would do nothing.
    """
    layers = transformer_layers(module)
    if not layers:
        raise ValueError(
            f"activation_checkpointing = True: {type(module).__name__} has no list of layers to recompute; "
            "repair: set it to false"
        )
    for layer in layers:
        checkpoint_module(layer, context_fn)
    return len(layers)
