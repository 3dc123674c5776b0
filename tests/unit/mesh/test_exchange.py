"""Exchanges between ranks: what arrives, and that gradients are those of the same computation in one process."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from shoal.mesh.exchange import Rotation, all_to_all, gather, refuse_disagreement, ring_shift
from tests.zygote import RankRunner

DTYPES = (torch.float64, torch.bfloat16)


def _drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _owned(world: int) -> list[Tensor]:
    """[2, 3 * world, 4 * world, 5] per rank: every dimension but the first can be split or joined."""
    return [_drawn(rank, 2, 3 * world, 4 * world, 5) for rank in range(world)]


def _exchange(name: str, tensor: Tensor) -> Tensor:
    group = dist.group.WORLD
    assert group is not None
    if name == "all_to_all":
        return all_to_all(tensor, group, split_dim=2, join_dim=1)
    if name == "gather":
        return gather(tensor, group, dim=1)
    return ring_shift(tensor, group, 2)


def run_exchange(rank: int, world: int, name: str) -> tuple[Tensor, Tensor]:
    own = _owned(world)[rank].requires_grad_()
    # Not contiguous, as what a model hands over seldom is.
    out = _exchange(name, own.transpose(1, 2).contiguous().transpose(1, 2))
    (out * _drawn(50 + rank, *out.shape)).sum().backward()
    assert own.grad is not None
    return out.detach(), own.grad


def _all_to_all_of(owned: list[Tensor]) -> list[Tensor]:
    parts = [tensor.chunk(len(owned), 2) for tensor in owned]
    return [torch.cat([part[rank] for part in parts], 1) for rank in range(len(owned))]


def _gather_of(owned: list[Tensor]) -> list[Tensor]:
    return [torch.cat(owned, 1)] * len(owned)


def _ring_shift_of(owned: list[Tensor]) -> list[Tensor]:
    return [owned[(rank - 2) % len(owned)] for rank in range(len(owned))]


EXCHANGES: dict[str, Callable[[list[Tensor]], list[Tensor]]] = {
    "all_to_all": _all_to_all_of,
    "gather": _gather_of,
    "ring_shift": _ring_shift_of,
}


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("name", EXCHANGES)
def test_values_and_gradients_are_those_of_one_process(ranks: RankRunner, name: str, world: int) -> None:
    results = ranks(run_exchange, world, name)
    owned = [tensor.requires_grad_() for tensor in _owned(world)]
    outs = EXCHANGES[name](owned)
    sum((out * _drawn(50 + rank, *out.shape)).sum() for rank, out in enumerate(outs)).backward()  # type: ignore[union-attr]
    for rank, (out, gradient) in enumerate(results):
        assert torch.equal(out, outs[rank])
        torch.testing.assert_close(gradient, owned[rank].grad, rtol=1e-14, atol=1e-14)


def rotate(rank: int, world: int, dtype: torch.dtype) -> list[list[Tensor]]:
    group = dist.group.WORLD
    assert group is not None
    own = [torch.full((2, 3), float(rank), dtype=dtype), torch.full((4,), 10.0 + rank, dtype=dtype)]
    ahead, back = Rotation(own, group), Rotation(own, group, -1)  # both under way at once
    return [ahead.wait(), back.wait()]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("world", [2, 3])
def test_tensors_travel_around_the_ring(ranks: RankRunner, world: int, dtype: torch.dtype) -> None:
    for rank, (ahead, back) in enumerate(ranks(rotate, world, dtype)):
        for arrived, source in ((ahead, (rank - 1) % world), (back, (rank + 1) % world)):
            assert torch.equal(arrived[0], torch.full((2, 3), float(source), dtype=dtype))
            assert torch.equal(arrived[1], torch.full((4,), 10.0 + source, dtype=dtype))


def disagree(rank: int, world: int, odd_one: int) -> str:
    group = dist.group.WORLD
    assert group is not None
    try:
        refuse_disagreement([7, 5 + (rank == odd_one)], group, "the number of tokens", "share one loader")
    except ValueError as error:
        return str(error)
    return ""


def test_disagreement_is_refused_on_every_rank(ranks: RankRunner) -> None:
    expected = "the number of tokens differs between ranks that have to agree: [[7, 5], [7, 6]]"
    assert all(expected in message for message in ranks(disagree, 2, 1))
    assert ranks(disagree, 2, -1) == ["", ""]


def split_unevenly(rank: int, world: int) -> str:
    group = dist.group.WORLD
    assert group is not None
    try:
        all_to_all(torch.zeros(3, 4), group, split_dim=0, join_dim=1)
    except ValueError as error:
        return str(error)
    return ""


def test_an_uneven_split_is_refused_before_anything_is_sent(ranks: RankRunner) -> None:
    assert all("multiple of the 2 ranks" in message for message in ranks(split_unevenly, 2))
