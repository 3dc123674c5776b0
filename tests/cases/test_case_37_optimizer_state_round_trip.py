"""Case 37: optimizer state through a distributed checkpoint.

Raw optimizer dictionaries restore nothing; helpers that materialise missing state step the optimizer, so a
save before the first step shifts Adam's bias correction for ever; a trainable parameter that never had a
gradient has no state to save but is demanded on load.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from shoal.checkpoint.state import load_state, save_state


class _Model(nn.Module):
    """`never` is trainable and gets no gradient; `late` gets its first one at step 2."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.always = nn.Linear(4, 3)
        self.late = nn.Linear(3, 3)
        self.never = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor, step: int) -> torch.Tensor:
        """[B, 4] -> [B, 3]."""
        x = self.always(x)
        return self.late(x) if step >= 2 else x


def _build(world_size: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = _Model()
    if world_size > 1:
        fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)))
    return model, torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        torch.manual_seed(step)
        model(torch.randn(5, 4), step).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def _snapshot(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    tensors = {}
    for name, parameter in model.named_parameters():
        named = {"": parameter, **optimizer.state.get(parameter, {})}
        for state, value in named.items():
            local = value.to_local() if hasattr(value, "to_local") else value
            tensors[f"{name}/{state}"] = local.detach().clone()
    return tensors


def _same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def _save_at(rank: int, world_size: int, directory: Path, saved_at: int) -> dict[str, Any]:
    total = 4
    model, optimizer = _build(world_size)
    _train(model, optimizer, range(total))
    undisturbed = _snapshot(model, optimizer)

    model, optimizer = _build(world_size)
    _train(model, optimizer, range(saved_at))
    before = _snapshot(model, optimizer)
    path = save_state(directory / f"step={saved_at}", model=model, optimizer=optimizer, step=saved_at)
    after = _snapshot(model, optimizer)
    gradients = [name for name, p in model.named_parameters() if p.grad is not None]
    _train(model, optimizer, range(saved_at, total))
    continued = _snapshot(model, optimizer)

    model, optimizer = _build(world_size)
    _train(model, optimizer, range(1))  # loading replaces state that is there already
    load_state(path, model=model, optimizer=optimizer)
    loaded = _snapshot(model, optimizer)
    _train(model, optimizer, range(saved_at, total))
    return {
        "saving changes nothing": _same(before, after) and not gradients,
        "the saving run continues undisturbed": _same(undisturbed, continued),
        "loading gives what was saved": _same(before, loaded),
        "the resumed run equals the uninterrupted one": _same(undisturbed, _snapshot(model, optimizer)),
        "states": sorted(name for name in loaded if name.endswith("/step")),
        "steps": {float(value) for name, value in loaded.items() if name.endswith("/step")},
    }


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("saved_at", [0, 1, 3])
def test_saving_has_no_side_effect_and_resuming_is_exact(ranks, tmp_path, world_size, saved_at):
    wanted = {0: [], 1: ["always"], 3: ["always", "late"]}[saved_at]
    for report in ranks(_save_at, world_size, tmp_path, saved_at):
        states = report.pop("states")
        steps = report.pop("steps")
        assert report == dict.fromkeys(report, True)
        assert states == [f"{module}.{part}/step" for module in wanted for part in ("bias", "weight")]
        assert steps == {0: set(), 1: {1.0}, 3: {1.0, 3.0}}[saved_at]
