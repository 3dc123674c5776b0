"""Reading torch's distributed checkpoints without running code from them.

torch writes `.metadata` (which tensor lies where) as a pickle and reads it with the full unpickler, so a
doctored checkpoint could run anything. Here only the record types of that file can be built, and only tensors
are accepted: an entry of raw bytes would be unpickled by torch when it is read. The safetensors shards of a model
hold no pickle at all.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import pickle
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import torch
from safetensors import safe_open
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.checkpoint.state_dict_loader import load as load_tensors
from torch.futures import Future

from shoal.checkpoint.store import REPAIR, CheckpointError, read_manifest
from shoal.models.folder import one_line

MODEL_FOLDER = "model"
MODEL_PREFIX = "model."
_RECORDS = "torch.distributed.checkpoint.metadata"
_ALLOWED = {
    (_RECORDS, "Metadata"),
    (_RECORDS, "TensorStorageMetadata"),
    (_RECORDS, "BytesStorageMetadata"),
    (_RECORDS, "ChunkStorageMetadata"),
    (_RECORDS, "TensorProperties"),
    (_RECORDS, "MetadataIndex"),
    (_RECORDS, "StorageMeta"),
    (_RECORDS, "_MEM_FORMAT_ENCODING"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("pathlib", "PosixPath"),  # the directory the writer was given; Python 3.13 names the module differently
    ("pathlib._local", "PosixPath"),
}


def damaged(path: Path, what: str) -> CheckpointError:
    """The error for a checkpoint of which something is broken or missing."""
    return CheckpointError(f"the checkpoint {path} is damaged: {what}; {REPAIR}")


def read_part(path: Path, name: str, keys: tuple[str, ...]) -> dict[str, Any]:
    """The content of one of a checkpoint's JSON files.

    Args:
        path: the checkpoint.
        name: of the file in it.
        keys: what it must have.

    Raises:
        CheckpointError: the file is missing, is not JSON or lacks one of the keys.
    """
    file = path / name
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise damaged(path, f"cannot read {file}: {one_line(error)}") from error
    absent = [key for key in keys if not isinstance(content, dict) or key not in content]
    if absent:
        raise damaged(path, f"{file} has no {', '.join(absent)}")
    return dict(content)


@contextlib.contextmanager
def without_group_warning() -> Iterator[None]:
    """torch warns whenever there is no process group, also when a single process is what was asked for."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        yield


class MetadataUnpickler(pickle.Unpickler):
    """Builds the records of `.metadata` and torch dtypes, nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        """Look up one global of the pickle.

        Raises:
            CheckpointError: it is not on the list.
        """
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if (module, name) not in _ALLOWED:
            raise CheckpointError(
                f"checkpoint metadata names {module}.{name}, which no checkpoint needs: refused"
            )
        return super().find_class(module, name)


class TensorReader(FileSystemReader):
    """torch's file reader with the restricted unpickler; it reads the metadata once.

    Args:
        path: the directory with `.metadata` and the shards.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(path)
        self._metadata: Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Read `.metadata`.

        Raises:
            CheckpointError: it is missing, damaged, or holds something other than tensors.
        """
        if self._metadata is None:
            path = Path(self.path)
            file = path / ".metadata"
            try:
                with open(file, "rb") as stream:
                    metadata = _load(stream)
            except CheckpointError as error:
                raise CheckpointError(f"{file}: {error}") from error
            except Exception as error:  # broken pickles raise almost anything
                raise damaged(path, f"cannot read {file}: {one_line(error)}") from error
            self._metadata = metadata
        return self._metadata

    def check_files(self) -> None:
        """Refuse a checkpoint of which a file is missing or cut off, before anything is filled from it.

        Raises:
            CheckpointError: one is.
        """
        _check_sizes(Path(self.path), self.read_metadata())

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read what `plan` asks for, file by file, so that a failure names the file.

        Raises:
            CheckpointError: a file cannot be read.
        """
        path = Path(self.path)
        files = {
            item.storage_index: path / self.storage_data[item.storage_index].relative_path
            for item in plan.items
        }
        return _by_file(super(), path, files, plan, planner)

    def tensors(self) -> dict[str, TensorStorageMetadata]:
        """Name -> global shape, dtype and chunks of every tensor in the checkpoint."""
        return dict(self.read_metadata().state_dict_metadata)  # type: ignore[arg-type]  # checked in _load


class ShardReader(HuggingFaceStorageReader):
    """torch's reader of sharded safetensors files; it reads their headers once.

    Args:
        path: the directory with the files.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(str(path))
        self._metadata: Metadata | None = None

    def read_metadata(self) -> Metadata:
        """Read the headers of all files.

        Raises:
            CheckpointError: a file is missing or damaged.
        """
        if self._metadata is None:
            folder = Path(self.path)
            try:
                metadata = super().read_metadata()
            except Exception as error:  # headers come from a file that may hold anything
                file = _first_unreadable(folder) or folder
                raise damaged(
                    folder.parent, f"cannot read the tensors in {file}: {one_line(error)}"
                ) from error
            _check_coverage(folder, metadata)
            self._metadata = metadata
        return self._metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read what `plan` asks for, file by file, so that a failure names the file.

        Raises:
            CheckpointError: a file cannot be read.
        """
        folder = Path(self.path)
        files = {
            item.storage_index: Path(self.storage_data[item.storage_index].relative_path)
            for item in plan.items
        }
        return _by_file(super(), folder.parent, files, plan, planner)

    def tensors(self) -> dict[str, TensorStorageMetadata]:
        """Name -> global shape, dtype and chunks of every tensor in the files."""
        return dict(self.read_metadata().state_dict_metadata)  # type: ignore[arg-type]  # tensors only


