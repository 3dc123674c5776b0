"""Law 1 for language models of many families, in full and with adapters, at every number of accumulated batches."""

from __future__ import annotations

import functools

import pytest
import torch

from shoal.config.schema import FSDP2Config, ParallelismSizes
from tests.parity.harness import Layout, Record, assert_parity, reference, run_layout
from tests.parity.text import text_case
from tests.zygote import RankRunner

HSDP = ParallelismSizes(dp_replicate_size=2)
LORA = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"}
FAMILIES = (
    "llama",
    "llama-tied",
    "qwen2",
    "qwen3",
    "gemma3",
    "smollm3",
    "mistral",
    "phi3",
    "qwen3-moe",
    "nemotron-h",
)
LAYOUTS = {
    layout.name: layout
    for layout in (
        Layout("ddp2", 2, "ddp"),
        Layout("fsdp2", 2),
        Layout("fsdp2-no-defer", 2, fsdp2=FSDP2Config(defer_fsdp_grad_sync=False)),
        Layout("fsdp4-checkpointing", 4, checkpoint_llm=True),
        Layout("hsdp2x2", 4, sizes=HSDP),
    )
}


CASES = {
    **{family: text_case(family) for family in FAMILIES},
    **{f"{family}-lora": text_case(family, lora=LORA) for family in ("llama", "qwen3", "gemma3", "smollm3")},
    "llama-1": text_case("llama", 2),
    "llama-2": text_case("llama", 4, unsupervised=(1,)),
    "llama-4": text_case("llama", 8),
    "llama-fp32": text_case("llama", dtype=torch.float32, optimizer="sgd"),
}
"""Without a number, five micro-batches: two or three on each of two ranks, one of them empty."""

# Every family at its richest layout; every layout, every accumulation and LoRA with Llama.
TABLE = [
    *((family, "hsdp2x2") for family in FAMILIES),
    *((family, "fsdp2") for family in ("llama", "qwen3-moe", "nemotron-h")),
    *((f"{family}-lora", layout) for family in ("qwen3", "gemma3", "smollm3") for layout in ("fsdp2",)),
    *(("llama", layout) for layout in LAYOUTS if layout not in ("fsdp2", "hsdp2x2")),
    *(("llama-lora", layout) for layout in ("ddp2", "fsdp4-checkpointing", "hsdp2x2")),
    *((f"llama-{count}", layout) for count in (1, 2, 4) for layout in ("ddp2", "fsdp2")),
    *((family, "ddp2") for family in ("qwen3-moe", "nemotron-h", "llama-tied")),
    ("llama-fp32", "fsdp4-checkpointing"),
]


@functools.cache
def expected(case: str) -> Record:
    return reference(CASES[case])


@pytest.mark.parametrize(("case", "layout"), TABLE)
def test_layout_never_changes_the_numbers(ranks: RankRunner, case: str, layout: str) -> None:
    row = LAYOUTS[layout]
    actual = ranks(run_layout, row.world, CASES[case], row)[0]
    assert_parity(actual, expected(case), CASES[case])
    assert all(torch.isfinite(g).all() for step in actual.gradients for g in step.values())
    frozen = CASES[case].lora is not None
    trained = {name for name in actual.initial if not frozen or ".lora_" in name}
    assert set(actual.gradients[0]) == trained  # every parameter has one
