"""Packed attention from torch's own operators: its fused CPU kernel, or blocks of scores that are recomputed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shoal.kernels.attention_blocks import MASKED_ROWS, Block, Mask, blocks
from shoal.kernels.attention_fused import PartKernel, attend_to_all, widened, with_lse_column
from shoal.kernels.packed import AttentionSpec, Part, accumulation_dtype

_fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_fused_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def sdpa_attention(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, spec: AttentionSpec
) -> tuple[Tensor, Tensor]:
    """Computes what `varlen_attention` documents.

    On a CPU without soft-cap this is torch's fused kernel, document by document, which holds no scores. Elsewhere
    scores are held for 512 queries at a time, in float32 or float64, and recomputed in backward.
    """
    return attend_to_all(SDPA, q, k, v, cu_seqlens_q, cu_seqlens_k, spec)


def sdpa_forward(q: Tensor, k: Tensor, v: Tensor, part: Part, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
    """Attends to one part of the keys; see `shoal.kernels.attention_parts.attend`."""
    out = q.new_zeros(*q.shape[:2], v.shape[2])
    lse = q.new_full(q.shape[:2], -torch.inf, dtype=accumulation_dtype(q.dtype))
    (_fused_forward if _is_fused(q, spec) else _plain_forward)(q, k, v, out, lse, part, spec)
    return out, lse


def sdpa_backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    part: Part,
    spec: AttentionSpec,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients through one part of the keys; see `shoal.kernels.attention_parts.gradients`."""
    run = _fused_gradients if _is_fused(q, spec) else _plain_gradients
    # Blocks can share keys: their gradients add up in the accumulation dtype.
    grads = tuple(torch.zeros_like(x, dtype=accumulation_dtype(x.dtype)) for x in (q, k, v))
    run(grads, grad_out, grad_lse, q, k, v, out, lse, part, spec)
    return grads[0], grads[1], grads[2]


SDPA = PartKernel(sdpa_forward, sdpa_backward)


def _is_fused(q: Tensor, spec: AttentionSpec) -> bool:
    return q.device.type == "cpu" and spec.softcap is None


class _Masks(dict[Mask, Tensor]):
    """Masks by what they say: blocks inside a long document share one."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self._kind = (dtype, device)

    def __missing__(self, mask: Mask) -> Tensor:
        self[mask] = mask.additive(*self._kind)
        return self[mask]


def _plan(part: Part, spec: AttentionSpec, max_rows: int | None) -> Sequence[Block]:
    return blocks(part.cu_q, part.cu_k, spec.causal, spec.window, max_rows, part.positions)


def _fused_forward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, part: Part, spec: AttentionSpec
) -> None:
    """torch's fused CPU kernel over blocks; fills `out` and `lse` where a query sees a key."""
    value_width = v.shape[2]
    q, k, v = widened(max(q.shape[2], value_width), q, k, v)
    masks = _Masks(q.dtype, q.device)
    for block in _plan(part, spec, None):
        inputs = (_heads_first(q[block.queries]), _heads_first(k[block.keys]), _heads_first(v[block.keys]))
        mask = None if block.mask is None else masks[block.mask]
        result, result_lse = _fused(*inputs, 0.0, block.lower_triangle, attn_mask=mask, scale=spec.scale)
        out[block.queries] = result[0].transpose(0, 1)[..., :value_width]
        lse[block.queries] = result_lse[0].t()


def _fused_gradients(
    grads: Sequence[Tensor],
    grad_out: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    part: Part,
    spec: AttentionSpec,
) -> None:
    """Adds to the gradients of q, k and v."""
    q, k, v, out, grad_out = widened(max(q.shape[2], v.shape[2]), q, k, v, out, grad_out)
    if grad_lse is not None:
        q, k, v, out, grad_out = with_lse_column(q, k, v, out, grad_out, grad_lse)
    masks = _Masks(q.dtype, q.device)
    for block in _plan(part, spec, None):
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
            scale=spec.scale,
        )
        for grad, result, where in zip(grads, parts, (block.queries, block.keys, block.keys), strict=True):
            grad[where] += result[0].transpose(0, 1)[..., : grad.shape[2]]


def _plain_forward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, part: Part, spec: AttentionSpec
) -> None:
    """Plain scores, block by block; fills `out` and `lse` where a query sees a key."""
    masks = _Masks(lse.dtype, q.device)
    for block in _plan(part, spec, MASKED_ROWS):
        scores = _scores(q[block.queries].to(lse.dtype), k[block.keys].to(lse.dtype), block, masks, spec)
        block_lse = scores.logsumexp(-1)
        weights = (scores - block_lse[..., None]).exp_()
        result = torch.einsum("hgqk,khd->qhgd", weights, v[block.keys].to(lse.dtype))
        out[block.queries] = result.flatten(1, 2).to(out.dtype)
        lse[block.queries] = block_lse.permute(2, 0, 1).flatten(1, 2)


def _plain_gradients(
    grads: Sequence[Tensor],
    grad_out: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    part: Part,
    spec: AttentionSpec,
) -> None:
    """Adds to the gradients of q, k and v; computes the scores of each block again instead of keeping them."""
    dtype, groups = lse.dtype, k.shape[1]
    masks = _Masks(dtype, q.device)
    # Softmax: dS = P * (dP - delta), and the log-sum-exp adds P * grad_lse.
    delta = (grad_out.to(dtype) * out.to(dtype)).sum(-1)
    delta = delta if grad_lse is None else delta - grad_lse
    for block in _plan(part, spec, MASKED_ROWS):
        rows = block.q_stop - block.q_start
        upstream = grad_out[block.queries].to(dtype).reshape(rows, groups, -1, v.shape[2])
        value = v[block.keys].to(dtype)
        with torch.enable_grad(), torch.autocast(q.device.type, enabled=False):
            query = q[block.queries].detach().to(dtype).requires_grad_()
            key = k[block.keys].detach().to(dtype).requires_grad_()
            scores = _scores(query, key, block, masks, spec)
        with torch.autocast(q.device.type, enabled=False):
            weights = (scores.detach() - _by_group(lse[block.queries], groups)).exp_()
            grads[2][block.keys] += torch.einsum("hgqk,qhgd->khd", weights, upstream)
            grad_scores = torch.einsum("qhgd,khd->hgqk", upstream, value)
            grad_scores.sub_(_by_group(delta[block.queries], groups)).mul_(weights)
            grad_query, grad_key = torch.autograd.grad(scores, (query, key), grad_scores)
        grads[0][block.queries] += grad_query
        grads[1][block.keys] += grad_key


def _by_group(x: Tensor, groups: int) -> Tensor:
    """[Q, Hq] to [Hkv, Hq / Hkv, Q, 1], to go with scores."""
    return x.reshape(len(x), groups, -1).permute(1, 2, 0)[..., None]


def _scores(q: Tensor, k: Tensor, block: Block, masks: _Masks, spec: AttentionSpec) -> Tensor:
    """Scores of one block, [Hkv, Hq / Hkv, Q, K], of q [Q, Hq, D] and k [K, Hkv, D]."""
    grouped = q.view(len(q), k.shape[1], -1, q.shape[2])
    scores = torch.einsum("qhgd,khd->hgqk", grouped, k) * spec.scale
    if spec.softcap is not None:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    return scores if block.mask is None else scores + masks[block.mask]


def _heads_first(x: Tensor) -> Tensor:
    """Returns [T, H, D] as a view [1, H, T, D]."""
    return x.transpose(0, 1)[None]
