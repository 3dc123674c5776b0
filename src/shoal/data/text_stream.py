"""The one stream of global micro-batches of a text data set.

It is a function of (configuration, order seed, epoch) alone: a permutation of all documents, then splitting or
leaving out by length, then rows or packs. Any layout can deal it out and any run can replay it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import islice

import numpy as np

from shoal.config.seeds import derive_seed
from shoal.config.text import PackedSequenceConfig, TextDatasetConfig
from shoal.data.packing import fit_to_pack, pack_best_fit, pack_greedily, split
from shoal.data.steps import EpochStream
from shoal.data.text import WHOLE, Documents, Piece


class TextStream:
    """Composes the micro-batches of a text data set, metadata only.

    Args:
        documents: The data set.
        config: Its section.
        packing: Pack size 0 gives rows instead of packs.
        rows: Rows of a micro-batch without packing.
        shuffle: A new permutation of all documents in each epoch; False keeps their order.
        drop_last: Leaves an unfinished last step out.
        key: Key path of `config`, for messages.
    """

    def __init__(
        self,
        documents: Documents,
        config: TextDatasetConfig,
        packing: PackedSequenceConfig,
        *,
        rows: int,
        shuffle: bool,
        drop_last: bool,
        key: str,
    ) -> None:
        self.key = key
        self.drop_last = drop_last
        self._documents = documents
        self._config = config
        self._packing = packing
        self._rows = rows
        self._shuffle = shuffle

    def epoch(self, epoch: int, order_seed: int) -> EpochStream:
        """Returns the micro-batches of one epoch in their order."""
        counts: Counter[str] = Counter()
        pieces = self._pieces(epoch, order_seed, counts)
        if self._packing.packed_sequence_size == 0:
            return EpochStream(_rows_of(pieces, self._rows), counts)
        return EpochStream(islice(self._packs(pieces, counts), self._packing.max_packs), counts)

    def _packs(self, pieces: Iterator[Piece], counts: Counter[str]) -> Iterator[tuple[Piece, ...]]:
        packing = self._packing
        size = packing.packed_sequence_size
        fitting = fit_to_pack(pieces, size, long_documents=packing.long_documents, counts=counts)
        if packing.packing_strategy == "greedy":
            return pack_greedily(fitting, size)
        return pack_best_fit(fitting, size, open_packs=packing.open_packs)

    def _pieces(self, epoch: int, order_seed: int, counts: Counter[str]) -> Iterator[Piece]:
        longest, config = self._config.seq_length, self._config
        if longest is None and self._packing.packed_sequence_size == 0:
            # Nothing asks for lengths, so no document is tokenized here; a replay costs next to nothing.
            yield from (Piece(document, 0, WHOLE) for document in self._order(epoch, order_seed))
            return
        for document in self._order(epoch, order_seed):
            piece = Piece(document, 0, self._documents.length(document))
            if piece.length == 0:
                counts["empty_document"] += 1
            elif longest is None or piece.length <= longest:
                yield piece
            elif config.type in ("text", "tokens"):
                counts["split_document"] += 1
                yield from split(piece, longest)
            elif config.truncation:
                counts["truncated_document"] += 1
                yield Piece(document, 0, longest)
            else:
                counts["longer_than_seq_length"] += 1

    def _order(self, epoch: int, order_seed: int) -> Iterator[int]:
        if not self._shuffle:
            yield from range(len(self._documents))
            return
        generator = np.random.default_rng(derive_seed("documents", order_seed, epoch))
        for document in generator.permutation(len(self._documents)):
            yield int(document)


def _rows_of(pieces: Iterator[Piece], rows: int) -> Iterator[tuple[Piece, ...]]:
    while batch := tuple(islice(pieces, rows)):
        yield batch
