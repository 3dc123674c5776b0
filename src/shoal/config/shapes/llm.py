"""Reads the sections of the LLM recipe as AutoModel spells them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shoal.config import aliases
from shoal.config.build import FAILED, READERS, Report, build, convert, join
from shoal.config.llm import (
    CausalLMConfig,
    CheckpointConfig,
    ClipGradNormConfig,
    LLMConfig,
    LossConfig,
    PeftConfig,
    RngConfig,
)
from shoal.config.shapes.target import as_mapping, drop_target
from shoal.config.speech import BackendConfig
from shoal.config.text import DataloaderConfig, PackedSequenceConfig, TextDatasetConfig
from shoal.config.values import FrozenDict

_VALIDATION = "validation_dataset"


def read_llm(raw: Any, path: str, report: Report) -> Any:
    """Reads a whole file; every ``validation_dataset`` and ``validation_dataset_NAME`` is one validation set."""
    block = as_mapping(raw, path, report)
    if block is None:
        return FAILED
    _drop_recipe(block, report)
    if "clip_grad_norm" in block and block["clip_grad_norm"] is None:  # of other sections null is the default
        block["clip_grad_norm"] = {"max_norm": None}
    if isinstance(block.get("precision"), str | int):
        block["precision"] = aliases.PRECISIONS.get(block["precision"], block["precision"])
    named = {key: block.pop(key) for key in list(block) if _set_name(key) is not None}
    config = build(LLMConfig, block, path, report, also={"recipe", _VALIDATION})
    sets = dict(config.validation_datasets)
    for key, value in named.items():
        name = _set_name(key)
        assert name is not None
        if value is None:
            continue
        if name in sets:
            limit, repair = f"one set of the name {name}", f"rename {key}"
            report.refuse("given-twice", key, value, limit, repair)
            continue
        sets[name] = convert(TextDatasetConfig, value, key, report)
    good = {name: value for name, value in sets.items() if value is not FAILED}
    values = {name: getattr(config, name) for name in config.__dataclass_fields__}
    return LLMConfig(**{**values, "validation_datasets": FrozenDict(good)})


def _set_name(key: str) -> str | None:
    """Returns the name of the validation set that a key of the file gives, or None for another key."""
    if key == _VALIDATION:
        return "default"
    return key.removeprefix(_VALIDATION + "_") if key.startswith(_VALIDATION + "_") else None


def _drop_recipe(block: dict[str, Any], report: Report) -> None:
    """Takes ``recipe`` out: there is one LLM recipe, and the name must mean it."""
    recipe = block.pop("recipe", None)
    name = recipe.get("_target_") if isinstance(recipe, Mapping) else recipe
    if name is not None and str(name).rpartition(".")[2] not in aliases.LLM_RECIPES:
        limit = f"one of {', '.join(sorted(aliases.LLM_RECIPES))}"
        report.refuse("recipe", "recipe", name, limit, "delete recipe")


def read_model(raw: Any, path: str, report: Report) -> Any:
    """Reads ``model``; its ``_target_`` says whether the weights or only the architecture are taken."""
    block = as_mapping(raw, path, report)
    if block is None:
        return FAILED
    target = block.pop("_target_", None)
    kind = None if target is None else aliases.MODEL_FACTORIES.get(str(target).rpartition(".")[2])
    if target is not None and kind is None:
        limit = "AutoModelForCausalLM.from_pretrained or AutoModelForCausalLM.from_config"
        return report.refuse("target", join(path, "_target_"), target, limit, f"delete {path}._target_")
    if kind is not None and block.get(kind) is None:
        other = ({*aliases.MODEL_FACTORIES.values()} - {kind}).pop()
        if block.get(other) is not None and kind == "config" and isinstance(block[other], str):
            block[kind] = block.pop(other)  # AutoModel's from_config takes the name of a model too
    inner = block.get("config")
    if isinstance(inner, Mapping) and str(inner.get("_target_", "")).endswith("AutoConfig.from_pretrained"):
        block["config"] = inner.get("pretrained_model_name_or_path")
    return build(CausalLMConfig, _with_dtype(block), path, report, also={"_target_"})


def _with_dtype(block: dict[str, Any]) -> dict[str, Any]:
    dtype = block.get("torch_dtype")
    return {**block, "torch_dtype": aliases.DTYPES.get(dtype, dtype)} if isinstance(dtype, str) else block


def read_backend(raw: Any, path: str, report: Report) -> Any:
    """Reads a choice of kernels; what AutoModel needs for its own model classes has one legal value here."""
    block = as_mapping(raw, path, report)
    if block is None:
        return FAILED
    drop_target(block, aliases.BACKEND_TARGETS, path, report)
    for name, allowed in aliases.BACKEND_AS_BUILT.items():
        if block.get(name) in allowed:
            block.pop(name, None)
    if block.pop("enable_deepep", False):
        block.setdefault("dispatcher", "deepep")
    return build(BackendConfig, block, path, report, {"_target_", "enable_deepep", *aliases.BACKEND_AS_BUILT})


def read_dataset(raw: Any, path: str, report: Report) -> Any:
    """Reads a data set of text: ``type`` and ``path``, or a ``_target_`` of AutoModel with its own spelling."""
    block = as_mapping(raw, path, report)
    if block is None:
        return FAILED
    target = block.pop("_target_", None)
    if target is not None:
        kind = aliases.DATASETS.get(str(target))
        if kind is None:
            limit = f"one of {', '.join(sorted(aliases.DATASETS))}"
            repair = f"give {path}.type and {path}.path"
            return report.refuse("target", join(path, "_target_"), target, limit, repair)
        block.setdefault("type", kind)
    for theirs, ours in aliases.DATASET_KEYS.items():
        if theirs in block:
            block.setdefault(ours, block.pop(theirs))
    for name, allowed in aliases.DATASET_AS_BUILT.items():
        if name in block and block[name] in allowed:
            del block[name]
    return build(
        TextDatasetConfig, block, path, report, {"_target_", *aliases.DATASET_KEYS, *aliases.DATASET_AS_BUILT}
    )


def read_dataloader(raw: Any, path: str, report: Report) -> Any:
    """Reads loader options; the loader's class and its padding are ours, so those names must be known ones."""
    block = as_mapping(raw, path, report)
    if block is None:
        return FAILED
    drop_target(block, aliases.LOADER_TARGETS, path, report)
    collate = block.pop("collate_fn", None)
    name = collate.get("_target_") if isinstance(collate, Mapping) else collate
    if name is not None and str(name).rpartition(".")[2] not in aliases.COLLATERS:
        key, limit = join(path, "collate_fn"), f"one of {', '.join(sorted(aliases.COLLATERS))}"
        report.refuse("target", key, name, limit, f"delete {key}")
    return build(DataloaderConfig, block, path, report, also={"_target_", "collate_fn"})


