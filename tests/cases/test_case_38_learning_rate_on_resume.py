"""Case 38: learning rate and weight decay of every step after a resumption.

They equal the uninterrupted run's from the first resumed step, at warm-up, peak and decay. When the end of the
schedule is changed, the first resumed step still uses the rate that was computed for it before; from the next one
on the rate is what the new schedule says for that step.
"""

from pathlib import Path

import pytest
import torch
from torch import nn

from shoal.checkpoint.state import load_state, save_state
from shoal.config.values import TargetConfig
from shoal.train.optim import build_optimizer, build_scheduler

MAX_STEPS = 12
OPTIMIZER = TargetConfig("torch.optim.AdamW", {"lr": 0.1, "weight_decay": 0.03})
SCHEDULE = TargetConfig("shoal.train.optim.CosineAnnealing", {"warmup_steps": 3, "min_lr": 0.01})


def _rates(
    steps: range, max_steps: int, source: Path | None = None, save_at: dict[int, Path] | None = None
) -> list[tuple[float, float]]:
    """(learning rate, weight decay) that each step of `steps` is taken with."""
    model = nn.Linear(2, 1)
    optimizer = build_optimizer(OPTIMIZER, model)
    scheduler = build_scheduler(SCHEDULE, optimizer, max_steps)
    assert scheduler is not None
    if source is not None:
        load_state(source, model=model, optimizer=optimizer, scheduler=scheduler)
    used = []
    for step in steps:
        if save_at and step in save_at:
            save_state(save_at[step], model=model, optimizer=optimizer, scheduler=scheduler, step=step)
        model(torch.ones(1, 2)).sum().backward()
        group = optimizer.param_groups[0]
        used.append((group["lr"], group["weight_decay"]))
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    return used


@pytest.mark.parametrize("stop", [1, 3, 4, 8], ids=["warm-up", "peak", "after the peak", "decay"])
def test_every_rate_equals_the_uninterrupted_runs(tmp_path, stop):
    whole = _rates(range(MAX_STEPS), MAX_STEPS, save_at={stop: tmp_path / "saved"})
    assert len({rate for rate, _ in whole}) > 8  # the schedule does move
    assert _rates(range(stop, MAX_STEPS), MAX_STEPS, tmp_path / "saved") == whole[stop:]


def test_a_changed_end_applies_from_the_second_resumed_step(tmp_path):
    old = _rates(range(MAX_STEPS), MAX_STEPS, save_at={8: tmp_path / "saved"})
    new = _rates(range(20), 20)
    resumed = _rates(range(8, 20), 20, tmp_path / "saved")
    assert resumed[0] == old[8] != new[8]
    assert resumed[1:] == new[9:]
