"""Imports point one way, and what has to start fast imports no torch."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import shoal

SOURCE = Path(shoal.__file__).parent

# A package may import itself and whatever stands to its left.
ORDER = (
    "config",
    "mesh",
    "kernels",
    "parallel",
    "models",
    "data",
    "speech",
    "checkpoint",
    "train",
    "evaluate",
    "verify",
    "launch",
    "cli",
)
# The planner stands aside: nothing may import it but the command line, and it needs the arithmetic only.
PLAN_IMPORTS = ("shoal.plan", "shoal.config", "shoal.mesh.sizes", "shoal.mesh.axes")


def imported_modules(source: str) -> list[tuple[int, str]]:
    """(line, module) of every import of Shoal's own, wherever it stands: in functions, for types, by name."""
    found: list[tuple[int, str]] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            names = [f"shoal.{alias.name}" for alias in node.names] if module == "shoal" else [module]
            found += [(node.lineno, name) for name in names]
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            function = (
                node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            )
            if function in ("import_module", "__import__"):
                found.append((node.lineno, str(node.args[0].value)))
    return [(line, name) for line, name in found if name.startswith(("shoal.", ".")) or name == "shoal"]


def problem(package: str, module: str) -> str | None:
    """Why `package` may not import `module`, or None."""
    if module.startswith("."):
        return "is relative; write the module's full name"
    target = (module.split(".") + [""])[1]
    if package == "plan":
        light = any(module == name or module.startswith(f"{name}.") for name in PLAN_IMPORTS)
        return None if light else "is more than the planner may import"
    if (package, target) == ("cli", "plan") or module == "shoal.__version__":
        return None
    if target not in ORDER:
        return "is the lazy front door or outside the order; import the module that defines the name"
    return None if ORDER.index(target) <= ORDER.index(package) else f"stands to the right of {package}"


def violations(package: str, source: str) -> list[str]:
    found = imported_modules(source)
    return [f"line {line}: {name} {why}" for line, name in found if (why := problem(package, name))]


def python_files() -> list[Path]:
    return sorted(path for path in SOURCE.rglob("*.py") if path.parent != SOURCE)


@pytest.mark.parametrize("path", python_files(), ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_point_one_way(path: Path) -> None:
    package = path.relative_to(SOURCE).parts[0]
    assert package == "plan" or package in ORDER
    assert violations(package, path.read_text()) == []


@pytest.mark.parametrize(
    ("package", "source", "refused"),
    [
        ("mesh", "import torch\nfrom shoal.config.errors import ConfigError", False),
        ("mesh", "from shoal.mesh.axes import MeshAxisName", False),
        ("mesh", "from shoal.train import step", True),
        ("mesh", "import shoal.parallel.setup", True),
        ("data", "from shoal.speech.prompts import Encoder", True),
        ("config", "def f():\n    from shoal.mesh.sizes import resolve_sizes", True),
        ("config", "if TYPE_CHECKING:\n    from shoal.cli import main", True),
        ("config", "import_module('shoal.train.step')", True),
        ("config", "importlib.import_module('shoal.config.errors')", False),
        ("train", "from shoal import FSDP2Config", True),
        ("train", "from . import step", True),
        ("cli", "from shoal import __version__", False),
        ("cli", "from shoal.plan.search import search", False),
        ("train", "from shoal.plan.search import search", True),
        ("plan", "from shoal.mesh.sizes import resolve_sizes", False),
        ("plan", "from shoal.mesh.context import MeshContext", True),
    ],
)
def test_the_check_itself(package: str, source: str, refused: bool) -> None:
    assert bool(violations(package, source)) == refused


def modules_of(package: str) -> list[str]:
    paths = sorted((SOURCE / package).rglob("*.py"))
    parts = [("shoal", *path.relative_to(SOURCE).with_suffix("").parts) for path in paths]
    return [
        ".".join(part for part in names if part != "__init__") for names in parts if "__main__" not in names
    ]


def loaded_after(statement: str) -> set[str]:
    """Top-level packages in a fresh interpreter after `statement`."""
    code = f"import sys\n{statement}\nprint(*{{name.split('.')[0] for name in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.splitlines()[-1].split())


@pytest.mark.parametrize(
    "modules",
    [
        ["shoal"],
        ["shoal.mesh", "shoal.mesh.axes", "shoal.mesh.sizes"],
        modules_of("config"),
        modules_of("cli"),
    ],
    ids=["shoal", "mesh arithmetic", "config", "cli"],
)
def test_what_starts_fast_imports_no_torch(modules: list[str]) -> None:
    assert modules, "there is nothing to import"
    loaded = loaded_after(f"import {', '.join(modules)}")
    assert "shoal" in loaded
    assert not loaded & {"torch", "numpy", "transformers", "lightning", "lhotse"}


def test_exported_names_are_what_they_say() -> None:
    for name in shoal.__all__:
        value = getattr(shoal, name)
        assert name == "__version__" or value.__name__ == name
    assert set(shoal.__all__) <= set(dir(shoal))
    with pytest.raises(AttributeError, match="no attribute 'Shark'"):
        shoal.Shark  # noqa: B018
