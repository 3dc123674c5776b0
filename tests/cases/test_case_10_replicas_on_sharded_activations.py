"""Case 10: parameters that ranks have in common miss the sum of their gradients, and drift apart."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.tensor import DTensor

import shoal.parallel.tensor.apply as apply_module
from shoal.config.schema import FSDP2Config, ParallelismSizes
from shoal.models.assemble import Numerics, assemble
from shoal.parallel.setup import DistributedSetup
from shoal.train.step import agree_on_step, train_step
from tests.parity.harness import CPU, Layout, deal, plan_of, reference
from tests.parity.text import draw, text_case
from tests.zygote import RankRunner

CASE = text_case("qwen3", 3, num_steps=3)
"""Norms of the residual stream and of heads, and with four ranks two key-value heads that are shared."""


def replicas(rank: int, world: int, honest: bool) -> dict[str, torch.Tensor]:
    """The values of every whole parameter after three steps of AdamW."""
    if not honest:
        apply_module.TensorParallel.sum_partial_gradients = lambda self: None  # type: ignore[method-assign]
    setup = DistributedSetup.build(FSDP2Config(sequence_parallel=True), ParallelismSizes(tp_size=world))
    model = assemble(plan_of(CASE, Layout("any", world)), setup, Numerics(stored=torch.float64), CPU)
    model.module.train()
    optimizer = torch.optim.AdamW(model.module.parameters(), lr=1e-2, weight_decay=0.1)
    for step in range(3):
        batch = deal(draw(CASE, step), model)
        header = agree_on_step(batch, model.group, CPU)
        train_step(model, batch, optimizer, step=step, seed=3, max_norm=0.5, header=header)
    state = model.module.tensor_parallel
    assert len(state.partial) >= 9  # two norms and two of heads in each of two layers, and the last one
    names = {id(module): name for name, module in model.module.named_modules()}
    return {
        f"{names[id(module)]}.{name}": module._parameters[name].detach().full_tensor()
        for module, name in state.partial
        if isinstance(module._parameters[name], DTensor)
    }


@pytest.mark.parametrize("world", [2, 4])
def test_replicas_stay_equal_bit_for_bit_and_right(ranks: RankRunner, world: int) -> None:
    first, *others = ranks(replicas, world, True)
    expected = reference(CASE).weights
    for name, value in first.items():
        assert all(torch.equal(value, other[name]) for other in others), name
        torch.testing.assert_close(value, expected[name], rtol=1e-10, atol=1e-10)


def test_without_the_sum_they_drift_apart(ranks: RankRunner) -> None:
    first, second = ranks(replicas, 2, False)
    assert any(not torch.equal(value, second[name]) for name, value in first.items())
