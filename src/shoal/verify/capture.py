"""What every module puts out in forward, and the gradient that comes back to it, micro-batch by micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn


@dataclass
class Captured:
    """Of one micro-batch.

    Attributes:
        outputs: By module name, in the order of the forward.
        gradients: Of these outputs.
        share: Under context parallelism, this rank's tokens; None when it has them all.
    """

    outputs: dict[str, Tensor] = field(default_factory=dict)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    share: TokenShare | None = None


@dataclass(frozen=True)
class TokenShare:
    """The tokens of a micro-batch that a rank has, in order.

    Attributes:
        index: Place of each among the flattened tokens of the micro-batch, int64 [num_local].
        is_real: False on padding, bool [num_local].
    """

    index: Tensor
    is_real: Tensor


class Capture:
    """Notes the first tensor that each module returns; `next` starts the notes of another micro-batch.

    A module that runs more than once for a micro-batch (recomputation, or chunks) is noted the first time.
    """

    def __init__(self, module: nn.Module) -> None:
        self.taken: list[Captured] = []
        self._current = Captured()
        self._handles: list[Any] = []
        for name, child in module.named_modules():
            if name:
                self._handles.append(child.register_forward_hook(self._hook(name)))

    def next(self) -> None:
        """Ends the notes of a micro-batch."""
        self.taken.append(self._current)
        self._current = Captured()

    def close(self) -> list[Captured]:
        """Ends the last micro-batch, takes the hooks off and returns all notes."""
        self.next()
        for handle in self._handles:
            handle.remove()
        return self.taken

    def shares(self, tokens: TokenShare) -> None:
        """Notes which tokens of the current micro-batch this rank has."""
        self._current.share = tokens

    def _hook(self, name: str) -> Callable[[nn.Module, Any, Any], None]:
        def note(module: nn.Module, inputs: Any, output: Any) -> None:
            current = self._current
            tensor = first_tensor(output)
            if tensor is None or name in current.outputs:
                return
            current.outputs[name] = tensor.detach().clone()
            if tensor.requires_grad and torch.is_grad_enabled():
                tensor.register_hook(lambda gradient: _keep(current, name, gradient))  # type: ignore[no-untyped-call]

        return note


def _keep(current: Captured, name: str, gradient: Tensor) -> None:
    if name not in current.gradients:
        current.gradients[name] = gradient.detach().clone()


def first_tensor(output: Any) -> Tensor | None:
    """The first floating-point tensor in what a module returned; None when there is none."""
    if isinstance(output, Tensor):
        return output if output.is_floating_point() else None
    values = output.values() if isinstance(output, Mapping) else output
    if isinstance(values, tuple | list) or isinstance(output, Mapping):
        return next((tensor for value in values if (tensor := first_tensor(value)) is not None), None)
    return None
