"""Loading adapters that peft, or an export of ours, has saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from shoal.checkpoint.naming import AdapterNames
from shoal.checkpoint.parts import ADAPTER_CONFIG, Part
from shoal.models.files import open_file
from shoal.models.folder import read_json
from shoal.models.init import store

ADAPTER_FILE = "adapter_model.safetensors"
_SCALING = ("r", "lora_alpha", "use_rslora", "use_dora", "rank_pattern", "alpha_pattern", "fan_in_fan_out")


def load_adapter(module: nn.Module, part: Part, folder: Path) -> None:
    """Fill the adapters of a model in any layout; each rank keeps its own slices, without traffic.

    Args:
        module: the trainable module that `part` belongs to.
        part: its language model, which has adapters.
        folder: holds `adapter_config.json` and `adapter_model.safetensors`.

    Raises:
        ValueError: a file is damaged, the model has no adapter, the saved one is of other layers or shapes, or it
            was trained with another scaling; the message lists what differs. On every rank, before anything is filled.
    """
    if part.adapter is None:
        raise ValueError(
            f"{folder} holds an adapter, but the model has none; repair: configure LoRA as in it"
        )
    _check_scaling(folder, part.adapter)
    named = dict(module.named_parameters())
    renamed = AdapterNames(part.adapted_skeleton()).renamed
    targets = {key: named[part.prefix + name] for name, key in renamed.items()}
    tensors = open_file(folder / ADAPTER_FILE)
    saved = {key: tuple(tensor.get_shape()) for key, tensor in tensors.items()}
    wanted = {key: tuple(target.shape) for key, target in targets.items()}
    differing = sorted(key for key in saved.keys() | wanted.keys() if saved.get(key) != wanted.get(key))
    if differing:
        lines = [f"{key}: saved {saved.get(key)}, this model's {wanted.get(key)}" for key in differing[:8]]
        raise ValueError(
            f"the adapter in {folder} does not fit ({len(differing)} tensors):\n  " + "\n  ".join(lines)
        )
    for key, target in targets.items():
        store(tensors[key][...], target)


def _check_scaling(folder: Path, adapter: Any) -> None:
    saved = read_json(folder / ADAPTER_CONFIG)
    own = adapter.to_dict()
    differing = [name for name in _SCALING if (saved.get(name) or None) != (own.get(name) or None)]
    if differing:
        lines = [f"{name} = {saved.get(name)!r}, this run's {own.get(name)!r}" for name in differing]
        raise ValueError(f"the adapter in {folder} was trained with " + "; ".join(lines))
