"""Activation checkpointing: a layer's activations are recomputed in backward instead of kept.

torch's composable `checkpoint` works in place, so parameter names stay those of Hugging Face. Random numbers are
replayed, so dropout draws the same values in the recomputation.
"""

from __future__ import annotations

from torch import nn
from torch.distributed._composable.checkpoint_activation import checkpoint

from shoal.parallel.layers import transformer_layers


def checkpoint_module(module: nn.Module) -> None:
    """Recomputes the activations of one module in backward, in place; its forward must be called as a module."""
    checkpoint(module)


def checkpoint_activations(module: nn.Module) -> int:
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
        checkpoint_module(layer)
    return len(layers)
