"""Optimizers and schedules are refused under the key that the user wrote them with."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from shoal.config import ConfigError, load_config
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


@pytest.mark.parametrize(
    ("target", "kwargs", "words"),
    [
        ("torch.optim.LBFGS", {}, "evaluates the loss several times a step"),
        ("torch.optim.SparseAdam", {}, "those of training are dense"),
        ("torch.optim.AdamW", {"betas": (0.9,)}, "does not take .*betas"),
    ],
)
def test_an_optimizer_that_could_not_step_is_refused_when_it_is_made(
    target: str, kwargs: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=f"^optimizer.*{target}.*{words}"):
        build_optimizer(TargetConfig(target, kwargs), torch.nn.Linear(1, 1))


def test_a_class_that_is_not_there_is_refused_by_its_key_with_the_nearest() -> None:
    with pytest.raises(
        ConfigError, match="optimizer._target_ = .*\n.*\n.*did you mean torch.optim.AdamW?"
    ) as refused:
        build_optimizer(TargetConfig("torch.optim.AdamWW"), torch.nn.Linear(1, 1))
    assert refused.value.findings[0].key == "optimizer._target_"


def test_adafactor_steps_whole_weights_and_is_refused_for_sharded_ones() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    whole, sharded = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    fully_shard(sharded, mesh=init_device_mesh("cpu", (1,)))
    sharded(torch.ones(1, 2)).sum().backward()
    with pytest.raises(RuntimeError):  # torch's own reason; when it goes, so may the refusal
        torch.optim.Adafactor(sharded.parameters()).step()
    with pytest.raises(ValueError, match="^optimizer._target_ = 'torch.optim.Adafactor': .*strategy ddp"):
        build_optimizer(TargetConfig("torch.optim.Adafactor"), sharded)
    whole(torch.ones(1, 2)).sum().backward()
    before = whole.weight.detach().clone()
    build_optimizer(TargetConfig("torch.optim.Adafactor"), whole).step()
    assert not torch.equal(before, whole.weight)


def test_a_schedule_without_an_end_is_refused_by_its_key() -> None:
    _, scheduler = targets_of("speech", lr_scheduler={"_target_": "shoal.train.optim.CosineAnnealing"})
    with pytest.raises(ValueError, match="^model.lr_scheduler.max_steps = None"):
        build_scheduler(scheduler, torch.optim.SGD([torch.nn.Parameter(torch.ones(1))]), -1)


def test_where_a_target_was_written_is_no_part_of_it() -> None:
    one, other = (TargetConfig("torch.optim.SGD", key=key) for key in ("optimizer", "model.optimizer"))
    assert one == other and hash(one) == hash(other)
    with pytest.raises(ValueError, match="^optimizer: torch.optim.SGD does not take"):
        build_optimizer(TargetConfig("torch.optim.SGD", {"lr": -1.0}), torch.nn.Linear(1, 1))
