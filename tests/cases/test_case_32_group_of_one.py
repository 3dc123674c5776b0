"""Case 32: with a group of size 1 gradients are doubled per micro-batch, or overwritten by the last one."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.cases.toy import Toy, step_of, toy_batch, toy_model
from tests.parity.harness import Record
from tests.zygote import RankRunner

ACCUMULATION = 4


def samples() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(8, 4, dtype=torch.float64, generator=generator), torch.arange(8) % 3


def adamw(parameters: object) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.1, weight_decay=0.1)  # type: ignore[arg-type]


def on_one_rank(rank: int, world: int, strategy: str) -> tuple[Record, dict[str, torch.Tensor]]:
    features, targets = samples()
    model = toy_model(Toy, strategy, world, 4, 3)
    mine = [toy_batch(*one) for one in zip(features.split(2), targets.split(2), strict=True)]
    assert len(mine) == ACCUMULATION
    record = step_of(model, mine, adamw(model.module.parameters()))
    weights = {
        n: getattr(p, "full_tensor", lambda p=p: p)().detach() for n, p in model.module.named_parameters()
    }
    return record, weights


@pytest.mark.parametrize("strategy", ["fsdp2", "ddp"])
def test_gradient_and_first_update_equal_the_plain_module(ranks: RankRunner, strategy: str) -> None:
    features, targets = samples()
    plain = toy_model(Toy, "plain", 1, 4, 3).module
    F.cross_entropy(plain.layers[0](features), targets).backward()  # type: ignore[union-attr, operator, index]
    gradients = {name: parameter.grad for name, parameter in plain.named_parameters()}
    adamw(plain.parameters()).step()
    record, weights = ranks(on_one_rank, 1, strategy)[0]
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(record.gradients[0][name], gradients[name], rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(weights[name], parameter.detach(), rtol=1e-12, atol=1e-14)
