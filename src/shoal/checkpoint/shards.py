"""Writing safetensors files of bounded size, with the index of Hugging Face's layout."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, contiguous_format

from shoal.checkpoint.store import CheckpointError

MAX_SHARD_BYTES = 5 * 10**9
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}


class ShardWriter:
    """Collects tensors and writes them as `STEM-00001-of-00003.safetensors`, ... and an index.

    One file alone is called `STEM.safetensors` and has no index, as transformers does it. Holds at most one file's
    tensors in memory. This class knows nothing of ranks.

    Args:
        directory: exists.
        stem: name of the files without number and extension.
        max_bytes: largest size of one file's tensors; a larger tensor gets a file of its own.
    """

    def __init__(self, directory: Path, stem: str = "model", max_bytes: int = MAX_SHARD_BYTES) -> None:
        self.directory = directory
        self.stem = stem
        self.max_bytes = max_bytes
        self._pending: dict[str, Tensor] = {}
        self._pending_bytes = 0
        self._written: list[list[str]] = []
        self._names: set[str] = set()
        self._total_bytes = 0

    def add(self, name: str, tensor: Tensor) -> None:
        """Take one tensor on the CPU; writes a file when this one does not fit into it any more.

        Raises:
            ValueError: `name` was added before.
            CheckpointError: the disk refused.
        """
        if name in self._names:
            raise ValueError(f"two tensors would both be saved as {name}")
        self._names.add(name)
        size = tensor.numel() * tensor.element_size()
        if self._pending and self._pending_bytes + size > self.max_bytes:
            self._flush()
        # A view would keep, and a shared storage would refuse to save, the tensor it was cut from.
        compact = tensor.is_contiguous() and tensor.untyped_storage().nbytes() == size
        self._pending[name] = tensor if compact else tensor.clone(memory_format=contiguous_format)
        self._pending_bytes += size
        self._total_bytes += size

    def finish(self) -> dict[str, str]:
        """Write what is left, give the files their final names and write the index; returns name -> file.

        Raises:
            ValueError: nothing was added.
            CheckpointError: the disk refused.
        """
        if self._pending:
            self._flush()
        number = len(self._written)
        if number == 0:
            raise ValueError(f"there is nothing to save in {self.directory}")
        weight_map: dict[str, str] = {}
        for index, names in enumerate(self._written):
            final = f"{self.stem}-{index + 1:05d}-of-{number:05d}.safetensors"
            final = final if number > 1 else f"{self.stem}.safetensors"
            os.rename(self._temporary(index), self.directory / final)
            weight_map.update(dict.fromkeys(names, final))
        if number > 1:
            index_file = self.directory / f"{self.stem}.safetensors.index.json"
            content = {"metadata": {"total_size": self._total_bytes}, "weight_map": weight_map}
            index_file.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        return weight_map

    def _flush(self) -> None:
        file = self._temporary(len(self._written))
        try:
            save_file(self._pending, file, metadata={"format": "pt"})
        except SafetensorError as error:
            raise CheckpointError(f"cannot write {file} ({self._pending_bytes} bytes): {error}") from error
        self._written.append(list(self._pending))
        self._pending, self._pending_bytes = {}, 0

    def _temporary(self, index: int) -> Path:
        return self.directory / f"{self.stem}-{index + 1:05d}.unfinished"


def parse_size(text: str) -> int:
    """Bytes of a size such as `500MB` or `5GB` (powers of ten), as transformers and accelerate write it.

    >>> parse_size("5GB")
    5000000000

    Raises:
        ValueError: not a positive number with one of the units.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(KB|MB|GB)?", text.strip().upper())
    size = int(float(found[1]) * _UNITS[found[2] or ""]) if found else 0
    if size < 1:
        raise ValueError(f"{text!r} is not a size; write it as 5GB, 500MB or a number of bytes")
    return size
