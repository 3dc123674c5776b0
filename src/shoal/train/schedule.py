"""The learning-rate schedule of the LLM recipe: warm-up, then one of five ways down."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Literal

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from shoal.config.llm import LRSchedulerConfig

Style = Literal["cosine", "constant", "linear", "inverse-square-root", "WSD"]
WsdStyle = Literal["linear", "cosine", "exponential", "minus_sqrt"]


@dataclass(frozen=True)
class Schedule:
    """The learning rate as a function of the optimizer step n, counted from 0; a pure function of n.

    During warm-up the rate goes linearly from init_lr to the peak, which step `warmup_steps` uses. From there to
    `decay_steps` it follows `style`; later steps use min_lr. ``constant`` stays at the peak;
    ``inverse-square-root`` is peak * sqrt(warmup_steps / n), at least min_lr; ``WSD`` stays at the peak and goes
    down over the last `wsd_decay_steps` before decay_steps as `wsd_style` says.

    Attributes:
        warmup_steps: Steps of the warm-up, less than decay_steps.
        decay_steps: The step at which min_lr is reached.
        style: The way down.
        init_lr, min_lr: First and last rate; None means a tenth and a hundredth of the peak.
        wsd_decay_steps, wsd_style: Of ``WSD``.
    """

    warmup_steps: int
    decay_steps: int
    style: Style = "cosine"
    init_lr: float | None = None
    min_lr: float | None = None
    wsd_decay_steps: int | None = None
    wsd_style: WsdStyle = "exponential"

    def rate(self, step: int, peak: float) -> float:
        """Returns the rate of a step for parameters whose peak is `peak`.

        >>> schedule = Schedule(2, 10, "linear", init_lr=0.0, min_lr=0.0)
        >>> [schedule.rate(n, 8.0) for n in (0, 1, 2, 6, 10, 11)]
        [0.0, 4.0, 8.0, 4.0, 0.0, 0.0]
        """
        first = 0.1 * peak if self.init_lr is None else self.init_lr
        last = 0.01 * peak if self.min_lr is None else self.min_lr
        if step < self.warmup_steps:
            return first + (peak - first) * step / self.warmup_steps
        if self.style == "constant":
            return peak
        if step > self.decay_steps:
            return last
        if self.style == "inverse-square-root":
            return max(last, peak * math.sqrt(max(self.warmup_steps, 1) / max(step, 1)))
        return last + (peak - last) * self._share(step)

    def _share(self, step: int) -> float:
        """How much of the way from min_lr to the peak is left, 1 to 0."""
        if self.style == "WSD":
            assert self.wsd_decay_steps is not None
            start = self.decay_steps - self.wsd_decay_steps
            return _fallen(self.wsd_style, max(0.0, (step - start) / self.wsd_decay_steps))
        return _fallen(self.style, (step - self.warmup_steps) / (self.decay_steps - self.warmup_steps))


def _fallen(style: str, progress: float) -> float:
    if style == "linear":
        return 1.0 - progress
    if style == "exponential":
        return 2.0 * math.pow(0.5, progress) - 1.0
    if style == "minus_sqrt":
        return 1.0 - math.sqrt(progress)
    return 0.5 * (1.0 + math.cos(math.pi * progress))


class WarmupDecay(LambdaLR):
    """Applies a `Schedule` to every group of an optimizer; the group's ``lr`` is its peak.

    Only the number of steps is restored on resume: the schedule is that of the resumed configuration, so a
    changed length or rate holds from the first resumed step on.

    Args:
        optimizer: Stepped once before each step of the schedule.
        schedule: The rates.
    """

    def __init__(self, optimizer: Optimizer, schedule: Schedule) -> None:
        def factor(step: int, peak: float) -> float:
            return schedule.rate(step, peak) / peak if peak else 0.0

        peaks = [float(group.get("initial_lr", group["lr"])) for group in optimizer.param_groups]
        super().__init__(optimizer, [partial(factor, peak=peak) for peak in peaks])


def schedule_of(config: LRSchedulerConfig, num_steps: int | None) -> Schedule:
    """Returns the schedule that a section describes for a run of `num_steps`.

    Raises:
        ValueError: Warm-up and decay do not fit each other.
    """
    decay = config.lr_decay_steps or num_steps
    assert decay is not None
    warmup = min(1000, decay // 10) if config.lr_warmup_steps is None else config.lr_warmup_steps
    if warmup >= decay:
        raise ValueError(
            f"lr_scheduler.lr_warmup_steps = {warmup}: less than the {decay} steps of the schedule; repair: a shorter "
            "warm-up, or lr_scheduler.lr_decay_steps"
        )
    wsd = config.wsd_decay_steps
    if wsd is not None and wsd > decay - warmup:
        raise ValueError(
            f"lr_scheduler.wsd_decay_steps = {wsd}: at most {decay - warmup}, the steps after the warm-up; "
            f"repair: wsd_decay_steps: {decay - warmup}"
        )
    return Schedule(
        warmup, decay, config.lr_decay_style, config.init_lr, config.min_lr, wsd, config.lr_wsd_decay_style
    )
