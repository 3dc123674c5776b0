"""A copy of a snapshot in host memory, made while the next step computes its gradients.

Parameters and optimizer state change in the optimizer's step and nowhere else, so that a copy that is begun after
one step has until the next one. Everything that a forward may change (buffers) is copied at once.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from shoal.checkpoint.snapshot import Snapshot


@dataclass(frozen=True)
class _Copy:
    source: Tensor
    target: Tensor


class Staging:
    """Host memory for one snapshot, allocated at the first and used again for the following ones.

    The optimizers it is given wait, before they step, until `fill` has copied what they are about to change.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}
        self._pending: list[_Copy] = []
        self._copied = threading.Event()
        self._copied.set()
        self._ready: Any = None
        self._held: WeakSet[Optimizer] = WeakSet()

    def begin(self, snapshot: Snapshot, optimizers: Iterable[Optimizer]) -> Snapshot:
        """A snapshot of host tensors, of which the buffers are filled and the rest will be by `fill`.

        Args:
            snapshot: the state to copy; `fill` reads its tensors until the next optimizer step.
            optimizers: all that change it; without any, everything is copied now.
        """
        optimizers = list(optimizers)
        parameters = {name for name, _ in snapshot.module.named_parameters()}
        self._hold(optimizers)
        if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            self._ready = torch.cuda.current_stream().record_event()
        self._pending = []
        now: list[_Copy] = []
        model: dict[str, Tensor] = {}
        for name, tensor in snapshot.model.items():
            model[name], copy = self._host(f"model/{name}", tensor)
            (self._pending if optimizers and name in parameters else now).append(copy)
        optimizer: dict[str, Tensor] = {}
        for key, tensor in snapshot.optimizer.items():
            optimizer[key], copy = self._host(key, tensor)
            self._pending.append(copy)
        for key in self._buffers.keys() - {f"model/{name}" for name in model} - optimizer.keys():
            del self._buffers[key]
        for copy in now:
            copy.target.copy_(copy.source)
        self._copied.clear()
        return replace(snapshot, model=model, optimizer=optimizer)

    def fill(self) -> None:
        """Copy what `begin` left; call it in another thread. The optimizers may step when it has returned."""
        try:
            if self._ready is None:
                for copy in self._pending:
                    copy.target.copy_(copy.source)
                return
            stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            stream.wait_event(self._ready)
            with torch.cuda.stream(stream):
                for copy in self._pending:
                    copy.target.copy_(copy.source, non_blocking=True)
            stream.synchronize()
        finally:
            self._pending = []
            self._copied.set()

    def _host(self, key: str, tensor: Tensor) -> tuple[Tensor, _Copy]:
        local = _local(tensor).detach()
        buffer = self._buffers.get(key)
        if buffer is None or (buffer.shape, buffer.dtype) != (local.shape, local.dtype):
            buffer = torch.empty(local.shape, dtype=local.dtype, pin_memory=local.is_cuda)
            self._buffers[key] = buffer
        copy = _Copy(local, buffer)
        if not isinstance(tensor, DTensor):
            return buffer, copy
        # Not `from_local`, which would move the copy back to the mesh's device.
        return DTensor(buffer, tensor._spec, requires_grad=False), copy  # type: ignore[no-untyped-call]

    def _hold(self, optimizers: Iterable[Optimizer]) -> None:
        for optimizer in optimizers:
            if optimizer not in self._held:
                self._held.add(optimizer)
                optimizer.register_step_pre_hook(self._wait)

    def _wait(self, *arguments: Any) -> None:
        self._copied.wait()


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
