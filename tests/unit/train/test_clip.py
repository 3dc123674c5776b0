"""The gradient norm over any placements equals that of the whole model, for every norm."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from shoal.train.clip import gradient_norm, refuse_non_finite, scale_gradients
from tests.zygote import RankRunner

SHAPES = [(5, 2), (1, 3), (8,), (4, 4)]  # uneven shards and empty ones among them
NORMS = [2.0, 1.0, 3.0, math.inf]


def plain_parameters(dtype: torch.dtype = torch.float64) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    parameters = [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in SHAPES]
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(dtype)
    return parameters


def expected_norm(norm_type: float) -> float:
    gradients = torch.cat([p.grad.flatten() for p in plain_parameters() if p.grad is not None])
    return float(torch.linalg.vector_norm(gradients, norm_type))


@pytest.mark.parametrize("norm_type", NORMS)
def test_one_process(norm_type: float) -> None:
    assert float(gradient_norm(plain_parameters(), norm_type)) == pytest.approx(
        expected_norm(norm_type), rel=1e-12
    )


def on_mixed_meshes(rank: int, world: int) -> list[float]:
    """Parameters sharded over four ranks, replicated, sharded over two of them, hybrid, and plain."""
    flat = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    places = [
        (flat, [Shard(0)]),
        (grid, [Replicate(), Shard(0)]),
        (grid["shard"], [Shard(0)]),
        (flat, [Replicate()]),
    ]
    sharded = []
    for plain, (mesh, placements) in zip(plain_parameters(), places, strict=True):
        parameter = nn.Parameter(distribute_tensor(plain.detach(), mesh, placements))
        parameter.grad = distribute_tensor(plain.grad, mesh, placements)  # type: ignore[arg-type]
        assert isinstance(parameter.grad, DTensor)
        sharded.append(parameter)
    return [float(gradient_norm(sharded, norm_type)) for norm_type in NORMS]


def test_a_shard_counts_once_and_a_replica_once(ranks: RankRunner) -> None:
    expected = [expected_norm(norm_type) for norm_type in NORMS]
    for norms in ranks(on_mixed_meshes, 4):
        assert norms == pytest.approx(expected, rel=1e-12)


def test_half_precision_gradients_are_measured_in_fp32() -> None:
    parameter = nn.Parameter(torch.zeros(100_000, dtype=torch.bfloat16))
    parameter.grad = torch.full_like(parameter, 0.01)
    exact = float(parameter.grad[0]) * math.sqrt(100_000)
    assert float(gradient_norm([parameter])) == pytest.approx(exact, rel=1e-5)


def test_a_missing_gradient_counts_as_zero() -> None:
    parameters = [*plain_parameters(), nn.Parameter(torch.zeros(3, dtype=torch.float64))]
    assert float(gradient_norm(parameters)) == pytest.approx(expected_norm(2.0), rel=1e-12)
    assert float(gradient_norm(parameters[-1:])) == 0.0


@pytest.mark.parametrize("max_norm", [0.5, 1e3])
def test_scaling_is_that_of_torch(max_norm: float) -> None:
    ours, theirs = plain_parameters(), plain_parameters()
    scale_gradients(ours, gradient_norm(ours), max_norm)
    nn.utils.clip_grad_norm_(theirs, max_norm)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-12, atol=0)


def test_non_finite_gradients_are_refused_by_name() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    module(torch.ones(1, 2)).sum().backward()
    refuse_non_finite(gradient_norm(module.parameters()), module, None, step=3)
    module[1].weight.grad[0, 0] = float("nan")  # type: ignore[index]
    with pytest.raises(FloatingPointError, match=r"step 3: the gradient norm is nan; .* in: 1\.weight\."):
        refuse_non_finite(gradient_norm(module.parameters()), module, None, step=3)
