"""Puts audio embeddings where the prompt has placeholders, and shifts the labels.

Rows of token ids are right-padded. Each placeholder becomes the embeddings of one clip; clips stand in
row-major order. The spliced conversations are padded to rows of one length, or packed: one after the other in a
single row without padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from shoal.speech.log_mel import frame_mask

IGNORE = -100
"""Label of a position that is not supervised."""

Arrangement = Literal["right", "left", "packed"]
"""Rows padded on the right or on the left, or all conversations in one row."""


@dataclass(frozen=True)
class Layout:
    """Where everything goes in the spliced rows [R, L]; flat indices count in R * L.

    Padded, R is the number B of conversations. Packed, R is 1 and L the sum of their lengths (1 if that is 0).

    Attributes:
        is_text: Tokens that are text, [B, S] bool.
        text_target: Flat index of each of them, in row-major order.
        clip_row: Row of each clip, [B_aud] int64.
        clip_ordinal: Index of each clip within its row, [B_aud] int64.
        clip_target: Flat index of each clip's first embedding, [B_aud] int64.
        clip_lens: Embeddings of each clip, [B_aud] int64.
        labels: The token that follows each position in its conversation, or -100, [R, L] int64.
        attention_mask: True on text and audio, [R, L] bool.
        position_ids: 0, 1, 2, ... from each conversation's first column, [R, L] int64.
        conversation: Which conversation each position belongs to, [R, L] int64.
        num_conversations: B.
        cu_seqlens: Borders of the packed conversations, [B + 1] int32; None for padded rows.
        max_seqlen: Positions of the longest conversation.
    """

    is_text: Tensor
    text_target: Tensor
    clip_row: Tensor
    clip_ordinal: Tensor
    clip_target: Tensor
    clip_lens: Tensor
    labels: Tensor
    attention_mask: Tensor
    position_ids: Tensor
    conversation: Tensor
    num_conversations: int
    cu_seqlens: Tensor | None
    max_seqlen: int


def check_placeholders(
    input_ids: Tensor, text_lens: Tensor, placeholder_id: int, num_clips: int, sample_ids: Sequence[str]
) -> None:
    """Compares the placeholders of a micro-batch with its clips; cheap, and needs no model.

    Args:
        input_ids: [B, S] int64, right-padded.
        text_lens: Tokens of each row, [B] int64.
        placeholder_id: Id that stands for one clip.
        num_clips: Clips of the micro-batch.
        sample_ids: Names of the rows, for the message.

    Raises:
        ValueError: The counts differ.
    """
    found = (input_ids == placeholder_id) & frame_mask(text_lens, input_ids.shape[1])
    per_row = found.sum(1).tolist()
    if sum(per_row) != num_clips:
        rows = ", ".join(f"{name}: {count}" for name, count in zip(sample_ids, per_row, strict=True))
        raise ValueError(
            f"a micro-batch has {sum(per_row)} audio placeholders ({rows}) but {num_clips} clips; "
            "each audio turn needs exactly one placeholder and one clip"
        )


def plan(
    input_ids: Tensor,
    loss_mask: Tensor,
    text_lens: Tensor,
    clip_lens: Tensor,
    *,
    placeholder_id: int,
    sample_ids: Sequence[str],
    arrangement: Arrangement = "right",
) -> Layout:
    """Computes where text and audio go, and what each position is to predict.

    Position t is labelled with the token at t + 1 when that is a supervised text token of the same conversation;
    so the last embedding of a clip may carry a label, and the number of labels is `loss_mask[:, 1:].sum()`, packed
    or padded. A conversation of no or one position takes part and supervises nothing.

    Args:
        input_ids: [B, S] int64, right-padded, one placeholder per clip.
        loss_mask: Tokens to be predicted, [B, S] bool; False on padding and placeholders.
        text_lens: Tokens of each row, [B] int64.
        clip_lens: Embeddings of each clip, [B_aud] int64; 0 is allowed.
        placeholder_id: Id that stands for one clip; it may lie beyond the vocabulary.
        sample_ids: Names of the rows, for messages.
        arrangement: On which side the spliced rows are padded, or that they are packed.

    Raises:
        ValueError: Placeholders and clips do not match, padding or a placeholder is supervised, or a
            supervised token has nothing before it because the audio there is empty.
    """
    check_placeholders(input_ids, text_lens, placeholder_id, len(clip_lens), sample_ids)
    valid = frame_mask(text_lens, input_ids.shape[1])
    is_clip = (input_ids == placeholder_id) & valid
    is_text = valid & ~is_clip
    widths = is_text.long().masked_scatter(is_clip, clip_lens)
    starts = widths.cumsum(1) - widths
    lengths = widths.sum(1)
    _check_supervision(loss_mask, is_text, starts, sample_ids)

    first, shape = _first_columns(lengths, arrangement)
    target = first[:, None] + starts
    labels = torch.full((shape[0] * shape[1],), IGNORE, dtype=torch.int64, device=input_ids.device)
    supervised = loss_mask & is_text
    supervised[:, :1] = False
    labels[target[supervised] - 1] = input_ids[supervised]
    conversation, position_ids, real = _positions(first, lengths, shape)
    return Layout(
        is_text=is_text,
        text_target=target[is_text],
        clip_row=is_clip.nonzero()[:, 0],
        clip_ordinal=(is_clip.cumsum(1) - 1)[is_clip],
        clip_target=target[is_clip],
        clip_lens=clip_lens,
        labels=labels.view(shape),
        attention_mask=real,
        position_ids=position_ids,
        conversation=conversation,
        num_conversations=len(lengths),
        cu_seqlens=_borders(lengths) if arrangement == "packed" else None,
        max_seqlen=int(lengths.max()),
    )


def _first_columns(lengths: Tensor, arrangement: Arrangement) -> tuple[Tensor, tuple[int, int]]:
    """Returns the flat index of each conversation's first position [B], and the shape [R, L] of the spliced rows."""
    if arrangement == "packed":
        return lengths.cumsum(0) - lengths, (1, max(1, int(lengths.sum())))
    width = max(1, int(lengths.max()))
    first = torch.arange(len(lengths), device=lengths.device) * width
    return (first + width - lengths if arrangement == "left" else first), (len(lengths), width)


