"""Sums and gathered objects over a process group; each function states its gradient.

A group of None means a job of one process: nothing is communicated.
"""

from __future__ import annotations

from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

T = TypeVar("T")


def all_reduce_sum(tensor: Tensor, group: ProcessGroup | None) -> Tensor:
    """Sum of `tensor` over the group, as a new tensor of the same shape and dtype.

    Gradient: none. It is meant for counts and sums that are reported or that normalise a loss. Raises
    ValueError for a tensor that requires a gradient, which would be lost without notice.
    """
    if tensor.requires_grad:
        raise ValueError(
            "tensor requires a gradient, which this sum does not propagate; pass tensor.detach()"
        )
    total = tensor.clone(memory_format=torch.contiguous_format)
    if group is not None:
        dist.all_reduce(total, op=dist.ReduceOp.SUM, group=group)
    return total


def all_gather_objects(value: T, group: ProcessGroup | None) -> list[T]:
    """The value of every rank of the group, in group order. Values are pickled.

    Gradient: none.
    """
    if group is None:
        return [value]
    gathered: list[T | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, value, group=group)
    return gathered  # type: ignore[return-value]


__all__ = ["all_gather_objects", "all_reduce_sum"]
