"""Synthetic micro-batches: ragged lengths, unequally many supervised tokens, one without audio.

A step has more micro-batches than there are data-parallel ranks and not a multiple of them, so that ranks
accumulate and one of them ends with an empty micro-batch. What is drawn depends on the step alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from shoal.config.seeds import derive_seed
from shoal.data.batch import MicroBatch, empty_micro_batch
from shoal.data.text import Tokens
from shoal.data.text_batches import packed, padded

_LONGEST = 19
"""Tokens of the longest document; odd, so that it divides by no degree of sequence or context parallelism."""


@dataclass(frozen=True)
class Shape:
    """What the micro-batches look like.

    Attributes:
        vocab: Ids lie below; the last one is the padding.
        num_micro_batches: Of a step, over all ranks.
        pack_size: Tokens of a pack; 0 pads rows instead.
        round_to: Multiple to which a document in a pack is rounded up, as room taken.
        placeholder: Token id that stands for a clip; None for text.
        clip_samples: Samples of the shortest and the longest clip.
        seed: Of everything drawn.
    """

    vocab: int
    num_micro_batches: int
    pack_size: int = 0
    round_to: int = 1
    placeholder: int | None = None
    clip_samples: tuple[int, int] = (4000, 24000)
    seed: int = 100

    @property
    def pad_id(self) -> int:
        """Id on padded positions."""
        return self.vocab - 1


def micro_batches(shape: Shape, step: int) -> list[MicroBatch]:
    """The global micro-batches of a step; the second one of a speech step has no audio."""
    random = np.random.default_rng(derive_seed("verify", shape.seed, step))
    return [_micro_batch(shape, random, step, index) for index in range(shape.num_micro_batches)]


def empty(shape: Shape) -> MicroBatch:
    """The micro-batch of a rank that has none left, as the data loaders make it."""
    batch = empty_micro_batch(shape.pad_id)
    if shape.pack_size:
        nothing = Tokens(np.full(2, shape.pad_id, dtype=np.int64), np.zeros(2, dtype=bool))
        batch |= packed([nothing], 2, shape.pad_id)
    return batch


def _micro_batch(shape: Shape, random: np.random.Generator, step: int, index: int) -> MicroBatch:
    has_audio = shape.placeholder is not None and index != 1
    rows = _documents(shape, random, index, has_audio)
    names = [f"verify-{step}-{index}-{row}" for row in range(len(rows))]
    body = packed(rows, shape.pack_size, shape.pad_id) if shape.pack_size else padded(rows, shape.pad_id)
    return {
        **_audio(shape, random, len(rows) if has_audio else 0),
        **body,
        "sample_ids": names,
        "sample_seeds": torch.tensor([derive_seed("sample", name) for name in names], dtype=torch.int64),
        "is_empty": False,
    }


def _documents(shape: Shape, random: np.random.Generator, index: int, has_audio: bool) -> list[Tokens]:
    """One to three rows, or as many documents as fill most of a pack; one of a pack's has a single token."""
    if not shape.pack_size:
        return [_document(shape, random, has_audio) for _ in range(1 + index % 3)]
    documents = [_document(shape, random, has_audio, length=1)] if not has_audio else []
    room = shape.pack_size - sum(_room(shape, document) for document in documents)
    while True:
        document = _document(shape, random, has_audio)
        room -= _room(shape, document)
        if room < 0:
            return documents
        documents.append(document)


def _room(shape: Shape, document: Tokens) -> int:
    return -(-len(document.input_ids) // shape.round_to) * shape.round_to


def _document(
    shape: Shape, random: np.random.Generator, has_audio: bool, length: int | None = None
) -> Tokens:
    """A prompt, with a clip in it if there is audio, and an answer of which every token is supervised."""
    length = int(random.integers(5, _LONGEST + 1)) if length is None else length
    ids = random.integers(0, shape.vocab - 1, length)
    answer = int(random.integers(1, max(2, length - 3)))
    mask = np.arange(length) >= length - answer
    if has_audio and shape.placeholder is not None:
        ids[1] = shape.placeholder
        mask[:2] = False
    return Tokens(ids.astype(np.int64), mask)


def _audio(shape: Shape, random: np.random.Generator, clips: int) -> dict[str, Any]:
    lengths = random.integers(*shape.clip_samples, clips)
    audios = np.zeros((clips, int(lengths.max()) if clips else 0), dtype=np.float32)
    for row, length in zip(audios, lengths, strict=True):
        row[:length] = 0.1 * random.standard_normal(length)
    return {"audios": torch.from_numpy(audios), "audio_lens": torch.from_numpy(lengths.astype(np.int64))}
