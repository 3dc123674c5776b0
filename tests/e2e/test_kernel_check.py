"""A fused backward that is wrong on one rank's device stops the run on all ranks, before the first step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shoal.config import SpeechConfig, load_config
from tests.e2e.tiny_run import AUTOMODEL, configuration
from tests.zygote import RankRunner


def train_with_fault(
    rank: int, world: int, mapping: dict[str, Any], victim: int, factor: float
) -> tuple[str, int]:
    """Trains with a backward whose gradients of the queries are `factor` times too large on one rank."""
    from shoal.kernels import attention_sdpa
    from shoal.kernels.check import KernelError
    from shoal.train import modules
    from shoal.train.recipes import run_training

    sound, steps = attention_sdpa._fused_backward, []

    def faulty(*arguments: Any, **keywords: Any) -> Any:
        grad_q, *others = sound(*arguments, **keywords)
        return factor * grad_q, *others

    if rank == victim:
        attention_sdpa._fused_backward = faulty
    step = modules.train_step
    modules.train_step = lambda *args, **rest: steps.append(1) or step(*args, **rest)
    config = load_config(mapping, world_size=world)
    assert isinstance(config, SpeechConfig)
    try:
        run_training(config)
    except KernelError as error:
        return str(error), len(steps)
    return "", len(steps)


@pytest.mark.parametrize("factor", [8.0, 960.0, 1.0])
def test_a_backward_that_amplifies_is_caught_before_step_one(
    ranks: RankRunner, tmp_path: Path, factor: float
) -> None:
    options = {"devices": 2, "strategy": {"_target_": AUTOMODEL}, "enable_progress_bar": False}
    mapping = configuration(tmp_path, num_clips=4, max_steps=1, limit_val_batches=0, **options)
    mapping["model"] |= {"packed_sequences": True, "lr_scheduler": None}
    outcomes = ranks(train_with_fault, 2, mapping, 1, factor, init=False, timeout=180)
    if factor == 1.0:
        assert list(outcomes) == [("", 1)] * 2
        return
    for message, steps in outcomes:
        assert steps == 0
        assert (
            "training has not started" in message
            and "on ranks 1: kernel attention shoal (sdpa; flash is out: it needs a CUDA" in message
        )
        assert "grad q" in message and "grad k" not in message and "attn: eager" in message
