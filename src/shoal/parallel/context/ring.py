"""Ring attention: keys and values travel around the ranks, queries stay.

In step i a rank attends to the keys of the rank i before it, while those of the next step are on their way; results
are merged by their log-sum-exp. Backward goes round once more, with the gradients of the keys travelling along with
them, and computes every part again from the saved output and log-sum-exp. A rank never holds more than two ranks'
keys: memory for keys falls as 1 / ranks.

Without a window each step is one call without a mask. With r < s the chunks of rank s are r < s < 2n-1-s < 2n-1-r, so

    own keys        causal attention over both chunks, which follow each other in time
    keys of s < r   all queries see all of the earlier chunk and nothing of the later one
    keys of s > r   the later queries see all of both chunks, the earlier ones nothing

which is 2 c^2 scores per document and step with chunks of c tokens, on every rank. Source: arXiv 2310.01889 (ring),
2311.09431 (balance).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from shoal.kernels.attention import apply_sinks
from shoal.kernels.attention_parts import attend, gradients, merge, part_backend
from shoal.kernels.packed import AttentionSpec, Part, accumulation_dtype
from shoal.mesh.exchange import Rotation
from shoal.parallel.context.split import DualChunks, Places, add, borders_of, local_places, put, take


@dataclass(frozen=True)
class Pass:
    """One call of the kernel: some of this rank's queries over some of the keys that are here now.

    Attributes:
        queries: Which of this rank's tokens ask.
        keys: Which of the visiting tokens answer.
        part: Where the documents lie among those.
        causal: Whether later keys are hidden; where none is later, they need not be.
    """

    queries: Places
    keys: Places
    part: Part
    causal: bool


@lru_cache(maxsize=64)
def ring_passes(
    layout: DualChunks, causal: bool, window: int | None, device: torch.device
) -> tuple[tuple[Pass, ...], ...]:
    """What this rank computes in each of the steps; every query sees every key it may see exactly once."""
    if window is not None and window >= max(layout.lengths, default=0):
        window = None
    steps = []
    for step in range(layout.size):
        source = (layout.rank - step) % layout.size
        if window is not None:
            steps.append(tuple(_windowed(layout, source, causal, window, device)))
        else:
            steps.append((_whole(layout, source, causal, device),))
    return tuple(steps)


def _whole(layout: DualChunks, source: int, causal: bool, device: torch.device) -> Pass:
    rank = layout.rank
    query_half = 1 if causal and source > rank else None
    key_half = 0 if causal and source < rank else None
    part = Part(_borders(layout, rank, query_half), _borders(layout, source, key_half))
    return Pass(
        local_places(layout, rank, query_half, device),
        local_places(layout, source, key_half, device),
        part,
        causal and source == rank,
    )


def _windowed(
    layout: DualChunks, source: int, causal: bool, window: int, device: torch.device
) -> Iterator[Pass]:
    """One call per pair of chunks: their distance differs, and with it what the window hides."""
    for query_half, key_half in product((0, 1), (0, 1)):
        distance = layout.halves(layout.rank)[query_half] - layout.halves(source)[key_half]
        nearest = min(((abs(distance) - 1) * chunk + 1 for chunk in layout.chunks if chunk), default=0)
        if (causal and distance < 0) or nearest >= window:
            continue
        part = Part(
            _borders(layout, layout.rank, query_half),
            _borders(layout, source, key_half),
            tuple(distance * chunk for chunk in layout.chunks),
        )
        queries = local_places(layout, layout.rank, query_half, device)
        yield Pass(queries, local_places(layout, source, key_half, device), part, causal)


def _borders(layout: DualChunks, rank: int, half: int | None) -> tuple[int, ...]:
    if half is not None:
        return borders_of(layout.real(rank, half))
    both = zip(layout.real(rank, 0), layout.real(rank, 1), strict=True)
    return borders_of(tuple(first + second for first, second in both))


def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: DualChunks,
    group: ProcessGroup,
    spec: AttentionSpec,
    sinks: Tensor | None,
    backend: str,
) -> Tensor:
    """Attention of this rank's queries over the keys of all ranks.

    Args:
        q: [num_local, Hq, D].
        k: [num_local, Hkv, D].
        v: [num_local, Hkv, Dv].
        layout: Of the documents over the ranks of `group`.
        group: The ring.
        spec: What is computed.
        sinks: [Hq] or None; their gradient is this rank's part of it.
        backend: "auto", "sdpa", "flash" or "te".

    Returns:
        [num_local, Hq, Dv] in q's dtype; 0 on padding.

    Raises:
        ValueError: The named backend cannot compute this.
    """
    passes = ring_passes(layout, spec.causal, spec.window, q.device)
    positioned = any(one.part.positions is not None for step in passes for one in step)
    backend = part_backend(backend, q, v, spec, positioned=positioned)
    out: Tensor
    out, lse = _Ring.apply(q, k, v, passes, group, spec, backend)  # type: ignore[no-untyped-call]
    return out if sinks is None else apply_sinks(out, lse, sinks)[0]


class _Ring(torch.autograd.Function):
    """(out, lse) of this rank's queries; gradients of q, k, v are complete and stay where the tokens are."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        passes: tuple[tuple[Pass, ...], ...],
        group: ProcessGroup,
        spec: AttentionSpec,
        backend: str,
    ) -> tuple[Tensor, Tensor]:
        dtype = accumulation_dtype(q.dtype)
        out = q.new_zeros(*q.shape[:2], v.shape[2], dtype=dtype)
        lse = q.new_full(q.shape[:2], -torch.inf, dtype=dtype)
        visiting = [k, v]
        for step, calls in enumerate(passes):
            rotation = Rotation(visiting, group) if step < len(passes) - 1 else None
            for call in calls:
                query, key, value = take(q, call.queries), *(take(x, call.keys) for x in visiting)
                part = attend(query, key, value, call.part, replace(spec, causal=call.causal), backend)
                merged = merge(take(out, call.queries), take(lse, call.queries), *part)
                for whole, values in zip((out, lse), merged, strict=True):
                    put(whole, call.queries, values)
            visiting = visiting if rotation is None else rotation.wait()
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.arguments = (passes, group, spec, backend)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        passes, group, spec, backend = ctx.arguments
        grad_out = torch.zeros_like(out) if grad_out is None else grad_out
        grad_q = torch.zeros_like(q, dtype=lse.dtype)
        visiting, home = [k, v], None
        for step, calls in enumerate(passes):
            rotation = Rotation(visiting, group) if step < len(passes) - 1 else None
            grads = [torch.zeros_like(x, dtype=lse.dtype) for x in visiting]
            for call in calls:
                asked = replace(spec, causal=call.causal)
                part = gradients(*_seen(call, (grad_out, grad_lse, q), visiting, (out, lse)), asked, backend)
                add(grad_q, call.queries, part[0])
                for grad, values in zip(grads, part[1:], strict=True):
                    add(grad, call.keys, values)
            if home is not None:  # what the ranks before have added for the keys that are here now
                grads = [grad + earlier for grad, earlier in zip(grads, home.wait(), strict=True)]
            home = Rotation(grads, group)  # one step behind the keys; the last step brings them home
            visiting = visiting if rotation is None else rotation.wait()
        assert home is not None
        grad_k, grad_v = home.wait()
        return grad_q.to(q.dtype), grad_k.to(k.dtype), grad_v.to(v.dtype), None, None, None, None


