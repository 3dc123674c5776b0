"""The loss of text the plain way: each document alone through transformers' own model, its labels shifted here.

Nothing of this is shared with the trainable module of the LLM recipe (`shoal.models.causal_lm`): no packing, no
padding, no chunked loss, no attention of ours.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from shoal.data.batch import MicroBatch


def plain_text_loss(
    module: nn.Module, micro_batch: MicroBatch, *, label_smoothing: float = 0.0, z_loss: float = 0.0
) -> Tensor:
    """The sum of token losses of a micro-batch of rows or of one pack.

    Args:
        module: Has the model of transformers as its submodule ``llm``.
        micro_batch: See `shoal.data.text_batches`.
        label_smoothing: Share of the target spread over the vocabulary.
        z_loss: Weight of the squared log-partition.

    Returns:
        Scalar with gradient, in the dtype of the model.
    """
    llm: Any = module.get_submodule("llm")
    sums: list[Tensor] = []
    for ids, mask in documents_of(micro_batch):
        logits: Tensor = llm(input_ids=ids[None], use_cache=False).logits[0, :-1]
        labels, supervised = ids[1:], mask[1:]
        scores = torch.log_softmax(logits, dim=-1)
        picked = scores.gather(1, labels[:, None])[:, 0]
        losses = -(1.0 - label_smoothing) * picked - label_smoothing * scores.mean(dim=-1)
        losses = losses + z_loss * logits.logsumexp(dim=-1).square()
        sums.append(losses[supervised].sum())
    return torch.stack(sums).sum()


def documents_of(micro_batch: MicroBatch) -> Iterator[tuple[Tensor, Tensor]]:
    """Ids and mask of each document of two tokens or more; shorter ones have nothing to predict."""
    ids, mask = micro_batch["input_ids"], micro_batch["loss_mask"]
    if "cu_seqlens" in micro_batch:
        borders = micro_batch["cu_seqlens"].tolist()
        pieces = [(0, start, end) for start, end in zip(borders[:-1], borders[1:], strict=True)]
    else:
        pieces = [(row, 0, int(length)) for row, length in enumerate(micro_batch["text_lens"])]
    for row, start, end in pieces:
        if end - start > 1:
            yield ids[row, start:end], mask[row, start:end]
