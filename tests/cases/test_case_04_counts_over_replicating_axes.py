"""Case 4: peers that see the same tokens count them again, or a loss is scaled for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shoal.config.schema import FSDP2Config, ParallelismSizes
from shoal.models.assemble import ModelPlan, Numerics, assemble
from shoal.parallel.setup import DistributedSetup
from tests.cases.toy import CPU, step_of, toy_batch
from tests.zygote import RankRunner


class Slope(nn.Module):
    """loss_t = w * x_t."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(1, 1, bias=False)])

    def forward(self, micro_batch: Mapping[str, Any]) -> dict[str, Tensor]:
        losses = self.layers[0](micro_batch["features"])[:, 0]
        zero = torch.zeros(())
        return {
            "loss_sum": losses[micro_batch["loss_mask"][:, 1]].sum(),
            "num_correct": zero,
            "num_tokens": zero,
        }


def on_rank(rank: int, world: int, tp_size: int) -> tuple[float, float]:
    setup = DistributedSetup.build(
        FSDP2Config(), ParallelismSizes(tp_size=tp_size) if tp_size > 1 else ParallelismSizes()
    )
    # The toy has no layers to cut: what is tested is what its peers count and sum.
    import shoal.models.assemble as assemble_module

    assemble_module._cut = lambda *_: None  # type: ignore[assignment]
    model = assemble(ModelPlan(Slope, llm="", seed=1), setup, Numerics(stored=torch.float64), CPU)
    x = torch.arange(1.0, 17.0, dtype=torch.float64).view(2, 8, 1)[model.dp_rank]
    supervised = [token < 4 or model.dp_rank == 1 for token in range(8)]
    record = step_of(model, [toy_batch(x, torch.zeros(8, dtype=torch.int64), supervised)])
    return float(record.gradients[0]["layers.0.weight"]), record.norms[0]


@pytest.mark.parametrize("tp_size", [1, 2])
def test_twelve_tokens_whatever_the_layout(ranks: RankRunner, tp_size: int) -> None:
    right = (1 + 2 + 3 + 4 + sum(range(9, 17))) / 12  # the local means would give 7.5
    for gradient, norm in ranks(on_rank, 2 * tp_size, tp_size):
        assert gradient == pytest.approx(right, abs=1e-12) == pytest.approx(9.1667, abs=1e-4)
        assert norm == pytest.approx(right, abs=1e-12)
