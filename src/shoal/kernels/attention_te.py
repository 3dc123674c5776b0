"""Packed attention from Transformer Engine's fused kernel, cuDNN's, with the log-sum-exp that its modules keep back.

What the kernel's source leaves open is not asked of it. Documents without queries or without keys never reach it, and
causal attention only with as many queries as keys, where all ways of aligning the two agree.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate

import torch
from torch import Tensor

from shoal.kernels.attention_fused import (
    LSE_COLUMNS,
    PartKernel,
    attend_to_all,
    multiple_of_8,
    why_not_on_cuda,
    widened,
    with_lse_column,
)
from shoal.kernels.packed import AttentionSpec, Part, accumulation_dtype
from shoal.kernels.te_calls import fused_backward, fused_forward
from shoal.kernels.te_engine import Heads, engine_or_reason


def why_not_te(q: Tensor, v: Tensor, spec: AttentionSpec) -> str | None:
    """Returns why Transformer Engine's fused attention cannot compute this, or None when it can."""
    engine = engine_or_reason()
    if isinstance(engine, str):
        return engine
    if reason := why_not_on_cuda(q, spec):
        return reason
    if spec.window is not None and not spec.causal:
        return "it has no window to both sides (before 2.12 it ignores the later one)"
    tokens = max(len(q), len(v))
    for columns in (0, LSE_COLUMNS) if spec.sinks else (0,):
        widths = (multiple_of_8(x.shape[2]) + columns for x in (q, v))
        if reason := engine.why_not(Heads(q.shape[1], v.shape[1], *widths), tokens, q.dtype, spec):
            return reason
    return None


def te_attention(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, spec: AttentionSpec
) -> tuple[Tensor, Tensor]:
    """Computes what `varlen_attention` documents, on CUDA in half precision.

    Raises:
        ValueError: The kernel cannot compute this, see `why_not_te`, or the attention is causal and a document has
            more or fewer queries than keys.
    """
    if reason := why_not_te(q, v, spec):
        raise ValueError(f"attention backend te: {reason}; give backend flash, sdpa or auto")
    return attend_to_all(TE, q, k, v, cu_seqlens_q, cu_seqlens_k, spec)


def te_forward(q: Tensor, k: Tensor, v: Tensor, part: Part, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
    """Attends to one part of the keys; see `shoal.kernels.attention_parts.attend`."""
    out = q.new_zeros(*q.shape[:2], v.shape[2])
    lse = q.new_full(q.shape[:2], -torch.inf, dtype=accumulation_dtype(q.dtype))
    part, queries, keys = _both_sided(part, spec.causal, spec.window, q.device)
    if len(part.cu_q) > 1:
        q, k, v = _filled(_take(q, queries), _take(k, keys), _take(v, keys))
        seen, seen_lse = fused_forward(q, k, v, part, spec)
        out, lse = _put(seen[..., : out.shape[2]], queries, out), _put(seen_lse, queries, lse)
    return out, lse


def te_backward(
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
    grads = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    part, queries, keys = _both_sided(part, spec.causal, spec.window, q.device)
    if len(part.cu_q) == 1:
        return grads
    q, k, v = _filled(_take(q, queries), _take(k, keys), _take(v, keys))
    out, grad_out = widened(v.shape[2], _take(out, queries), _take(grad_out, queries))
    if grad_lse is not None:
        grad_lse = _take(grad_lse, queries)
        q, k, v, out, grad_out = with_lse_column(q, k, v, out, grad_out, grad_lse, LSE_COLUMNS)
    found = fused_backward(grad_out, q, k, v, out, _take(lse, queries), part, spec)
    q_grad, k_grad, v_grad = (
        _put(grad[..., : whole.shape[2]], places, whole)
        for grad, places, whole in zip(found, (queries, keys, keys), grads, strict=True)
    )
    return q_grad, k_grad, v_grad


TE = PartKernel(te_forward, te_backward)


def _filled(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The kernel wants widths that 8 divides; those of keys and values may differ."""
    q, k = widened(multiple_of_8(q.shape[2]), q, k)
    return q, k, widened(multiple_of_8(v.shape[2]), v)[0]


@lru_cache(maxsize=64)
def _both_sided(
    part: Part, causal: bool, window: int | None, device: torch.device
) -> tuple[Part, Tensor | None, Tensor | None]:
    """Returns the documents that have queries and keys, and where those stand: indices, or None for all tokens.

    Raises:
        ValueError: The attention is causal and a document has more or fewer queries than keys, or it is not and the
            window hides something.
    """
    assert part.positions is None  # attention_parts refuses them
    borders = zip(part.cu_q, part.cu_q[1:], part.cu_k, part.cu_k[1:], strict=False)
    documents = [(range(a, b), range(c, d)) for a, b, c, d in borders if b > a and d > c]
    for queries, keys in documents:
        sizes = f"{len(queries)} queries over {len(keys)} keys of a document"
        if causal and len(queries) != len(keys):
            what = f"causal attention of {sizes}, which have to be as many"
        elif not causal and window is not None and window < max(len(queries), len(keys)):
            what = f"a window of {window} to both sides for {sizes}"
        else:
            continue
        raise ValueError(f"attention backend te: {what}; give backend flash, sdpa or auto")
    sides = [[document[side] for document in documents] for side in (0, 1)]
    cu_q, cu_k = (tuple(accumulate(map(len, side), initial=0)) for side in sides)
    at_q, at_k = (
        None if cu[-1] == total else torch.tensor([at for tokens in side for at in tokens], device=device)
        for side, cu, total in zip(sides, (cu_q, cu_k), (part.cu_q[-1], part.cu_k[-1]), strict=True)
    )
    return Part(cu_q, cu_k), at_q, at_k


def _take(x: Tensor, places: Tensor | None) -> Tensor:
    return x if places is None else x.index_select(0, places)


def _put(values: Tensor, places: Tensor | None, around: Tensor) -> Tensor:
    return values if places is None else around.index_copy(0, places, values)
