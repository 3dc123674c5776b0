"""Case 5: labels shifted within each shard of the sequence lose a target at every border."""

from __future__ import annotations

import pytest
import torch

from shoal.config.schema import FSDP2Config, ParallelismSizes
from tests.parity.harness import CPU, Layout, plan_of
from tests.parity.text import text_case
from tests.zygote import RankRunner

CASE = text_case("llama")
IDS = torch.arange(4, 12)[None]


def sums(rank: int, world: int, sequence_parallel: bool) -> tuple[float, float]:
    from shoal.models.assemble import Numerics, assemble
    from shoal.parallel.setup import DistributedSetup

    setup = None
    if world > 1:
        setup = DistributedSetup.build(
            FSDP2Config(sequence_parallel=sequence_parallel), ParallelismSizes(tp_size=world)
        )
    model = assemble(plan_of(CASE, Layout("any", world)), setup, Numerics(stored=torch.float64), CPU)
    out = model.module({"input_ids": IDS, "loss_mask": torch.ones_like(IDS, dtype=torch.bool)})
    return float(out["num_tokens"]), float(out["loss_sum"])


@pytest.mark.parametrize(("world", "sequence_parallel"), [(2, False), (2, True), (4, True)])
def test_eight_tokens_have_seven_targets(ranks: RankRunner, world: int, sequence_parallel: bool) -> None:
    tokens, loss = sums(0, 1, False)
    assert tokens == 7
    for actual in ranks(sums, world, sequence_parallel):
        assert actual[0] == 7  # a shift within each of two shards would leave 6
        assert actual[1] == pytest.approx(loss, rel=1e-12)
