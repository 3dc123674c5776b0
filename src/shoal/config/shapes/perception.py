"""Reads the blocks of the speech model that NeMo writes with its own class names: perception and LoRA."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shoal.config import aliases
from shoal.config.build import FAILED, READERS, Report, build, join, nearest
from shoal.config.shapes.target import as_mapping, drop_target
from shoal.config.speech import LoraConfig, ModalityAdapterConfig, PerceptionConfig, SpecAugmentConfig


def read_perception(raw: Any, path: str, report: Report) -> Any:
    """Reads ``model.perception``; NeMo names the module by ``target`` and may configure the features."""
    block = as_mapping(raw, path, report)
    if block is None:
        return FAILED
    for name in ("target", "_target_"):
        if (target := block.pop(name, None)) is not None:
            drop_target({"_target_": target}, aliases.PERCEPTION_TARGETS, path, report)
    if block.pop("preprocessor", None):
        report.refuse(
            "perception-preprocessor",
            join(path, "preprocessor"),
            raw["preprocessor"],
            "absent: the log-mel settings come with model.pretrained_asr",
            f"delete {join(path, 'preprocessor')}",
        )
    if isinstance(encoder := block.get("encoder"), Mapping):
        block["encoder"] = _encoder_overrides(encoder, join(path, "encoder"), report)
    return build(PerceptionConfig, block, path, report, also={"target", "_target_"})


def _encoder_overrides(raw: Mapping[str, Any], path: str, report: Report) -> dict[str, Any]:
    """Renames NeMo's encoder settings to those of transformers, when the block says it is NeMo's encoder."""
    block = dict(raw)
    if "_target_" not in block:
        return block
    drop_target(block, aliases.ADAPTER_KINDS, path, report)
    for name in [name for name in block if name not in aliases.ENCODER_KEYS]:
        limit, near = f"one of {', '.join(aliases.ENCODER_KEYS)}", nearest(name, aliases.ENCODER_KEYS)
        repair = f"did you mean {join(path, near)}?" if near else f"delete {join(path, name)}"
        report.refuse("unknown-key", join(path, name), block.pop(name), limit, repair)
    return {aliases.ENCODER_KEYS[name]: value for name, value in block.items()}


def read_adapter(raw: Any, path: str, report: Report) -> Any:
    """Reads ``modality_adapter``: our ``kind``, or one of NeMo's classes by ``_target_``."""
    block = as_mapping(raw, path, report)
    if block is None:
        return FAILED
    target = block.pop("_target_", None)
    if target is None:
        return build(ModalityAdapterConfig, block, path, report, also={"_target_"})
    kind = aliases.ADAPTER_KINDS.get(target) if isinstance(target, str) else None
    if kind is None:
        limit = f"one of {', '.join(aliases.ADAPTER_KINDS)}"
        repair = "use ConformerEncoder or IdentityConnector, or kind: mlp"
        return report.refuse("target", join(path, "_target_"), target, limit, repair)
    if block.pop("dropout_att", block.get("dropout", 0)) != block.get("dropout", 0):
        limit = "the value of dropout, which serves attention too"
        key = join(path, "dropout_att")
        report.refuse("adapter-variant", key, raw["dropout_att"], limit, f"delete {key}")
    _refuse_other_conformers(block, path, report)
    own = {name: value for name, value in block.items() if name not in _FOREIGN}
    return build(
        ModalityAdapterConfig, {"kind": kind, **own}, path, report, {"_target_", "dropout_att", *_FOREIGN}
    )


_FOREIGN = aliases.CONFORMER_INERT | set(aliases.CONFORMER_AS_BUILT)


def _refuse_other_conformers(block: Mapping[str, Any], path: str, report: Report) -> None:
    for name, allowed in aliases.CONFORMER_AS_BUILT.items():
        value = block.get(name, allowed[0])
        if (tuple(value) if isinstance(value, list) else value) not in allowed:
            report.refuse(
                "adapter-variant",
                join(path, name),
                value,
                f"{allowed[0]}, the only variant implemented",
                f"{name}: {allowed[0]}",
            )


def read_spec_augment(raw: Any, path: str, report: Report) -> Any:
    """Reads ``spec_augment``, with or without the name of NeMo's class."""
    block = as_mapping(raw, path, report)
    if block is None:
        return FAILED
    drop_target(block, aliases.SPEC_AUGMENT_TARGETS, path, report)
    return build(SpecAugmentConfig, block, path, report, also={"_target_"})


def read_lora(raw: Any, path: str, report: Report) -> Any:
    """Reads ``model.lora`` in PEFT's or in AutoModel's spelling."""
    block = as_mapping(raw, path, report)
    if block is None:
        return FAILED
    drop_target(block, _LORA_TARGETS, path, report)
    for name, ours in aliases.LORA_KEYS.items():
        if name in block and ours in block:
            limit = f"either {ours} or {name}"
            report.refuse(
                "given-twice", join(path, name), block.pop(name), limit, f"delete {join(path, name)}"
            )
        elif name in block:
            block[ours] = block.pop(name)
    if block.pop("match_all_linear", False) is True and not block.get("target_modules"):
        block["target_modules"] = "all-linear"
    return build(LoraConfig, block, path, report, {"_target_", "match_all_linear", *aliases.LORA_KEYS})


_LORA_TARGETS = ("peft.LoraConfig", "nemo_automodel.components._peft.lora.PeftConfig")

READERS[PerceptionConfig] = read_perception
READERS[ModalityAdapterConfig] = read_adapter
READERS[SpecAugmentConfig] = read_spec_augment
READERS[LoraConfig] = read_lora
