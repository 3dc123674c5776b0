"""Reading torch's distributed checkpoints without running code from them.

torch writes `.metadata` (which tensor lies where) as a pickle and reads it with the full unpickler, so a
doctored checkpoint could run anything. Here only the record types of that file can be built, and only tensors
are accepted: an entry of raw bytes would be unpickled by torch when it is read.
"""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import IO, Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from shoal.checkpoint.store import CheckpointError

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