def _seen(
    call: Pass,
    queries: tuple[Tensor, Tensor | None, Tensor],
    keys: list[Tensor],
    whole: tuple[Tensor, Tensor],
) -> tuple[Tensor, Tensor | None, Tensor, Tensor, Tensor, Tensor, Tensor, Part]:
    """What `gradients` gets of the tokens that take part in a call."""
    grad_out, grad_lse, q = queries
    return (
        take(grad_out, call.queries),
        None if grad_lse is None else take(grad_lse, call.queries),
        take(q, call.queries),
        take(keys[0], call.keys),
        take(keys[1], call.keys),
        take(whole[0], call.queries),
        take(whole[1], call.queries),
        call.part,
    )


def score_counts(layout: DualChunks, causal: bool = True, window: int | None = None) -> list[int]:
    """Pairs of query and key that each rank computes with; their spread is the imbalance of the ring."""
    counts = []
    for rank in range(layout.size):
        steps = ring_passes(replace(layout, rank=rank), causal, window, torch.device("cpu"))
        counts.append(sum(_pairs(call, window) for step in steps for call in step))
    return counts


def _pairs(call: Pass, window: int | None) -> int:
    cu_q, cu_k = call.part.cu_q, call.part.cu_k
    total = 0
    for index in range(len(cu_q) - 1):
        num_queries, num_keys = cu_q[index + 1] - cu_q[index], cu_k[index + 1] - cu_k[index]
        if not call.causal and window is None:
            total += num_queries * num_keys
            continue
        positions = call.part.positions
        position = num_keys - num_queries if positions is None else positions[index]
        at = torch.arange(num_queries) + position
        reach = 0 if call.causal else num_keys if window is None else window - 1
        last = (at + reach).clamp(max=num_keys - 1)
        first = torch.zeros_like(at) if window is None else (at - window + 1).clamp(min=0)
        total += int((last - first + 1).clamp(min=0).sum())
    return total


__all__ = ["Pass", "ring_attention", "ring_passes", "score_counts"]
