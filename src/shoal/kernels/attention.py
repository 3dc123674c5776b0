"""Attention over packed documents: one function, several backends, chosen by name.

The tokens of all documents stand one after the other, `cu_seqlens` says where each begins and ends, and no token
sees another document. `varlen_attention` states what is computed, `attention_reference` says it in a few lines.
"""

from __future__ import annotations

import logging
from functools import cache
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.kernels.attention_flash import flash_attention, why_not_flash
from shoal.kernels.attention_reference import reference_attention
from shoal.kernels.attention_sdpa import sdpa_attention
from shoal.kernels.attention_te import te_attention
from shoal.kernels.packed import AttentionSpec, Kernel, borders

Backend = Literal["auto", "sdpa", "flash", "te", "reference"]
BACKENDS: dict[str, Kernel] = {
    "sdpa": sdpa_attention,
    "flash": flash_attention,
    "te": te_attention,
    "reference": reference_attention,
}
_logger = logging.getLogger(__name__)


def varlen_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    causal: bool,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    cu_seqlens_q_padded: Tensor | None = None,
    cu_seqlens_k_padded: Tensor | None = None,
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor]:
    """Attends within each of N documents packed along the first dimension.

    Query i of a document with Q queries and K keys stands at position i + K - Q: the last query stands where the
    last key does. It sees key j when `causal` and `window` allow it, j <= position and |position - j| < window (a
    window counts the query's own position). With s = scale * q.k, soft-capped to softcap * tanh(s / softcap), the
    output is the mean of the values weighted with exp(s - lse), and lse = log(sum over seen keys of exp(s), plus
    exp(sink) where there are sinks). Query heads share key heads in groups of Hq / Hkv, in order.

    Tokens outside the documents are padding: after the last document, or, where documents are padded, after the
    real tokens of each. Padding is never read: its output is 0, its lse minus infinity, its gradients 0, and so
    it is for a query that sees no key. Both results are differentiable, once.

    Args:
        q: [T, Hq, D], floating point.
        k: [Tk, Hkv, D].
        v: [Tk, Hkv, Dv]; Dv may differ from D, as in multi-head latent attention.
        cu_seqlens_q: Running sum of the documents' real numbers of queries, [N+1] int32 or int64, from 0.
        cu_seqlens_k: The same for keys.
        causal: Whether a query sees only keys up to its position.
        scale: Factor of the scores, 1 / sqrt(D) when not given.
        window: Sliding window, at least 1.
        softcap: Bound of the scores, as in Gemma 2 (arXiv 2408.00118, section 2).
        sinks: [Hq], one logit per head that takes a share of the softmax and gives nothing, as in GPT-OSS.
        cu_seqlens_q_padded: Where documents begin when each is followed by padding, [N+1].
        cu_seqlens_k_padded: The same for keys.
        backend: "sdpa" runs everywhere, "flash" is torch's CUDA kernel, "te" that of an installed Transformer
            Engine, "reference" is slow and plain. "auto" takes flash where it can compute this and sdpa elsewhere,
            and logs which and why; never te, which stands on functions that are no public interface.

    Returns:
        out [T, Hq, Dv] in q's dtype (under autocast in its dtype) and lse [T, Hq] in float32 (float64 for float64).

    Raises:
        ValueError: Shapes, borders or arguments do not fit, or the named backend cannot compute this.
    """
    device = q.device.type
    if torch.is_autocast_enabled(device):  # as torch's own attention does
        q, k, v = (x.to(torch.get_autocast_dtype(device)) for x in (q, k, v))
    _check(q, k, v, cu_seqlens_q, cu_seqlens_k, window, softcap, sinks)
    scale = q.shape[2] ** -0.5 if scale is None else float(scale)
    spec = AttentionSpec(causal, scale, window, softcap, sinks is not None)
    total = len(q)
    places = _real_places("q", cu_seqlens_q, cu_seqlens_q_padded, total)
    key_places = _real_places("k", cu_seqlens_k, cu_seqlens_k_padded, len(k))
    q, k, v = _take(q, places), _take(k, key_places), _take(v, key_places)
    with torch.autocast(device, enabled=False):
        out, lse = _kernel(backend, q, v, spec)(q, k, v, cu_seqlens_q, cu_seqlens_k, spec)
        if sinks is not None:
            out, lse = apply_sinks(out, lse, sinks)
    return _put(out, places, total, 0.0), _put(lse, places, total, -torch.inf)


