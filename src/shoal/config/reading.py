"""Text to plain data: YAML, command-line overrides and ``${...}`` interpolation."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from shoal.config.errors import ConfigError, Finding

# The C parser is five times faster; a wheel of PyYAML without it still works.
_Base: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _Loader(_Base):  # type: ignore[misc]
    """Numbers as in YAML 1.2, and no key twice: ``1e-4`` is a float, ``1:30:00`` and dates are strings."""


_NUMBERS: tuple[tuple[str, str], ...] = (
    ("tag:yaml.org,2002:int", r"[-+]?(?:0|[1-9][0-9_]*)|0x[0-9a-fA-F]+|0o[0-7]+"),
    (
        "tag:yaml.org,2002:float",
        r"[-+]?(?:[0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*)(?:[eE][-+]?[0-9]+)?"
        r"|[-+]?[0-9][0-9_]*[eE][-+]?[0-9]+|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
    ),
)
_REPLACED = {tag for tag, _ in _NUMBERS} | {"tag:yaml.org,2002:timestamp"}
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag not in _REPLACED]
    for first, resolvers in _Base.yaml_implicit_resolvers.items()
}
for _tag, _pattern in _NUMBERS:
    _Loader.add_implicit_resolver(_tag, re.compile(f"(?:{_pattern})\\Z"), list("-+0123456789."))


def _mapping_without_duplicates(loader: Any, node: Any) -> dict[Any, Any]:
    seen: set[str] = set()
    for key_node, _ in node.value:
        if key_node.tag != "tag:yaml.org,2002:merge":
            if key_node.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key_node.value!r} stands twice in one block", key_node.start_mark
                )
            seen.add(key_node.value)
    loader.flatten_mapping(node)
    pairs: dict[Any, Any] = loader.construct_mapping(node, deep=True)
    return pairs


_Loader.add_constructor("tag:yaml.org,2002:map", _mapping_without_duplicates)


def parse_yaml(text: str, origin: str) -> Any:
    """Returns the data of a YAML text; `origin` (a path or an override) names it in the error.

    Raises:
        ConfigError: The text is not YAML, or has a key twice in one block.
    """
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f"line {mark.line + 1}: " if mark else ""
        problem = getattr(error, "problem", None) or str(error)
        shown = text if len(text) < 80 else None
        finding = Finding("yaml-syntax", origin, shown, "YAML without duplicate keys", f"{line}{problem}")
        raise ConfigError([finding]) from error


def read_source(source: str | Path | Mapping[str, Any]) -> dict[str, Any]:
    """Returns the top-level mapping of a YAML file, or a deep copy of a mapping.

    Raises:
        ConfigError: The file is missing, unreadable, not YAML, or not a mapping.
    """
    if isinstance(source, Mapping):
        return {key: _copied(value) for key, value in source.items()}
    path = Path(source)
    data = parse_yaml(_text_of(path), str(path))
    if not isinstance(data, dict):
        limit = "a mapping with the sections of a recipe at the top"
        raise ConfigError(
            [Finding("config-file", str(path), data, limit, "write model:, trainer:, data:, ...")]
        )
    return data


def read_list(path: str | Path) -> list[Any]:
    """Returns the top-level list of a YAML file.

    Raises:
        ConfigError: The file is missing, unreadable, not YAML, or not a list.
    """
    data = parse_yaml(_text_of(Path(path)), str(path))
    if not isinstance(data, list):
        raise ConfigError(
            [Finding("config-file", str(path), data, "a list of sources", "start with - type:")]
        )
    return data


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        finding = Finding(
            "config-file", str(path), None, "a readable YAML file", f"check the path ({reason})"
        )
        raise ConfigError([finding]) from error


def _copied(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _copied(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_copied(item) for item in value]
    return value


def apply_overrides(tree: dict[str, Any], overrides: Sequence[str]) -> list[Finding]:
    """Writes ``key.path=value``, ``+key.path=value``, ``~key.path`` into `tree`; returns what is malformed.

    A number in a path is an index into a list. Values are YAML, as in the file.
    """
    findings: list[Finding] = []
    for override in overrides:
        try:
            finding = _apply_override(tree, override)
        except ConfigError as error:
            findings.extend(error.findings)
            continue
        if finding is not None:
            findings.append(finding)
    return findings


def _apply_override(tree: dict[str, Any], override: str) -> Finding | None:
    deletes = override.startswith("~")
    key, equals, text = override.lstrip("+~").partition("=")
    if not key or (not deletes and (not equals or not text.strip())):
        repair = (
            f"write {key}=null, or {key}=\"''\" for an empty text"
            if equals and key
            else "write key.path=value"
        )
        return Finding(
            "override-syntax", override, None, "key.path=value, +key.path=value or ~key.path", repair
        )
    value = None if deletes else parse_yaml(text, f"override {override}")
    *parents, last = key.split(".")
    node: Any = tree
    for depth, name in enumerate(parents):
        child = _child(node, name)
        if child is None and isinstance(node, dict) and not deletes:
            child = node[name] = {}
        if not isinstance(child, dict | list):
            place = ".".join(parents[: depth + 1])
            limit = f"a path through blocks; {place} is not one"
            return Finding("override-path", key, value, limit, f"check {place} in the file")
        node = child
    if _child(node, last) is None and (deletes or isinstance(node, list)) and not _has(node, last):
        return Finding("override-path", key, value, "a key that is in the file", "drop the override")
    position: Any = int(last) if isinstance(node, list) else last
    if deletes:
        del node[position]
    else:
        node[position] = value
    return None


def _has(node: Any, name: str) -> bool:
    if isinstance(node, list):
        return name.isdigit() and int(name) < len(node)
    return isinstance(node, dict) and name in node


def _child(node: Any, name: str) -> Any:
    if not _has(node, name):
        return None
    return node[int(name)] if isinstance(node, list) else node[name]


_INNERMOST = re.compile(r"\$\{([^${}]*)\}")


class Interpolator:
    """Replaces ``${section.key}``, ``${.sibling}`` and ``${oc.env:NAME,default}`` in a tree of plain data.

    A value that is nothing but a reference keeps the type of what it refers to. Environment values are read
    as YAML, as values on the command line are.
    """

    def __init__(self, tree: dict[str, Any]) -> None:
        self.tree = tree
        self.findings: list[Finding] = []
        self._open: list[str] = []

    def resolve(self) -> dict[str, Any]:
        """Returns the tree without references; what could not be resolved is in `findings`."""
        resolved: dict[str, Any] = self._value(self.tree, "")
        return resolved

    def _value(self, value: Any, path: str) -> Any:
        if isinstance(value, dict):
            return {
                key: self._value(item, f"{path}.{key}" if path else str(key)) for key, item in value.items()
            }
        if isinstance(value, list):
            return [self._value(item, f"{path}.{index}") for index, item in enumerate(value)]
        if isinstance(value, str) and "${" in value:
            return self._text(value, path)
        return value

    def _text(self, text: str, path: str) -> Any:
        while (match := _INNERMOST.search(text)) is not None:
            try:
                value = self._reference(match.group(1).strip(), path)
            except LookupError as error:
                self.findings.append(
                    Finding("interpolation", path, text, str(error.args[0]), str(error.args[1]))
                )
                return None
            if match.span() == (0, len(text)):
                return value
            text = text[: match.start()] + ("" if value is None else str(value)) + text[match.end() :]
        return text

    def _reference(self, expression: str, path: str) -> Any:
        resolver, colon, rest = expression.partition(":")
        if colon:
            if resolver not in _RESOLVERS:
                raise LookupError(f"the resolvers {', '.join(_RESOLVERS)}", "write the value itself")
            return _RESOLVERS[resolver](rest)
        target = _absolute(expression, path)
        if target in self._open:
            raise LookupError("a reference that does not lead back to itself", f"break the cycle at {target}")
        node: Any = self.tree
        for name in target.split("."):
            if not _has(node, name):
                raise LookupError(
                    f"an existing key; there is no {target}", f"define {target} or write the value"
                )
            node = _child(node, name)
        self._open.append(target)
        try:
            return self._value(node, target)
        finally:
            self._open.pop()


def _absolute(expression: str, path: str) -> str:
    """Returns the path `expression` means at `path`; one leading dot is the own block, two its parent."""
    dots = len(expression) - len(expression.lstrip("."))
    if dots == 0:
        return expression
    return ".".join([*path.split(".")[:-dots], expression[dots:]])


def _environment(arguments: str) -> Any:
    name, comma, default = (part.strip() for part in arguments.partition(","))
    text = os.environ.get(name, default if comma else None)
    if text is None:
        raise LookupError(
            f"a set environment variable; {name} is not set", f"export {name} or give a default"
        )
    return parse_yaml(text, f"environment variable {name}")


_RESOLVERS: Mapping[str, Callable[[str], Any]] = {"oc.env": _environment}
