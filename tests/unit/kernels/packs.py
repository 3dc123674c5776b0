"""Ragged packs of documents for the tests of packed attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shoal.kernels.attention import varlen_attention

PADDING = 5


@dataclass(frozen=True)
class Pack:
    """q, k, v (and sinks) of documents followed by padding, and upstream gradients for both results."""

    leaves: dict[str, Tensor]
    cu_q: Tensor
    cu_k: Tensor
    grad_out: Tensor
    grad_lse: Tensor

    def run(self, *, sinks: bool = False, **arguments: Any) -> dict[str, Tensor]:
        """Results and gradients by name; a log-sum-exp of minus infinity becomes -99 and takes no gradient."""
        leaves = {name: leaf for name, leaf in self.leaves.items() if sinks or name != "sinks"}
        out, lse = varlen_attention(
            *(leaves[name] for name in "qkv"),
            self.cu_q,
            self.cu_k,
            sinks=leaves.get("sinks"),
            **arguments,
        )
        blind = lse.isneginf()
        lse = lse.masked_fill(blind, -99.0)
        total = (out.to(lse.dtype) * self.grad_out).sum() + (
            lse * self.grad_lse.masked_fill(blind, 0.0)
        ).sum()
        gradients = torch.autograd.grad(total, list(leaves.values()))
        return {"out": out.detach(), "lse": lse.detach(), **dict(zip(leaves, gradients, strict=True))}


def pack(
    query_lens: Sequence[int],
    key_lens: Sequence[int] | None = None,
    *,
    heads: int = 4,
    kv_heads: int = 2,
    width: int = 8,
    value_width: int = 8,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
    device: str = "cpu",
) -> Pack:
    """Returns documents of the given lengths with 5 tokens of padding filled with huge values behind them."""
    key_lens = query_lens if key_lens is None else key_lens
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(device=device)

    num_queries, num_keys = sum(query_lens) + PADDING, sum(key_lens) + PADDING
    leaves = {
        "q": random(num_queries, heads, width),
        "k": random(num_keys, kv_heads, width),
        "v": random(num_keys, kv_heads, value_width),
        "sinks": random(heads),
    }
    for name in "qkv":
        leaves[name][-PADDING:] = 1e30
    return Pack(
        {name: leaf.to(dtype).requires_grad_() for name, leaf in leaves.items()},
        running_sum(query_lens, device),
        running_sum(key_lens, device),
        random(num_queries, heads, value_width),
        random(num_queries, heads),
    )


def running_sum(lens: Sequence[int], device: str = "cpu") -> Tensor:
    return torch.tensor([0, *lens], device=device).cumsum(0).int()


def assert_same(ours: dict[str, Tensor], reference: dict[str, Tensor], tolerance: float) -> None:
    """Every result and gradient agrees, relative to the largest entry."""
    assert ours.keys() == reference.keys()
    for name, expected in reference.items():
        assert ours[name].shape == expected.shape and ours[name].dtype == expected.dtype, name
        error = (ours[name].double() - expected.double()).abs().max() / expected.double().abs().max().clamp(
            min=1e-30
        )
        assert error <= tolerance, f"{name}: {error:.1e}"


class OnCuda:
    """A tensor's shape and dtype, on a device that is not here: enough to ask whether a kernel could compute it."""

    def __init__(self, x: Tensor) -> None:
        self.shape, self.dtype, self.device = x.shape, x.dtype, torch.device("cuda")

    def __len__(self) -> int:
        return self.shape[0]
