"""Packed attention from the flash-attention kernel that comes with torch for CUDA."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shoal.kernels.attention_fused import (
    LSE_COLUMNS,
    PartKernel,
    attend_to_all,
    longest,
    multiple_of_8,
    on_device,
    why_not_on_cuda,
    widened,
    with_lse_column,
)
from shoal.kernels.packed import AttentionSpec, Part, accumulation_dtype

MAX_WIDTH = 256


def why_not_flash(q: Tensor, v: Tensor, spec: AttentionSpec) -> str | None:
    """Returns why torch's flash-attention kernel cannot compute this, or None when it can."""
    if reason := why_not_on_cuda(q, spec):
        return reason
    width, most = max(q.shape[2], v.shape[2]), MAX_WIDTH - (LSE_COLUMNS if spec.sinks else 0)
    if width > most:
        return (
            f"it takes heads at most {most} wide{' with sinks' if spec.sinks else ''} and these have {width}"
        )
    return None


def flash_attention(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, spec: AttentionSpec
) -> tuple[Tensor, Tensor]:
    """Computes what `varlen_attention` documents, on CUDA in half precision.

    Raises:
        ValueError: The kernel cannot compute this; see `why_not_flash`.
    """
    if reason := why_not_flash(q, v, spec):
        raise ValueError(f"attention backend flash: {reason}; give backend sdpa or auto")
    return attend_to_all(FLASH, q, k, v, cu_seqlens_q, cu_seqlens_k, spec)


def flash_forward(q: Tensor, k: Tensor, v: Tensor, part: Part, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
    """Attends to one part of the keys; see `shoal.kernels.attention_parts.attend`."""
    value_width = v.shape[2]
    if not _has_work(q, k):
        lse = q.new_full(q.shape[:2], -torch.inf, dtype=accumulation_dtype(q.dtype))
        return q.new_zeros(*q.shape[:2], value_width), lse
    q, k, v = widened(multiple_of_8(max(q.shape[2], value_width)), q, k, v)
    grouped = q.shape[1] != k.shape[1]
    out, lse, _ = _operators()._varlen_attn(q, k, v, *_sizes(part, q.device), *_options(spec), grouped)
    lse = lse.t()
    # The kernel marks queries that see no key with plus infinity.
    return out[..., :value_width], lse.masked_fill(lse.isposinf(), -torch.inf)


def flash_backward(
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
    if not _has_work(q, k):
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    widths = (q.shape[2], k.shape[2], v.shape[2])
    blind = lse.isneginf()
    q, k, v, out, grad_out = widened(multiple_of_8(max(widths)), q, k, v, out, grad_out)
    if grad_lse is not None:
        # A query that sees no key has a log-sum-exp without gradient.
        grad_lse = grad_lse.masked_fill(blind, 0.0)
        q, k, v, out, grad_out = with_lse_column(q, k, v, out, grad_out, grad_lse, LSE_COLUMNS)
    causal, scale, window = _options(spec)
    grads = _operators()._varlen_attn_backward(
        grad_out.contiguous(),
        *(q, k, v, out.contiguous(), lse.masked_fill(blind, torch.inf).t().contiguous()),
        *_sizes(part, q.device),
        causal,
        torch.zeros(2, dtype=torch.uint64, device=q.device),  # of dropout, which there is none of
        scale,
        window,
    )
    q_grad, k_grad, v_grad = (grad[..., :width] for grad, width in zip(grads, widths, strict=True))
    return q_grad, k_grad, v_grad


FLASH = PartKernel(flash_forward, flash_backward)


def _has_work(q: Tensor, k: Tensor) -> bool:
    """Whether there are queries and keys: a rank may hold no token of any document, and CUDA starts no empty grid."""
    return len(q) > 0 and len(k) > 0


def _sizes(part: Part, device: torch.device) -> tuple[Tensor, Tensor, int, int]:
    """Borders [N+1] int32 and the longest document, of queries and of keys, as the kernel takes them."""
    assert part.positions is None  # attention_parts refuses them
    cu_q, cu_k = (on_device(cu, device) for cu in (part.cu_q, part.cu_k))
    return cu_q, cu_k, longest(part.cu_q), longest(part.cu_k)


def _options(spec: AttentionSpec) -> tuple[bool, float, list[int]]:
    """Returns whether it is causal, the scale and the window.

    A window is how many earlier and later keys the kernel shows a query, -1 for all; ours counts the query.
    """
    reach = -1 if spec.window is None else spec.window - 1
    return spec.causal and spec.window is None, spec.scale, [reach, 0 if spec.causal else reach]


def _operators() -> Any:
    """Returns torch's operators; they are private, and a test holds their signatures."""
    from torch.nn.attention import varlen  # noqa: F401  registers them

    return torch.ops.torch_attn
