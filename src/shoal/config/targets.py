"""Which objects a ``_target_`` may name: classes and listed factories *defined* in the libraries we allow.

A dotted name can walk from an allowed package into anything that it imports (``lhotse.utils.os.system``). So
the place that counts is where the object is defined. `check_target` finds that out from the source on disk,
importing nothing; `resolve_target`, the only function that imports, checks the object itself.
"""

from __future__ import annotations

import ast
import difflib
import importlib
import importlib.util
import inspect
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from shoal.config.aliases import TARGETS
from shoal.config.errors import ConfigError, Finding

ALLOWED_MODULES = (
    "shoal",
    "torch.optim",
    "lightning",
    "pytorch_lightning",
    "transformers",
    "peft",
    "lhotse",
    "flashoptim",
)

FACTORY_METHODS = frozenset({"from_pretrained", "from_config"})

FACTORIES = frozenset(
    {
        "transformers.get_constant_schedule",
        "transformers.get_constant_schedule_with_warmup",
        "transformers.get_cosine_schedule_with_warmup",
        "transformers.get_linear_schedule_with_warmup",
    }
)
"""Functions that may be named although they are not classes."""

_REPAIR = "name a class of an allowed library, or allow its module with --allow-target MODULE"


@dataclass(frozen=True)
class StaticTarget:
    """What the source says about a name; `parameters` are those of ``__init__``, None when not known."""

    limit: str | None = None
    parameters: tuple[str, ...] | None = None


def canonical_target(name: str) -> str:
    """Returns our name for a target that NeMo or AutoModel call otherwise, or the name itself."""
    return TARGETS.get(name, name)


def check_target(name: str, allow: Collection[str] = ()) -> StaticTarget:
    """Judges a target by its text and the source on disk, importing nothing.

    Args:
        name: Dotted name, aliases already replaced.
        allow: Modules, or full names, that the user allows in addition.

    Returns:
        What is known; `limit` says in words why the name is refused, or is None.
    """
    if not all(part.isidentifier() for part in name.split(".")):
        return StaticTarget("a dotted name such as torch.optim.AdamW")
    if not _inside(name, (*ALLOWED_MODULES, *allow)):
        return StaticTarget(f"a class defined in {', '.join((*ALLOWED_MODULES, *allow))}")
    module, source, attributes = _locate(name)
    if source is None:
        return StaticTarget(f"an installed library; {name.partition('.')[0]} is not")
    if not attributes:
        return StaticTarget("a class or a listed factory, not a module")
    if name in FACTORIES or name in allow:
        return StaticTarget()
    if len(attributes) > 2 or (len(attributes) == 2 and attributes[1] not in FACTORY_METHODS):
        return StaticTarget(f"a class, or its {' or '.join(sorted(FACTORY_METHODS))}")
    return _judge(module, source, attributes[0], allow, depth=0)


def _inside(module: str, allowed: Collection[str]) -> bool:
    return any(module == prefix or module.startswith(prefix + ".") for prefix in allowed)


@cache
def _locate(name: str) -> tuple[str, Path | None, tuple[str, ...]]:
    """Splits a name into the longest module on disk, its source file, and what follows it."""
    first, *rest = name.split(".")
    spec = importlib.util.find_spec(first)
    if spec is None or spec.origin is None:
        return first, None, tuple(rest)
    module, source = first, Path(spec.origin)
    while rest and source.name == "__init__.py":
        folder = source.parent
        found = [
            path for path in (folder / rest[0] / "__init__.py", folder / f"{rest[0]}.py") if path.exists()
        ]
        if not found:
            break
        module, source = f"{module}.{rest.pop(0)}", found[0]
    return module, source, tuple(rest)


@cache
def _definitions(source: Path) -> Mapping[str, ast.stmt]:
    """The statements of a source file that bind names at its top level, also inside if and try."""
    found: dict[str, ast.stmt] = {}
    pending: list[ast.stmt] = list(ast.parse(source.read_text(encoding="utf-8")).body)
    while pending:
        statement = pending.pop()
        if isinstance(statement, ast.ClassDef | ast.FunctionDef):
            found[statement.name] = statement
        elif isinstance(statement, ast.Import | ast.ImportFrom):
            found.update({(alias.asname or alias.name).split(".")[0]: statement for alias in statement.names})
        elif isinstance(statement, ast.If | ast.Try):
            handlers = getattr(statement, "handlers", [])
            pending += [
                *statement.body,
                *statement.orelse,
                *(line for item in handlers for line in item.body),
            ]
    return found


