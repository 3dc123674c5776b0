"""Cases 4 and 5 where ranks share the tokens of a document: they are counted once, labels shift before the split."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from shoal.config.schema import ContextMethod, FSDP2Config, ParallelismSizes
from shoal.models.assemble import ModelPlan, Numerics, assemble
from shoal.parallel.context.split import DualChunks, local_index
from shoal.parallel.setup import DistributedSetup
from tests.cases.toy import CPU, step_of, toy_batch
from tests.parity.harness import Case, Layout, plan_of
from tests.parity.packed_text import build_packed, draw_rows
from tests.zygote import RankRunner


class SharedSlope(nn.Module):
    """loss_t = w * x_t over this rank's chunks of eight tokens."""

    cp_group: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(1, 1, bias=False)])

    def forward(self, micro_batch: Mapping[str, Any]) -> dict[str, Tensor]:
        losses = self.layers[0](micro_batch["features"])[:, 0]
        supervised = micro_batch["loss_mask"][:, 1]
        if self.cp_group is not None:
            layout = DualChunks((8,), self.cp_group.size(), self.cp_group.rank())
            index, is_real = local_index(layout, (0,), CPU)
            losses, supervised = losses[index], supervised[index] & is_real
        return {
            "loss_sum": losses[supervised].sum(),
            "num_correct": supervised.sum(),
            "num_tokens": supervised.sum(),
        }


def slope(rank: int, world: int, cp_size: int) -> tuple[float, float]:
    setup = DistributedSetup.build(FSDP2Config(), ParallelismSizes(cp_size=cp_size))
    # The toy has no attention: what is tested is what its peers count and sum.
    import shoal.models.assemble as assemble_module

    def share(module: SharedSlope, plan: ModelPlan, setup: DistributedSetup) -> None:
        module.cp_group = setup.mesh_context.group(assemble_module.MeshAxisName.CP)

    assemble_module._share_tokens = share  # type: ignore[assignment]
    model = assemble(ModelPlan(SharedSlope, llm="", seed=1), setup, Numerics(stored=torch.float64), CPU)
    x = torch.arange(1.0, 17.0, dtype=torch.float64).view(2, 8, 1)[model.dp_rank]
    supervised = [token < 4 or model.dp_rank == 1 for token in range(8)]
    record = step_of(model, [toy_batch(x, torch.zeros(8, dtype=torch.int64), supervised)])
    return float(record.gradients[0]["layers.0.weight"]), record.norms[0]


@pytest.mark.parametrize("cp_size", [1, 2])
def test_twelve_tokens_whatever_the_layout(ranks: RankRunner, cp_size: int) -> None:
    right = (1 + 2 + 3 + 4 + sum(range(9, 17))) / 12  # the local means give 7.5, tokens counted twice 4.5833
    for gradient, norm in ranks(slope, 2 * cp_size, cp_size):
        assert gradient == pytest.approx(right, abs=1e-12) == pytest.approx(9.1667, abs=1e-4)
        assert norm == pytest.approx(right, abs=1e-12)


CASE = Case(build_packed, draw_rows, "llama")
EIGHT: dict[str, Any] = {
    "input_ids": torch.arange(4, 12)[None],
    "loss_mask": torch.ones(1, 8, dtype=torch.bool),
    "text_lens": torch.tensor([8]),
}


def sums(rank: int, world: int, method: ContextMethod) -> tuple[float, float]:
    """Tokens and loss over all ranks."""
    setup = None
    if world > 1:
        setup = DistributedSetup.build(FSDP2Config(cp_method=method), ParallelismSizes(cp_size=world))
    model = assemble(plan_of(CASE, Layout("any", world)), setup, Numerics(stored=torch.float64), CPU)
    out = model.module(EIGHT)
    found = torch.stack([out["num_tokens"].double(), out["loss_sum"].detach()])
    if world > 1:
        dist.all_reduce(found, group=model.loss_group)
    return float(found[0]), float(found[1])


@pytest.mark.parametrize(("world", "method"), [(2, "ring"), (2, "ulysses"), (4, "allgather")])
def test_eight_tokens_have_seven_targets(ranks: RankRunner, world: int, method: ContextMethod) -> None:
    tokens, loss = sums(0, 1, method)
    assert tokens == 7
    for actual in ranks(sums, world, method):
        assert actual[0] == 7  # a shift within each of four chunks would leave 4
        assert actual[1] == pytest.approx(loss, rel=1e-7)  # norms round to float32
