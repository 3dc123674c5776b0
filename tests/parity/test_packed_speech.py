"""Law 1 for packed conversations: every layout, packed, gives the numbers of one plain process that pads."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest

from shoal.config.schema import ParallelismSizes
from tests.parity.harness import Case, Layout, Record, assert_parity, reference, run_layout
from tests.zygote import RankRunner

LAYOUTS = {
    layout.name: layout
    for layout in (
        Layout("ddp2", 2, "ddp"),
        Layout("fsdp2", 2),
        Layout("fsdp4-checkpointing", 4, checkpoint_llm=True, checkpoint_perception=True),
        Layout("hsdp2x2", 4, sizes=ParallelismSizes(dp_replicate_size=2)),
    )
}
CASES = {
    "whisper": Case(unsupervised=(1,)),
    # A bias before a batch norm has no gradient but rounding noise, which AdamW would blow up: hence SGD.
    "parakeet": Case(encoder="parakeet", optimizer="sgd"),
    "tied": Case(tied=True),
    "lora": Case(lora={"r": 4, "lora_alpha": 8, "target_modules": "all-linear"}),
}
"""Five micro-batches: ragged, one without audio, on two ranks one of them empty."""


def packed(case: Case) -> Case:
    return replace(case, packed=True)


@functools.cache
def expected(case: str) -> Record:
    return reference(CASES[case])


@pytest.mark.parametrize(
    ("case", "layout"),
    [
        *(("whisper", layout) for layout in LAYOUTS),
        *((case, "fsdp2") for case in CASES if case != "whisper"),
        ("lora", "hsdp2x2"),
    ],
)
def test_packing_and_the_layout_change_no_number(ranks: RankRunner, case: str, layout: str) -> None:
    row = LAYOUTS[layout]
    actual = ranks(run_layout, row.world, packed(CASES[case]), row)[0]
    assert_parity(actual, expected(case), CASES[case])
    assert set(actual.gradients[0]) == set(expected(case).gradients[0])


def test_in_one_process() -> None:
    assert_parity(
        reference(packed(CASES["whisper"])), expected("whisper"), replace(CASES["whisper"], max_norm=None)
    )
