"""Mamba-2 models for the parity harness, in float64 throughout where transformers would round to float32."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch import nn

from shoal.kernels import ssd_chunked, ssd_convolution
from shoal.models import mamba
from tests.parity import text
from tests.parity.harness import Case, Layout, Record, replace, run_layout
from tests.parity.packed_text import build_packed, packed_case
from tests.unit.kernels.families import InDouble


def build(case: Case) -> nn.Module:
    """The model of `build_packed` with our scan."""
    module = build_packed(case)
    assert mamba.substitute_mamba(module.llm)  # type: ignore[arg-type]
    return module


def build_rows(case: Case) -> nn.Module:
    """The same with transformers' own attention."""
    module = text.build(case)
    assert mamba.substitute_mamba(module.llm)  # type: ignore[arg-type]
    return module


def hybrid_case(family: str, num_micro_batches: int | None = None, **changes: object) -> Case:
    """Packs; compared with `rows_of` it, which has transformers' own scan.

    Without a number, five micro-batches: two or three on each of two ranks, one of them empty. GraniteMoeHybrid gets
    eight, because the harness's empty ones are rows, and its packed attention needs borders.
    """
    number = num_micro_batches or (8 if family == "granite-hybrid" else 5)
    return replace(packed_case(family, number, **changes), build=build)


def run_in_double(rank: int, world: int, case: Case, layout: Layout, fault: str = "") -> Record | None:
    if fault:
        FAULTS[fault]()  # this rank is a forked process: the fault dies with it
    ssd_chunked.CHUNK_TOKENS, ssd_chunked.BLOCK_TOKENS = 4, 16
    with InDouble() if case.dtype == torch.float64 else nullcontext():
        return run_layout(rank, world, case, layout)


def state_is_not_reset() -> None:
    right = ssd_chunked._masks
    ssd_chunked._masks = lambda span, size, _, like: right(span, size, None, like)


def convolution_is_not_reset() -> None:
    ssd_convolution._masked = lambda x, *_: x


def borders_are_not_read() -> None:
    mamba._documents = lambda given, args: None


FAULTS: dict[str, Callable[[], None]] = {
    "state": state_is_not_reset,
    "convolution": convolution_is_not_reset,
    "borders": borders_are_not_read,
}
