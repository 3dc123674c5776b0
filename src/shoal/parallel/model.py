"""The one interface between a parallelised model and the training step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

MicroBatch = Mapping[str, Any]
"""One micro-batch: tensors and metadata by name, see `shoal.data`."""

Sums = Mapping[str, Tensor]
"""What a trainable module returns: scalars ``loss_sum`` (with gradient), ``num_correct`` and ``num_tokens``."""


def no_gradient_sync(enabled: bool) -> AbstractContextManager[None]:
    """Gradients of a model on one process need no synchronisation."""
    del enabled
    return nullcontext()


GradientSync = Callable[[bool], AbstractContextManager[None]]
"""See `ParallelModel.gradient_sync`."""


def surrounded(sync: GradientSync, begin: Callable[[], None], finish: Callable[[], None]) -> GradientSync:
    """Calls `begin` before each micro-batch, and `finish` when the gradients of the last one have been synchronised."""

    @contextmanager
    def synchronised(last: bool) -> Iterator[None]:
        begin()
        with sync(last):
            yield
        if last:
            finish()

    return synchronised


@dataclass(frozen=True)
class ParallelModel:
    """A trainable module on its mesh: how to run it, and when its gradients are summed over the ranks.

    Attributes:
        module: The module itself, under the names of its parameters. Owns state dict, optimizer and evaluation.
        forward: Runs one micro-batch *for training*: the DDP wrapper's own forward, or the module.
        gradient_sync: ``with gradient_sync(last): ...backward()``; gradients are summed over the data-parallel
            ranks when `last` is true, and kept local until then (or reduced right away when the strategy does
            not defer).
        group: The data-parallel group, over which tokens are counted; None on one process.
        device: Where micro-batches are moved to.
        loss_group: The ranks over which losses are summed: with context parallelism also those that share the tokens
            of a micro-batch. `group` when not given.
    """

    module: nn.Module
    forward: Callable[[MicroBatch], Sums]
    gradient_sync: GradientSync
    group: ProcessGroup | None
    device: torch.device
    loss_group: ProcessGroup | None = None

    def __post_init__(self) -> None:
        if self.loss_group is None:
            object.__setattr__(self, "loss_group", self.group)

    @property
    def dp_size(self) -> int:
        """Number of data-parallel ranks."""
        return 1 if self.group is None else self.group.size()

    @property
    def dp_rank(self) -> int:
        """Data-parallel coordinate of this rank."""
        return 0 if self.group is None else self.group.rank()


def single_process(module: nn.Module, device: torch.device) -> ParallelModel:
    """Wraps a module that lives on one process alone."""
    return ParallelModel(module, module, no_gradient_sync, None, device)
