"""From the names inside a trainable module to the names in the files that others read.

A naming says which tensors of one part of a model must be at hand together, and turns such a group into what is
written. Everything else about saving (where tensors come from, which rank holds them, the size of files) is the
same for all of them, so one group after the other can stream through memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from copy import deepcopy
from typing import Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    PrefixChange,
    WeightConverter,
    apply_converters,
    revert_weight_conversion,
)

from shoal.models.lora import adapted_modules


class Naming(Protocol):
    """What a part's tensors are called in its files."""

    stem: str

    def groups(self, names: Iterable[str]) -> list[tuple[str, ...]]:
        """The names to fetch together, in the order of the files; names that are not written are left out."""

    def convert(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """One group's tensors under the names, and in the shapes, of the files."""


class OwnNames:
    """The names of the module itself."""

    stem = "model"

    def groups(self, names: Iterable[str]) -> list[tuple[str, ...]]:
        """Every tensor by itself."""
        return [(name,) for name in names]

    def convert(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors as they are."""
        return dict(tensors)


class HuggingFaceNames:
    """The names and shapes of a model's published checkpoints; adapters are merged into their layers.

    Stacked experts become one tensor per expert again, fused projections are split, and of tied tensors one is
    written, all by transformers' own rules for the architecture.

    Args:
        model: the architecture, on the meta device, without adapters.
        adapted: the same with adapters injected, or None.

    Raises:
        ValueError: adapters that cannot be merged one layer at a time.
    """

    stem = "model"

    def __init__(self, model: PreTrainedModel, adapted: PreTrainedModel | None = None) -> None:
        self.model = model
        self.adapted = adapted
        self._layers = () if adapted is None else adapted_modules(adapted)
        if any(f"{layer}.base_layer" in self._layers for layer in self._layers):
            raise ValueError(
                "adapters on single parameters (target_parameters) cannot be merged while exporting; "
                "export the adapters and merge them with peft"
            )
        conversions = get_model_conversion_mapping(model, add_legacy=False) or []
        # A prefix that some checkpoints have and others do not: transformers leaves it out for new models.
        conversions = [one for one in conversions if not isinstance(one, PrefixChange)]
        # transformers looks here first; without it the rules would be collected again for every tensor.
        model._weight_conversions = conversions  # type: ignore[assignment]
        reversed_ones = [one.reverse_transform() for one in reversed(conversions)]
        self._converters = [one for one in reversed_ones if isinstance(one, WeightConverter)]
        self._tied: dict[str, str] = dict(getattr(model, "all_tied_weights_keys", None) or {})

    def groups(self, names: Iterable[str]) -> list[tuple[str, ...]]:
        """A tensor with those that make one tensor of the files with it: adapters, fused and tied ones."""
        groups: dict[str, list[str]] = {}  # the key of a group -> its names; keys of merged groups go away
        leader: dict[str, str] = {}
        for name in names:
            keys = self._keys(name)
            joined = list(dict.fromkeys(leader[key] for key in keys if key in leader))
            first = joined[0] if joined else keys[0]
            members = groups.setdefault(first, [])
            for other in joined[1:]:
                members += groups.pop(other)
            members.append(name)
            if len(joined) > 1:
                keys += [key for key, group in leader.items() if group in joined]
            leader.update(dict.fromkeys(keys, first))
        return [tuple(members) for members in groups.values()]

    def convert(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Adapters merged, ties dropped, conversions reverted.

        Raises:
            ValueError: tensors that the configuration ties have different values.
        """
        plain: dict[str, Tensor] = {}
        by_layer: dict[str, dict[str, Tensor]] = {}
        for name, tensor in tensors.items():
            layer = self._layer_of(name)
            if layer is None:
                plain[name] = tensor
            else:
                by_layer.setdefault(layer, {})[name.removeprefix(f"{layer}.")] = tensor
        for layer, own in by_layer.items():
            assert self.adapted is not None
            plain |= merged_layer(self.adapted.get_submodule(layer), layer, own)
        self._drop_ties(plain)
        converted: dict[str, Tensor] = revert_weight_conversion(self.model, plain)
        return converted

    def _keys(self, name: str) -> list[str]:
        """What ties `name` to others: equal keys of two names put both into one group."""
        layer = self._layer_of(name)
        target = name if layer is None else name.replace(".base_layer.", ".")
        keys = [] if layer is None else [f"layer {layer}"]
        keys.append(apply_converters(target, self._converters)[0])
        keys.append(f"tied {self._tied.get(target, target)}")
        return keys

    def _layer_of(self, name: str) -> str | None:
        found = [layer for layer in self._layers if name.startswith(f"{layer}.")]
        return max(found, key=len, default=None)

    def _drop_ties(self, tensors: dict[str, Tensor]) -> None:
        for target, source in self._tied.items():
            if target not in tensors:
                continue
            if not torch.equal(tensors.setdefault(source, tensors[target]), tensors[target]):
                raise ValueError(
                    f"the model's configuration ties {target} to {source}, but their values differ; set "
                    "tie_word_embeddings: false in its configuration"
                )
            del tensors[target]


def merged_layer(layer: nn.Module, name: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weight and bias of an adapted layer with its adapter added, computed by peft on the CPU.

    Args:
        layer: the adapted layer on the meta device.
        name: its full name; the results are called `NAME.weight`, ...
        tensors: what the layer holds, by the names inside it.
    """
    filled = deepcopy(layer)
    # peft adds to the weight in place, and what we were given may be the model's own memory.
    own = {leaf: t.clone() if leaf.startswith("base_layer.") else t for leaf, t in tensors.items()}
    filled.load_state_dict(own, assign=True)
    with torch.no_grad():
        filled.merge()  # type: ignore[operator]  # every adapted layer of peft has it
    base = filled.get_submodule("base_layer").state_dict()
    return {f"{name}.{leaf}": tensor for leaf, tensor in base.items()}


class AdapterNames:
    """The names of peft's `adapter_model.safetensors`, taken from peft itself; nothing but adapters is written.

    Args:
        adapted: the model with adapters, on the meta device.
    """

    stem = "adapter_model"

    def __init__(self, adapted: PreTrainedModel) -> None:
        from peft import get_peft_model_state_dict

        # peft chooses and renames by key and passes the values on: identity tells which is which.
        placeholders = dict(adapted.state_dict())
        names = {id(tensor): name for name, tensor in placeholders.items()}
        chosen = get_peft_model_state_dict(adapted, placeholders, save_embedding_layers=False)
        self.renamed = {names[id(tensor)]: f"base_model.model.{key}" for key, tensor in chosen.items()}

    def groups(self, names: Iterable[str]) -> list[tuple[str, ...]]:
        """Every adapter tensor by itself."""
        return [(name,) for name in names if name in self.renamed]

    def convert(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors under peft's names."""
        return {self.renamed[name]: tensor for name, tensor in tensors.items()}
