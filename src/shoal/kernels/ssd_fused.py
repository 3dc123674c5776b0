"""The Triton and CUDA kernels of the packages `mamba_ssm` and `causal_conv1d`, where they are installed."""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any

import torch
from torch import Tensor

CHUNK_TOKENS = 128
_LARGEST_KERNEL = 4


@cache
def _function(module: str, name: str) -> Any:
    """The function, or why there is none."""
    try:
        return getattr(importlib.import_module(module), name)
    except (
        ImportError,
        AttributeError,
        OSError,
    ) as error:  # OSError: built for another version of torch or CUDA
        return f"{module} cannot be imported ({type(error).__name__}: {error})"


def _why_not(module: str, name: str, x: Tensor) -> str | None:
    if x.device.type != "cuda":
        return f"it has no kernel for {x.device.type}"
    if x.dtype == torch.float64:
        return "it has no float64"
    found = _function(module, name)
    return found if isinstance(found, str) else None


def why_not_fused_convolution(x: Tensor, weight: Tensor) -> str | None:
    """Returns why causal_conv1d cannot compute this, or None."""
    channels, taps = weight.shape
    if not 2 <= taps <= _LARGEST_KERNEL:
        return f"it has no kernel of width {taps}, only 2 to {_LARGEST_KERNEL}"
    if channels % 8:
        return f"{channels} channels are no multiple of 8"
    return _why_not("causal_conv1d", "causal_conv1d_fn", x)


def why_not_fused_scan(x: Tensor) -> str | None:
    """Returns why mamba_ssm cannot compute this, or None."""
    return _why_not("mamba_ssm.ops.triton.ssd_combined", "mamba_chunk_scan_combined", x)


def fused_convolution(
    x: Tensor, weight: Tensor, bias: Tensor | None, documents: Tensor | None, silu: bool
) -> Tensor:
    """`causal_conv1d.causal_conv1d_fn` on x [R, T, C]; it takes channels before tokens, with channels contiguous."""
    convolve = _function("causal_conv1d", "causal_conv1d_fn")
    y: Tensor = convolve(
        x.contiguous().transpose(1, 2),
        weight.to(x.dtype),
        None if bias is None else bias.to(x.dtype),
        seq_idx=None if documents is None else documents.int().contiguous(),
        activation="silu" if silu else None,
    )
    return y.transpose(1, 2)


def fused_scan(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    *,
    d: Tensor | None,
    dt_bias: Tensor | None,
    dt_softplus: bool,
    dt_limit: tuple[float, float],
    documents: Tensor | None,
) -> Tensor:
    """`mamba_ssm`'s chunked scan; its result comes in x's dtype and is widened."""
    scan = _function("mamba_ssm.ops.triton.ssd_combined", "mamba_chunk_scan_combined")
    y: Tensor = scan(
        x.contiguous(),
        dt.contiguous(),
        a.float(),
        b.contiguous(),
        c.contiguous(),
        chunk_size=CHUNK_TOKENS,
        D=d,
        dt_bias=dt_bias,
        dt_softplus=dt_softplus,
        dt_limit=dt_limit,
        seq_idx=None if documents is None else documents.int().contiguous(),
    )
    return y.float()