def _positions(first: Tensor, lengths: Tensor, shape: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor]:
    """Returns conversation, position in it, and whether it is real, for each place [R, L].

    Padding belongs to the conversation of its row. Its positions go on after a conversation and are 0 before one.
    """
    places = torch.arange(shape[0] * shape[1], device=first.device)
    if shape[0] == len(first):
        conversation = places // shape[1]
    else:
        ends = (first + lengths).contiguous()
        conversation = torch.searchsorted(ends, places, right=True).clamp(max=len(first) - 1)
    position = places - first[conversation]
    real = (position >= 0) & (position < lengths[conversation])
    return conversation.view(shape), position.clamp(min=0).view(shape), real.view(shape)


def _borders(lengths: Tensor) -> Tensor:
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).int()


def _check_supervision(loss_mask: Tensor, is_text: Tensor, starts: Tensor, sample_ids: Sequence[str]) -> None:
    not_text = (loss_mask & ~is_text).any(1)
    no_predecessor = (loss_mask & is_text & (starts == 0))[:, 1:].any(1)
    for bad, reason in (
        (not_text, "padding or an audio placeholder is supervised"),
        (no_predecessor, "a supervised token follows audio without a single frame at the start of the row"),
    ):
        if bool(bad.any()):
            names = [name for name, wrong in zip(sample_ids, bad.tolist(), strict=True) if wrong]
            raise ValueError(f"{reason}: {', '.join(names)}; repair or drop these samples")


def splice(text: Tensor, clips: Tensor, layout: Layout) -> Tensor:
    """Returns embeddings [R, L, H] in the order of the layout, zero on padding.

    Args:
        text: Embeddings of the token ids, [B, S, H]; those of placeholders and padding are not used.
        clips: Embeddings of the clips, [B_aud, L_aud, H], of the same dtype; what lies behind a clip's end is
            not used. The gradient of each used embedding is that of its place in the row.
        layout: From `plan`.
    """
    num_rows, width = layout.labels.shape
    rows = text.new_zeros(num_rows * width, text.shape[-1])
    rows = rows.index_copy(0, layout.text_target, text[layout.is_text])
    kept = frame_mask(layout.clip_lens, clips.shape[1])
    clip_target = (layout.clip_target[:, None] + torch.arange(clips.shape[1], device=clips.device))[kept]
    return rows.index_copy(0, clip_target, clips[kept]).view(num_rows, width, -1)