def apply_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Lets sinks [H] take their share of finished attention: out [T, H, Dv], lse [T, H], both without sinks."""
    sinks = sinks.to(lse.dtype)
    # sigmoid(lse - sink) = exp(lse) / (exp(lse) + exp(sink)); 0 and without gradient where lse is -inf.
    share = torch.sigmoid(lse - sinks)
    blind = lse.isneginf()
    with_sinks = torch.logaddexp(lse.masked_fill(blind, 0.0), sinks).masked_fill(blind, -torch.inf)
    return (out * share[..., None]).to(out.dtype), with_sinks


def choose_backend(backend: str, q: Tensor, v: Tensor, spec: AttentionSpec) -> tuple[str, str | None]:
    """Returns the backend that computes this, and for "auto" why it is not flash.

    Raises:
        ValueError: There is no such backend.
    """
    if backend == "auto":
        reason = why_not_flash(q, v, spec)
        return ("flash", None) if reason is None else ("sdpa", reason)
    if backend not in BACKENDS:
        raise ValueError(f"attention backend: {backend!r} is none of {', '.join(get_args(Backend))}")
    return backend, None


def _kernel(backend: str, q: Tensor, v: Tensor, spec: AttentionSpec) -> Kernel:
    chosen, reason = choose_backend(backend, q, v, spec)
    if backend == "auto":
        _log_choice(chosen, reason)
    return BACKENDS[chosen]


@cache
def _log_choice(backend: str, reason: str | None) -> None:
    why = "it can compute all that is asked for" if reason is None else f"flash is out: {reason}"
    _logger.info("attention backend auto: %s; %s", backend, why)


Places = Tensor | int | None
"""Where real tokens stand: at these indices, or in front of this one, or everywhere."""


def _real_places(name: str, real: Tensor, padded: Tensor | None, total: int) -> Places:
    """Returns where the tokens of documents stand among `total`."""
    ends = borders(real)
    starts = ends if padded is None else borders(padded)
    lengths = [b - a for a, b in zip(ends, ends[1:], strict=False)]
    rooms = [b - a for a, b in zip(starts, starts[1:], strict=False)]
    if len(rooms) != len(lengths) or any(a > b for a, b in zip(lengths, rooms, strict=True)):
        raise ValueError(
            f"cu_seqlens_{name}_padded: lengths {rooms} cannot hold documents of lengths {lengths}; "
            "give one padded length per document, at least as long"
        )
    if starts[-1] > total:
        raise ValueError(
            f"cu_seqlens_{name}: the documents end at {starts[-1]}, but there are {total} tokens; "
            "give borders within the tokens"
        )
    if lengths == rooms:
        return None if ends[-1] == total else ends[-1]
    ranges = [torch.arange(start, start + length) for start, length in zip(starts, lengths, strict=False)]
    return torch.cat(ranges).to(real.device)


def _take(x: Tensor, places: Places) -> Tensor:
    if isinstance(places, Tensor):
        return x.index_select(0, places)
    return x if places is None else x[:places]


def _put(x: Tensor, places: Places, total: int, fill: float) -> Tensor:
    if places is None:
        return x
    if isinstance(places, Tensor):
        return x.new_full((total, *x.shape[1:]), fill).index_copy(0, places, x)
    return F.pad(x, (0, 0) * (x.dim() - 1) + (0, total - places), value=fill)


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> None:
    shapes = f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}"
    if not q.dim() == k.dim() == v.dim() == 3 or q.shape[2] != k.shape[2] or k.shape[:2] != v.shape[:2]:
        raise ValueError(
            f"varlen_attention: {shapes} do not fit; give [T, Hq, D], [Tk, Hkv, D], [Tk, Hkv, Dv]"
        )
    if q.shape[1] % k.shape[1]:
        raise ValueError(
            f"varlen_attention: {q.shape[1]} query heads cannot share {k.shape[1]} key heads evenly"
        )
    if not q.dtype == k.dtype == v.dtype or not q.is_floating_point():
        raise ValueError(f"varlen_attention: dtypes {q.dtype}, {k.dtype}, {v.dtype} differ; cast to one")
    if cu_seqlens_q.dim() != 1 or cu_seqlens_q.shape != cu_seqlens_k.shape:
        raise ValueError(
            f"cu_seqlens_q {list(cu_seqlens_q.shape)} and cu_seqlens_k {list(cu_seqlens_k.shape)} have to be "
            "[N+1] for the same N documents"
        )
    if window is not None and window < 1:
        raise ValueError(f"window: {window} is below 1, so that no query sees a key; give None for no window")
    if softcap is not None and softcap <= 0.0:
        raise ValueError(f"softcap: {softcap} is not positive; give None for scores without a bound")
    if sinks is not None and sinks.shape != (q.shape[1],):
        raise ValueError(f"sinks: {list(sinks.shape)} has to be [{q.shape[1]}], one logit per query head")
