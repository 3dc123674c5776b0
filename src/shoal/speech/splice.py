"""Puts audio embeddings where the prompt has placeholders, and shifts the labels.

Rows of token ids are right-padded. Each placeholder becomes the embeddings of one clip; clips stand in
row-major order.
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


@dataclass(frozen=True)
class Layout:
    """Where everything goes in the spliced rows [B, L]; flat indices count in B * L.

    Attributes:
        is_text: Tokens that are text, [B, S] bool.
        text_target: Flat index of each of them, in row-major order.
        clip_row: Row of each clip, [B_aud] int64.
        clip_ordinal: Index of each clip within its row, [B_aud] int64.
        clip_target: Flat index of each clip's first embedding, [B_aud] int64.
        clip_lens: Embeddings of each clip, [B_aud] int64.
        labels: The token that follows each position, or -100, [B, L] int64.
        attention_mask: True on text and audio, [B, L] bool.
        position_ids: 0, 1, 2, ... from each row's first column, [B, L] int64.
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
    padding: Literal["right", "left"] = "right",
) -> Layout:
    """Computes where text and audio go, and what each position is to predict.

    Position t is labelled with the token at t + 1 when that is a supervised text token of the same row; so
    the last embedding of a clip may carry a label, and the number of labels is `loss_mask[:, 1:].sum()`.

    Args:
        input_ids: [B, S] int64, right-padded, one placeholder per clip.
        loss_mask: Tokens to be predicted, [B, S] bool; False on padding and placeholders.
        text_lens: Tokens of each row, [B] int64.
        clip_lens: Embeddings of each clip, [B_aud] int64; 0 is allowed.
        placeholder_id: Id that stands for one clip; it may lie beyond the vocabulary.
        sample_ids: Names of the rows, for messages.
        padding: On which side the spliced rows are padded.

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

    num_rows, width = len(lengths), max(1, int(lengths.max()))
    columns = torch.arange(width, device=input_ids.device).expand(num_rows, width)
    shift = (width - lengths if padding == "left" else torch.zeros_like(lengths))[:, None]
    target = torch.arange(num_rows, device=input_ids.device)[:, None] * width + shift + starts

    supervised = loss_mask & is_text
    supervised[:, :1] = False
    labels = torch.full((num_rows * width,), IGNORE, dtype=torch.int64, device=input_ids.device)
    labels[target[supervised] - 1] = input_ids[supervised]
    return Layout(
        is_text=is_text,
        text_target=target[is_text],
        clip_row=is_clip.nonzero()[:, 0],
        clip_ordinal=(is_clip.cumsum(1) - 1)[is_clip],
        clip_target=target[is_clip],
        clip_lens=clip_lens,
        labels=labels.view(num_rows, width),
        attention_mask=(columns >= shift) & (columns < shift + lengths[:, None]),
        position_ids=(columns - shift).clamp(min=0),
    )


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
    """Returns embeddings [B, L, H] in the order of the layout, zero on padding.

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
