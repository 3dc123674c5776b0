"""Law 1 for context parallelism: packs and rows under every layout, against rows in one plain process."""

from __future__ import annotations

import functools

import pytest

from shoal.config.schema import ContextMethod, FSDP2Config, ParallelismSizes
from tests.parity.harness import Case, Layout, Record, assert_parity, reference, replace, run_layout
from tests.parity.packed_text import build_packed, draw_rows, packed_case, rows_of
from tests.unit.kernels.families import InDouble
from tests.zygote import RankRunner

METHODS: tuple[ContextMethod, ...] = ("ring", "allgather", "ulysses")
LORA = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"}


def _layouts(method: ContextMethod) -> list[Layout]:
    options = FSDP2Config(cp_method=method)
    sp = replace(options, sequence_parallel=True)
    eager = replace(options, defer_fsdp_grad_sync=False)
    cp2, cp4 = ParallelismSizes(cp_size=2), ParallelismSizes(cp_size=4)
    tp2 = ParallelismSizes(cp_size=2, tp_size=2)
    hsdp = ParallelismSizes(cp_size=2, dp_replicate_size=2)
    return [
        Layout(f"{method}-cp2", 2, sizes=cp2, fsdp2=options),
        Layout(f"{method}-cp2-checkpointing", 2, sizes=cp2, fsdp2=options, checkpoint_llm=True),
        Layout(f"{method}-cp4", 4, sizes=cp4, fsdp2=options),
        Layout(f"{method}-dp2-cp2", 4, sizes=cp2, fsdp2=options, checkpoint_llm=True),
        Layout(f"{method}-dp2-cp2-no-defer", 4, sizes=cp2, fsdp2=eager),
        Layout(f"{method}-hsdp2x2-cp2", 8, sizes=hsdp, fsdp2=options),
        Layout(f"{method}-cp2-tp2", 4, sizes=tp2, fsdp2=options),
        Layout(f"{method}-cp2-tp2-sp", 4, sizes=tp2, fsdp2=sp),
        Layout(f"{method}-dp2-cp2-tp2-sp", 8, sizes=tp2, fsdp2=sp, checkpoint_llm=True),
    ]


LAYOUTS = {layout.name: layout for method in METHODS for layout in _layouts(method)}
FAMILIES = ("llama", "qwen3", "gemma3", "mistral", "gpt-oss", "qwen3-moe", "smollm3")
PACKS = {
    **{family: packed_case(family) for family in FAMILIES},
    **{f"{family}-lora": packed_case(family, lora=LORA) for family in ("llama", "gemma3")},
    "llama-unsupervised": packed_case("llama", 4, unsupervised=(0, 1, 2)),
    "llama-nothing": packed_case("llama", 2, unsupervised=(0, 1), max_norm=None),
}
CASES = {**PACKS, **{f"{name}-rows": replace(case, draw=draw_rows) for name, case in PACKS.items()}}
"""Five micro-batches: two or three on each of two ranks, one of them empty."""

# A covering selection; the full product is scripts/parity_context.py.
TABLE = [
    *(("llama", layout) for layout in LAYOUTS if layout.startswith("ring")),
    *(
        ("llama", f"{method}-{layout}")
        for method in ("allgather", "ulysses")
        for layout in ("cp4", "dp2-cp2-no-defer", "hsdp2x2-cp2", "dp2-cp2-tp2-sp")
    ),
    *(("llama-rows", layout) for layout in ("ring-cp2", "ring-dp2-cp2", "allgather-cp2", "ulysses-cp4")),
    *((family, "ring-dp2-cp2") for family in FAMILIES[1:] if family != "qwen3-moe"),
    # Routers round to float32 where they are computed again: `InDouble` does not reach into the recomputation.
    ("qwen3-moe", "ring-dp2-cp2-no-defer"),
    *((family, "allgather-cp2") for family in ("gemma3", "mistral", "gpt-oss")),
    *((family, "ulysses-cp2") for family in ("qwen3", "smollm3", "gpt-oss")),
    *((f"{family}-rows", "ring-cp2") for family in ("gemma3", "gpt-oss")),
    *((family, "ring-cp4") for family in ("gemma3", "mistral", "gpt-oss")),
    ("gemma3", "ring-cp2-tp2-sp"),
    ("gpt-oss", "allgather-cp2-tp2-sp"),
    ("qwen3", "ulysses-cp2-tp2-sp"),
    ("llama-lora", "ring-dp2-cp2"),
    ("gemma3-lora", "allgather-dp2-cp2"),
    ("llama-lora", "ulysses-cp2-tp2-sp"),
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
