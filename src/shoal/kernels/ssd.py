"""Mamba-2's two operations over tokens, its convolution and its state-space scan, kept inside documents.

Each is one function with backends by name. `torch` runs on every device in plain torch, `reference` is slow and
plain, and the packages `causal_conv1d` and `mamba_ssm` are used on GPUs where they are installed.
"""

from __future__ import annotations

import logging
from functools import cache
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.kernels.packed import accumulation_dtype
from shoal.kernels.ssd_chunked import ChunkedScan
from shoal.kernels.ssd_convolution import CausalConvolution
from shoal.kernels.ssd_fused import (
    fused_convolution,
    fused_scan,
    why_not_fused_convolution,
    why_not_fused_scan,
)
from shoal.kernels.ssd_reference import reference_convolution, reference_scan

_logger = logging.getLogger(__name__)

ConvolutionBackend = Literal["auto", "torch", "causal_conv1d", "reference"]
ScanBackend = Literal["auto", "torch", "mamba_ssm", "reference"]


def document_ids(cu_seqlens: Tensor, num_tokens: int) -> Tensor:
    """Returns the number of each token's document, [1, T] int32; tokens behind the last document get one of their own.

    Args:
        cu_seqlens: Running sum of the documents' lengths, [N+1], from 0; a length may be 0.
        num_tokens: Length T of the row, at least the last border.
    """
    tokens = torch.arange(num_tokens, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    return (torch.searchsorted(cu_seqlens, tokens, right=True) - 1).int()[None]


def causal_convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    silu: bool = True,
    documents: Tensor | None = None,
    backend: ConvolutionBackend = "auto",
) -> Tensor:
    """Mixes each channel of a token with those of the tokens before it in the same document.

    Args:
        x: [R, T, C], floating point.
        weight: [C, K]; the last tap is the token's own.
        bias: [C] or None.
        silu: Apply SiLU to the result.
        documents: Number of each token's document, [R, T] int32, not decreasing within a row; None for rows of one
            document.
        backend: "auto" takes causal_conv1d where it can compute this and torch elsewhere, and logs which and why.

    Returns:
        [R, T, C] in x's dtype. Half precision is summed in float32.

    Raises:
        ValueError: Shapes do not fit, or the named backend cannot compute this.
    """
    _check_convolution(x, weight, documents)
    if not x.numel():  # a rank without a token of any document: CUDA starts no empty grid
        backend = "torch"
    chosen = _chosen("convolution", backend, "causal_conv1d", why_not_fused_convolution(x, weight))
    if chosen not in get_args(ConvolutionBackend):
        raise ValueError(
            f"convolution backend: {chosen!r} is none of {', '.join(get_args(ConvolutionBackend))}"
        )
    with torch.autocast(x.device.type, enabled=False):
        if chosen == "causal_conv1d":
            return fused_convolution(x, weight, bias, documents, silu)
        dtype = accumulation_dtype(x.dtype)
        floats = (x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))
        if chosen == "reference":
            y = reference_convolution(*floats, documents)
        else:
            y = CausalConvolution.apply(*floats, documents)  # type: ignore[no-untyped-call]
        return (F.silu(y) if silu else y).to(x.dtype)


