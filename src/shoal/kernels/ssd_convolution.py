"""Causal depthwise convolution over tokens, reset at the borders of documents, in plain torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

BLOCK_TOKENS = 64
"""How many tokens are computed at once: few enough to stay in a processor's cache for all taps."""


class CausalConvolution(torch.autograd.Function):
    """y_t = bias + sum over k of w[K - 1 - k] x_{t-k}, over the tokens of t's document only.

    x [R, T, C], weight [C, K], bias [C] or None, all of one dtype; documents [R, T] int, not decreasing within a row,
    or None. Keeps its inputs for backward and nothing else; differentiable once, in everything but `documents`.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, documents: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight, documents)
        ctx.has_bias = bias is not None
        y = torch.empty_like(x, memory_format=torch.contiguous_format)
        for span in _spans(x.shape[1]):
            part = torch.mul(x[:, span], weight[:, -1], out=y[:, span])
            if bias is not None:
                part += bias
            for back, tap in _earlier_taps(weight):
                first, later, earlier = _pairs(span, back)
                part[:, first:].addcmul_(_masked(x[:, earlier], documents, later, earlier), tap)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, documents = ctx.saved_tensors
        dx = torch.mul(dy, weight[:, -1])
        d_weight = torch.zeros_like(weight)
        for span in _spans(x.shape[1]):
            d_weight[:, -1] += (dy[:, span] * x[:, span]).sum((0, 1))
            for back, tap in _earlier_taps(weight):
                first, later, earlier = _pairs(span, back)
                given = _masked(dy[:, later], documents, later, earlier)
                dx[:, earlier].addcmul_(given, tap)
                seen = _masked(x[:, earlier], documents, later, earlier)
                d_weight[:, -1 - back] += (given * seen).sum((0, 1))
        return dx, d_weight, dy.sum((0, 1)) if ctx.has_bias else None, None


def _spans(num_tokens: int) -> list[slice]:
    return [
        slice(start, min(start + BLOCK_TOKENS, num_tokens)) for start in range(0, num_tokens, BLOCK_TOKENS)
    ]


def _earlier_taps(weight: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Distance and tap [C], without the token's own."""
    for back in range(1, weight.shape[1]):
        yield back, weight[:, -1 - back]


def _pairs(span: slice, back: int) -> tuple[int, slice, slice]:
    """The tokens of a span that have one at this distance: the first one's place in the span, they, and the others."""
    start = min(max(span.start, back), span.stop)
    return start - span.start, slice(start, span.stop), slice(start - back, span.stop - back)


def _masked(x: Tensor, documents: Tensor | None, later: slice, earlier: slice) -> Tensor:
    """0 where a pair is of two documents: replaced and not multiplied, another document's infinities stay there."""
    if documents is None:
        return x
    return x.masked_fill((documents[:, later] != documents[:, earlier])[..., None], 0.0)
