"""Calls of Transformer Engine's fused attention: its arguments, and where it keeps the log-sum-exp."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.kernels.attention_fused import longest, on_device
from shoal.kernels.packed import AttentionSpec, Part
from shoal.kernels.te_engine import PACKED, Engine, engine_or_reason, mask_of

_SINCE_2_15 = {"o_format": "thd", "do_format": "thd", "dqkv_layout": PACKED}


def fused_forward(q: Tensor, k: Tensor, v: Tensor, part: Part, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
    """Returns out [T, Hq, Dv] and lse [T, Hq] of documents that all have queries and keys.

    Args:
        q: [T, Hq, D] with a width that 8 divides.
        k: [Tk, Hkv, D].
        v: [Tk, Hkv, Dv] with a width that 8 divides.
        part: The documents; all tokens are theirs.
        spec: What is computed, without sinks.
    """
    out, statistics, _ = _forward(q, k, v, part, spec)
    return out, _unfold(statistics, part)


def fused_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    part: Part,
    spec: AttentionSpec,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of q, k and v; out and lse may be those over more keys than these."""
    engine = _engine()
    by_token, rng_state = _conventions(q.device)
    statistics = lse[..., None] if by_token else _fold(lse, part)
    later = {"dqkv_dtype": engine.dtypes.get(q.dtype)} | _SINCE_2_15  # dqkv_dtype until 2.14
    grad_q, grad_k, grad_v, *_ = engine.backward(
        **_common(engine, q, k, v, part, spec),
        **{name: value for name, value in later.items() if name in _taken(engine.backward)},
        o=out.contiguous(),
        d_o=grad_out.contiguous(),
        aux_ctx_tensors=[statistics.contiguous(), rng_state],
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )
    return grad_q, grad_k, grad_v


def _forward(
    q: Tensor, k: Tensor, v: Tensor, part: Part, spec: AttentionSpec
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns out [T, Hq, Dv], statistics in the kernel's layout, and the state of the random numbers."""
    engine = _engine()
    later = {"o_format": "thd"} if "o_format" in _taken(engine.forward) else {}
    out, (statistics, rng_state) = engine.forward(
        **_common(engine, q, k, v, part, spec),
        **later,
        is_training=True,  # else there are no statistics
        rng_gen=_generator(q.device),
    )
    return out, statistics, rng_state


def _common(
    engine: Engine, q: Tensor, k: Tensor, v: Tensor, part: Part, spec: AttentionSpec
) -> dict[str, Any]:
    """The arguments of both directions. Strides are not read, so that tensors have to be contiguous."""
    cu_q, cu_k = (on_device(cu, q.device) for cu in (part.cu_q, part.cu_k))
    return {
        "q": q.contiguous(),
        "k": k.contiguous(),
        "v": v.contiguous(),
        "fake_dtype": q.dtype,
        "max_seqlen_q": longest(part.cu_q),
        "max_seqlen_kv": longest(part.cu_k),
        "cu_seqlens_q": cu_q,
        "cu_seqlens_kv": cu_k,
        # Where documents begin; packed tokens are read by these, and without them from nowhere.
        "cu_seqlens_q_padded": cu_q,
        "cu_seqlens_kv_padded": cu_k,
        "fused_attention_backend": engine.kernel,
        "attn_scale": spec.scale,
        "dropout": 0.0,
        "qkv_layout": PACKED,
        "attn_bias_type": "no_bias",
        "softmax_type": "vanilla",
        **mask_of(spec),
    }


def _engine() -> Engine:
    engine = engine_or_reason()
    assert isinstance(engine, Engine)  # why_not_te comes first
    return engine


@cache
def _taken(function: Callable[..., Any]) -> frozenset[str]:
    return frozenset(inspect.signature(function).parameters)


@cache
def _generator(device: torch.device) -> torch.Generator:
    """The kernel draws from a generator even without dropout; the default one would move, and with it a run."""
    return torch.Generator(device)


@cache
def _conventions(device: torch.device) -> tuple[bool, Tensor]:
    """Returns whether statistics are [T, Hq, 1], and not [N, Hq, longest, 1], and a state of the random numbers.

    It depends on cuDNN and the device (before cuDNN 9.6 and on sm120 they are by document), so one call shows it.
    Backward takes the statistics in that layout, and a state that it does not read without dropout.
    """
    x = torch.zeros(64, 1, 64, dtype=torch.bfloat16, device=device)
    _, statistics, rng_state = _forward(x, x, x, Part((0, 64), (0, 64)), AttentionSpec(True, 1.0))
    return statistics.dim() == 3, rng_state


def _unfold(statistics: Tensor, part: Part) -> Tensor:
    """Returns [T, Hq] from either layout."""
    num_heads = statistics.shape[1]
    if statistics.shape == (part.cu_q[-1], num_heads, 1):
        return statistics[..., 0]
    if statistics.shape != (len(part.cu_q) - 1, num_heads, longest(part.cu_q), 1):
        raise ValueError(
            f"attention backend te: statistics {list(statistics.shape)} of {part.cu_q[-1]} queries in "
            f"{len(part.cu_q) - 1} documents have an unknown layout; give backend flash, sdpa or auto"
        )
    lengths = [b - a for a, b in zip(part.cu_q, part.cu_q[1:], strict=False)]
    return torch.cat([rows[:, :length, 0].t() for rows, length in zip(statistics, lengths, strict=True)])


def _fold(lse: Tensor, part: Part) -> Tensor:
    """Returns [N, Hq, longest, 1] of lse [T, Hq]; plus infinity, a probability of 0, behind the documents."""
    width = longest(part.cu_q)
    documents = [lse[a:b].t() for a, b in zip(part.cu_q, part.cu_q[1:], strict=False)]
    return torch.stack([F.pad(x, (0, width - x.shape[1]), value=torch.inf) for x in documents])[..., None]
