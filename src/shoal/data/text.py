"""Documents of a text data set: token ids, what is supervised, and how long they are.

The sampler composes micro-batches of pieces, metadata only; a worker that loads one asks for the tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from shoal.config.text import TextDatasetConfig
from shoal.data.text_corpus import TokenCorpus
from shoal.data.text_encoding import RowEncoder, row_encoder
from shoal.data.text_rows import Rows, open_rows

WHOLE = 2**31 - 1
"""Length of a piece that goes to the end of its document, where nothing needs to know how long that is."""


@dataclass(frozen=True)
class Piece:
    """A document or a part of it.

    Args:
        document: Number of the document in its data set.
        start: First token.
        length: Tokens, at most; the first of them has no predecessor and is not supervised.
    """

    document: int
    start: int
    length: int

    @property
    def id(self) -> str:
        """The name of the piece in its data set."""
        return f"{self.document}:{self.start}+{self.length}"


@dataclass(frozen=True)
class Tokens:
    """Ids [L] int64 of a piece, and which of them are supervised [L] bool."""

    input_ids: NDArray[np.int64]
    loss_mask: NDArray[np.bool_]


class Documents(Protocol):
    """The documents of a data set by number."""

    def __len__(self) -> int: ...

    def length(self, index: int) -> int:
        """Returns the tokens of a document."""

    def tokens(self, piece: Piece) -> Tokens:
        """Returns the tokens of a piece."""


class EncodedRows:
    """Rows that are tokenized when they are asked for; lengths are measured once and kept."""

    def __init__(self, rows: Rows, encode: RowEncoder, key: str) -> None:
        self._rows = rows
        self._encode = encode
        self._key = key
        self._lengths = np.full(len(rows), -1, dtype=np.int32)

    def __len__(self) -> int:
        """Returns the number of documents."""
        return len(self._rows)

    def length(self, index: int) -> int:
        """Returns the tokens of a document; the first time it is tokenized for that."""
        if self._lengths[index] < 0:
            self._lengths[index] = len(self._all(index).input_ids)
        return int(self._lengths[index])

    def tokens(self, piece: Piece) -> Tokens:
        """Returns the tokens of a piece."""
        whole = self._all(piece.document)
        part = slice(piece.start, piece.start + piece.length)
        return Tokens(whole.input_ids[part], whole.loss_mask[part])

    def _all(self, index: int) -> Tokens:
        try:
            encoded = self._encode(self._rows[index])
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise ValueError(f"{self._key}: row {index}: {type(error).__name__}: {error}") from error
        return Tokens(
            np.asarray(encoded.input_ids, dtype=np.int64), np.asarray(encoded.loss_mask, dtype=bool)
        )


class CorpusDocuments:
    """The documents of a pre-tokenised corpus; every token is supervised."""

    def __init__(self, corpus: TokenCorpus, limit: int | None = None) -> None:
        self._corpus = corpus
        self._num = len(corpus) if limit is None else min(limit, len(corpus))

    def __len__(self) -> int:
        """Returns the number of documents."""
        return self._num

    def length(self, index: int) -> int:
        """Returns the tokens of a document."""
        return self._corpus.length(index)

    def tokens(self, piece: Piece) -> Tokens:
        """Returns the tokens of a piece."""
        ids = self._corpus.tokens(piece.document, piece.start, piece.length)
        return Tokens(ids, np.ones(len(ids), dtype=bool))


def open_documents(config: TextDatasetConfig, tokenizer: Any, key: str) -> Documents:
    """Opens a data set.

    Args:
        config: What and where it is.
        tokenizer: A transformers tokenizer; None is enough for ``tokens``.
        key: Key path of `config`, for messages.

    Raises:
        ValueError: The data is missing or of another form, or needs a tokenizer or a chat template.
    """
    if config.type == "tokens":
        assert isinstance(config.path, str)
        return CorpusDocuments(TokenCorpus(Path(config.path)), config.limit_dataset_samples)
    if tokenizer is None:
        raise ValueError(
            f"{key}.type = {config.type!r} needs a tokenizer; give tokenizer: FOLDER, or a model that has one"
        )
    return EncodedRows(open_rows(config, key), row_encoder(config, tokenizer), key)
