"""Case 1: a local mean times dp_size, never divided by the accumulation, makes gradients dp x accumulation too big."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.cases.toy import STRATEGIES, Toy, step_of, toy_batch, toy_model
from tests.parity.harness import Record
from tests.zygote import RankRunner

DP, ACCUMULATION, MICRO = 4, 2, 2


def samples() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(DP * ACCUMULATION * MICRO, 5, dtype=torch.float64, generator=generator)
    return features, torch.arange(len(features)) % 3


def on_rank(rank: int, world: int, strategy: str) -> Record:
    features, targets = samples()
    chunks = list(zip(features.split(MICRO), targets.split(MICRO), strict=True))
    mine = [toy_batch(*chunk) for chunk in chunks[rank::world]]
    assert len(mine) == ACCUMULATION
    return step_of(toy_model(Toy, strategy, world, 5, 3), mine)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_gradient_is_that_of_the_mean_over_all_samples(ranks: RankRunner, strategy: str) -> None:
    features, targets = samples()
    plain = toy_model(Toy, "plain", 1, 5, 3).module
    F.cross_entropy(plain.layers[0](features), targets).backward()  # type: ignore[union-attr, operator, index]
    for record in ranks(on_rank, DP, strategy):
        for name, parameter in plain.named_parameters():
            assert parameter.grad is not None
            ratio = record.gradients[0][name].norm() / parameter.grad.norm()
            assert ratio.item() == pytest.approx(1.0, abs=1e-12)
            torch.testing.assert_close(record.gradients[0][name], parameter.grad)
