"""Compiled layers compute what eager ones do, under sharding and recomputation, and keep their names."""

from __future__ import annotations

import functools

import pytest
import torch
from torch._dynamo.utils import counters

from shoal.config.llm import CompileConfig
from shoal.config.schema import FSDP2Config, ParallelismSizes
from shoal.models.assemble import ModelPlan, Numerics, assemble
from shoal.parallel.compile import compile_layers
from tests.families import tiny_lm
from tests.parity.harness import Case, Layout, Record, assert_parity, reference, run_layout
from tests.parity.text import text_case
from tests.zygote import RankRunner

EAGER = CompileConfig(enabled=True, backend="aot_eager")
LAYOUTS = {
    layout.name: layout
    for layout in (
        Layout("ddp2", 2, "ddp"),
        Layout("fsdp2", 2),
        Layout("fsdp2-checkpointing", 2, checkpoint_llm=True),
        Layout(
            "tp2-sp-checkpointing",
            2,
            sizes=ParallelismSizes(tp_size=2),
            fsdp2=FSDP2Config(sequence_parallel=True),
            checkpoint_llm=True,
        ),
    )
}


def run_compiled(rank: int, world: int, case: Case, layout: Layout) -> tuple[Record | None, int, int]:
    """The record, the number of graphs compiled, and the number of graph breaks."""
    counters.clear()
    record = run_layout(rank, world, case, layout)
    return record, counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())


@functools.cache
def expected(family: str) -> Record:
    return reference(text_case(family))


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("llama", "ddp2"),
        pytest.param("llama", "fsdp2-checkpointing", marks=pytest.mark.full),
        ("llama", "tp2-sp-checkpointing"),
        pytest.param("gemma3", "fsdp2-checkpointing", marks=[pytest.mark.slow, pytest.mark.full]),
        pytest.param("qwen3-moe", "fsdp2", marks=[pytest.mark.slow, pytest.mark.full]),
    ],
)
def test_compiled_layers_change_no_number(ranks: RankRunner, family: str, layout: str) -> None:
    case = text_case(family, compile=EAGER)
    row = LAYOUTS[layout]
    record, num_graphs, _ = ranks(run_compiled, row.world, case, row, timeout=180)[0]
    assert num_graphs >= 1
    assert_parity(record, expected(family), case)


@pytest.mark.slow
def test_inductor_stays_within_single_precision(ranks: RankRunner) -> None:
    case = text_case(
        "llama", dtype=torch.float32, optimizer="sgd", compile=CompileConfig(enabled=True, fullgraph=True)
    )
    row = LAYOUTS["fsdp2-checkpointing"]
    record, num_graphs, num_breaks = ranks(run_compiled, row.world, case, row, timeout=400)[0]
    assert num_graphs >= 1 and num_breaks == 0
    assert_parity(record, reference(text_case("llama", dtype=torch.float32, optimizer="sgd")), case)


def test_names_stay() -> None:
    plain, compiled = (
        assemble(
            ModelPlan(lambda: tiny_lm("llama"), llm="", compile=config), None, Numerics(), torch.device("cpu")
        )
        for config in (None, EAGER)
    )
    assert list(plain.module.state_dict()) == list(compiled.module.state_dict())


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (CompileConfig(backend="speedy"), "compile.backend = 'speedy': one of .*inductor"),
        (CompileConfig(backend="aot_eager", mode="max-autotune"), "repair: compile.mode=default"),
    ],
)
def test_settings_that_mean_nothing_are_refused(config: CompileConfig, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        compile_layers(tiny_lm("llama"), config)
    with pytest.raises(ValueError, match="no list of layers"):
        compile_layers(torch.nn.Linear(1, 1), EAGER)
