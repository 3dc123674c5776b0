"""The header of a step: what one rank knows reaches every rank of the job, peers included, counted once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shoal.config.schema import ParallelismSizes
from shoal.data.batch import StepBatch, empty_micro_batch
from shoal.data.position import START
from shoal.mesh.axes import MeshAxisName
from shoal.mesh.context import MeshContext
from shoal.mesh.sizes import resolve_sizes
from shoal.train.step import agree_on_step
from tests.zygote import RankRunner

CPU = torch.device("cpu")


def step_of(num_tokens: int) -> StepBatch:
    """A step with one micro-batch of `num_tokens` supervised tokens, and an empty one."""
    mask = torch.arange(9)[None] <= num_tokens
    micro_batch = empty_micro_batch(0) | {
        "input_ids": torch.ones(1, 9, dtype=torch.int64),
        "loss_mask": mask,
        "text_lens": torch.tensor([num_tokens + 1]),
        "is_empty": False,
    }
    return StepBatch([micro_batch, empty_micro_batch(0)], START)


def agreed(rank: int, world: int, fault: str) -> tuple[int, int, bool]:
    mesh = MeshContext.build(resolve_sizes(ParallelismSizes(tp_size=2), world), "cpu")
    batch = step_of(3 + mesh.dp_rank)
    if fault == "error" and rank == 3:
        batch = replace(batch, error="sample 'x' is bad")
    if fault == "other batch" and rank == 3:
        batch = step_of(5)
    stop = fault == "stop" and rank == 1
    group: Any = mesh.group(MeshAxisName.DP)
    header = agree_on_step(batch, group, CPU, stop_requested=stop, everyone=dist.group.WORLD)
    return header.num_tokens, header.num_samples, header.stop_requested


@pytest.mark.parametrize("fault", ["", "stop"])
def test_peers_are_counted_once_and_one_rank_can_stop_all(ranks: RankRunner, fault: str) -> None:
    assert ranks(agreed, 4, fault) == [(7, 2, fault == "stop")] * 4


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("error", "data of this step failed:\nsample 'x' is bad"),
        ("other batch", "2 peers of a data-parallel coordinate must have the same batch, and their counts add"),
    ],
)  # fmt: skip
def test_what_one_peer_has_stops_every_rank(ranks: RankRunner, fault: str, message: str) -> None:
    outcomes = ranks(agreed, 4, fault, expect_failure=True)
    assert [(one.kind, one.error_type) for one in outcomes] == [("raised", "RuntimeError")] * 4
    assert all(one.message.startswith(message) for one in outcomes)
