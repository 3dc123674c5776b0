"""Batch normalisation whose running statistics do not depend on the layout.

A micro-batch is normalised by its own statistics, on whatever rank it runs. The running statistics move once per
optimizer step, towards the mean over all micro-batches of all ranks weighted by their frames; torch's own layer
moves them once per forward, on each rank by itself, and again when a checkpointed layer is recomputed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from shoal.mesh.collectives import all_reduce_sum


class StepBatchNorm1d(nn.BatchNorm1d):
    """`nn.BatchNorm1d` over frames [B, C, L] that leaves its running statistics to `update_running_statistics`.

    Attributes:
        observing: Whether forwards count towards the running statistics.
    """

    def __init__(self, plain: nn.BatchNorm1d) -> None:
        """Takes over the parameters and buffers of a plain layer."""
        super().__init__(plain.num_features, plain.eps, plain.momentum)
        self._parameters = plain._parameters
        self._buffers = plain._buffers
        self.training = plain.training
        self.observing = True
        self._seen: Tensor | None = None

    def forward(self, input: Tensor) -> Tensor:
        """Returns normalised frames of the shape of `input`, [B, C, L]."""
        if not self.training:
            return super().forward(input)
        # Inside a backward pass this is a recomputation, which must not count again.
        if self.observing and torch._C._current_graph_task_id() == -1:
            self._observe(input.detach())
        return F.batch_norm(input, None, None, self.weight, self.bias, training=True, eps=self.eps)

    def _observe(self, input: Tensor) -> None:
        precise = input if input.dtype == torch.float64 else input.float()
        variance, mean = torch.var_mean(precise, dim=(0, 2))
        statistics = torch.cat([torch.ones_like(mean[:1]), mean, variance]).double()
        seen = input.shape[0] * input.shape[2] * statistics
        self._seen = seen if self._seen is None else self._seen + seen

    def take_seen(self) -> Tensor:
        """Returns frames and frame-weighted sums of mean and variance, [1 + 2 C] float64, and forgets them."""
        seen, self._seen = self._seen, None
        if seen is None:
            device = self.weight.device
            return torch.zeros(1 + 2 * self.num_features, dtype=torch.float64, device=device)
        return seen

    def move(self, seen: Tensor) -> None:
        """Moves the running statistics by `momentum` towards the means in `seen`; not at all without frames."""
        assert self.running_mean is not None and self.running_var is not None
        assert self.num_batches_tracked is not None and self.momentum is not None
        moves = seen[0] > 0
        mean, variance = torch.split(seen[1:] / seen[0].clamp(min=1), self.num_features)
        for running, target in ((self.running_mean, mean), (self.running_var, variance)):
            running.add_((target.to(running.dtype) - running) * (self.momentum * moves))
        self.num_batches_tracked.add_(moves)


def use_step_batch_norm(module: nn.Module) -> None:
    """Replaces every `nn.BatchNorm1d` below `module` in place; parameter and buffer names stay."""
    for parent in list(module.modules()):
        for name, child in parent.named_children():
            if type(child) is nn.BatchNorm1d:
                setattr(parent, name, StepBatchNorm1d(child))


def update_running_statistics(module: nn.Module, group: ProcessGroup | None) -> None:
    """Moves all running statistics once, after an optimizer step; collective over `group`.

    Args:
        module: The trained module, the same on every rank.
        group: The data-parallel ranks; None for a single process.
    """
    norms = [part for part in module.modules() if isinstance(part, StepBatchNorm1d) and part.training]
    if not norms:
        return
    total = all_reduce_sum(torch.cat([norm.take_seen() for norm in norms]), group)
    parts = torch.split(total, [1 + 2 * norm.num_features for norm in norms])
    for norm, seen in zip(norms, parts, strict=True):
        norm.move(seen)


@contextmanager
def unobserved(module: nn.Module) -> Iterator[None]:
    """Inside, forwards of `module` do not count towards running statistics: for stand-ins without data."""
    norms = [part for part in module.modules() if isinstance(part, StepBatchNorm1d)]
    for norm in norms:
        norm.observing = False
    try:
        yield
    finally:
        for norm in norms:
            norm.observing = True
