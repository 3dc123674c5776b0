"""Packed attention from torch's own operators: its fused CPU kernel, or blocks of scores that are recomputed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from shoal.kernels.attention_blocks import MASKED_ROWS, Block, Mask, blocks
from shoal.kernels.packed import AttentionSpec, accumulation_dtype, borders

_fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_fused_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def sdpa_attention(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, spec: AttentionSpec
) -> tuple[Tensor, Tensor]:
    """Computes what `varlen_attention` documents.

    On a CPU without soft-cap this is torch's fused kernel, document by document, which holds no scores. Elsewhere
    scores are held for 512 queries at a time, in float32 or float64, and recomputed in backward.
    """
    cu_q, cu_k = borders(cu_seqlens_q), borders(cu_seqlens_k)
    result: tuple[Tensor, Tensor]
    if q.device.type == "cpu" and spec.softcap is None:
        width = max(q.shape[2], v.shape[2])
        plan = blocks(cu_q, cu_k, spec.causal, spec.window)
        # The fused kernel wants one width for all: zeros change neither scores nor outputs.
        wide = [F.pad(x, (0, width - x.shape[2])) if x.shape[2] < width else x for x in (q, k, v)]
        out, lse = _Fused.apply(*wide, plan, spec.scale)  # type: ignore[no-untyped-call]
        return out[..., : v.shape[2]], lse
    plan = blocks(cu_q, cu_k, spec.causal, spec.window, MASKED_ROWS)
    result = _Recomputed.apply(q, k, v, plan, spec)  # type: ignore[no-untyped-call]
    return result


class _Masks(dict[Mask, Tensor]):
    """Masks by what they say: blocks inside a long document share one."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self._kind = (dtype, device)

    def __missing__(self, mask: Mask) -> Tensor:
        self[mask] = mask.additive(*self._kind)
        return self[mask]


class _Fused(torch.autograd.Function):
    """torch's fused CPU kernel over blocks; all of q, k, v have the same width."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, plan: Sequence[Block], scale: float
    ) -> tuple[Tensor, Tensor]:
        out = torch.zeros_like(q, memory_format=torch.contiguous_format)
        lse = q.new_full(q.shape[:2], -torch.inf, dtype=accumulation_dtype(q.dtype))
        masks = _Masks(q.dtype, q.device)
        for block in plan:
            inputs = (
                _heads_first(q[block.queries]),
                _heads_first(k[block.keys]),
                _heads_first(v[block.keys]),
            )
            mask = None if block.mask is None else masks[block.mask]
            part, part_lse = _fused(*inputs, 0.0, block.lower_triangle, attn_mask=mask, scale=scale)
            out[block.queries] = part[0].transpose(0, 1)
            lse[block.queries] = part_lse[0].t()
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.arguments = (plan, scale)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        plan, scale = ctx.arguments
        grad_out = torch.zeros_like(out) if grad_out is None else grad_out
        width = q.shape[2]
        if grad_lse is not None:
            q, k, v, out, grad_out = with_lse_column(q, k, v, out, grad_out, grad_lse)
        # Blocks with a window share keys: their gradients add up in the accumulation dtype.
        grads = [torch.zeros_like(x, dtype=accumulation_dtype(x.dtype)) for x in (q, k, v)]
        masks = _Masks(q.dtype, q.device)
        for block in plan:
            parts = _fused_backward(
                _heads_first(grad_out[block.queries]),
                _heads_first(q[block.queries]),
                _heads_first(k[block.keys]),
                _heads_first(v[block.keys]),
                _heads_first(out[block.queries]),
                lse[block.queries].t()[None],
                0.0,
                block.lower_triangle,
                attn_mask=None if block.mask is None else masks[block.mask],
                scale=scale,
            )
            for grad, part, where in zip(grads, parts, (block.queries, block.keys, block.keys), strict=True):
                grad[where] += part[0].transpose(0, 1)
        return (*(grad[..., :width].to(q.dtype) for grad in grads), None, None)


def with_lse_column(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, grad_out: Tensor, grad_lse: Tensor, columns: int = 1
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Widens the inputs of a flash backward so that it also propagates the gradient of the log-sum-exp.

    Such a kernel computes dS = P * (grad_out @ v^T - rowsum(grad_out * out)); what is missing is + P * grad_lse.
    A column in which v is 0, out is -1 and grad_out is grad_lse adds exactly that. The gradients' new columns mean
    nothing.

    Args:
        q, k, v, out, grad_out: [T, heads, D].
        grad_lse: [T, heads].
        columns: New columns, all but one of zeros, for kernels that want a multiple of some width.
    """
    q, k, v, out, grad_out = (F.pad(x, (0, columns)) for x in (q, k, v, out, grad_out))
    out[..., -1] = -1.0
    grad_out[..., -1] = grad_lse
    return q, k, v, out, grad_out


class _Recomputed(torch.autograd.Function):
    """Plain scores, block by block; backward computes each block again instead of keeping its scores."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, plan: Sequence[Block], spec: AttentionSpec
    ) -> tuple[Tensor, Tensor]:
        out = q.new_zeros(*q.shape[:2], v.shape[2])
        lse = q.new_full(q.shape[:2], -torch.inf, dtype=accumulation_dtype(q.dtype))
        masks = _Masks(lse.dtype, q.device)
        for block in plan:
            part = _scores_to_output(q[block.queries], k[block.keys], v[block.keys], block, masks, spec)
            out[block.queries], lse[block.queries] = part
        ctx.save_for_backward(q, k, v)
        ctx.arguments = (plan, spec)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor, grad_lse: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        plan, spec = ctx.arguments
        grads = [torch.zeros_like(x, dtype=accumulation_dtype(x.dtype)) for x in saved]
        masks = _Masks(grad_lse.dtype, grad_lse.device)
        for block in plan:
            places = (block.queries, block.keys, block.keys)
            # Backward may run where autocast is on; forward has turned it off.
            with torch.enable_grad(), torch.autocast(grad_out.device.type, enabled=False):
                inputs = [x[where].detach().requires_grad_() for x, where in zip(saved, places, strict=True)]
                query, key, value = inputs
                outputs = _scores_to_output(query, key, value, block, masks, spec)
                upstream = (grad_out[block.queries], grad_lse[block.queries])
                parts = torch.autograd.grad(outputs, inputs, upstream)
            for grad, part, where in zip(grads, parts, places, strict=True):
                grad[where] += part
        return (*(grad.to(x.dtype) for grad, x in zip(grads, saved, strict=True)), None, None)


def _scores_to_output(
    q: Tensor, k: Tensor, v: Tensor, block: Block, masks: _Masks, spec: AttentionSpec
) -> tuple[Tensor, Tensor]:
    """Attends within one block: q [Q, Hq, D], k [K, Hkv, D], v [K, Hkv, Dv] to out [Q, Hq, Dv], lse [Q, Hq]."""
    dtype = accumulation_dtype(q.dtype)
    grouped = q.to(dtype).view(len(q), k.shape[1], -1, q.shape[2])
    scores = torch.einsum("qhgd,khd->hgqk", grouped, k.to(dtype)) * spec.scale
    if spec.softcap is not None:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    if block.mask is not None:
        scores = scores + masks[block.mask]
    lse = scores.logsumexp(-1)
    out = torch.einsum("hgqk,khd->qhgd", (scores - lse[..., None]).exp(), v.to(dtype))
    return out.flatten(1, 2).to(q.dtype), lse.permute(2, 0, 1).flatten(1, 2)


def _heads_first(x: Tensor) -> Tensor:
    """Returns [T, H, D] as a view [1, H, T, D]."""
    return x.transpose(0, 1)[None]
