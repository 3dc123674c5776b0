"""Loads pieces of documents as micro-batches: rows of equal length, or one pack.

The entries are those of speech micro-batches (`shoal.data.dataset.collate`) without audio, so that one training
step serves both. A pack has in addition ``position_ids``, ``cu_seqlens`` and ``max_seqlen``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from shoal.config.seeds import derive_seed
from shoal.data.batch import MicroBatch, empty_micro_batch
from shoal.data.dataset import PlanDataset, SampleError, pad_rows
from shoal.data.text import Documents, Piece, Tokens


class TextDataset(PlanDataset[Piece]):
    """Maps a step plan of pieces to a step batch.

    Args:
        documents: The data set.
        pad_id: Id on padded positions.
        seed: The run's seed, from which each sample's seed derives.
        pack_size: Tokens of a pack; 0 pads rows instead.
    """

    def __init__(self, documents: Documents, pad_id: int, *, seed: int, pack_size: int = 0) -> None:
        super().__init__(pad_id)
        self._documents = documents
        self._seed = seed
        self._pack_size = pack_size

    def empty(self) -> MicroBatch:
        """Returns a micro-batch of the smallest shape without a supervised token."""
        batch = empty_micro_batch(self.pad_id)
        if self._pack_size:
            batch |= _borders([2], 2)
        return batch

    def micro_batch(self, items: Sequence[Piece], epoch: int, skipped: Counter[str]) -> MicroBatch:
        """Loads one micro-batch; see `PlanDataset.micro_batch`."""
        if not items:
            return self.empty()
        loaded = [self._load(piece) for piece in items]
        names = [piece.id for piece in items]
        seeds = [derive_seed("sample", self._seed, epoch, name) for name in names]
        return {
            "audios": torch.zeros(0, 0),
            "audio_lens": torch.zeros(0, dtype=torch.int64),
            **(
                packed(loaded, self._pack_size, self.pad_id)
                if self._pack_size
                else padded(loaded, self.pad_id)
            ),
            "sample_ids": names,
            "sample_seeds": torch.tensor(seeds, dtype=torch.int64),
            "is_empty": False,
        }

    def _load(self, piece: Piece) -> Tokens:
        try:
            return self._documents.tokens(piece)
        except Exception as error:
            # Whatever it is, a worker that raises stops one rank and leaves the others waiting for it.
            raise SampleError(piece.id, error) from error


def padded(rows: Sequence[Tokens], pad_id: int) -> dict[str, Tensor]:
    """Returns rows as ``input_ids`` and ``loss_mask`` [B, S], right-padded, and ``text_lens`` [B].

    S is at least 2: a row of one token leaves nothing after the shift of the labels.
    """
    ids = pad_rows([torch.from_numpy(row.input_ids) for row in rows], pad_id, torch.int64)
    mask = pad_rows([torch.from_numpy(row.loss_mask) for row in rows], False, torch.bool)
    missing = max(0, 2 - ids.shape[1])
    mask[:, :1] = False
    return {
        "input_ids": torch.nn.functional.pad(ids, (0, missing), value=pad_id),
        "loss_mask": torch.nn.functional.pad(mask, (0, missing), value=False),
        "text_lens": torch.tensor([len(row.input_ids) for row in rows], dtype=torch.int64),
    }


def packed(rows: Sequence[Tokens], size: int, pad_id: int) -> dict[str, Tensor | int]:
    """Returns documents one after the other in a sequence of `size` tokens.

    Returns:
        ``input_ids`` and ``loss_mask`` [1, T] with T = size, the mask False on each document's first token and
        on padding; ``text_lens`` [1], the real tokens; ``position_ids`` int64 [1, T], which restart in each
        document and in the padding, where none is larger than in the documents; ``cu_seqlens`` int32 [N + 1],
        borders of the N documents; ``max_seqlen``, the longest document.

    Raises:
        ValueError: The documents do not fit.
    """
    lengths = [len(row.input_ids) for row in rows]
    total = sum(lengths)
    if total > size:
        raise ValueError(f"documents of {lengths} tokens do not fit a pack of {size}")
    ids = np.full((1, size), pad_id, dtype=np.int64)
    mask = np.zeros((1, size), dtype=bool)
    ids[0, :total] = np.concatenate([row.input_ids for row in rows])
    mask[0, :total] = np.concatenate([row.loss_mask for row in rows])
    mask[0, np.cumsum([0, *lengths[:-1]])] = False
    return {
        "input_ids": torch.from_numpy(ids),
        "loss_mask": torch.from_numpy(mask),
        "text_lens": torch.tensor([total], dtype=torch.int64),
        **_borders(lengths, size),
    }


def _borders(lengths: Sequence[int], size: int) -> dict[str, Tensor | int]:
    longest = max(lengths)
    # Padding must not look like a document longer than all others: rotary embeddings can follow the largest position.
    rest = torch.arange(size - sum(lengths)) % max(longest, 1)
    parts = [*(torch.arange(length) for length in lengths), rest]
    borders = np.cumsum([0, *lengths]).astype(np.int32)
    return {
        "position_ids": torch.cat(parts)[None],
        "cu_seqlens": torch.from_numpy(borders),
        "max_seqlen": longest,
    }