class SavedModel:
    """The model's tensors in a checkpoint, whichever way they were written.

    Args:
        path: the checkpoint.
        model_format: `safetensors` (files in `model/`) or `torch_save` (among the others in the checkpoint).

    Raises:
        CheckpointError: damaged, or something other than tensors.
    """

    def __init__(self, path: Path, model_format: str) -> None:
        in_shards = model_format == "safetensors"
        self.reader: TensorReader | ShardReader = (
            ShardReader(path / MODEL_FOLDER) if in_shards else TensorReader(path)
        )
        self.prefix = "" if in_shards else MODEL_PREFIX
        if isinstance(self.reader, TensorReader):
            self.reader.check_files()
        found = self.reader.tensors()
        self.tensors = {
            key.removeprefix(self.prefix): entry
            for key, entry in found.items()
            if key.startswith(self.prefix)
        }

    def fetch(self, name: str) -> Tensor:
        """One whole tensor on the CPU; needs no process group and makes no collective.

        Raises:
            CheckpointError: its file cannot be read.
        """
        entry = self.tensors[name]
        target = {self.prefix + name: torch.empty(entry.size, dtype=entry.properties.dtype)}
        try:
            load_tensors(target, storage_reader=self.reader, no_dist=True)
        except CheckpointException as error:  # not an Exception, and it prints the traceback of what it wraps
            cause, _ = error.failures[min(error.failures)]
            raise CheckpointError(str(cause)) from error
        return target[self.prefix + name]


def absent_shards(path: Path, manifest: Mapping[str, Any]) -> str:
    """Which ranks' files `model/` of a checkpoint lacks, in words to end a message with; empty when none is known.

    A rank that had nothing to write has no file, so this explains a lack and does not prove one.
    """
    world = dict(manifest.get("layout") or {}).get("world")
    folder = path / MODEL_FOLDER
    if manifest.get("model_format") != "safetensors" or not isinstance(world, int):
        return ""
    lacking = [
        stem
        for rank in range(world)
        if not list(folder.glob(f"{(stem := f'shard-{rank + 1:05d}')}-*.safetensors"))
    ]
    return (
        f" ({folder} has no {', '.join(f'{stem}-*.safetensors' for stem in lacking[:8])})" if lacking else ""
    )


def _by_file(
    reader: Any, path: Path, files: Mapping[Any, Path], plan: LoadPlan, planner: LoadPlanner
) -> Future[None]:
    """`reader.read_data` once for every file of a plan; `reader` is a `super()` of torch's classes."""
    items: dict[Path, list[Any]] = {}
    for item in plan.items:
        items.setdefault(files[item.storage_index], []).append(item)
    for file, own in items.items():
        try:
            reader.read_data(dataclasses.replace(plan, items=own), planner).wait()
        except Exception as error:  # torch.load and safetensors raise what their parsers raise
            raise damaged(path, f"cannot read the tensors in {file}: {one_line(error)}") from error
    done: Future[None] = Future()
    done.set_result(None)
    return done


def _check_sizes(path: Path, metadata: Metadata) -> None:
    ends: dict[str, int] = {}
    for entry in (metadata.storage_data or {}).values():
        ends[entry.relative_path] = max(ends.get(entry.relative_path, 0), entry.offset + entry.length)
    for name, end in sorted(ends.items()):
        file = path / name
        if not file.is_file():
            raise damaged(path, f"{file} is missing")
        if (size := file.stat().st_size) < end:
            raise damaged(path, f"{file} has {size} bytes, its tensors end at {end}")


def _check_coverage(folder: Path, metadata: Metadata) -> None:
    """Refuse tensors of which a part is in no file: torch would leave that part of the model as it was."""
    for name, entry in metadata.state_dict_metadata.items():
        assert isinstance(entry, TensorStorageMetadata)
        held, whole = sum(math.prod(chunk.sizes) for chunk in entry.chunks), math.prod(entry.size)
        if held < whole:
            raise damaged(
                folder.parent,
                f"the files in {folder} hold {held} of the {whole} elements of {name}"
                f"{absent_shards(folder.parent, read_manifest(folder.parent)) or ', so one of them is missing'}",
            )


def _first_unreadable(folder: Path) -> Path | None:
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, framework="pt") as tensors:
                tensors.keys()
        except Exception:  # whatever it is, the caller has the reason
            return file
    return None


def _load(stream: IO[bytes]) -> Metadata:
    metadata = MetadataUnpickler(stream).load()
    if not isinstance(metadata, Metadata):
        raise CheckpointError("checkpoint metadata is not a Metadata record")
    for name, entry in metadata.state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):
            raise CheckpointError(
                f"checkpoint entry {name!r} is not a tensor: refused, it would be unpickled"
            )
    return metadata
