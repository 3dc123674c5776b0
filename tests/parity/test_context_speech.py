"""Law 1 for speech models under context parallelism: clips divided, tokens shared, the numbers of one process."""

from __future__ import annotations

import functools

import pytest

from shoal.config.schema import ContextMethod, FSDP2Config, ParallelismSizes
from tests.parity.harness import Case, Layout, Record, assert_parity, reference, replace, run_layout
from tests.zygote import RankRunner


def _layout(method: ContextMethod, world: int, sizes: ParallelismSizes, **options: bool) -> Layout:
    fsdp2 = FSDP2Config(cp_method=method, **options)
    return Layout(method, world, sizes=sizes, fsdp2=fsdp2, checkpoint_llm=True, checkpoint_perception=True)


CP2, CP4 = ParallelismSizes(cp_size=2), ParallelismSizes(cp_size=4)
LAYOUTS = {
    "ring-cp2": _layout("ring", 2, CP2),
    "ring-cp4": _layout("ring", 4, CP4),
    "ring-dp2-cp2": _layout("ring", 4, CP2),
    "ulysses-hsdp2x2-cp2": _layout("ulysses", 8, ParallelismSizes(cp_size=2, dp_replicate_size=2)),
    "allgather-cp2-tp2-sp": _layout(
        "allgather", 4, ParallelismSizes(cp_size=2, tp_size=2), sequence_parallel=True
    ),
}
CASES = {
    "whisper": Case(unsupervised=(1,)),
    # A bias before a batch norm has no gradient but rounding noise, which AdamW would blow up: hence SGD.
    "parakeet": Case(encoder="parakeet", optimizer="sgd"),
    "frozen-encoder-lora": Case(
        freeze=(r"^llm\..+", r"^perception\.encoder\..+"),
        lora={"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "down_proj"]},
    ),
}
"""Five micro-batches: ragged, one without audio, on two ranks one of them empty; some have fewer clips than ranks."""


@functools.cache
def expected(case: str) -> Record:
    return reference(CASES[case])  # padded


@pytest.mark.parametrize(
    ("case", "layout"),
    [
        *(("whisper", layout) for layout in LAYOUTS),
        *((case, "ring-dp2-cp2") for case in CASES if case != "whisper"),
    ],
)
def test_layout_never_changes_the_numbers(ranks: RankRunner, case: str, layout: str) -> None:
    row = LAYOUTS[layout]
    packed = replace(CASES[case], packed=True)
    actual = ranks(run_layout, row.world, packed, row, timeout=300)[0]
    assert_parity(actual, expected(case), CASES[case])
    assert set(actual.gradients[0]) == set(expected(case).gradients[0])


def run_padded(rank: int, world: int) -> str:
    try:
        run_layout(rank, world, CASES["whisper"], LAYOUTS["ring-cp2"])
    except ValueError as error:
        return str(error)
    return ""


def test_padded_conversations_are_refused(ranks: RankRunner) -> None:
    for message in ranks(run_padded, 2, timeout=120):
        assert "cp_size = 2" in message and "model.packed_sequences: true" in message
