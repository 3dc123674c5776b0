"""What packed attention computes, and where documents lie: shared by its front and its backends."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

T = TypeVar("T")


@dataclass(frozen=True)
class AttentionSpec:
    """What a backend computes; see `shoal.kernels.attention.varlen_attention`."""

    causal: bool
    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    """Sinks are added afterwards, which needs the gradient of the log-sum-exp."""


@dataclass(frozen=True)
class Part:
    """Which keys the documents' queries look at, when not all keys are in one place.

    Attributes:
        cu_q: Borders of the documents among the queries, [N+1].
        cu_k: Borders among the keys, [N+1].
        positions: Key at which each document's first query stands, counted from the document's first key here;
            None where the last query stands at the last key. It matters to causal attention and to windows.
    """

    cu_q: tuple[int, ...]
    cu_k: tuple[int, ...]
    positions: tuple[int, ...] | None = None


Kernel = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, AttentionSpec], tuple[Tensor, Tensor]]
"""(q, k, v, cu_seqlens_q, cu_seqlens_k, spec) -> (out, lse): every token is in a document, sinks are left out."""


class TensorMemo(Generic[T]):
    """Remembers what follows from a tensor's contents while the tensor lives and stays as it is.

    All layers get the same tensor of borders; on a GPU its values are then copied once and not once per layer.
    """

    def __init__(self) -> None:
        self._known: Any = WeakIdKeyDictionary()

    def of(self, tensor: Tensor, compute: Callable[[], T], *also: Hashable) -> T:
        """Returns `compute()`, or what it was for this tensor and the same `also`."""
        if tensor.is_inference():  # has no version that would tell of a change
            return compute()
        key = (tensor._version, *also)
        known: tuple[Any, T] | None = self._known.get(tensor)
        if known is not None and known[0] == key:
            return known[1]
        value = compute()
        self._known[tensor] = (key, value)
        return value


_borders = TensorMemo[tuple[int, ...]]()


def borders(cu_seqlens: Tensor) -> tuple[int, ...]:
    """Returns the values of `cu_seqlens` [N+1].

    Raises:
        ValueError: They do not begin with 0 or decrease somewhere.
    """
    return _borders.of(cu_seqlens, lambda: _checked(tuple(cu_seqlens.tolist())))


def _checked(values: tuple[int, ...]) -> tuple[int, ...]:
    if not values or values[0] != 0 or any(b < a for a, b in zip(values, values[1:], strict=False)):
        raise ValueError(
            f"cu_seqlens: {list(values)} has to begin with 0 and never decrease; "
            "give the running sum of the documents' lengths, with a 0 in front"
        )
    return values


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns float64 for float64 and float32 for everything else."""
    return torch.float64 if dtype == torch.float64 else torch.float32
