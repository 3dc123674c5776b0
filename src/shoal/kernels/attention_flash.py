"""Packed attention from the flash-attention kernel that comes with torch for CUDA."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from shoal.kernels.attention_sdpa import with_lse_column
from shoal.kernels.packed import AttentionSpec, Part, borders

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
    part = Part(borders(cu_seqlens_q), borders(cu_seqlens_k))
    result: tuple[Tensor, Tensor] = _Flash.apply(q, k, v, part, spec)  # type: ignore[no-untyped-call]
    return result


def flash_forward(q: Tensor, k: Tensor, v: Tensor, part: Part, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
    """Attends to one part of the keys; see `shoal.kernels.attention_parts.attend`."""
    value_width = v.shape[2]
    q, k, v = _widened(max(q.shape[2], value_width), q, k, v)
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
    widths = (q.shape[2], k.shape[2], v.shape[2])
    blind = lse.isneginf()
    q, k, v, out, grad_out = _widened(max(widths), q, k, v, out, grad_out)
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


def _widened(width: int, *tensors: Tensor) -> tuple[Tensor, ...]:
    """The kernel wants one width for all, which 8 divides: zeros change neither scores nor outputs."""
    width = -(-width // 8) * 8
    return tuple(F.pad(x, (0, width - x.shape[2])) if x.shape[2] < width else x for x in tensors)


def _sizes(part: Part, device: torch.device) -> tuple[Tensor, Tensor, int, int]:
    """Borders [N+1] int32 and the longest document, of queries and of keys, as the kernel takes them."""
    assert part.positions is None  # attention_parts refuses them
    cu_q, cu_k = (_on_device(cu, device) for cu in (part.cu_q, part.cu_k))
    return cu_q, cu_k, _longest(part.cu_q), _longest(part.cu_k)


@lru_cache(maxsize=64)
def _on_device(values: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def _longest(values: tuple[int, ...]) -> int:
    return max((b - a for a, b in zip(values, values[1:], strict=False)), default=0)


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


class _Flash(torch.autograd.Function):
    """The kernel behind `torch.nn.attention.varlen`, with the gradient of the log-sum-exp that it leaves out."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, part: Part, spec: AttentionSpec
    ) -> tuple[Tensor, Tensor]:
        out, lse = flash_forward(q, k, v, part, spec)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.arguments = (part, spec)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        grad_out = torch.zeros_like(out) if grad_out is None else grad_out
        return (*flash_backward(grad_out, grad_lse, q, k, v, out, lse, *ctx.arguments), None, None)
