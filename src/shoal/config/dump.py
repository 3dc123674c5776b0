"""Configuration objects back to plain YAML data, in the shape the loader reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any, cast

from shoal.config.values import TargetConfig


def plain(value: Any) -> dict[str, Any]:
    """Returns a dataclass of the configuration as nested dicts, lists and scalars."""
    return cast("dict[str, Any]", _plain(value))


def _plain(value: Any) -> Any:
    if isinstance(value, TargetConfig):
        return {"_target_": value.target, **{key: _plain(item) for key, item in value.kwargs.items()}}
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return value


__all__ = ["plain"]
