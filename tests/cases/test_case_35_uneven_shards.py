"""Case 35: parameters whose first dimension does not divide by the number of ranks, or is smaller than it.

Rebuilding such a tensor from its local shards by a guess gives a wrong global shape (two shards of a (5, 2) look
like (6, 2) and (4, 2)). The checkpoint takes the true shape from the parameter and its Adam states.
"""

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from shoal.checkpoint.reader import TensorReader
from shoal.checkpoint.state import load_state, save_state

SHAPES = {"gate": (5, 2), "row": (1, 2), "mamba": (3, 7)}


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        for name, shape in SHAPES.items():
            setattr(self, name, nn.Parameter(torch.randn(shape)))

    def forward(self) -> torch.Tensor:
        return sum((getattr(self, name) ** 3).sum() for name in SHAPES)


def _pass_on(rank: int, world_size: int, source: Path | None, target: Path) -> dict[str, torch.Tensor]:
    """Load `source` on this many ranks (or train two steps), save to `target`; returns the full tensors."""
    model = _Model()
    if world_size > 1:
        fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    if source is not None:
        load_state(source, model=model, optimizer=optimizer)
    for _ in range(0 if source else 2):
        model().backward()
        optimizer.step()
        optimizer.zero_grad()
    save_state(target, model=model, optimizer=optimizer, step=2)
    values = {name: getattr(model, name) for name in SHAPES}
    for name in SHAPES:
        state = optimizer.state[getattr(model, name)]
        values |= {f"{name}/{key}": value for key, value in state.items()}
    return {name: (v.full_tensor() if world_size > 1 and v.ndim else v) for name, v in values.items()}


@pytest.mark.parametrize("first", [2, 4])
def test_exact_round_trips_over_2_or_4_then_3_then_1_ranks(ranks, tmp_path, first):
    source, wanted = None, None
    for size in (first, 3, 1):
        target = tmp_path / f"on={size}"
        tensors = ranks(_pass_on, size, source, target)[0]
        saved = TensorReader(target).tensors()
        for name, shape in SHAPES.items():
            for key in (f"model.{name}", f"optimizer.{name}.exp_avg", f"optimizer.{name}.exp_avg_sq"):
                assert tuple(saved[key].size) == shape
                assert sum(chunk.sizes.numel() for chunk in saved[key].chunks) == torch.Size(shape).numel()
        wanted = wanted or tensors
        assert wanted.keys() == tensors.keys()
        assert [name for name in wanted if not torch.equal(wanted[name], tensors[name])] == []
        source = target
