"""Plain data to typed, frozen dataclasses, following the annotations; what is wrong goes to a report."""

from __future__ import annotations

import difflib
import math
import types
from collections.abc import Callable, Collection, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from shoal.config.errors import Finding
from shoal.config.values import FrozenDict, FunctionName, Range

FAILED: Any = object()
"""Stands for a value that was refused; rules that read its key are skipped."""


@dataclass
class Report:
    """Findings of one load, the keys whose values could not be built, and the targets the user allows."""

    findings: list[Finding] = field(default_factory=list)
    failed: set[str] = field(default_factory=set)
    allow_targets: tuple[str, ...] = ()

    def refuse(self, rule: str, key: str, value: object, limit: str, repair: str) -> Any:
        """Notes a finding about the value at `key`; returns FAILED."""
        self.findings.append(Finding(rule, key, value, limit, repair))
        self.failed.add(key)
        return FAILED


Reader = Callable[[Any, str, Report], Any]
READERS: dict[type, Reader] = {}
"""Dataclasses whose YAML shape differs from their fields; filled by `shoal.config.shapes`."""


def join(path: str, name: object) -> str:
    """Returns the dotted path of `name` inside `path`; the root is the empty path."""
    return f"{path}.{name}" if path else str(name)


@cache
def field_types(cls: type) -> Mapping[str, Any]:
    """Returns the resolved annotations of a dataclass, ranges included."""
    return get_type_hints(cls, include_extras=True)


def build(cls: type, raw: Any, path: str, report: Report, also: Collection[str] = ()) -> Any:
    """Builds dataclass `cls` from the mapping `raw` at `path`; unknown and missing keys go to the report.

    A field that fails takes its default (FAILED when it has none), so that rules on other keys still run.

    Args:
        cls: The dataclass.
        raw: Its keys.
        path: Where they stand.
        report: Takes the findings.
        also: Further keys that the block may have, which the caller has read; for suggestions.
    """
    if raw is None:
        raw = {}
    if not isinstance(raw, Mapping):
        return report.refuse("wrong-type", path, raw, "a block of keys", f"indent the keys under {path}:")
    known = {item.name: item for item in fields(cls) if not item.metadata.get("internal")}
    refuse_unknown(raw, known, path, report, also)
    return cls(**{name: _field_value(cls, item, raw, path, report) for name, item in known.items()})


def _field_value(cls: type, item: Field[Any], raw: Mapping[str, Any], path: str, report: Report) -> Any:
    key = join(path, item.name)
    default = FAILED
    if item.default is not MISSING:
        default = item.default
    elif item.default_factory is not MISSING:
        default = item.default_factory()
    value = raw.get(item.name)
    annotation = field_types(cls)[item.name]
    if value == "???":
        return report.refuse("missing-key", key, value, "a value; ??? marks one you must give", f"set {key}")
    if item.name not in raw or (value is None and not _allows_none(annotation) and default is not FAILED):
        if default is FAILED and is_dataclass(annotation):
            # A section that is absent lacks everything in it: say what.
            return convert(annotation, {}, key, report)
        if default is FAILED:
            report.refuse("missing-key", key, None, describe(annotation), f"add {key}")
        return default
    converted = convert(annotation, value, key, report)
    return default if converted is FAILED else converted


def refuse_unknown(
    raw: Mapping[Any, Any],
    known: Mapping[str, Any] | set[str],
    path: str,
    report: Report,
    also: Collection[str] = (),
) -> None:
    """Reports every key of `raw` that is not in `known`, with the nearest one that is.

    Keys that are read apart, and so are no longer in `raw`, are in `also`: who misspells one must be told of it.
    """
    for name in raw:
        if name in known:
            continue
        legal = {*known, *also} - {name}  # one of `also` is still here when its value is not a legal one
        near = nearest(str(name), legal)
        repair = f"did you mean {join(path, near)}?" if near else "delete it"
        limit = f"one of: {', '.join(sorted(legal))}"
        report.findings.append(Finding("unknown-key", join(path, name), raw[name], limit, repair))


def convert(annotation: Any, value: Any, path: str, report: Report) -> Any:
    """Returns `value` as the annotated type, frozen, or FAILED after reporting why not."""
    origin = get_origin(annotation)
    if annotation is Any:
        return freeze(value)
    if origin is Annotated:
        return _ranged(annotation, value, path, report)
    if origin in (Union, types.UnionType):
        return _one_of(annotation, value, path, report)
    if origin is Literal:
        if any(value == option and type(value) is type(option) for option in get_args(annotation)):
            return value
        return _wrong(annotation, value, path, report)
    if origin is tuple:
        return _sequence(annotation, value, path, report)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return _mapping(annotation, value, path, report)
    if annotation in READERS:
        return READERS[annotation](value, path, report)
    if is_dataclass(annotation):
        return build(annotation, value, path, report)  # type: ignore[arg-type]
    return _scalar(annotation, value, path, report)


