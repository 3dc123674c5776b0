"""Packed attention said plainly: one document after the other, all scores at once, torch's own gradients."""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.kernels.packed import AttentionSpec, accumulation_dtype, borders


def reference_attention(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, spec: AttentionSpec
) -> tuple[Tensor, Tensor]:
    """Computes what `varlen_attention` documents, in float32 or float64, holding a document's whole scores."""
    dtype = accumulation_dtype(q.dtype)
    groups = q.shape[1] // k.shape[1]
    cu_q, cu_k = borders(cu_seqlens_q), borders(cu_seqlens_k)
    outs, lses = [], []
    for index in range(len(cu_q) - 1):
        query = q[cu_q[index] : cu_q[index + 1]].to(dtype).transpose(0, 1)
        keys = slice(cu_k[index], cu_k[index + 1])
        key = k[keys].to(dtype).transpose(0, 1).repeat_interleave(groups, 0)
        value = v[keys].to(dtype).transpose(0, 1).repeat_interleave(groups, 0)
        scores = spec.scale * query @ key.transpose(1, 2)
        if spec.softcap is not None:
            scores = spec.softcap * torch.tanh(scores / spec.softcap)
        visible = _visible(query.shape[1], key.shape[1], spec, q.device)
        scores = scores.masked_fill(~visible, -torch.inf)
        # A query that sees no key has no softmax: its output is 0 and its log-sum-exp minus infinity.
        blind = ~visible.any(1)
        weights = scores.masked_fill(blind[:, None], 0.0).softmax(-1).masked_fill(blind[:, None], 0.0)
        outs.append((weights @ value).transpose(0, 1))
        lses.append(scores.masked_fill(blind[:, None], 0.0).logsumexp(-1).masked_fill(blind, -torch.inf).t())
    empty = [q.new_zeros(0, q.shape[1], v.shape[2], dtype=dtype), q.new_zeros(0, q.shape[1], dtype=dtype)]
    return torch.cat([empty[0], *outs]).to(q.dtype), torch.cat([empty[1], *lses])


def _visible(num_queries: int, num_keys: int, spec: AttentionSpec, device: torch.device) -> Tensor:
    """Returns which key [K] each query [Q] sees; the last query stands where the last key does."""
    query = torch.arange(num_queries, device=device)[:, None] + num_keys - num_queries
    distance = query - torch.arange(num_keys, device=device)
    visible = torch.ones_like(distance, dtype=torch.bool)
    if spec.causal:
        visible &= distance >= 0
    if spec.window is not None:
        visible &= distance.abs() < spec.window
    return visible
