"""A pre-tokenised corpus: documents of token ids in one memory-mapped file.

A corpus is a folder of three files. ``tokens.bin`` holds the ids of all documents one after the other,
little-endian, without header. ``offsets.npy`` is an int64 array [N + 1] in numpy's format: document i is
tokens[offsets[i]:offsets[i + 1]]. ``corpus.json`` says ``dtype`` (uint16 or uint32), ``num_documents``,
``num_tokens`` and ``tokenizer``, the name of what made the ids.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

TOKENS, OFFSETS, HEADER = "tokens.bin", "offsets.npy", "corpus.json"


class TokenCorpus:
    """The documents of a corpus, read where they lie; nothing is copied before a document is asked for.

    Args:
        folder: What `write_corpus` wrote.

    Raises:
        ValueError: A file is missing, or they do not fit together.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        missing = [name for name in (TOKENS, OFFSETS, HEADER) if not (self.folder / name).is_file()]
        if missing:
            raise ValueError(
                f"{self.folder}: no {', '.join(missing)}; a corpus is a folder that scripts/tokenize_corpus.py wrote"
            )
        header: dict[str, Any] = json.loads((self.folder / HEADER).read_text(encoding="utf-8"))
        self.tokenizer: str = header["tokenizer"]
        self.offsets: NDArray[np.int64] = np.load(self.folder / OFFSETS, mmap_mode="r")
        dtype = np.dtype(header["dtype"]).newbyteorder("<")
        size = (self.folder / TOKENS).stat().st_size
        expected = int(self.offsets[-1]) * dtype.itemsize
        if size != expected or len(self.offsets) != header["num_documents"] + 1:
            raise ValueError(
                f"{self.folder}: {TOKENS} has {size} bytes and {len(self.offsets) - 1} documents, and its header "
                f"and offsets say {expected} bytes and {header['num_documents']} documents; write it again"
            )
        # numpy cannot map an empty file
        self._tokens: NDArray[Any] = (
            np.memmap(self.folder / TOKENS, dtype=dtype, mode="r") if size else np.empty(0, dtype)
        )

    def __len__(self) -> int:
        """Returns the number of documents."""
        return len(self.offsets) - 1

    def length(self, index: int) -> int:
        """Returns the tokens of a document without reading it."""
        return int(self.offsets[index + 1] - self.offsets[index])

    def tokens(self, index: int, start: int = 0, length: int | None = None) -> NDArray[np.int64]:
        """Returns the ids of a document, or of a part of it."""
        begin, end = int(self.offsets[index]) + start, int(self.offsets[index + 1])
        end = end if length is None else min(end, begin + length)
        return self._tokens[begin:end].astype(np.int64)


def write_corpus(
    documents: Iterable[Sequence[int]], folder: str | Path, *, vocab_size: int, tokenizer: str
) -> int:
    """Writes a corpus, one document after the other; returns the number of tokens.

    Args:
        documents: Token ids of each document, below `vocab_size`; read once.
        folder: Made if need be; an earlier corpus in it is replaced.
        vocab_size: Decides between two and four bytes per token.
        tokenizer: Name of what made the ids.

    Raises:
        ValueError: An id is outside the vocabulary.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / HEADER).unlink(missing_ok=True)  # without its header a half-written corpus is refused
    dtype = np.dtype("<u2" if vocab_size <= 2**16 else "<u4")
    offsets = [0]
    with (folder / TOKENS).open("wb") as file:
        for document in documents:
            ids = np.asarray(document, dtype=np.int64)
            if len(ids) and not (ids.min() >= 0 and ids.max() < vocab_size):
                raise ValueError(f"document {len(offsets) - 1}: a token outside [0, {vocab_size})")
            file.write(ids.astype(dtype).tobytes())
            offsets.append(offsets[-1] + len(ids))
    np.save(folder / OFFSETS, np.asarray(offsets, dtype=np.int64))
    header = {
        "dtype": dtype.newbyteorder("=").name,
        "num_documents": len(offsets) - 1,
        "num_tokens": offsets[-1],
        "tokenizer": tokenizer,
    }
    (folder / HEADER).write_text(json.dumps(header, indent=2) + "\n", encoding="utf-8")
    return offsets[-1]
