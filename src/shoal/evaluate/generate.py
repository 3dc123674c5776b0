"""Answers conversations with a SALM, in batches of similar length."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.data.conversation import ASSISTANT, Conversation, TextTurn
from shoal.evaluate.inputs import ConversationLoader
from shoal.speech.prompts import PromptFormatter
from shoal.speech.salm import SALM
from shoal.train.step import to_device


@dataclass(frozen=True)
class Answer:
    """What the model said.

    Attributes:
        index: Place of the conversation in the input.
        text: The answer.
        num_tokens: Generated tokens, the end token included.
    """

    index: int
    text: str
    num_tokens: int


def deal(
    conversations: Sequence[Conversation], batch_size: int, rank: int, world_size: int
) -> list[list[int]]:
    """Returns this rank's batches of indices; every conversation is in exactly one batch of one rank.

    Batches hold conversations of similar length; the longest come first, so that a lack of memory shows at once.
    """
    order = sorted(range(len(conversations)), key=lambda i: (-conversations[i].duration, i))
    batches = [order[start : start + batch_size] for start in range(0, len(order), batch_size)]
    return batches[rank::world_size]


def answer(
    model: SALM,
    prompts: PromptFormatter,
    conversations: Sequence[Conversation],
    batches: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    eos_ids: Sequence[int],
    device: torch.device,
) -> Iterator[list[Answer]]:
    """Yields the answers of one batch after the other.

    Args:
        model: In eval mode, on `device`.
        prompts: Of the model.
        conversations: What to answer; a final assistant turn is not shown to the model.
        batches: Indices into `conversations`.
        max_new_tokens: Bound of each answer.
        eos_ids: Tokens that end an answer.
        device: Where the model is.
    """
    loader = ConversationLoader(prompts, model.perception.sampling_rate, prompt_only=True)
    for batch in batches:
        micro_batch = to_device(loader.load([conversations[index] for index in batch]), device)
        tokens = model.generate(
            micro_batch,
            max_new_tokens=max_new_tokens,
            eos_token_id=list(eos_ids),
            pad_token_id=prompts.pad_id,
        )
        lengths = answer_lengths(tokens, eos_ids)
        yield [
            Answer(index, prompts.decode(row[:length]), length)
            for index, row, length in zip(batch, tokens.tolist(), lengths, strict=True)
        ]


def answer_lengths(tokens: Tensor, eos_ids: Sequence[int]) -> list[int]:
    """Returns the tokens of each row up to and with its first end token; tokens is [B, N] int64."""
    is_end = torch.isin(tokens, torch.tensor(eos_ids, device=tokens.device))
    before = (is_end.cumsum(1) == 0).sum(1)
    return [min(int(count) + 1, tokens.shape[1]) for count in before]


def reference_of(conversation: Conversation) -> str | None:
    """Returns the text of the final assistant turn, which generation is to reproduce, or None."""
    last = conversation.turns[-1] if conversation.turns else None
    return last.text if isinstance(last, TextTurn) and last.role == ASSISTANT else None
