"""Finds the repeated layers of a model: the units of sharding, recomputation and compilation."""

from __future__ import annotations

from torch import nn

_LAYER_LISTS = ("layers", "h", "blocks", "block")
"""What transformers calls the list of a model's layers (``h`` in the GPT-2 lineage)."""


def transformer_layers(module: nn.Module) -> list[nn.Module]:
    """Returns the outermost repeated layers below `module`, in the order of registration.

    A list inside a layer (adapters, experts) is part of that layer and not listed again.

    >>> model = nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)]), "norm": nn.Linear(2, 2)})
    >>> len(transformer_layers(model))
    2
    """
    found: list[nn.Module] = []
    for name, child in module.named_children():
        if isinstance(child, nn.ModuleList) and name in _LAYER_LISTS:
            found.extend(child)
        else:
            found.extend(transformer_layers(child))
    return found
