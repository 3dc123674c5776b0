"""The numbers of a training run, gathered in full, and the error measure between two of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


@dataclass
class Record:
    """Losses, gradient norms and gradients per optimizer step; weights before and after.

    Attributes:
        losses: Loss of each step.
        norms: Gradient norm of each step, before clipping.
        tokens: Supervised tokens of each step, as the run counted them.
        gradients: By parameter name, for each step. Of the plain process before clipping, of a layout as the
            optimizer gets them; see `unclipped`.
        initial: Weights before the first step.
        weights: Weights and saved buffers after the last step.
    """

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    initial: dict[str, Tensor] = field(default_factory=dict)
    weights: dict[str, Tensor] = field(default_factory=dict)


def full_tensors(
    module: nn.Module, of: Callable[[nn.Parameter], Tensor | None] = lambda parameter: parameter.detach()
) -> dict[str, Tensor]:
    """Copies of the parameters, or of what `of` gives for each, whole; collective where they are sharded."""
    tensors = {name: of(parameter) for name, parameter in module.named_parameters()}
    return {
        name: (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()
        for name, tensor in tensors.items()
        if tensor is not None
    }


def saved_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Copies of the floating-point buffers that a checkpoint holds, batch-norm statistics above all."""
    kept = module.state_dict().keys()
    return {n: b.clone() for n, b in module.named_buffers() if n in kept and b.is_floating_point()}


class Recording:
    """An optimizer that notes the gradients it is given, in full, and then steps."""

    def __init__(self, optimizer: torch.optim.Optimizer, module: nn.Module, record: Record) -> None:
        self.optimizer, self.module, self.record = optimizer, module, record

    def step(self) -> None:
        """Notes the gradients and steps; collective where they are sharded."""
        self.record.gradients.append(full_tensors(self.module, lambda parameter: parameter.grad))
        self.optimizer.step()

    def zero_grad(self) -> None:
        """Forgets the gradients."""
        self.optimizer.zero_grad()


def unclipped(record: Record, max_norm: float | None) -> list[dict[str, Tensor]]:
    """Gradients of a layout as they were before it clipped them by its own norm."""
    if max_norm is None:
        return record.gradients
    factors = [min(1.0, max_norm / (norm + 1e-6)) for norm in record.norms]
    return [
        {name: gradient / factor for name, gradient in step.items()}
        for step, factor in zip(record.gradients, factors, strict=True)
    ]


def error_of(actual: Tensor, expected: Tensor, largest: float) -> float:
    """max|a-b| / max(max|b|, 1e-3 `largest`); infinite for another shape or a value that is not finite."""
    if actual.shape != expected.shape or not bool(torch.isfinite(actual).all()):
        return float("inf")
    if expected.numel() == 0:
        return 0.0
    difference = float((actual - expected).abs().max())
    scale = max(float(expected.abs().max()), 1e-3 * largest)
    return difference / scale if scale else difference


def largest_entry(tensors: Mapping[str, Tensor]) -> float:
    """The largest absolute value of all entries."""
    return max((float(tensor.abs().max()) for tensor in tensors.values() if tensor.numel()), default=0.0)


def relative_errors(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> dict[str, float]:
    """`error_of` by name. A name that only one side has, with a value other than zero, has an infinite error."""
    largest = largest_entry(expected)
    errors = {}
    for name in [*expected, *(name for name in actual if name not in expected)]:
        if name in actual and name in expected:
            errors[name] = error_of(actual[name], expected[name], largest)
        else:
            lone = actual.get(name, expected.get(name))
            assert lone is not None
            errors[name] = float("inf") if bool(lone.ne(0).any()) else 0.0
    return errors
