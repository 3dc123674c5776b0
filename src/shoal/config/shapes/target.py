"""Reads ``{_target_: name, ...}`` wherever it may stand, checking name and keywords without importing."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from shoal.config.build import FAILED, READERS, Report, freeze, join, nearest, refuse_unknown
from shoal.config.targets import canonical_target, check_target
from shoal.config.values import FunctionName, TargetConfig

_TARGET_REPAIR = "name a class of an allowed library, or allow its module with --allow-target MODULE"
_SUPPLIED = frozenset({"params", "optimizer"})
"""Parameters of a target that the training code passes itself."""


def as_mapping(raw: Any, path: str, report: Report) -> dict[str, Any] | None:
    if raw is None:
        return {}
    if isinstance(raw, Mapping) and all(isinstance(key, str) for key in raw):
        return dict(raw)
    report.refuse("wrong-type", path, raw, "a block of keys", f"indent the keys under {path}:")
    return None


def drop_target(raw: dict[str, Any], allowed: Collection[str], path: str, report: Report) -> None:
    """Takes ``_target_`` out of a block whose class is fixed, after checking that it names that class."""
    target = raw.pop("_target_", None)
    if target is not None and target not in allowed:
        key, limit = join(path, "_target_"), f"one of {', '.join(sorted(allowed))}"
        report.refuse("target", key, target, limit, f"delete {key}")


def read_target(raw: Any, path: str, report: Report) -> Any:
    """Reads ``{_target_: name, **kwargs}``; the name must be allowed and the keywords must be its own."""
    block = as_mapping(raw, path, report)
    if block is None:
        return FAILED
    name = block.pop("_target_", None)
    key = join(path, "_target_")
    if name is None and (meant := [other for other in block if nearest(other, ("_target_",), cutoff=0.8)]):
        limit = "_target_, the dotted name of a class, beside its keywords"
        return report.refuse(
            "unknown-key", join(path, meant[0]), block[meant[0]], limit, f"did you mean {key}?"
        )
    if not isinstance(name, str):
        limit = "the dotted name of a class, such as torch.optim.AdamW"
        return report.refuse("missing-key" if name is None else "wrong-type", key, name, limit, f"add {key}")
    full = canonical_target(name)
    verdict = check_target(full, report.allow_targets)
    if verdict.limit is not None:
        return report.refuse("target", key, name, verdict.limit, _TARGET_REPAIR)
    if verdict.parameters is not None:
        refuse_unknown(block, set(verdict.parameters) - _SUPPLIED, path, report, also={"_target_"})
    _refuse_nested_targets(block, path, report)
    return TargetConfig(full, freeze(block), report.allow_targets, path)


def read_function(raw: Any, path: str, report: Report) -> Any:
    """Reads the dotted name of a function, which has to be allowed by its full name."""
    if not isinstance(raw, str):
        return report.refuse(
            "wrong-type", path, raw, "the dotted name of a function", f"write {path} as a text"
        )
    if raw not in report.allow_targets:
        limit, repair = "a function that is allowed by its full name", f"--allow-target {raw}"
        return report.refuse("target", path, raw, limit, repair)
    verdict = check_target(raw, report.allow_targets)
    if verdict.limit is not None:
        return report.refuse("target", path, raw, verdict.limit, "correct the name")
    return FunctionName(raw, report.allow_targets, path)


def _refuse_nested_targets(value: Any, path: str, report: Report) -> None:
    """Reports a ``_target_`` inside the keywords of another one: only the outer object is made."""
    if isinstance(value, Mapping):
        for name, item in value.items():
            if name == "_target_":
                limit = "plain values: only the outer _target_ is made into an object"
                report.refuse("nested-target", join(path, name), item, limit, f"write {path} as plain values")
            _refuse_nested_targets(item, join(path, name), report)
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            _refuse_nested_targets(item, join(path, index), report)


READERS[TargetConfig] = read_target
READERS[FunctionName] = read_function
