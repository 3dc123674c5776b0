"""Case 19: groups that own different parameters each clip by a norm of their own."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from shoal.train.clip import gradient_norm, scale_gradients
from tests.zygote import RankRunner


def norms(rank: int, world: int) -> tuple[float, float, float, float]:
    """A dense gradient that both ranks hold, of norm 4, and an expert on each, of norm 40 and 0.4."""
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("ep",))
    dense = nn.Parameter(DTensor.from_local(torch.zeros(1, dtype=torch.float64), mesh, [Replicate()]))
    expert = nn.Parameter(DTensor.from_local(torch.zeros(1, dtype=torch.float64), mesh, [Shard(0)]))
    plain = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    dense.grad = DTensor.from_local(torch.tensor([4.0], dtype=torch.float64), mesh, [Replicate()])
    expert.grad = DTensor.from_local(torch.tensor([(40.0, 0.4)[rank]], dtype=torch.float64), mesh, [Shard(0)])
    plain.grad = torch.zeros(1, dtype=torch.float64)
    parameters = [dense, expert, plain]
    found = [float(gradient_norm(parameters, p)) for p in (2.0, 1.0, float("inf"))]
    scale_gradients(parameters, torch.tensor(found[0]), 1.0)
    return found[0], found[1], found[2], float(dense.grad.to_local())


def test_every_rank_clips_by_the_same_norm(ranks: RankRunner) -> None:
    for two, one, largest, dense in ranks(norms, 2):
        assert two == pytest.approx((16 + 1600 + 0.16) ** 0.5) == pytest.approx(40.2015, abs=1e-4)
        assert one == pytest.approx(44.4)
        assert largest == 40.0
        assert dense == pytest.approx(
            4 / 40.2015, rel=1e-5
        )  # by its group's own norm it would be 0.0995 or 0.995
