"""Law 1 for Mamba-2 models: packs with our scan under every layout, against rows with transformers' in one process."""

from __future__ import annotations

import functools
from contextlib import nullcontext

import pytest
import torch

from shoal.config.schema import FSDP2Config, ParallelismSizes
from tests.parity.context_product import HYBRIDS, MAMBA_METHODS
from tests.parity.harness import Layout, Record, assert_parity, reference, replace
from tests.parity.hybrids import FAULTS, build_rows, hybrid_case, run_in_double
from tests.parity.packed_text import draw_rows, rows_of
from tests.parity.test_llm_families import LAYOUTS
from tests.unit.kernels.families import InDouble
from tests.zygote import RankRunner

LORA = {"r": 4, "lora_alpha": 8, "target_modules": ["in_proj", "out_proj", "q_proj"]}
PACKS = {
    **{family: hybrid_case(family) for family in HYBRIDS},
    **{f"{family}-fp32": hybrid_case(family, dtype=torch.float32, optimizer="sgd") for family in HYBRIDS},
    "bamba-lora": hybrid_case("bamba", lora=LORA),
    "bamba-unsupervised": hybrid_case("bamba", 4, unsupervised=(0, 1, 2)),
}
CASES = {
    **PACKS,
    **{f"{family}-rows": replace(PACKS[family], build=build_rows, draw=draw_rows) for family in HYBRIDS},
}
CP2 = ParallelismSizes(cp_size=2)
CONTEXT = {
    layout.name: layout
    for method in MAMBA_METHODS
    for options in (FSDP2Config(mamba_cp=method, cp_method="allgather"),)
    for layout in (
        Layout(f"{method}-dp2-cp2", 4, sizes=CP2, fsdp2=options),
        Layout(f"{method}-cp2-checkpointing", 2, sizes=CP2, fsdp2=options, checkpoint_llm=True),
    )
}
TP2_SP = Layout("tp2-sp", 2, sizes=ParallelismSizes(tp_size=2), fsdp2=FSDP2Config(sequence_parallel=True))
ALL_LAYOUTS = {**LAYOUTS, **CONTEXT, "tp2-sp": TP2_SP}
TABLE = [
    *((family, layout) for family in HYBRIDS for layout in ("ddp2", "hsdp2x2")),
    *((f"{family}-rows", "fsdp2") for family in HYBRIDS),
    *((f"{family}-fp32", "fsdp4-checkpointing") for family in HYBRIDS),  # in float64 they would round again
    ("bamba-lora", "fsdp2"),
    ("bamba-lora", "ddp2"),
    ("bamba-unsupervised", "fsdp2"),
    *((case, f"{method}-dp2-cp2") for case in ("bamba-rows", "bamba-lora") for method in MAMBA_METHODS),
    ("bamba", "tp2-sp"),
    *(("bamba-fp32", f"{method}-cp2-checkpointing") for method in MAMBA_METHODS),
]


@functools.cache
def expected(name: str) -> Record:
    with InDouble() if CASES[name].dtype == torch.float64 else nullcontext():
        return reference(rows_of(CASES[name]))


@pytest.mark.parametrize(("name", "layout"), TABLE)
def test_layout_never_changes_the_numbers(ranks: RankRunner, name: str, layout: str) -> None:
    row = ALL_LAYOUTS[layout]
    actual = ranks(run_in_double, row.world, CASES[name], row)[0]
    assert_parity(actual, expected(name), CASES[name])
    if CASES[name].lora is None:
        assert set(actual.gradients[0]) == set(actual.initial)
    else:
        trained = {name.rsplit(".", 3)[0].rpartition(".")[2] for name in actual.gradients[0]}
        assert trained == {"in_proj", "out_proj", "q_proj"}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_breaks_the_parity(ranks: RankRunner, fault: str) -> None:
    actual = ranks(run_in_double, 2, CASES["bamba"], LAYOUTS["fsdp2"], fault)[0]
    with pytest.raises(AssertionError, match="gradients differ|not close"):
        assert_parity(actual, expected("bamba"), CASES["bamba"])
