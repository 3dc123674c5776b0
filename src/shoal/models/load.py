"""Loads a Hugging Face folder into a model that is already sharded: each rank reads only its own slices.

Hugging Face's loader fills parameters that are DTensors in any layout, one slice at a time, and applies the
conversions between checkpoint and model names (stacked experts and the like).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.modeling_utils import LoadStateDictConfig
from transformers.utils import logging as transformers_logging

from shoal.models.lora import adapted_modules


@dataclass(frozen=True)
class WeightSource:
    """Where the weights of one submodule come from.

    Attributes:
        module: Full name of a `PreTrainedModel` inside the trainable module (``llm``, ``perception.encoder``).
        folder: A Hugging Face folder with safetensors files.
        prefix: What stands before the module's own names in the checkpoint; tensors without it belong to
            something else (a decoder, say) and are left alone.
    """

    module: str
    folder: Path
    prefix: str = ""


def conversions_of(model: PreTrainedModel) -> list[Any]:
    """The checkpoint-to-model conversions of a model; must be taken before `fully_shard` renames its classes."""
    conversions: list[Any] = get_model_conversion_mapping(model) or []
    return conversions


def load_pretrained(
    model: PreTrainedModel,
    source: WeightSource,
    conversions: Sequence[Any],
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Fills `model` in place; parameters keep their layout, `requires_grad` and dtype.

    LoRA adapters and the buffers that no checkpoint holds are left alone.

    Raises:
        ValueError: The folder has no safetensors files, or keys are missing, unexpected or of another shape; the
            message lists them.
    """
    trainable = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    length = len(source.prefix)
    own = {
        name[length:]: t for name, t in open_tensors(source.folder).items() if name.startswith(source.prefix)
    }
    tensors = _into_adapted_layers(own, adapted_modules(model))
    config = LoadStateDictConfig(
        pretrained_model_name_or_path=str(source.folder),
        dtype=dtype,
        dtype_plan=model._get_dtype_plan(dtype),
        weight_mapping=list(conversions),
        device_map={"": device},
        ignore_mismatched_sizes=True,  # collected and refused below, together with the other findings
    )
    with _quiet():
        found, _ = type(model)._load_pretrained_model(model, tensors, None, config)
    # Not `_finalize_model_loading`: it replaces every buffer that no checkpoint holds by uninitialised memory, on
    # the assumption that the model was built on the meta device as a whole.
    model.tie_weights(missing_keys=found.missing_keys, recompute_mapping=False)
    model._adjust_missing_and_unexpected_keys(found)
    missing = sorted(key for key in found.missing_keys if ".lora_" not in key)
    _refuse(source, missing, sorted(found.unexpected_keys), sorted(map(str, found.mismatched_keys)))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trainable[name])


def open_tensors(folder: Path) -> dict[str, Any]:
    """Lazy slices of every tensor in a folder's safetensors files, by name; nothing is read yet."""
    files = _weight_files(folder)
    tensors: dict[str, Any] = {}
    for file in files:
        handle = safe_open(file, framework="pt")
        tensors.update({name: handle.get_slice(name) for name in handle.keys()})  # type: ignore[no-untyped-call] # noqa: SIM118
    return tensors


def _weight_files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        files = sorted({folder / name for name in json.loads(index.read_text())["weight_map"].values()})
        absent = [file.name for file in files if not file.is_file()]
        if absent:
            raise ValueError(f"{folder}: the index names files that are absent: {', '.join(absent)}")
        return files
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ValueError(
            f"{folder}: no safetensors files; repair: point to a folder saved with safetensors, or set "
            "model.pretrained_weights=false to start from random weights"
        )
    return files


def _into_adapted_layers(tensors: Mapping[str, Any], adapted: Sequence[str]) -> dict[str, Any]:
    """Redirects the weights of adapted layers to their ``base_layer``."""
    layers = frozenset(adapted)

    def target(name: str) -> str:
        module, _, leaf = name.rpartition(".")
        return f"{module}.base_layer.{leaf}" if module in layers else name

    return {target(name): tensor for name, tensor in tensors.items()}


@contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' progress bars, of which every rank would draw its own."""
    enabled = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        if enabled:
            transformers_logging.enable_progress_bar()  # type: ignore[no-untyped-call]


def _refuse(source: WeightSource, missing: list[str], unexpected: list[str], mismatched: list[str]) -> None:
    kinds = {"missing": missing, "unexpected": unexpected, "of another shape": mismatched}
    lines = [
        f"  {kind}: {', '.join(keys[:12])}{' ...' if len(keys) > 12 else ''}"
        for kind, keys in kinds.items()
        if keys
    ]
    if lines:
        raise ValueError(
            f"{source.folder} does not fit {source.module}:\n"
            + "\n".join(lines)
            + "\n  repair: name a checkpoint "
            "of the same architecture, or set model.pretrained_weights=false"
        )