def _judge(module: str, source: Path, name: str, allow: Collection[str], depth: int) -> StaticTarget:
    """Follows the definition of `name` in `module` through re-exports to a class, or says why it is none."""
    definition = _definitions(source).get(name)
    if isinstance(definition, ast.ClassDef):
        return StaticTarget(parameters=_init_parameters(definition))
    if isinstance(definition, ast.FunctionDef):
        return StaticTarget(f"a class or a listed factory; {name} is a function")
    if isinstance(definition, ast.Import) or (definition is None and not name[0].isupper()):
        return StaticTarget(f"a class; {module}.{name} is not one")
    if isinstance(definition, ast.ImportFrom) and depth < 8:
        origin, original = _origin(module, source, definition, name)
        if not _inside(origin, (*ALLOWED_MODULES, *allow)):
            return StaticTarget(f"a class defined in an allowed library; {name} comes from {origin}")
        next_module, next_source, attributes = _locate(f"{origin}.{original}")
        if next_source is not None and not attributes:
            return StaticTarget(f"a class; {module}.{name} is a module")
        if next_source is not None and len(attributes) == 1:
            return _judge(next_module, next_source, attributes[0], allow, depth + 1)
    # Bound in a way the source does not tell (lazy modules): the object itself is checked when it is made.
    return StaticTarget()


def _origin(module: str, source: Path, statement: ast.ImportFrom, name: str) -> tuple[str, str]:
    """Returns the module an import statement takes `name` from, and its name there."""
    original = next(alias.name for alias in statement.names if (alias.asname or alias.name) == name)
    if not statement.level:
        return statement.module or "", original
    parts = module.split(".")
    up = statement.level - (1 if source.name == "__init__.py" else 0)
    base = parts[: len(parts) - up]
    return ".".join([*base, *([statement.module] if statement.module else [])]), original


def _init_parameters(definition: ast.ClassDef) -> tuple[str, ...] | None:
    for statement in definition.body:
        if isinstance(statement, ast.FunctionDef) and statement.name == "__init__":
            arguments = statement.args
            if arguments.kwarg is not None or arguments.vararg is not None:
                return None
            names = [item.arg for item in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
            return tuple(names[1:])
    return None


def resolve_target(name: str, allow: Collection[str] = (), key: str = "_target_") -> Any:
    """Imports and returns the class or factory that `name` stands for.

    Args:
        name: Dotted name; names of NeMo and AutoModel are replaced by ours.
        allow: Modules, or full names, that the user allows in addition.
        key: Path of the key, for the message.

    Raises:
        ConfigError: The name is not allowed, does not exist, or the object is defined elsewhere.
    """
    full = canonical_target(name)
    limit = check_target(full, allow).limit
    found, repair = None, _REPAIR
    if limit is None:
        try:
            found = _import(full)
        except (ImportError, AttributeError) as error:
            limit, repair = f"an existing name ({error})", _nearest(error) or _REPAIR
        else:
            limit = _object_limit(found, full, allow)
    if limit is not None:
        raise ConfigError([Finding("target", key, name, limit, repair)])
    return found


def _nearest(error: Exception) -> str | None:
    if not isinstance(error, AttributeError) or not inspect.ismodule(error.obj):
        return None
    near = difflib.get_close_matches(str(error.name), dir(error.obj), n=1)
    return f"did you mean {error.obj.__name__}.{near[0]}?" if near else None


def _import(name: str) -> Any:
    module, _, attributes = _locate(name)
    found: Any = importlib.import_module(module)
    for attribute in attributes:
        found = getattr(found, attribute)
    return found


def _object_limit(found: Any, name: str, allow: Collection[str]) -> str | None:
    """Returns why the imported object is refused, in words, or None."""
    owner = found.__self__ if inspect.ismethod(found) and inspect.isclass(found.__self__) else found
    listed = name in FACTORIES or name in allow
    if not (inspect.isclass(owner) or (listed and callable(found))):
        return "a class or a listed factory"
    module = str(getattr(owner, "__module__", ""))
    if not listed and not _inside(module, (*ALLOWED_MODULES, *allow)):
        return f"a class defined in an allowed library; this one is defined in {module}"
    return None
