"""Every rank's own shard of every gradient is right: gathering on one rank would not see what other replicas hold."""

from __future__ import annotations

import functools

import pytest
import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor

from shoal.config.schema import FSDP2Config, ParallelismSizes
from shoal.models.assemble import Numerics, assemble
from shoal.parallel.setup import DistributedSetup
from shoal.train.step import num_supervised, to_device
from tests.parity.harness import CPU, Layout, deal, micro_batches_of, plan_of, reference
from tests.parity.text import text_case
from tests.zygote import RankRunner

CASE = text_case("llama-odd", 5, num_steps=1, max_norm=None)
LAYOUTS = {
    layout.name: layout
    for layout in (
        Layout("hsdp2x2", 4, sizes=ParallelismSizes(dp_replicate_size=2)),
        Layout("hsdp2x1-tp2", 4, sizes=ParallelismSizes(dp_size=2, tp_size=2)),
        Layout(
            "hsdp2x2-tp2-sp",
            8,
            sizes=ParallelismSizes(dp_replicate_size=2, tp_size=2),
            fsdp2=FSDP2Config(sequence_parallel=True),
        ),
    )
}


def errors_here(
    rank: int, world: int, layout: Layout, expected: dict[str, torch.Tensor], lost: bool
) -> dict[str, float]:
    """The error of this rank's shard of each gradient, over the largest entry of the whole gradient."""
    setup = DistributedSetup.build(layout.fsdp2, layout.sizes, world_size=world)
    model = assemble(plan_of(CASE, layout), setup, Numerics(stored=torch.float64), CPU)
    model.module.train()
    batches = micro_batches_of(CASE, 0)
    tokens = sum(num_supervised(batch) for batch in batches)
    mine = deal(batches, model).micro_batches
    for index, micro_batch in enumerate(mine):
        with model.gradient_sync(index == len(mine) - 1):
            if lost:
                assert isinstance(model.module, FSDPModule)
                model.module.set_requires_all_reduce(False)
            (model.forward(to_device(micro_batch, CPU))["loss_sum"] / tokens).backward()
    found = {}
    for name, parameter in model.module.named_parameters():
        assert isinstance(parameter, DTensor)
        place = (parameter.device_mesh, parameter.placements)
        own = distribute_tensor(expected[name], *place, src_data_rank=None).to_local()
        if parameter.grad is None:  # a reduction that never came
            found[name] = 1.0
        elif own.numel():
            error = (parameter.grad.to_local() - own).abs().max()
            found[name] = float(error / expected[name].abs().max())
    return found


@functools.cache
def expected() -> dict[str, torch.Tensor]:
    return reference(CASE).gradients[0]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_rank_holds_its_part_of_the_whole_gradient(ranks: RankRunner, layout: str) -> None:
    row = LAYOUTS[layout]
    for rank, errors in enumerate(ranks(errors_here, row.world, row, expected(), False)):
        bad = {name: error for name, error in errors.items() if error > 1e-10}
        assert errors and not bad, (rank, bad)


def test_a_reduction_over_replicas_that_is_lost_shows(ranks: RankRunner) -> None:
    row = LAYOUTS["hsdp2x2"]
    for errors in ranks(errors_here, row.world, row, expected(), True):
        assert max(errors.values()) > 1e-3
