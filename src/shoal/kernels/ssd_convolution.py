"""Causal depthwise convolution over tokens, reset at the borders of documents, in plain torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class CausalConvolution(torch.autograd.Function):
    """y_t = bias + sum over k of w[K - 1 - k] x_{t-k}, over the tokens of t's document only.

    x [R, T, C], weight [C, K], bias [C] or None, all of one dtype; documents [R, T] int, not decreasing within a row,
    or None. Keeps its inputs for backward and nothing else; differentiable once, in everything but `documents`.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, documents: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight, documents)
        ctx.has_bias = bias is not None
        y = x * weight[:, -1]
        if bias is not None:
            y += bias
        for back, tap, apart in _earlier_taps(weight, x.shape[1], documents):
            y[:, back:].addcmul_(_masked(x[:, :-back], apart), tap)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, documents = ctx.saved_tensors
        dx, d_weight = dy * weight[:, -1], torch.zeros_like(weight)
        d_weight[:, -1] = (dy * x).sum((0, 1))
        for back, tap, apart in _earlier_taps(weight, x.shape[1], documents):
            later = dy[:, back:]
            dx[:, :-back].addcmul_(_masked(later, apart), tap)
            d_weight[:, -1 - back] = (later * _masked(x[:, :-back], apart)).sum((0, 1))
        return dx, d_weight, dy.sum((0, 1)) if ctx.has_bias else None, None


def _earlier_taps(
    weight: Tensor, num_tokens: int, documents: Tensor | None
) -> Iterator[tuple[int, Tensor, Tensor | None]]:
    """For every distance: the tap [C], and which pairs of tokens are of two documents, [R, T - distance, 1]."""
    for back in range(1, min(weight.shape[1], num_tokens)):
        apart = None if documents is None else (documents[:, back:] != documents[:, :-back])[..., None]
        yield back, weight[:, -1 - back], apart


def _masked(x: Tensor, apart: Tensor | None) -> Tensor:
    """Replaced and not multiplied by zero: another document's infinities stay there."""
    return x if apart is None else x.masked_fill(apart, 0.0)
