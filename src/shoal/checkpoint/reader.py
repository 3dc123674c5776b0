"""Reading torch's distributed checkpoints without running code from them.

torch writes `.metadata` (which tensor lies where) as a pickle and reads it with the full unpickler, so a
doctored checkpoint could run anything. Here only the record types of that file can be built, and only tensors
are accepted: an entry of raw bytes would be unpickled by torch when it is read. The safetensors shards of a model
hold no pickle at all.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as load_tensors

from shoal.checkpoint.store import CheckpointError

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
            file = Path(self.path) / ".metadata"
            try:
                with open(file, "rb") as stream:
                    self._metadata = _load(stream)
            except (OSError, pickle.UnpicklingError, EOFError, AttributeError) as error:
                raise CheckpointError(f"cannot read {file}: {error}") from error
        return self._metadata

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
            try:
                self._metadata = super().read_metadata()
            except (OSError, SafetensorError, KeyError, ValueError) as error:
                raise CheckpointError(f"cannot read the tensors in {self.path}: {error}") from error
        return self._metadata

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
        found = self.reader.tensors()
        self.tensors = {
            key.removeprefix(self.prefix): entry
            for key, entry in found.items()
            if key.startswith(self.prefix)
        }

    def fetch(self, name: str) -> Tensor:
        """One whole tensor on the CPU; needs no process group and makes no collective."""
        entry = self.tensors[name]
        target = {self.prefix + name: torch.empty(entry.size, dtype=entry.properties.dtype)}
        load_tensors(target, storage_reader=self.reader, no_dist=True)
        return target[self.prefix + name]


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
