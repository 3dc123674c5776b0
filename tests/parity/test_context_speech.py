"""Padded conversations are refused under context parallelism; packed ones are in the product of layouts and models."""

from __future__ import annotations

from shoal.config.schema import ParallelismSizes
from tests.parity.harness import Case, Layout, run_layout
from tests.zygote import RankRunner


def run_padded(rank: int, world: int) -> str:
    try:
        run_layout(rank, world, Case(), Layout("cp2", 2, sizes=ParallelismSizes(cp_size=2)))
    except ValueError as error:
        return str(error)
    return ""


def test_padded_conversations_are_refused(ranks: RankRunner) -> None:
    for message in ranks(run_padded, 2, timeout=120):
        assert "cp_size = 2" in message and "model.packed_sequences: true" in message
