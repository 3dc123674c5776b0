"""What fused attention kernels have in common: one autograd function around them, and how their limits are met."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from shoal.kernels.packed import AttentionSpec, Part, borders

Forward = Callable[[Tensor, Tensor, Tensor, Part, AttentionSpec], tuple[Tensor, Tensor]]
Backward = Callable[
    [Tensor, Tensor | None, Tensor, Tensor, Tensor, Tensor, Tensor, Part, AttentionSpec],
    tuple[Tensor, Tensor, Tensor],
]

LSE_COLUMNS = 8
"""By how much `with_lse_column` widens heads for kernels that want widths that 8 divides."""


@dataclass(frozen=True)
class PartKernel:
    """A kernel that computes attention to some of the keys; see `shoal.kernels.attention_parts`.

    Attributes:
        forward: As `attend` there, without the backend.
        backward: As `gradients` there, without the backend.
    """

    forward: Forward
    backward: Backward


def attend_to_all(
    kernel: PartKernel,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    spec: AttentionSpec,
) -> tuple[Tensor, Tensor]:
    """Computes what `varlen_attention` documents, differentiable, with all keys as the only part."""
    part = Part(borders(cu_seqlens_q), borders(cu_seqlens_k))
    result: tuple[Tensor, Tensor] = _Whole.apply(q, k, v, part, spec, kernel)  # type: ignore[no-untyped-call]
    return result


class _Whole(torch.autograd.Function):
    """All keys at once, with the gradient of the log-sum-exp."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, part: Part, spec: AttentionSpec, kernel: PartKernel
    ) -> tuple[Tensor, Tensor]:
        out, lse = kernel.forward(q, k, v, part, spec)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.arguments = (part, spec, kernel)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        part, spec, kernel = ctx.arguments
        grad_out = torch.zeros_like(out) if grad_out is None else grad_out
        grads = kernel.backward(grad_out, grad_lse, q, k, v, out, lse, part, spec)
        return (*(grad.to(q.dtype) for grad in grads), None, None, None)


def why_not_on_cuda(q: Tensor, spec: AttentionSpec) -> str | None:
    """Returns why no fused CUDA kernel computes this, or None when one may."""
    if q.device.type != "cuda":
        return f"it needs a CUDA device and the tensors are on {q.device.type}"
    if q.dtype not in (torch.float16, torch.bfloat16):
        return f"it computes in float16 or bfloat16 and the tensors are {str(q.dtype).removeprefix('torch.')}"
    if spec.softcap is not None:
        return "it cannot soft-cap the scores"
    return None


def widened(width: int, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Fills [T, heads, D] up to a width that a kernel takes: zeros change neither scores nor outputs."""
    return tuple(F.pad(x, (0, width - x.shape[2])) if x.shape[2] < width else x for x in tensors)


def multiple_of_8(width: int) -> int:
    """Returns the next width that the CUDA kernels take."""
    return -(-width // 8) * 8


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


@lru_cache(maxsize=64)
def on_device(values: tuple[int, ...], device: torch.device) -> Tensor:
    """Returns borders [N+1] as a kernel takes them, int32; the layers of a model share the tensor."""
    return torch.tensor(values, dtype=torch.int32, device=device)


def longest(values: tuple[int, ...]) -> int:
    """Returns the length of the longest document between borders [N+1]."""
    return max((b - a for a, b in zip(values, values[1:], strict=False)), default=0)
