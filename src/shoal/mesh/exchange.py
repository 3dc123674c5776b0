"""Exchanges between the ranks of a group that share the tokens of one micro-batch; each states its gradient.

All ranks of the group call the same function, in the same order, on tensors of the same shape and dtype. Gloo ends
the process when the sizes of two ranks differ, so what the shapes follow from is agreed on once per micro-batch, with
`refuse_disagreement`.

    function      forward                                            backward
    all_to_all    a part of one dimension to each rank, joined       the same with the dimensions exchanged
                  along another
    gather        own tokens -> all tokens, on every rank            partial -> own tokens (reduce-scatter)
    ring_shift    rank r's tensor -> rank r + distance               rank r + distance's gradient -> rank r

A group of one rank communicates nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup


def all_to_all(tensor: Tensor, group: ProcessGroup, *, split_dim: int, join_dim: int) -> Tensor:
    """Sends part p of `tensor` along `split_dim` to rank p and joins what arrives along `join_dim`, in rank order.

    With [T / n, heads, D] on each of n ranks, ``split_dim=1, join_dim=0`` gives all T tokens of heads / n heads, and
    ``split_dim=0, join_dim=1`` undoes it.

    Gradient: the reverse exchange; every element lives on exactly one rank, so nothing is summed.

    Raises:
        ValueError: The number of ranks does not divide the dimension that is split.
    """
    num_ranks = group.size()
    if tensor.shape[split_dim] % num_ranks:
        raise ValueError(
            f"all_to_all: dimension {split_dim} of {list(tensor.shape)} has to be a multiple of the "
            f"{num_ranks} ranks; pad it"
        )
    if num_ranks == 1:
        return tensor
    return _apply(_AllToAll, tensor, group, split_dim, join_dim)


def gather(tensor: Tensor, group: ProcessGroup, *, dim: int = 0) -> Tensor:
    """Joins the tensors of all ranks along `dim`, in rank order, on every rank.

    Gradient: each rank computes with the joined tensor for its own tokens only, so its gradient is partial; the sum
    over the ranks goes back to where each part came from.
    """
    if group.size() == 1:
        return tensor
    return _apply(_Gather, tensor, group, dim)


def ring_shift(tensor: Tensor, group: ProcessGroup, distance: int = 1) -> Tensor:
    """Gives `tensor` to the rank `distance` further along the ring, and returns what arrives from as far behind.

    Gradient: travels back; nothing is summed.
    """
    if distance % group.size() == 0:
        return tensor
    return _apply(_RingShift, tensor, group, distance)


class Rotation:
    """Tensors on their way around the ring; compute between start and `wait`.

    Not differentiable: for kernels that write their own backward.

    Args:
        tensors: Of the same shapes and dtypes on every rank; left alone.
        group: The ring, in rank order.
        distance: Where they go; negative for backwards.
    """

    def __init__(self, tensors: Sequence[Tensor], group: ProcessGroup, distance: int = 1) -> None:
        size, rank = group.size(), group.rank()
        target = dist.get_global_rank(group, (rank + distance) % size)
        source = dist.get_global_rank(group, (rank - distance) % size)
        # Held until `wait`: a transport may still read what Python has let go of.
        self._sent = [tensor.contiguous() for tensor in tensors]
        self._works: list[dist.Work] = []
        if size == 1:
            self._received = self._sent
            return
        self._received = [torch.empty_like(tensor) for tensor in self._sent]
        operations = []
        for own, other in zip(self._sent, self._received, strict=True):
            operations.append(dist.P2POp(dist.isend, own, target, group))
            operations.append(dist.P2POp(dist.irecv, other, source, group))
        self._works = dist.batch_isend_irecv(operations)

    def wait(self) -> list[Tensor]:
        """Returns the tensors that have arrived, in the order they were given in."""
        for work in self._works:
            work.wait()
        return self._received


def refuse_disagreement(values: Sequence[int], group: ProcessGroup, what: str, repair: str) -> None:
    """Stops every rank of the group when their numbers differ. Collective.

    Args:
        values: Equally many on every rank; they fit into 63 bits.
        group: The ranks that have to agree.
        what: What the numbers describe.
        repair: What the user can do.

    Raises:
        ValueError: On every rank of the group together, with the numbers of each.
    """
    if group.size() == 1:
        return
    device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
    own = torch.tensor(list(values), dtype=torch.int64, device=device)
    gathered = own.new_empty(group.size() * len(values))
    dist.all_gather_single(gathered, own, group=group)
    gathered = gathered.view(group.size(), len(values))
    if bool((gathered != gathered[0]).any()):
        raise ValueError(
            f"{what} differs between ranks that have to agree: {gathered.tolist()}; repair: {repair}"
        )


def _apply(function: type[torch.autograd.Function], *arguments: Any) -> Tensor:
    result: Tensor = function.apply(*arguments)  # type: ignore[no-untyped-call]
    return result


def _exchanged(tensor: Tensor, group: ProcessGroup, split_dim: int, join_dim: int) -> Tensor:
    num_ranks = group.size()
    # Both ends of the exchange lie contiguously: part p is row p.
    parts = torch.stack(tensor.chunk(num_ranks, split_dim)).contiguous()
    arrived = torch.empty_like(parts)
    dist.all_to_all_single(arrived, parts, group=group)
    return torch.cat(arrived.unbind(), join_dim)


def _shifted(tensor: Tensor, group: ProcessGroup, distance: int) -> Tensor:
    return Rotation([tensor], group, distance).wait()[0]


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: ProcessGroup, split_dim: int, join_dim: int) -> Tensor:
        ctx.arguments = (group, join_dim, split_dim)
        return _exchanged(tensor, group, split_dim, join_dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return _exchanged(gradient, *ctx.arguments), None, None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: ProcessGroup, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        rows = tensor.movedim(dim, 0).contiguous()
        gathered = rows.new_empty(group.size() * rows.shape[0], *rows.shape[1:])
        dist.all_gather_single(gathered, rows, group=group)
        return gathered.movedim(0, dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        rows = gradient.movedim(ctx.dim, 0).contiguous()
        own = rows.new_empty(rows.shape[0] // ctx.group.size(), *rows.shape[1:])
        dist.reduce_scatter_single(own, rows, group=ctx.group)
        return own.movedim(0, ctx.dim), None, None


class _RingShift(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: ProcessGroup, distance: int) -> Tensor:
        ctx.arguments = (group, -distance)
        return _shifted(tensor, group, distance)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _shifted(gradient, *ctx.arguments), None, None


__all__ = ["Rotation", "all_to_all", "gather", "refuse_disagreement", "ring_shift"]
