"""Optimizers and schedules are refused under the key that the user wrote them with."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from shoal.config import load_config
from shoal.config.values import TargetConfig
from shoal.train.optim import build_optimizer, build_scheduler
from tests.unit.config.base import base, merged

SCHEDULE = "shoal.train.schedule.Schedule"  # can be made, and is no optimizer


def targets_of(recipe: str, **sections: Any) -> tuple[TargetConfig, TargetConfig | None]:
    """Optimizer and schedule of a recipe's smallest file with `sections` where that recipe has them."""
    written = sections if recipe == "llm" else {"model": sections}
    config = load_config(merged(base(recipe), written))
    section: Any = config if recipe == "llm" else config.model
    return section.optimizer, section.lr_scheduler


@pytest.mark.parametrize(("recipe", "prefix"), [("llm", ""), ("speech", "model.")])
def test_an_optimizer_is_refused_by_the_key_of_the_users_file(recipe: str, prefix: str) -> None:
    optimizer, _ = targets_of(recipe, optimizer={"_target_": "torch.optim.SGD", "lr": -1.0})
    with pytest.raises(
        ValueError, match=f"^{re.escape(prefix)}optimizer: torch.optim.SGD does not take .*-1.0"
    ):
        build_optimizer(optimizer, torch.nn.Linear(1, 1))
    no_optimizer = replace(optimizer, target=SCHEDULE, kwargs={"decay_steps": 3})
    with pytest.raises(ValueError, match=f"^{re.escape(prefix)}optimizer._target_ = '{SCHEDULE}'"):
        build_optimizer(no_optimizer, torch.nn.Linear(1, 1))


def test_a_schedule_without_an_end_is_refused_by_its_key() -> None:
    _, scheduler = targets_of("speech", lr_scheduler={"_target_": "shoal.train.optim.CosineAnnealing"})
    with pytest.raises(ValueError, match="^model.lr_scheduler.max_steps = None"):
        build_scheduler(scheduler, torch.optim.SGD([torch.nn.Parameter(torch.ones(1))]), -1)


def test_where_a_target_was_written_is_no_part_of_it() -> None:
    one, other = (TargetConfig("torch.optim.SGD", key=key) for key in ("optimizer", "model.optimizer"))
    assert one == other and hash(one) == hash(other)
    with pytest.raises(ValueError, match="^optimizer: torch.optim.SGD does not take"):
        build_optimizer(TargetConfig("torch.optim.SGD", {"lr": -1.0}), torch.nn.Linear(1, 1))
