"""Gradients that have been summed over ranks already, when more is added to them.

Ranks sum at the last micro-batch of a step. Whoever sums after each micro-batch instead, without clearing gradients in
between, would sum what is complete a second time and multiply it by the number of ranks. So each rank takes its share
of what is complete before it adds to it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


class SummedGradients:
    """Remembers which gradients are complete.

    Args:
        parameters: Gives the parameters whose gradients are summed over the ranks, as they are now.
        num_ranks: How many ranks sum.
    """

    def __init__(self, parameters: Callable[[], Iterable[nn.Parameter]], num_ranks: int) -> None:
        self._parameters = parameters
        self._num_ranks = num_ranks
        self._complete: list[weakref.ref[Tensor]] = []

    def share(self) -> None:
        """Before more is added to them: complete gradients become this rank's share, whose sum is what they were."""
        if not self._complete:
            return
        complete = {id(gradient) for reference in self._complete if (gradient := reference()) is not None}
        self._complete = []
        with torch.no_grad():
            for parameter in self._parameters():
                if parameter.grad is not None and id(parameter.grad) in complete:
                    local_gradient(parameter.grad).div_(self._num_ranks)

    def note(self) -> None:
        """After they have been summed."""
        gradients = (parameter.grad for parameter in self._parameters())
        self._complete = [weakref.ref(gradient) for gradient in gradients if gradient is not None]


def local_gradient(gradient: Tensor) -> Tensor:
    """This rank's part of a gradient."""
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient


__all__ = ["SummedGradients", "local_gradient"]
