"""The learning-rate schedule: its values, and that a resumed one continues (case 38)."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from shoal.config.llm import LRSchedulerConfig
from shoal.train.schedule import Schedule, WarmupDecay, schedule_of

PEAK = 1.0


def optimizer_of(*rates: float) -> torch.optim.Optimizer:
    groups = [{"params": [nn.Parameter(torch.ones(2))], "lr": rate} for rate in rates]
    return torch.optim.AdamW(groups, weight_decay=0.1)


def rates(schedule: Schedule, steps: range) -> list[float]:
    return [schedule.rate(step, PEAK) for step in steps]


@pytest.mark.parametrize(
    ("style", "halfway"),
    [("linear", 0.55), ("cosine", 0.55), ("constant", 1.0), ("inverse-square-root", math.sqrt(10 / 60))],
)
def test_styles(style: Any, halfway: float) -> None:
    schedule = Schedule(10, 110, style, init_lr=0.0, min_lr=0.1)
    assert rates(schedule, range(0, 11, 5)) == pytest.approx([0.0, 0.5, 1.0])
    assert schedule.rate(60, PEAK) == pytest.approx(halfway)
    beyond = 1.0 if style == "constant" else 0.1
    assert rates(schedule, range(111, 113)) == pytest.approx([beyond, beyond])
    if style in ("linear", "cosine"):
        assert schedule.rate(110, PEAK) == pytest.approx(0.1)
    falling = rates(schedule, range(10, 112))
    assert falling == sorted(falling, reverse=True)


@pytest.mark.parametrize(
    ("style", "halfway"),
    [("linear", 0.5), ("cosine", 0.5), ("exponential", math.sqrt(2) - 1), ("minus_sqrt", 1 - math.sqrt(0.5))],
)
def test_warmup_stable_decay(style: Any, halfway: float) -> None:
    schedule = Schedule(10, 110, "WSD", init_lr=0.0, min_lr=0.0, wsd_decay_steps=20, wsd_style=style)
    assert rates(schedule, range(10, 91, 20)) == pytest.approx([1.0] * 5)
    assert schedule.rate(100, PEAK) == pytest.approx(halfway)
    assert schedule.rate(110, PEAK) == pytest.approx(0.0, abs=1e-12) == schedule.rate(111, PEAK)


def test_defaults_are_shares_of_the_run_and_of_each_groups_rate() -> None:
    schedule = schedule_of(LRSchedulerConfig(), 500)
    assert (schedule.warmup_steps, schedule.decay_steps) == (50, 500)
    assert schedule_of(LRSchedulerConfig(), 50_000).warmup_steps == 1000
    assert schedule.rate(0, 3.0) == pytest.approx(0.3) and schedule.rate(500, 3.0) == pytest.approx(0.03)
    optimizer = optimizer_of(3.0, 0.0, 1.0)
    scheduler = WarmupDecay(optimizer, schedule)
    assert scheduler.get_last_lr() == pytest.approx([0.3, 0.0, 0.1])


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (LRSchedulerConfig(lr_warmup_steps=30), "lr_warmup_steps = 30: less than the 30 steps"),
        (LRSchedulerConfig(lr_decay_style="WSD", wsd_decay_steps=28), "wsd_decay_steps = 28: at most 27"),
    ],
)
def test_what_does_not_fit_the_run_is_refused(config: LRSchedulerConfig, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        schedule_of(config, 30)


def record(optimizer: torch.optim.Optimizer, scheduler: WarmupDecay, steps: int) -> list[tuple[float, float]]:
    """(lr, weight decay) that each optimizer step used."""
    used = []
    for _ in range(steps):
        used.append((optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["weight_decay"]))
        optimizer.step()
        scheduler.step()
    return used


@pytest.mark.parametrize("stop", [3, 10, 11, 60, 100])  # warm-up, peak, decay, the end
@pytest.mark.parametrize("style", ["cosine", "linear", "inverse-square-root", "WSD"])
def test_resumed_schedule_continues_from_the_first_step(stop: int, style: Any) -> None:
    schedule = Schedule(10, 100, style, wsd_decay_steps=20)
    whole_optimizer = optimizer_of(2.0)
    whole = record(whole_optimizer, WarmupDecay(whole_optimizer, schedule), 105)
    first = optimizer_of(2.0)
    scheduler = WarmupDecay(first, schedule)
    head = record(first, scheduler, stop)
    second = optimizer_of(2.0)
    resumed = WarmupDecay(second, schedule)
    second.load_state_dict(first.state_dict())
    resumed.load_state_dict(scheduler.state_dict())
    assert head + record(second, resumed, 105 - stop) == whole


def test_a_changed_length_holds_from_the_first_resumed_step() -> None:
    old, new = Schedule(10, 100, "linear"), Schedule(10, 200, "linear")
    first = optimizer_of(2.0)
    scheduler = WarmupDecay(first, old)
    record(first, scheduler, 50)
    second = optimizer_of(2.0)
    resumed = WarmupDecay(second, new)
    second.load_state_dict(first.state_dict())
    resumed.load_state_dict(scheduler.state_dict())
    optimizer_step = record(second, resumed, 2)
    assert optimizer_step[1][0] == pytest.approx(new.rate(51, 2.0))
