"""Packed attention from the flash-attention kernel that comes with torch for CUDA."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from shoal.kernels.attention_sdpa import with_lse_column
from shoal.kernels.packed import AttentionSpec, borders

MAX_WIDTH = 256
LSE_COLUMNS = 8
"""The kernel wants widths that 8 divides."""


def why_not_flash(q: Tensor, v: Tensor, spec: AttentionSpec) -> str | None:
    """Returns why torch's flash-attention kernel cannot compute this, or None when it can."""
    if q.device.type != "cuda":
        return f"it needs a CUDA device and the tensors are on {q.device.type}"
    if q.dtype not in (torch.float16, torch.bfloat16):
        return f"it computes in float16 or bfloat16 and the tensors are {str(q.dtype).removeprefix('torch.')}"
    if spec.softcap is not None:
        return "it cannot soft-cap the scores"
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
    width = -(-max(q.shape[2], v.shape[2]) // 8) * 8
    wide = [F.pad(x, (0, width - x.shape[2])) if x.shape[2] < width else x for x in (q, k, v)]
    cu_seqlens = (cu_seqlens_q.int(), cu_seqlens_k.int())
    longest = (_longest(cu_seqlens_q), _longest(cu_seqlens_k))
    out, lse = _Flash.apply(*wide, *cu_seqlens, *longest, spec)  # type: ignore[no-untyped-call]
    return out[..., : v.shape[2]], lse


def _longest(cu_seqlens: Tensor) -> int:
    values = borders(cu_seqlens)
    return max((b - a for a, b in zip(values, values[1:], strict=False)), default=0)


def _window(spec: AttentionSpec) -> list[int]:
    """Returns how many earlier and later keys the kernel shows a query, -1 for all; ours counts the query."""
    reach = -1 if spec.window is None else spec.window - 1
    return [reach, 0 if spec.causal else reach]


def _operators() -> Any:
    """Returns torch's operators; they are private, and a test holds their signatures."""
    from torch.nn.attention import varlen  # noqa: F401  registers them

    return torch.ops.torch_attn


class _Flash(torch.autograd.Function):
    """The kernel behind `torch.nn.attention.varlen`, with the gradient of the log-sum-exp that it leaves out."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_q: Tensor,
        cu_k: Tensor,
        max_q: int,
        max_k: int,
        spec: AttentionSpec,
    ) -> tuple[Tensor, Tensor]:
        causal = spec.causal and spec.window is None
        grouped = q.shape[1] != k.shape[1]
        sizes = (cu_q, cu_k, max_q, max_k)
        out, lse, rng_state = _operators()._varlen_attn(
            q, k, v, *sizes, causal, spec.scale, _window(spec), grouped
        )
        ctx.save_for_backward(q, k, v, out, lse, cu_q, cu_k, rng_state)
        ctx.arguments = (max_q, max_k, causal, spec)
        ctx.set_materialize_grads(False)
        # The kernel marks queries that see no key with plus infinity.
        return out, lse.t().masked_fill(lse.t().isposinf(), -torch.inf)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, cu_q, cu_k, rng_state = ctx.saved_tensors
        max_q, max_k, causal, spec = ctx.arguments
        grad_out = torch.zeros_like(out) if grad_out is None else grad_out.contiguous()
        width = q.shape[2]
        if grad_lse is not None:
            # A query that sees no key has a log-sum-exp without gradient.
            grad_lse = grad_lse.masked_fill(lse.t().isposinf(), 0.0)
            q, k, v, out, grad_out = with_lse_column(q, k, v, out, grad_out, grad_lse, LSE_COLUMNS)
        grads = _operators()._varlen_attn_backward(
            grad_out,
            *(q, k, v, out, lse, cu_q, cu_k, max_q, max_k),
            causal,
            rng_state,
            spec.scale,
            _window(spec),
        )
        return (*(grad[..., :width] for grad in grads), None, None, None, None, None)
