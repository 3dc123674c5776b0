"""The tensors of a folder's safetensors files: one file, or many with an index."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from shoal.models.folder import FETCH_AGAIN, one_line, read_json

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
        ValueError: There are no such files, one of them or the index is damaged, the index names files or tensors
            that are absent, or two files hold a tensor of the same name.
    """
    tensors: dict[str, Any] = {}
    for file in _weight_files(folder):
        slices = open_file(file)
        twice = sorted(slices.keys() & tensors.keys())
        if twice:
            raise ValueError(
                f"{folder}: {file.name} holds tensors that another file holds too: {', '.join(twice[:12])}; "
                f"repair: remove the files of the other checkpoint, or add the {INDEX} that says which count"
            )
        tensors.update(slices)
    return _indexed(folder, tensors)


def open_file(file: Path) -> dict[str, Any]:
    """Lazy slices of every tensor in one safetensors file, by name; nothing is read yet but the header.

    Raises:
        ValueError: The file is absent, empty, cut off or no safetensors file.
    """
    try:
        handle: Any = safe_open(file, framework="pt", backend="pread")
        return {name: handle.get_slice(name) for name in list(handle.keys())}
    except (SafetensorError, OSError) as error:
        raise ValueError(
            f"{file}: is no complete safetensors file: {one_line(error)}{_size(file)}; {FETCH_AGAIN}"
        ) from error


def _size(file: Path) -> str:
    return f" ({file.stat().st_size} bytes)" if file.is_file() else ""


def _weight_map(index: Path) -> dict[str, str]:
    """Which file holds a tensor, by the tensor's name.

    Raises:
        ValueError: The index is not JSON, or has no such table.
    """
    named = read_json(index).get("weight_map")
    if not isinstance(named, dict) or not all(isinstance(name, str) for name in named.values()):
        raise ValueError(f"{index}: has no table weight_map of tensors and their files; {FETCH_AGAIN}")
    return named


def _indexed(folder: Path, tensors: dict[str, Any]) -> dict[str, Any]:
    """The tensors that the index names; all of them without an index."""
    index = folder / INDEX
    if not index.is_file():
        return tensors
    named = _weight_map(index).keys()
    absent = sorted(named - tensors.keys())
    if absent:
        raise ValueError(
            f"{folder}: {INDEX} names tensors that no file holds: {', '.join(absent[:12])}; "
            "repair: fetch the files and the index again"
        )
    return {name: tensors[name] for name in tensors if name in named}


def _weight_files(folder: Path) -> list[Path]:
    index = folder / INDEX
    if index.is_file():
        files = sorted({folder / name for name in _weight_map(index).values()})
        absent = [file.name for file in files if not file.is_file()]
        if absent:
            raise ValueError(
                f"{folder}: {INDEX} names files that are absent: {', '.join(absent)}; repair: fetch or copy them "
                "again, or the whole folder"
            )
        return files
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ValueError(
            f"{folder}: no safetensors files; repair: point to a folder saved with safetensors; random weights are "
            f"{RANDOM_WEIGHTS}"
        )
    return files
