"""What packed attention computes, and where documents lie: shared by its front and its backends."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary


@dataclass(frozen=True)
class AttentionSpec:
    """What a backend computes; see `shoal.kernels.attention.varlen_attention`."""

    causal: bool
    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False  # added afterwards, which needs the gradient of the log-sum-exp


Kernel = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, AttentionSpec], tuple[Tensor, Tensor]]
"""(q, k, v, cu_seqlens_q, cu_seqlens_k, spec) -> (out, lse), all tokens belonging to a document, without sinks."""

_known_borders = WeakIdKeyDictionary()


def borders(cu_seqlens: Tensor) -> tuple[int, ...]:
    """Returns the values of `cu_seqlens` [N+1]; on a GPU they are copied once per tensor, not once per layer.

    Raises:
        ValueError: They do not begin with 0 or decrease somewhere.
    """
    # A tensor made in inference mode has no version that would tell of a change.
    version = None if cu_seqlens.is_inference() else cu_seqlens._version
    known: tuple[int, tuple[int, ...]] | None = _known_borders.get(cu_seqlens)  # type: ignore[no-untyped-call]
    if known is not None and version is not None and known[0] == version:
        return known[1]
    values: tuple[int, ...] = tuple(cu_seqlens.tolist())
    if not values or values[0] != 0 or any(b < a for a, b in zip(values, values[1:], strict=False)):
        raise ValueError(
            f"cu_seqlens: {list(values)} has to begin with 0 and never decrease; "
            "give the running sum of the documents' lengths, with a 0 in front"
        )
    _known_borders[cu_seqlens] = (version, values)
    return values


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns float64 for float64 and float32 for everything else."""
    return torch.float64 if dtype == torch.float64 else torch.float32
