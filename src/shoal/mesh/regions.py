"""The conjugate pairs of tensor and sequence parallelism: what a tensor becomes, and what its gradient becomes.

All ranks of the group call the same function on tensors of the same shape. A tensor is *full* when every rank holds
the same values, *partial* when the values of the ranks have to be summed, and *sharded* when each rank holds
ceil(length / ranks) of its tokens, the last ranks padded with zeros.

    function                   forward                backward
    copy                       full -> full           partial -> full       (all-reduce)
    reduce                     partial -> full        full -> full          (forward: all-reduce)
    gather_sequence            sharded -> full        partial -> sharded    (reduce-scatter)
    reduce_scatter_sequence    partial -> sharded     sharded -> full       (all-gather)
    gather_replicated          sharded -> full        full -> sharded       (slice)
    scatter_sequence           full -> sharded        sharded -> full       (all-gather)
    gather_features            sharded -> full        full -> sharded       (slice), of the last dimension

Source: the operators f, g and their sequence-parallel twins of Megatron-LM (arXiv 1909.08053, section 3; 2205.05198,
section 4.2.2). Padding lives only inside the sharded form: it is cut off by whatever makes a tensor full.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

TOKEN_DIM = 1
"""Dimension of the tokens in hidden states [B, T, H]."""


def copy(tensor: Tensor, group: ProcessGroup) -> Tensor:
    """A full tensor enters a region in which each rank computes with its own part of the weights."""
    return _apply(_Copy, tensor, group)


def reduce(tensor: Tensor, group: ProcessGroup) -> Tensor:
    """The partial result of a region becomes full."""
    return _apply(_Reduce, tensor, group)


def gather_sequence(tensor: Tensor, group: ProcessGroup, length: int) -> Tensor:
    """Hidden states [B, ceil(length / ranks), H] become [B, length, H] and enter a region of partial gradients."""
    return _apply(_GatherSequence, tensor, group, length, True)


def reduce_scatter_sequence(tensor: Tensor, group: ProcessGroup) -> Tensor:
    """The partial result [B, T, H] of a region is summed, and each rank keeps its tokens."""
    return _apply(_ReduceScatterSequence, tensor, group)


def gather_replicated(tensor: Tensor, group: ProcessGroup, length: int) -> Tensor:
    """As `gather_sequence`, for a region that every rank computes in full: its gradient is complete already."""
    return _apply(_GatherSequence, tensor, group, length, False)


def scatter_sequence(tensor: Tensor, group: ProcessGroup) -> Tensor:
    """Each rank keeps its tokens of full hidden states [B, T, H]."""
    return _apply(_ScatterSequence, tensor, group)


def gather_features(tensor: Tensor, group: ProcessGroup, total: int) -> Tensor:
    """Joins the last dimension [..., F_local], cut as `torch.chunk` cuts `total` features, on every rank."""
    return _apply(_GatherFeatures, tensor, group, total)


def chunk_size(length: int, num_ranks: int) -> int:
    """Tokens of each rank, padding included.

    >>> chunk_size(7, 2)
    4
    """
    return -(-length // num_ranks)


def chunk_bounds(length: int, num_ranks: int, rank: int) -> tuple[int, int]:
    """First and last (exclusive) of a rank's elements, as `torch.chunk` cuts them; the last ranks may have none.

    >>> [chunk_bounds(5, 4, rank) for rank in range(4)]
    [(0, 2), (2, 4), (4, 5), (5, 5)]
    """
    size = chunk_size(length, num_ranks)
    return min(rank * size, length), min((rank + 1) * size, length)


def _apply(function: type[torch.autograd.Function], *arguments: Any) -> Tensor:
    result: Tensor = _uncompiled(function, *arguments)
    return result


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _uncompiled(function: type[torch.autograd.Function], *arguments: Any) -> Any:
    """A compiled graph breaks here: it knows neither the function's collectives nor its gradient."""
    return function.apply(*arguments)  # type: ignore[no-untyped-call]


def _all_reduced(tensor: Tensor, group: ProcessGroup) -> Tensor:
    total = tensor.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def _own_tokens(tensor: Tensor, group: ProcessGroup) -> Tensor:
    """This rank's tokens of a full tensor, padded to the common size."""
    size = chunk_size(tensor.shape[TOKEN_DIM], group.size())
    start, end = chunk_bounds(tensor.shape[TOKEN_DIM], group.size(), group.rank())
    return _padded(tensor[:, start:end], size).contiguous()


def _padded(tensor: Tensor, size: int) -> Tensor:
    return F.pad(tensor, (0, 0, 0, size - tensor.shape[TOKEN_DIM]))


def _all_gathered_tokens(tensor: Tensor, group: ProcessGroup, length: int) -> Tensor:
    """[B, chunk, H] of every rank to [B, length, H]: padding of the last ranks is cut off."""
    rows = tensor.transpose(0, 1).contiguous()
    gathered = rows.new_empty(group.size() * rows.shape[0], *rows.shape[1:])
    dist.all_gather_single(gathered, rows, group=group)
    return gathered[:length].transpose(0, 1).contiguous()


def _reduce_scattered_tokens(tensor: Tensor, group: ProcessGroup) -> Tensor:
    size = chunk_size(tensor.shape[TOKEN_DIM], group.size())
    rows = _padded(tensor, size * group.size()).transpose(0, 1).contiguous()
    own = rows.new_empty(size, *rows.shape[1:])
    dist.reduce_scatter_single(own, rows, group=group)
    return own.transpose(0, 1).contiguous()


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _all_reduced(gradient, ctx.group), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: ProcessGroup) -> Tensor:
        return _all_reduced(tensor, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class _GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: ProcessGroup, length: int, partial: bool) -> Tensor:
        ctx.group, ctx.partial = group, partial
        return _all_gathered_tokens(tensor, group, length)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        to_own = _reduce_scattered_tokens if ctx.partial else _own_tokens
        return to_own(gradient, ctx.group), None, None, None


class _ReduceScatterSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group, ctx.length = group, tensor.shape[TOKEN_DIM]
        return _reduce_scattered_tokens(tensor, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _all_gathered_tokens(gradient, ctx.group, ctx.length), None


class _ScatterSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group, ctx.length = group, tensor.shape[TOKEN_DIM]
        return _own_tokens(tensor, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _all_gathered_tokens(gradient, ctx.group, ctx.length), None


class _GatherFeatures(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: ProcessGroup, total: int) -> Tensor:
        ctx.group, ctx.total = group, total
        size = chunk_size(total, group.size())
        columns = F.pad(tensor, (0, size - tensor.shape[-1])).contiguous()
        gathered = columns.new_empty(group.size() * columns.shape[0], *columns.shape[1:])
        dist.all_gather_single(gathered, columns, group=group)
        return (
            gathered.view(group.size(), *columns.shape).movedim(0, -2).flatten(-2)[..., :total].contiguous()
        )

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        start, end = chunk_bounds(ctx.total, ctx.group.size(), ctx.group.rank())
        return gradient[..., start:end].contiguous(), None, None


__all__ = [
    "chunk_bounds",
    "chunk_size",
    "copy",
    "gather_features",
    "gather_replicated",
    "gather_sequence",
    "reduce",
    "reduce_scatter_sequence",
    "scatter_sequence",
]
