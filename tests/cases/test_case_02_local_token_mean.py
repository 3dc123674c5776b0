"""Case 2: each rank dividing by its own token count weights the tokens of short ranks too much."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.cases.toy import Toy, step_of, toy_batch, toy_model
from tests.parity.harness import Record
from tests.zygote import RankRunner

# Supervised rows of each micro-batch, by rank; rank 0 has 1 token and rank 1 has 7 with accumulation 1.
SPLITS: dict[str, list[list[int]]] = {
    "accumulation-1": [[1], [7]],
    "accumulation-2": [[1, 0], [4, 3]],
    "accumulation-4": [[0, 1, 0, 0], [3, 0, 2, 2]],
    "short-last-window": [[1, 3], [4]],
}


def tokens() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    return torch.randn(8, 3, dtype=torch.float64, generator=generator), torch.arange(8) % 5


def on_rank(rank: int, world: int, strategy: str, split: str) -> Record:
    features, targets = tokens()
    counts = SPLITS[split]
    start = sum(counts[0]) if rank else 0
    mine = []
    for count in counts[rank]:
        rows = slice(start, start + max(count, 1))  # a micro-batch without a supervised row still has a row
        supervised = [True] * count or [False]
        if start >= 8:
            rows = slice(0, 1)
        mine.append(toy_batch(features[rows], targets[rows], supervised))
        start += count
    longest = max(len(one) for one in counts)
    empty = {**toy_batch(features[:1], targets[:1], [False]), "is_empty": True}
    mine += [empty] * (longest - len(mine))
    return step_of(toy_model(Toy, strategy, world, 3, 5), mine)


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_loss_and_gradient_are_means_over_all_tokens(ranks: RankRunner, strategy: str, split: str) -> None:
    features, targets = tokens()
    plain = toy_model(Toy, "plain", 1, 3, 5).module
    loss = F.cross_entropy(plain.layers[0](features), targets)  # type: ignore[union-attr, operator, index]
    loss.backward()
    for record in ranks(on_rank, 2, strategy, split):
        assert record.losses[0] == pytest.approx(loss.item(), rel=1e-12)
        for name, parameter in plain.named_parameters():
            torch.testing.assert_close(record.gradients[0][name], parameter.grad)