def state_space_scan(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    *,
    d: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    documents: Tensor | None = None,
    backend: ScanBackend = "auto",
) -> Tensor:
    """Runs the selective state-space recurrence of Mamba-2 (arXiv 2405.21060) over the tokens of each document.

    With dt = clamp(softplus(dt + dt_bias)), head by head: s_t = exp(dt_t a) s_{t-1} + dt_t x_t B_t^T, beginning at 0
    in every document, and y_t = s_t C_t + d x_t. All is differentiable once.

    Args:
        x: [R, T, H, P], floating point.
        dt: Time steps, [R, T, H].
        a: [H], negative.
        b: [R, T, G, N]; G divides H, and H / G heads in a row share a group.
        c: [R, T, G, N].
        d: Skip from input to output, [H] or None.
        dt_bias: [H] or None.
        dt_softplus: Apply softplus to dt with its bias.
        dt_limit: Bounds of dt, after softplus.
        documents: As in `causal_convolution`.
        backend: "auto" takes mamba_ssm where it can compute this and torch elsewhere, and logs which and why.

    Returns:
        [R, T, H, P] in float32 (float64 for float64).

    Raises:
        ValueError: Shapes do not fit, or the named backend cannot compute this.
    """
    _check_scan(x, dt, a, b, c, documents)
    if not x.numel():
        backend = "torch"
    chosen = _chosen("scan", backend, "mamba_ssm", why_not_fused_scan(x))
    if chosen not in get_args(ScanBackend):
        raise ValueError(f"scan backend: {chosen!r} is none of {', '.join(get_args(ScanBackend))}")
    options = {"d": d, "dt_bias": dt_bias, "dt_softplus": dt_softplus, "dt_limit": dt_limit}
    with torch.autocast(x.device.type, enabled=False):
        if chosen == "mamba_ssm":
            return fused_scan(x, dt, a, b, c, documents=documents, **options)  # type: ignore[arg-type]
        dtype = accumulation_dtype(x.dtype)
        x, dt, a, b, c = (tensor.to(dtype) for tensor in (x, dt, a, b, c))
        if chosen == "reference":
            return reference_scan(x, dt, a, b, c, documents=documents, **options)  # type: ignore[arg-type]
        dt = bounded_steps(dt, dt_bias, softplus=dt_softplus, limit=dt_limit)
        y: Tensor = ChunkedScan.apply(x, dt, dt * a, b, c, documents)  # type: ignore[no-untyped-call]
        return y if d is None else y + d.to(dtype)[:, None] * x


def bounded_steps(dt: Tensor, bias: Tensor | None, *, softplus: bool, limit: tuple[float, float]) -> Tensor:
    """Returns the time steps that the recurrence uses, [R, T, H] in dt's dtype."""
    if bias is not None:
        dt = dt + bias.to(dt.dtype)
    if softplus:
        dt = F.softplus(dt)
    return dt if limit == (0.0, float("inf")) and softplus else dt.clamp(*limit)


def _chosen(operation: str, backend: str, package: str, reason: str | None) -> str:
    """The backend to use, where `reason` says why the one of `package` is out."""
    if backend == "auto":
        backend = "torch" if reason else package
        _log_choice(operation, backend, package, reason)
    elif backend == package and reason:
        raise ValueError(f"{operation} backend {package}: {reason}; choose 'torch' or 'auto'")
    return backend


@cache
def _log_choice(operation: str, backend: str, package: str, reason: str | None) -> None:
    why = f"{package} is out: {reason}" if reason else "it can compute all that is asked for"
    _logger.info("Mamba-2 %s backend auto: %s; %s", operation, backend, why)


def _check_convolution(x: Tensor, weight: Tensor, documents: Tensor | None) -> None:
    if x.dim() != 3 or weight.dim() != 2 or weight.shape[0] != x.shape[2]:
        raise ValueError(
            f"convolution: x {list(x.shape)} and weight {list(weight.shape)} have to be [R, T, C] and [C, K]"
        )
    _check_documents("convolution", x, documents)


def _check_scan(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, documents: Tensor | None) -> None:
    heads = x.shape[2] if x.dim() == 4 else 0
    fits = heads and dt.shape == x.shape[:3] and a.shape == (heads,) and b.shape == c.shape and b.dim() == 4
    if not fits or b.shape[:2] != x.shape[:2] or not b.shape[2] or heads % b.shape[2]:
        raise ValueError(
            f"scan: x {list(x.shape)}, dt {list(dt.shape)}, a {list(a.shape)}, b {list(b.shape)} and c "
            f"{list(c.shape)} have to be [R, T, H, P], [R, T, H], [H] and twice [R, T, G, N], with G a divisor of H"
        )
    _check_documents("scan", x, documents)


def _check_documents(operation: str, x: Tensor, documents: Tensor | None) -> None:
    if documents is not None and documents.shape != x.shape[:2]:
        raise ValueError(
            f"{operation}: documents {list(documents.shape)} for tokens {list(x.shape[:2])}; give one number per token"
        )
