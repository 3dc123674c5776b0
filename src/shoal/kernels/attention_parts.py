"""Attention over some of the keys at a time: for keys that are never all in one place.

The softmax over all keys follows from that over each part: with (out, lse) of two parts, the weights of the whole are
exp(lse - lse of both). Its gradient through one part needs only the whole's output and log-sum-exp. Source: the ring
attention of arXiv 2310.01889, with the log-sum-exp of arXiv 2307.08691, section 3.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.kernels.attention_flash import FLASH, why_not_flash
from shoal.kernels.attention_fused import PartKernel
from shoal.kernels.attention_sdpa import SDPA
from shoal.kernels.attention_te import TE, why_not_te
from shoal.kernels.packed import AttentionSpec, Part

_KERNELS: dict[str, PartKernel] = {"sdpa": SDPA, "flash": FLASH, "te": TE}


def part_backend(backend: str, q: Tensor, v: Tensor, spec: AttentionSpec, *, positioned: bool) -> str:
    """Returns the backend that computes all parts: "sdpa", "flash" or "te".

    Args:
        backend: One of those, or "auto" for flash where it can and sdpa elsewhere.
        q: [T, Hq, D], of which dtype, device and shape matter, as those of v.
        v: [Tk, Hkv, Dv].
        spec: What all parts compute.
        positioned: Whether there are parts with `positions`.

    Raises:
        ValueError: The named backend cannot compute this.
    """
    if backend == "sdpa":
        return backend
    if backend not in ("auto", "flash", "te"):
        raise ValueError(f"attention backend {backend!r}, in parts: one of auto, {', '.join(_KERNELS)}")
    reason = (why_not_te if backend == "te" else why_not_flash)(q, v, spec)
    if reason is None and positioned:
        reason = "it cannot place queries freely among keys, as a window over parts needs"
    if backend == "auto":
        return "sdpa" if reason is not None else "flash"
    if reason is not None:
        raise ValueError(f"attention backend {backend}, in parts: {reason}; give backend sdpa or auto")
    return backend


def attend(
    q: Tensor, k: Tensor, v: Tensor, part: Part, spec: AttentionSpec, backend: str
) -> tuple[Tensor, Tensor]:
    """Attends to one part of the keys; not differentiable.

    Args:
        q: [T, Hq, D]; all tokens belong to documents.
        k: [Tk, Hkv, D].
        v: [Tk, Hkv, Dv].
        part: Where the documents' queries and keys lie.
        spec: As in `varlen_attention`; sinks are added once, to the whole.
        backend: From `part_backend`.

    Returns:
        out [T, Hq, Dv] and lse [T, Hq] of these keys alone; 0 and minus infinity for a query that sees none of them.
    """
    return _KERNELS[backend].forward(q, k, v, part, spec)


def gradients(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    part: Part,
    spec: AttentionSpec,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients that flow through one part of the keys.

    Args:
        grad_out, grad_lse: Of the output over *all* keys, [T, Hq, Dv] and [T, Hq] or None.
        q, k, v: As in `attend`.
        out, lse: Of these queries over *all* keys.
        part, spec, backend: As in `attend`.

    Returns:
        What this part adds to the gradients of q, k and v; from sdpa in the accumulation dtype.
    """
    return _KERNELS[backend].backward(grad_out, grad_lse, q, k, v, out, lse, part, spec)


def merge(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Joins attention over two disjoint parts of the keys: out [T, H, Dv], lse [T, H], in the accumulation dtype.

    A part that a query sees nothing of has a log-sum-exp of minus infinity and no weight.
    """
    merged = torch.logaddexp(lse, other_lse)
    # Minus infinity on both sides: the difference would be NaN.
    reference = merged.masked_fill(merged.isneginf(), 0.0)
    weight, other_weight = ((x - reference).exp()[..., None] for x in (lse, other_lse))
    return out * weight + other.to(out.dtype) * other_weight, merged


__all__ = ["attend", "gradients", "merge", "part_backend"]
