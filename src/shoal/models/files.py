"""The tensors of a folder's safetensors files: one file, or many with an index."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors import safe_open

INDEX = "model.safetensors.index.json"
RANDOM_WEIGHTS = (
    "model.config of an LLM run, model.pretrained_weights=false of a speech run, from_config in Python"
)
"""How each front end says that nothing is to be loaded; for messages of code that serves all of them."""


def open_tensors(folder: Path) -> dict[str, Any]:
    """Lazy slices of every tensor in a folder's safetensors files, by name; nothing is read yet.

    A slice reads with `pread` into memory of its own. A memory map would count every page that was touched as
    resident, and parameters that alias it would change with the file.

    Raises:
        ValueError: There are no such files, the index names files or tensors that are absent, or two files hold
            a tensor of the same name.
    """
    tensors: dict[str, Any] = {}
    for file in _weight_files(folder):
        handle: Any = safe_open(file, framework="pt", backend="pread")
        names = list(handle.keys())
        twice = sorted(set(names) & tensors.keys())
        if twice:
            raise ValueError(
                f"{folder}: {file.name} holds tensors that another file holds too: {', '.join(twice[:12])}; "
                f"repair: remove the files of the other checkpoint, or add the {INDEX} that says which count"
            )
        tensors.update({name: handle.get_slice(name) for name in names})
    return _indexed(folder, tensors)


def _indexed(folder: Path, tensors: dict[str, Any]) -> dict[str, Any]:
    """The tensors that the index names; all of them without an index."""
    index = folder / INDEX
    if not index.is_file():
        return tensors
    named = json.loads(index.read_text())["weight_map"].keys()
    absent = sorted(named - tensors.keys())
    if absent:
        raise ValueError(
            f"{folder}: the index names tensors that no file holds: {', '.join(absent[:12])}; "
            "repair: fetch the files again"
        )
    return {name: tensors[name] for name in tensors if name in named}


def _weight_files(folder: Path) -> list[Path]:
    index = folder / INDEX
    if index.is_file():
        files = sorted({folder / name for name in json.loads(index.read_text())["weight_map"].values()})
        absent = [file.name for file in files if not file.is_file()]
        if absent:
            raise ValueError(f"{folder}: the index names files that are absent: {', '.join(absent)}")
        return files
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ValueError(
            f"{folder}: no safetensors files; repair: point to a folder saved with safetensors; random weights are "
            f"{RANDOM_WEIGHTS}"
        )
    return files
