"""How many micro-batches make a step: the arithmetic between Lightning's counts and ours."""

from __future__ import annotations

from shoal.config.speech import TrainerConfig


def global_micro_batches(trainer: TrainerConfig, dp_size: int) -> int:
    """Returns the micro-batches of one optimizer step over the whole job."""
    return trainer.global_micro_batches or trainer.accumulate_grad_batches * dp_size


def accumulation(trainer: TrainerConfig, dp_size: int | None) -> int | None:
    """Returns the micro-batches per rank in one optimizer step, empty ones included; None when unknown."""
    if trainer.global_micro_batches is None:
        return trainer.accumulate_grad_batches
    return None if dp_size is None else -(-trainer.global_micro_batches // dp_size)
