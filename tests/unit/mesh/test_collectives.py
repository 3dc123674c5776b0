"""Sums and gathered objects over a group, and what happens to gradients."""

import pytest
import torch
import torch.distributed as dist

from shoal.mesh.collectives import all_gather_objects, all_reduce_sum
from tests.zygote import RankRunner


def use_collectives(rank: int, world_size: int) -> tuple[torch.Tensor, torch.Tensor, list[str]]:
    own = torch.arange(6.0, dtype=torch.float64).view(2, 3).T * (rank + 1)
    group = dist.group.WORLD
    return own, all_reduce_sum(own, group), all_gather_objects(f"rank {rank}", group)


def test_over_three_ranks(ranks: RankRunner) -> None:
    results = ranks(use_collectives, 3)
    for rank, (own, total, objects) in enumerate(results):
        base = torch.arange(6.0, dtype=torch.float64).view(2, 3).T
        assert torch.equal(own, base * (rank + 1))  # the argument is left alone
        assert torch.equal(total, base * 6) and total.dtype == torch.float64
        assert objects == ["rank 0", "rank 1", "rank 2"]


def test_a_job_of_one_process() -> None:
    own = torch.ones(2)
    total = all_reduce_sum(own, None)
    assert torch.equal(total, own) and total is not own
    assert all_gather_objects({"a": 1}, None) == [{"a": 1}]


def test_a_gradient_is_never_lost_silently() -> None:
    with pytest.raises(ValueError, match="requires a gradient"):
        all_reduce_sum(torch.ones(2, requires_grad=True), None)
