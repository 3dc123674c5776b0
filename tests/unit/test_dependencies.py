"""What the package declares is what its code imports: nothing missing, nothing that only takes room."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

DISTRIBUTIONS = {
    "hydra": "hydra-core",
    "yaml": "PyYAML",
    "huggingface_hub": "huggingface-hub",
    "typing_extensions": "typing-extensions",
}
"""Distributions that are not called as what they give."""
BEHIND_OTHERS = {"soundfile"}
"""Not imported here: lhotse decodes wave files with it and does not depend on it."""


def imported(folders: tuple[str, ...]) -> set[str]:
    """Distributions that modules below these folders import, anywhere in them, without the standard library."""
    found: set[str] = set()
    for path in (path for folder in folders for path in (ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                found.add(node.module.split(".")[0])
    return {DISTRIBUTIONS.get(name, name) for name in found - sys.stdlib_module_names - {"shoal"}}


def names(requirements: list[str]) -> set[str]:
    return {re.match(r"[\w-]+", line)[0] for line in requirements}  # type: ignore[index]


def optional() -> set[str]:
    """What is imported only where somebody asked for it, and named in the message when it is missing."""
    extras = PROJECT["optional-dependencies"]
    return names([line for extra in extras.values() for line in extra]) | {"transformer_engine", "flash_attn"}


def test_every_dependency_is_imported() -> None:
    assert names(PROJECT["dependencies"]) - imported(("src", "examples")) == BEHIND_OTHERS


def test_every_import_is_a_dependency() -> None:
    assert imported(("src", "examples")) - names(PROJECT["dependencies"]) <= optional()


def test_what_runs_here_is_within_the_declared_bounds() -> None:
    for line in PROJECT["dependencies"]:
        requirement = Requirement(line)
        assert {one.operator for one in requirement.specifier} == {">=", "<"}, line
        assert requirement.specifier.contains(Version(version(requirement.name)).base_version), line
