"""Whether a small model is built like the original: every kind of layer, every module outside the layers."""

from __future__ import annotations

import re
from collections.abc import Callable

import torch
from torch import nn

from shoal.parallel.layers import transformer_layers

MOST_PARAMETERS = 20_000_000
"""A model above this has kept a size that `shoal.verify.shrink` does not know."""


def on_meta(build: Callable[[], nn.Module]) -> nn.Module:
    """Builds a model of any size without memory for it."""
    with torch.device("meta"):
        return build()


def lost_structure(original: nn.Module, small: nn.Module) -> list[str]:
    """Kinds of layers and other modules of `original` that `small` has not, in words."""
    lost = []
    wanted, have = layer_kinds(original), layer_kinds(small)
    for kind, index in wanted.items():
        if kind not in have:
            lost.append(f"the kind of layer {index} ({kind[0][1]})")
    for name in sorted(outside_layers(original) - outside_layers(small)):
        lost.append(f"module {name}")
    return lost


def layer_kinds(module: nn.Module) -> dict[tuple[tuple[str, str], ...], int]:
    """Each kind of layer, as the names and classes of its modules and parameters, and the first layer of the kind."""
    kinds: dict[tuple[tuple[str, str], ...], int] = {}
    for index, layer in enumerate(transformer_layers(module)):
        modules = [(name, type(child).__name__) for name, child in layer.named_modules()]
        parameters = [(name, "parameter") for name, _ in layer.named_parameters()]
        kind = tuple(_without_numbers(name, what) for name, what in [*modules, *parameters])
        kinds.setdefault(tuple(dict.fromkeys(kind)), index)
    return kinds


def _without_numbers(name: str, what: str) -> tuple[str, str]:
    """Members of a list inside a layer (experts) are one: their number is a size."""
    return re.sub(r"\d+", "N", name), what


def outside_layers(module: nn.Module) -> set[str]:
    """Names and classes of the modules and parameters that belong to no layer."""
    inside = {id(child) for layer in transformer_layers(module) for child in layer.modules()}
    names = set()
    for name, child in module.named_modules():
        if id(child) not in inside:
            names.add(f"{name} ({type(child).__name__})")
            names |= {f"{name}.{own}" for own, _ in child.named_parameters(recurse=False)}
    return names


def num_parameters(module: nn.Module) -> int:
    """Parameters, ties counted once."""
    return sum(parameter.numel() for parameter in module.parameters())
