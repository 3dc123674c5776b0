"""The largest tensor that some operations make."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class Largest(TorchDispatchMode):
    """Notes the numbers of the largest floating-point tensor that an operation makes or fills."""

    numbers = 0

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        result = function(*arguments, **(keywords or {}))
        for value in result if isinstance(result, tuple | list) else [result]:
            is_view = function.is_view if hasattr(function, "is_view") else False
            if isinstance(value, Tensor) and value.is_floating_point() and not is_view:
                self.numbers = max(self.numbers, value.numel())
        return result
