"""Configuration objects back to plain YAML data, in the shape the loader reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any, cast

from shoal.config.aliases import SIZE_KEYS, STRATEGY_TARGETS
from shoal.config.schema import DistributedConfig, MegatronFSDPConfig
from shoal.config.speech import StrategyConfig
from shoal.config.values import FunctionName, TargetConfig


def plain(value: Any) -> dict[str, Any]:
    """Returns a dataclass of the configuration as nested dicts, lists and scalars."""
    return cast("dict[str, Any]", _plain(value))


def _plain(value: Any) -> Any:
    if isinstance(value, TargetConfig):
        return {"_target_": value.target, **{key: _plain(item) for key, item in value.kwargs.items()}}
    if isinstance(value, FunctionName):
        return value.target
    if isinstance(value, StrategyConfig):
        return _strategy(value)
    if isinstance(value, DistributedConfig):
        return _distributed(value)
    if is_dataclass(value) and not isinstance(value, type):
        return _fields(value)
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return value


def _fields(value: Any, *left_out: str) -> dict[str, Any]:
    names = [
        field.name
        for field in fields(value)
        if field.name not in left_out and not field.metadata.get("internal")
    ]
    return {name: _plain(getattr(value, name)) for name in names}


def _strategy(value: StrategyConfig) -> dict[str, Any]:
    """The block with sizes and DDP's flags flat in it, as the class named by ``_target_`` spells them."""
    block: dict[str, Any] = {"_target_": STRATEGY_TARGETS[value.kind]}
    block |= {name: getattr(value.sizes, size) for name, size in SIZE_KEYS[value.kind].items()}
    block |= {"process_group_backend": value.process_group_backend, "timeout": value.timeout_seconds}
    if value.kind == "ddp":
        return block | _fields(value.ddp, "activation_checkpointing")
    block["save_distributed_checkpoint"] = value.save_distributed_checkpoint
    if value.kind == "model_parallel":
        return block
    for name in ("activation_checkpointing_llm", "activation_checkpointing_perception", "moe_config"):
        block[name] = _plain(getattr(value, name))
    block["distributed_config"] = _plain(value.distributed_config)
    if isinstance(value.distributed_config, MegatronFSDPConfig):
        block["distributed_config"]["_target_"] = "shoal.MegatronFSDPConfig"
    return block


def _distributed(value: DistributedConfig) -> dict[str, Any]:
    """The section with the sizes and the options of the strategy flat in it."""
    return {
        **_fields(value, "sizes", "options"),
        **_fields(value.sizes),
        **_fields(value.options, "activation_checkpointing"),
    }
