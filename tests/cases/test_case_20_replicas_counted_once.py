"""Case 20: gradients that tensor-parallel ranks have in common are counted once for each rank."""

from __future__ import annotations

import pytest
import torch

from shoal.config.schema import FSDP2Config, ParallelismSizes
from shoal.models.assemble import Numerics, assemble
from shoal.parallel.setup import DistributedSetup
from shoal.train.clip import gradient_norm
from tests.parity.harness import CPU, Layout, micro_batches_of, plan_of
from tests.parity.text import text_case
from tests.zygote import RankRunner

CASE = text_case("qwen3", 1)
TYPES = (2.0, 1.0, 3.0, float("inf"))


def norms(rank: int, world: int, dp_size: int, sequence_parallel: bool) -> list[float]:
    setup = None
    if world > 1:
        setup = DistributedSetup.build(
            FSDP2Config(sequence_parallel=sequence_parallel), ParallelismSizes(tp_size=world // dp_size)
        )
    model = assemble(plan_of(CASE, Layout("any", world)), setup, Numerics(stored=torch.float64), CPU)
    with model.gradient_sync(True):
        (model.forward(micro_batches_of(CASE, 0)[0])["loss_sum"] / dp_size).backward()
    parameters = list(model.module.parameters())
    if setup is None:  # torch's own, of one process
        return [float(torch.nn.utils.get_total_norm([p.grad for p in parameters], p)) for p in TYPES]
    return [float(gradient_norm(parameters, p)) for p in TYPES]


@pytest.mark.parametrize(
    ("world", "dp_size", "sequence_parallel"), [(2, 1, False), (2, 1, True), (4, 2, True)]
)
def test_the_norm_is_that_of_the_whole_model(
    ranks: RankRunner, world: int, dp_size: int, sequence_parallel: bool
) -> None:
    expected = norms(0, 1, 1, False)
    for actual in ranks(norms, world, dp_size, sequence_parallel):
        assert actual == pytest.approx(expected, rel=1e-10)
