"""Case 31: under hybrid sharding the delayed all-reduce over replicas gets lost, or its factor differs from FSDP's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.cases.toy import STRATEGIES, step_of, toy_batch, toy_model
from tests.parity.harness import Record
from tests.zygote import RankRunner


class Slope(nn.Module):
    """loss = w * x, so that the gradient of w is the sum of x over the number of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(1, 4, bias=False)])

    def forward(self, micro_batch: Mapping[str, Any]) -> dict[str, Tensor]:
        out = self.layers[0](micro_batch["features"]).sum()
        zero = torch.zeros(())
        return {"loss_sum": out, "num_correct": zero, "num_tokens": zero}


def on_rank(rank: int, world: int, strategy: str) -> Record:
    mine = [
        # Only the first micro-batch of each rank counts a token: four in all.
        toy_batch(
            torch.tensor([[(rank + 1.0) * (index + 1)]], dtype=torch.float64), torch.tensor([0]), [index == 0]
        )
        for index in range(2)
    ]
    return step_of(toy_model(Slope, strategy, world), mine)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_sums_over_ranks_and_micro_batches(ranks: RankRunner, strategy: str) -> None:
    for record in ranks(on_rank, 4, strategy):
        # sum over ranks (1+2+3+4) x sum over micro-batches (1+2) / 4 tokens
        assert torch.equal(
            record.gradients[0]["layers.0.weight"], torch.full((4, 1), 7.5, dtype=torch.float64)
        )
