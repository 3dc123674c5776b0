"""Optimizers and schedules by name, over the trainable parameters."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from shoal.config.targets import resolve_target
from shoal.config.values import TargetConfig


class CosineAnnealing(LambdaLR):
    """Linear warm-up to the optimizer's learning rate, then a half cosine down to `min_lr` at `max_steps`.

    Step n (counted from 0) uses lr * (n + 1) / (warmup_steps + 1) during warm-up, so that the first step already
    moves; after `max_steps` the rate stays at `min_lr`.

    Args:
        optimizer: Its groups' ``lr`` is the peak.
        max_steps: Optimizer steps of the whole schedule, warm-up included.
        warmup_steps: Steps of the warm-up.
        min_lr: The rate at the end.
        last_epoch: As in torch's schedulers.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        max_steps: int,
        warmup_steps: int = 0,
        min_lr: float = 0.0,
        last_epoch: int = -1,
    ) -> None:
        if not 0 <= warmup_steps < max_steps:
            raise ValueError(
                f"warmup_steps = {warmup_steps}: at least 0 and less than max_steps = {max_steps}; "
                "repair: shorten the warm-up or raise max_steps"
            )

        def factor(step: int, peak: float) -> float:
            if step < warmup_steps:
                return (step + 1) / (warmup_steps + 1)
            progress = min((step - warmup_steps) / (max_steps - warmup_steps), 1.0)
            floor = min_lr / peak if peak else 0.0
            return floor + (1.0 - floor) * 0.5 * (1.0 + math.cos(math.pi * progress))

        peaks = [float(group.get("initial_lr", group["lr"])) for group in optimizer.param_groups]
        super().__init__(optimizer, [partial(factor, peak=peak) for peak in peaks], last_epoch)


def build_optimizer(config: TargetConfig, module: nn.Module) -> Optimizer:
    """Instantiates the optimizer named by `config` over the parameters of `module` that train.

    Raises:
        ValueError: The target is not allowed, or does not take these arguments.
    """
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    key = config.key or "optimizer"
    optimizer = _instantiate(config, key, parameters)
    if not isinstance(optimizer, Optimizer):
        raise ValueError(f"{key}._target_ = {config.target!r}: not an optimizer; repair: torch.optim.AdamW")
    reason = _cannot_step(optimizer, parameters)
    if reason is not None:
        raise ValueError(f"{key}._target_ = {config.target!r}: {reason}; repair: torch.optim.AdamW")
    return optimizer


def _cannot_step(optimizer: Optimizer, parameters: Sequence[torch.Tensor]) -> str | None:
    """Why the training step could not use an optimizer, said before the first batch; None when it can."""
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        return "it evaluates the loss several times a step, and a step here sees its data once"
    if isinstance(optimizer, torch.optim.SparseAdam):
        return "it needs sparse gradients, and those of training are dense"
    if isinstance(optimizer, torch.optim.Adafactor) and any(isinstance(p, DTensor) for p in parameters):
        return "torch cannot take its norms of sharded matrices, and strategy ddp does not shard"
    return None


def build_scheduler(
    config: TargetConfig | Callable[[Optimizer], LRScheduler] | None, optimizer: Optimizer, max_steps: int
) -> LRScheduler | None:
    """Makes the schedule, stepped once per optimizer step; our CosineAnnealing ends at the run's end.

    Raises:
        ValueError: The target is not allowed or takes other arguments; or the schedule has no end and neither has
            the run.
    """
    if config is None:
        return None
    if not isinstance(config, TargetConfig):
        return config(optimizer)
    key, kwargs = config.key or "lr_scheduler", dict(config.kwargs)
    target = resolve_target(config.target, config.allow, f"{key}._target_")
    if target is CosineAnnealing and kwargs.get("max_steps") is None:
        if max_steps < 1:
            raise ValueError(
                f"{key}.max_steps = None: the run has no end to anneal towards; "
                f"repair: set trainer.max_steps or {key}.max_steps"
            )
        kwargs["max_steps"] = max_steps
    scheduler = _instantiate(replace(config, kwargs=kwargs), key, optimizer)
    if not isinstance(scheduler, LRScheduler):
        raise ValueError(f"{key}._target_ = {config.target!r}: not a learning-rate scheduler")
    return scheduler


def _instantiate(config: TargetConfig, key: str, first: object) -> object:
    target = resolve_target(config.target, config.allow, f"{key}._target_")
    assert callable(target)
    try:
        return target(first, **config.kwargs)
    except (TypeError, ValueError, LookupError) as error:  # betas of one number are an IndexError in torch
        raise ValueError(f"{key}: {config.target} does not take {dict(config.kwargs)}: {error}") from error
