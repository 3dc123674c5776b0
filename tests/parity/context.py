"""Context-parallel attention on ranks and the same attention in one process, for tests of values and gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.config.schema import ContextMethod
from shoal.kernels.attention import varlen_attention
from shoal.kernels.packed import AttentionSpec
from shoal.parallel.context.attention import AttentionContext, context_attention
from shoal.parallel.context.split import DualChunks, local_index

HUGE = 1e6
RAGGED = (7, 3, 1, 0, 33, 2)
"""Shorter than 2 * ranks, of one token, of none, and one that nothing divides."""


@dataclass(frozen=True)
class Problem:
    """Documents, and what attention over them is."""

    lengths: tuple[int, ...] = RAGGED
    heads: int = 4
    kv_heads: int = 2
    width: int = 8
    value_width: int = 8
    causal: bool = True
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    document_chunk: int | None = None
    dtype: torch.dtype = torch.float64

    @property
    def spec(self) -> AttentionSpec:
        return AttentionSpec(self.causal, 0.3, self.window, self.softcap, self.sinks)


def inputs(problem: Problem) -> dict[str, Tensor]:
    """q, k, v, sinks and the gradient of the output, of all tokens in the order of the documents."""
    generator = torch.Generator().manual_seed(3)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(problem.dtype)

    total = sum(problem.lengths)
    return {
        "q": drawn(total, problem.heads, problem.width),
        "k": drawn(total, problem.kv_heads, problem.width),
        "v": drawn(total, problem.kv_heads, problem.value_width),
        "sinks": drawn(problem.heads),
        "grad": drawn(total, problem.heads, problem.value_width),
    }


def in_one_process(problem: Problem) -> dict[str, Tensor]:
    """Output and gradients by name, from the reference kernel."""
    given = inputs(problem)
    leaves = {name: given[name].requires_grad_() for name in ("q", "k", "v", "sinks")}
    lengths = problem.lengths
    if (chunk := problem.document_chunk) is not None:
        lengths = tuple(min(chunk, n - at) for n in lengths for at in range(0, n, chunk))
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)
    out, _ = varlen_attention(
        leaves["q"],
        leaves["k"],
        leaves["v"],
        cu_seqlens,
        cu_seqlens,
        causal=problem.causal,
        scale=problem.spec.scale,
        window=problem.window,
        softcap=problem.softcap,
        sinks=leaves["sinks"] if problem.sinks else None,
        backend="reference",
    )
    (out * given["grad"]).sum().backward()
    return {"out": out.detach(), **{n: leaf.grad for n, leaf in leaves.items() if leaf.grad is not None}}


def on_a_rank(rank: int, world: int, problem: Problem, method: ContextMethod) -> dict[str, Any]:
    """This rank's output and gradients; `index` and `is_real` say which tokens they belong to.

    Padding is filled with huge values, which must not be seen, and its gradients have to be 0.
    """
    group = dist.group.WORLD
    assert group is not None
    layout = DualChunks(problem.lengths, world, rank)
    starts = tuple(torch.tensor([0, *problem.lengths]).cumsum(0).tolist())[:-1]
    index, is_real = local_index(layout, starts, torch.device("cpu"))
    given = inputs(problem)
    local = {name: given[name][index] for name in ("q", "k", "v", "grad")}
    for name in "qkv":
        local[name][~is_real] = HUGE
        local[name].requires_grad_()
    sinks = given["sinks"].requires_grad_()
    out = context_attention(
        local["q"],
        local["k"],
        local["v"],
        AttentionContext(layout, group, method, "auto"),
        problem.spec,
        sinks=sinks if problem.sinks else None,
        document_chunk=problem.document_chunk,
    )
    (out * local["grad"]).sum().backward()
    gradients = {name: local[name].grad for name in "qkv"}
    return {"out": out.detach(), **gradients, "sinks": sinks.grad, "index": index, "is_real": is_real}


def joined(results: list[dict[str, Any]], problem: Problem) -> dict[str, Tensor]:
    """Output and gradients of all ranks in the order of the documents; every token on exactly one rank."""
    whole: dict[str, Tensor] = {}
    for name in ("out", "q", "k", "v"):
        like = results[0][name]
        whole[name] = like.new_full((sum(problem.lengths), *like.shape[1:]), torch.nan)
        for result in results:
            index, is_real = result["index"], result["is_real"]
            assert (result[name][~is_real] == 0).all(), f"{name} of padding"
            assert whole[name][index[is_real]].isnan().all(), "a token lies on two ranks"
            whole[name][index[is_real]] = result[name][is_real]
    if problem.sinks:
        whole["sinks"] = torch.stack([result["sinks"] for result in results]).sum(0)
    return whole


def assert_close(actual: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    assert actual.keys() == expected.keys()
    largest = max(float(tensor.abs().max()) for tensor in expected.values())
    for name, tensor in expected.items():
        # A query that sees one key has a gradient of rounding noise.
        error = (actual[name] - tensor).abs().max() / tensor.abs().max().clamp(min=1e-3 * largest)
        assert error <= tolerance, f"{name}: {error:.1e}"  # also when it is NaN: a token that lies nowhere
