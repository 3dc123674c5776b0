"""The same documents for the parity harness in rows and in packs: law 1 says that this changes no number."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import shoal.data.text_batches as text_batches
from shoal.data.text import Tokens
from shoal.kernels.attention_hf import PACKED_ATTENTION, register_attention
from tests.families import VOCAB
from tests.parity.harness import Case, replace
from tests.parity.text import build

PAD = 3
ROOM = 5
"""Positions of a pack that hold no document."""


def build_packed(case: Case) -> nn.Module:
    """The model of `build` with the attention that packs need."""
    register_attention()
    module: Any = build(case)
    module.llm.set_attn_implementation(PACKED_ATTENTION)
    return module


def documents_of(case: Case, step: int) -> list[list[Tokens]]:
    """Documents of each micro-batch: plain text and answers in turn, of 1 to 17 tokens; some are not supervised."""
    generator = torch.Generator().manual_seed(100 + step)
    batches = []
    for index in range(case.num_micro_batches):
        documents = []
        for number in range(2 + index % 3):
            length = int(torch.randint(1 if number == 1 else 4, 18, (), generator=generator))
            ids = torch.randint(4, VOCAB, (length,), generator=generator)
            first = int(torch.randint(0, length, (), generator=generator)) if number % 2 else 0
            mask = (torch.arange(length) >= first) & (index not in case.unsupervised)
            documents.append(Tokens(ids.numpy(), mask.numpy()))
        batches.append(documents)
    return batches


def draw_rows(case: Case, step: int) -> list[dict[str, Any]]:
    """A micro-batch is a rectangle with a row for each document."""
    return [_micro_batch(_padded(documents)) for documents in documents_of(case, step)]


def draw_packs(case: Case, step: int) -> list[dict[str, Any]]:
    """A micro-batch is one pack of the same documents."""
    return [_micro_batch(_packed(documents)) for documents in documents_of(case, step)]


def packed_case(family: str, num_micro_batches: int = 5, **changes: Any) -> Case:
    """Packs under a layout; `rows_of` it is what they are compared with."""
    return Case(build_packed, draw_packs, family, num_micro_batches=num_micro_batches, **changes)


def rows_of(case: Case) -> Case:
    """The same documents in rows, with the attention of transformers."""
    return replace(case, build=build, draw=draw_rows)


def _packed(documents: list[Tokens]) -> dict[str, Any]:
    size = sum(len(document.input_ids) for document in documents) + ROOM
    return text_batches.packed(documents, size, PAD)


def _padded(documents: list[Tokens]) -> dict[str, Any]:
    """By hand and not by the code under test."""
    longest = max(2, *(len(document.input_ids) for document in documents))
    ids = torch.full((len(documents), longest), PAD)
    mask = torch.zeros(len(documents), longest, dtype=torch.bool)
    for row, document in enumerate(documents):
        length = len(document.input_ids)
        ids[row, :length] = torch.from_numpy(document.input_ids)
        mask[row, 1:length] = torch.from_numpy(document.loss_mask)[1:]
    lengths = torch.tensor([len(document.input_ids) for document in documents])
    return {"input_ids": ids, "loss_mask": mask, "text_lens": lengths}


def _micro_batch(text: dict[str, Any]) -> dict[str, Any]:
    documents = len(text["cu_seqlens"]) - 1 if "cu_seqlens" in text else len(text["input_ids"])
    return {
        "audios": torch.zeros(0, 0),
        "audio_lens": torch.zeros(0, dtype=torch.int64),
        **text,
        "sample_ids": [str(number) for number in range(documents)],
        "sample_seeds": torch.zeros(documents, dtype=torch.int64),
        "is_empty": False,
    }