def _scalar(annotation: Any, value: Any, path: str, report: Report) -> Any:
    if annotation is float and type(value) in (int, float) and math.isfinite(value):
        return value
    if annotation in (int, bool, str, types.NoneType) and type(value) is annotation:
        return value
    return _wrong(annotation, value, path, report)


def _ranged(annotation: Any, value: Any, path: str, report: Report) -> Any:
    base, *marks = get_args(annotation)
    number = convert(base, value, path, Report())
    if number is FAILED:
        return _wrong(annotation, value, path, report)
    for mark in marks:
        if isinstance(mark, Range) and mark.problem(number) is not None:
            return _wrong(annotation, value, path, report)
    return number


def _one_of(annotation: Any, value: Any, path: str, report: Report) -> Any:
    if value is None and _allows_none(annotation):
        return None
    options = [option for option in get_args(annotation) if option is not types.NoneType]
    trials = [(option, Report(allow_targets=report.allow_targets)) for option in options]
    for option, trial in trials:
        converted = convert(option, value, path, trial)
        if converted is not FAILED and not trial.findings:
            return converted
    # A block or a list can only be meant for the one option of that shape: its own findings say more.
    shaped = [option for option, _ in trials if _has_shape(option, value)]
    if len(shaped) == 1:
        return convert(shaped[0], value, path, report)
    return _wrong(annotation, value, path, report)


def _has_shape(annotation: Any, value: Any) -> bool:
    if isinstance(value, str):
        return annotation is FunctionName
    if isinstance(value, Mapping):
        return (is_dataclass(annotation) and annotation is not FunctionName) or get_origin(
            annotation
        ) not in (None, tuple, Literal, Annotated)
    return isinstance(value, list | tuple) and get_origin(annotation) is tuple


def _sequence(annotation: Any, value: Any, path: str, report: Report) -> Any:
    if not isinstance(value, list | tuple):
        return _wrong(annotation, value, path, report)
    element = get_args(annotation)[0]
    items = [convert(element, item, join(path, index), report) for index, item in enumerate(value)]
    return FAILED if any(item is FAILED for item in items) else tuple(items)


def _mapping(annotation: Any, value: Any, path: str, report: Report) -> Any:
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        return _wrong(annotation, value, path, report)
    element = get_args(annotation)[1]
    items = {key: convert(element, item, join(path, key), report) for key, item in value.items()}
    return FAILED if any(item is FAILED for item in items.values()) else FrozenDict(items)


def freeze(value: Any) -> Any:
    """Returns plain data with mappings and lists made immutable."""
    if isinstance(value, Mapping):
        return FrozenDict({key: freeze(item) for key, item in value.items()})
    if isinstance(value, list | tuple):
        return tuple(freeze(item) for item in value)
    return value


def _allows_none(annotation: Any) -> bool:
    return annotation is Any or types.NoneType in get_args(annotation)


def _wrong(annotation: Any, value: Any, path: str, report: Report) -> Any:
    limit = describe(annotation)
    repair = f"write {limit}"
    if isinstance(value, str) and value.strip().lstrip("-").isdigit():
        repair = f"write the number without quotes: {value.strip()}"
    elif isinstance(value, str) and (near := nearest(value, _names(annotation))):
        repair = f"did you mean {near}?"
    return report.refuse("wrong-type", path, value, limit, repair)


_OTHER_SPELLINGS: Mapping[str, str] = {
    "data_parallel_size": "dp_size",
    "tensor_parallel_size": "tp_size",
    "pipeline_parallel_size": "pp_size",
    "context_parallel_size": "cp_size",
    "expert_parallel_size": "ep_size",
}


def nearest(name: str, known: Collection[str], cutoff: float = 0.5) -> str | None:
    """Returns the known name that `name` most likely means, other systems' spellings of sizes included."""
    spellings = {
        other: ours for other, ours in _OTHER_SPELLINGS.items() if ours in known and other not in known
    }
    near = difflib.get_close_matches(name, [*known, *spellings], n=1, cutoff=cutoff)
    return spellings.get(near[0], near[0]) if near else None


def _names(annotation: Any) -> list[str]:
    if get_origin(annotation) is Literal:
        return [option for option in get_args(annotation) if isinstance(option, str)]
    return [name for part in get_args(annotation) for name in _names(part)]


def describe(annotation: Any) -> str:
    """Returns the annotated type in the words of a message."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        noun = {int: "an integer", float: "a number"}[arguments[0]]
        return " and ".join([noun, *(mark.words for mark in arguments[1:] if isinstance(mark, Range))])
    if origin is Literal:
        return "one of " + ", ".join(str(option) for option in arguments)
    if origin in (Union, types.UnionType):
        return " or ".join(describe(part) for part in arguments)
    if origin is tuple:
        return f"a list, each {describe(arguments[0])}"
    names = {
        int: "an integer",
        float: "a number",
        bool: "true or false",
        str: "a text",
        types.NoneType: "null",
        FunctionName: "the dotted name of a function",
    }
    return names.get(annotation, "a block of keys")