def read_packing(raw: Any, path: str, report: Report) -> Any:
    """Reads ``packed_sequence``; AutoModel's strategies are thd and neat."""
    block = as_mapping(raw, path, report)
    if block is None:
        return FAILED
    strategy = block.get("packing_strategy")
    if isinstance(strategy, str):
        block["packing_strategy"] = aliases.PACKING.get(strategy, strategy)
    if "drop_long_samples" in block:
        drops = convert(bool, block.pop("drop_long_samples"), join(path, "drop_long_samples"), report)
        block.setdefault("long_documents", "drop" if drops is True else "split")
    return build(PackedSequenceConfig, block, path, report, also={"drop_long_samples"})


def read_loss(raw: Any, path: str, report: Report) -> Any:
    """Reads ``loss_fn``; AutoModel names a class."""
    block = as_mapping(raw, path, report)
    if block is None:
        return FAILED
    target = block.pop("_target_", None)
    if target is not None:
        kind = aliases.LOSSES.get(str(target).rpartition(".")[2])
        if kind is None:
            limit = f"one of {', '.join(sorted(aliases.LOSSES))}"
            return report.refuse("target", join(path, "_target_"), target, limit, f"delete {path}._target_")
        block.setdefault("kind", kind)
    for name, allowed in aliases.LOSS_AS_BUILT.items():
        if name in block and block[name] in allowed:
            del block[name]
    return build(LossConfig, block, path, report, also={"_target_", *aliases.LOSS_AS_BUILT})


def read_checkpoint(raw: Any, path: str, report: Report) -> Any:
    """Reads ``checkpoint``; AutoModel's name of keep_last is max_recent_checkpoints."""
    block = as_mapping(raw, path, report)
    if block is None:
        return FAILED
    if "max_recent_checkpoints" in block:
        block.setdefault("keep_last", block.pop("max_recent_checkpoints"))
    if str(block.get("restore_from")).upper() == "LATEST":
        block["restore_from"] = "latest"
    return build(CheckpointConfig, block, path, report, also={"max_recent_checkpoints"})


def read_clip(raw: Any, path: str, report: Report) -> Any:
    """Reads ``clip_grad_norm``: a number or null, or a block with max_norm."""
    if isinstance(raw, int | float) and not isinstance(raw, bool):
        raw = {"max_norm": raw}
    block = as_mapping(raw, path, report)
    if block is None:
        return FAILED
    built = build(ClipGradNormConfig, block, path, report)
    # Elsewhere null stands for an absent key, and gives the default.
    return ClipGradNormConfig(None) if "max_norm" in block and block["max_norm"] is None else built


def _named_class(cls: type, targets: frozenset[str]) -> None:
    """Registers a dataclass whose block may name AutoModel's class as ``_target_``."""

    def read(raw: Any, path: str, report: Report) -> Any:
        block = as_mapping(raw, path, report)
        if block is None:
            return FAILED
        drop_target(block, targets, path, report)
        return build(cls, block, path, report, also={"_target_"})

    READERS[cls] = read


READERS[LLMConfig] = read_llm
READERS[CausalLMConfig] = read_model
READERS[BackendConfig] = read_backend
READERS[TextDatasetConfig] = read_dataset
READERS[DataloaderConfig] = read_dataloader
READERS[PackedSequenceConfig] = read_packing
READERS[LossConfig] = read_loss
READERS[CheckpointConfig] = read_checkpoint
READERS[ClipGradNormConfig] = read_clip
_named_class(RngConfig, aliases.RNG_TARGETS)
_named_class(PeftConfig, aliases.PEFT_TARGETS)
