"""The random state of one rank: torch's CPU generator and current device, numpy's and Python's."""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal.checkpoint.plain import decode, encode


@dataclass(frozen=True)
class RandomState:
    """States of the global generators of this process.

    `torch_cpu` and `torch_device` are uint8 tensors on the CPU; `torch_device` is None without an
    accelerator.
    """

    python: tuple[Any, ...]
    numpy: dict[str, Any]
    torch_cpu: Tensor
    torch_device: Tensor | None

    @classmethod
    def capture(cls) -> RandomState:
        """Read the generators without disturbing them."""
        device = torch.cuda.get_rng_state() if _device_in_use() else None
        numpy_state = np.random.get_state(legacy=False)
        return cls(random.getstate(), dict(numpy_state), torch.get_rng_state(), device)

    def restore(self) -> None:
        """Set the generators of this process; the device's only when both sides have one."""
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        torch.set_rng_state(self.torch_cpu)
        if self.torch_device is not None and torch.cuda.is_available():
            torch.cuda.set_rng_state(self.torch_device)

    def to_json(self) -> dict[str, Any]:
        """JSON-able data; `from_json` undoes it exactly."""
        return {name: encode(value, name) for name, value in asdict(self).items()}

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> RandomState:
        """Undo `to_json`."""
        return cls(**{name: decode(value) for name, value in content.items()})


def _device_in_use() -> bool:
    # Asking for the state would create a context on a device that this process never used.
    return torch.cuda.is_available() and bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]
