"""What the rules know besides the configuration: the world, the machine and the shape of a local model."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shoal.config.llm import LLMConfig
from shoal.config.options import LoadOptions
from shoal.config.speech import SpeechConfig


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a language model as its ``config.json`` states them; None where it states none."""

    hidden_size: int | None = None
    intermediate_size: int | None = None
    num_layers: int | None = None
    num_heads: int | None = None
    num_kv_heads: int | None = None
    num_experts: int | None = None
    num_mamba_heads: int | None = None


_SHAPE_KEYS: Mapping[str, tuple[str, ...]] = {
    "hidden_size": ("hidden_size", "n_embd", "d_model"),
    "intermediate_size": ("intermediate_size", "n_inner"),
    "num_layers": ("num_hidden_layers", "n_layer", "num_layers"),
    "num_heads": ("num_attention_heads", "n_head"),
    "num_kv_heads": ("num_key_value_heads",),
    "num_experts": ("n_routed_experts", "num_local_experts", "num_experts", "moe_num_experts"),
    "num_mamba_heads": ("mamba_num_heads", "mamba_n_heads"),
}


ATTENTION_DROPOUT = ("attention_dropout", "attn_pdrop", "attn_dropout", "attention_probs_dropout_prob")
"""What ``config.json`` calls the dropout of attention probabilities."""


@dataclass(frozen=True)
class Facts:
    """What is known around a configuration.

    Attributes:
        options: Options of the load.
        world_size: Ranks of the whole job, as launched or as the configuration implies; None when unknown.
        launched_world_size: The number of ranks that were, or are about to be, started; None when not given.
        devices_per_node: Ranks on one node; None when unknown.
        accelerators: Accelerators of this machine.
        shape: Sizes of the language model when its folder is local and has a ``config.json``, or when its configuration
            stands in the file itself.
        attention_dropout: Those of `ATTENTION_DROPOUT` that the language model's configuration sets above 0.
        model_type: The family of that language model; None when unknown.
        layer_types: Kinds of its layers; empty when its configuration does not list them.
    """

    options: LoadOptions = LoadOptions()
    world_size: int | None = None
    launched_world_size: int | None = None
    devices_per_node: int | None = None
    accelerators: int = 0
    shape: ModelShape | None = None
    attention_dropout: Mapping[str, float] = field(default_factory=dict)
    model_type: str | None = None
    layer_types: tuple[str, ...] = ()


def gather_facts(config: Any, options: LoadOptions, world_size: int | None) -> Facts:
    """Collects the facts about a configuration; reads at most one small JSON file."""
    accelerators = count_accelerators() if options.accelerators is None else options.accelerators
    per_node, planned = _planned_world(config, accelerators, options.to_train)
    if world_size is not None:
        per_node = _launched_per_node(config, world_size)
    raw = read_model_config(llm_folder(config)) or _inline_config(config)
    kinds = raw.get("layer_types")
    return Facts(
        options=options,
        world_size=planned if world_size is None else world_size,
        launched_world_size=world_size,
        devices_per_node=per_node,
        accelerators=accelerators,
        shape=_shape(raw) if raw else None,
        attention_dropout=_attention_dropout(raw),
        model_type=family if isinstance(family := raw.get("model_type"), str) else None,
        layer_types=tuple(kinds) if isinstance(kinds, list | tuple) else (),
    )


def _planned_world(config: Any, accelerators: int, to_train: bool) -> tuple[int | None, int | None]:
    """Returns the ranks per node and in all that the configuration implies; LLM files name none."""
    if isinstance(config, LLMConfig) and to_train:
        return max(accelerators, 1), max(accelerators, 1)
    trainer = config.trainer if isinstance(config, SpeechConfig) else None
    devices, nodes = getattr(trainer, "devices", None), getattr(trainer, "num_nodes", None)
    if devices is None or nodes is None:
        return None, None
    if devices in (-1, "auto"):
        on_accelerator = trainer.accelerator != "cpu" and accelerators > 0  # type: ignore[union-attr]
        devices = accelerators if on_accelerator else 1
    return devices, devices * nodes


def _launched_per_node(config: Any, world_size: int) -> int | None:
    """Returns the ranks per node of a job that was started: what the launcher says, else an even split."""
    local = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("SLURM_NTASKS_PER_NODE", "")
    if local.isdigit():
        return int(local)
    nodes = getattr(getattr(config, "trainer", None), "num_nodes", None)
    return world_size // nodes if isinstance(nodes, int) and world_size % nodes == 0 else None


def count_accelerators() -> int:
    """Returns the NVIDIA devices that a process started here would see, without asking any library."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([name for name in visible.split(",") if name.strip() not in ("", "-1", "NoDevFiles")])
    return sum(1 for path in Path("/dev").glob("nvidia[0-9]*") if path.name[6:].isdigit())


def llm_folder(config: Any) -> Path | None:
    """Returns the folder of the language model when the configuration names an existing local one."""
    name: object = None
    if isinstance(config, SpeechConfig):
        name = getattr(config.model, "pretrained_llm", None)
    elif isinstance(config, LLMConfig) and config.model is not None:
        name = config.model.pretrained_model_name_or_path or config.model.config
    return Path(name) if isinstance(name, str) and Path(name).is_dir() else None


def read_model_config(folder: Path | None) -> Mapping[str, Any] | None:
    """Returns ``config.json`` of a folder, that of the language model on top, or None without a readable one."""
    if folder is None:
        return None
    try:
        raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return _text_fields(raw) if isinstance(raw, Mapping) else None


def _inline_config(config: Any) -> Mapping[str, Any]:
    """Returns the fields of a model's configuration that stand in the file itself."""
    fields = config.model.config if isinstance(config, LLMConfig) and config.model is not None else None
    return _text_fields(fields) if isinstance(fields, Mapping) else {}


def _text_fields(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the fields with those of the language model on top."""
    text = fields.get("text_config")
    return {**fields, **text} if isinstance(text, Mapping) else fields


def _shape(raw: Mapping[str, Any]) -> ModelShape:
    return ModelShape(**{name: _first_size(raw, keys) for name, keys in _SHAPE_KEYS.items()})


def _attention_dropout(raw: Mapping[str, Any]) -> Mapping[str, float]:
    values = {name: raw.get(name) for name in ATTENTION_DROPOUT}
    return {name: value for name, value in values.items() if isinstance(value, int | float) and value > 0}


def _first_size(raw: Mapping[str, Any], keys: tuple[str, ...]) -> int | None:
    return next((raw[key] for key in keys if type(raw.get(key)) is int), None)
