"""Law 1 for context parallelism beyond the product of layouts and models: rows, options, steps without a token."""

from __future__ import annotations

import functools

import pytest

from shoal.config.schema import ContextMethod, FSDP2Config, ParallelismSizes
from tests.parity.context_product import METHODS
from tests.parity.harness import Case, Layout, Record, assert_parity, reference, replace, run_layout
from tests.parity.packed_text import build_packed, draw_rows, packed_case, rows_of
from tests.unit.kernels.families import InDouble
from tests.zygote import RankRunner


def _layouts(method: ContextMethod) -> list[Layout]:
    options = FSDP2Config(cp_method=method)
    eager = replace(options, defer_fsdp_grad_sync=False)
    cp2, cp4 = ParallelismSizes(cp_size=2), ParallelismSizes(cp_size=4)
    return [
        Layout(f"{method}-cp2", 2, sizes=cp2, fsdp2=options),
        Layout(f"{method}-cp2-checkpointing", 2, sizes=cp2, fsdp2=options, checkpoint_llm=True),
        Layout(f"{method}-cp4", 4, sizes=cp4, fsdp2=options),
        Layout(f"{method}-dp2-cp2", 4, sizes=cp2, fsdp2=options, checkpoint_llm=True),
        Layout(f"{method}-dp2-cp2-no-defer", 4, sizes=cp2, fsdp2=eager),
    ]


LAYOUTS = {layout.name: layout for method in METHODS for layout in _layouts(method)}
CASES = {
    **{
        family: packed_case(family) for family in ("llama", "gemma3", "gpt-oss", "phi3-long", "llama-dynamic")
    },
    "llama-unsupervised": packed_case("llama", 4, unsupervised=(0, 1, 2)),
    "llama-nothing": packed_case("llama", 2, unsupervised=(0, 1), max_norm=None),
}
CASES |= {f"{name}-rows": replace(case, draw=draw_rows) for name, case in CASES.items()}
"""Five micro-batches: two or three on each of two ranks, one of them empty."""

TABLE = [
    ("llama", "ring-cp2-checkpointing"),
    *(("llama", f"{method}-dp2-cp2-no-defer") for method in METHODS),
    *(("llama-rows", layout) for layout in ("ring-cp2", "ring-dp2-cp2", "allgather-cp2", "ulysses-cp4")),
    *((f"{family}-rows", "ring-cp2") for family in ("gemma3", "gpt-oss")),
    ("phi3-long", "ring-cp4"),
    ("phi3-long-rows", "ulysses-cp2"),
    ("llama-dynamic", "ring-dp2-cp2"),
    ("llama-unsupervised", "ring-dp2-cp2"),
    ("llama-unsupervised", "ulysses-cp2"),
    ("llama-nothing", "ring-dp2-cp2"),
]


@functools.cache
def expected(case: str) -> Record:
    with InDouble():
        return reference(rows_of(CASES[case]))


def run_in_double(rank: int, world: int, case: Case, layout: Layout) -> Record | None:
    """As `run_layout`; norms that round to float32 would turn the order of a sum into an error of 1e-9."""
    with InDouble():
        return run_layout(rank, world, case, layout)


@pytest.mark.parametrize(("case", "layout"), TABLE)
def test_layout_never_changes_the_numbers(ranks: RankRunner, case: str, layout: str) -> None:
    row, chosen = LAYOUTS[layout], CASES[case]
    assert chosen.build is build_packed
    actual = ranks(run_in_double, row.world, chosen, row, timeout=300)[0]
    assert_parity(actual, expected(case), chosen)
