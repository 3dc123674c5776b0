"""A rank killed in the middle of a save costs the steps since the last save, and nothing else."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from shoal.config import SpeechConfig, load_config
from tests.e2e.tiny_run import AUTOMODEL, configuration
from tests.zygote import RankRunner

STEPS = 9
SAVE_EVERY = 2


def run_of(root: Path, name: str, world: int, strategy: dict[str, Any] | None) -> dict[str, Any]:
    """A run that saves every two steps and resumes if it finds a checkpoint."""
    run = configuration(
        root,
        devices=world,
        max_steps=STEPS,
        enable_progress_bar=False,
        callbacks=[
            {"_target_": "shoal.train.history.StepHistory", "path": str(root / name / "history.jsonl")}
        ],
        **({} if strategy is None else {"strategy": strategy}),
    )
    run["exp_manager"] = {
        "explicit_log_dir": str(root / name),
        "resume_if_exists": True,
        "resume_ignore_no_checkpoint": True,
        "create_tensorboard_logger": False,
        "checkpoint_callback_params": {"every_n_train_steps": SAVE_EVERY, "monitor": "loss", "save_top_k": 2},
    }
    return run


def train(rank: int, world: int, run: dict[str, Any]) -> int:
    from shoal.train.recipes import run_training

    config = load_config(run, world_size=world)
    assert isinstance(config, SpeechConfig)
    return run_training(config)


def train_until_killed(rank: int, world: int, run: dict[str, Any], victim: int, point: str, nth: int) -> int:
    """Kills one rank with SIGKILL at the nth time a save reaches `point`."""
    import shoal.checkpoint.writing as state
    from shoal.checkpoint.store import CheckpointStore

    calls = 0

    def die_at_nth(honest: Any) -> Any:
        def wrapped(*args: Any, **options: Any) -> Any:
            nonlocal calls
            calls += 1
            if rank == victim and calls == nth:
                os.kill(os.getpid(), signal.SIGKILL)
            return honest(*args, **options)

        return wrapped

    if point == "publish":
        CheckpointStore.publish = die_at_nth(CheckpointStore.publish)  # type: ignore[method-assign]
    else:
        setattr(state, point, die_at_nth(getattr(state, point)))
    return train(rank, world, run)


def history(root: Path, name: str, file: str = "history.jsonl") -> dict[int, tuple[float, float]]:
    """Loss and gradient norm of each step, which stands there once and in its place."""
    lines = [json.loads(line) for line in (root / name / file).read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(lines[0]["step"], lines[-1]["step"] + 1))
    return {line["step"]: (line["loss"], line["grad_norm"]) for line in lines}


@pytest.mark.parametrize(
    ("strategy", "victim", "point"),
    [
        ({"_target_": AUTOMODEL}, 1, "_write_own"),
        ({"_target_": AUTOMODEL}, 0, "_write_tensors"),
        ({"_target_": AUTOMODEL}, 0, "publish"),
        (None, 1, "_write_tensors"),
    ],
)
def test_killed_in_a_save_and_resumed_is_bit_for_bit_uninterrupted(
    ranks: RankRunner, tmp_path: Path, strategy: dict[str, Any] | None, victim: int, point: str
) -> None:
    world = 2
    ranks(train, world, run_of(tmp_path, "whole", world, strategy), init=False, timeout=120)
    run = run_of(tmp_path, "killed", world, strategy)
    outcomes = ranks(
        train_until_killed, world, run, victim, point, 3, init=False, timeout=60, expect_failure=True
    )
    assert outcomes[victim].failed
    before = history(tmp_path, "killed")
    assert max(before) == 3 * SAVE_EVERY  # it died while the third checkpoint was written
    ranks(train, world, run, init=False, timeout=120)
    resumed, whole = history(tmp_path, "killed"), history(tmp_path, "whole")
    assert resumed == whole and len(whole) == STEPS
    undone = history(tmp_path, "killed", "history.undone.jsonl")
    assert undone == {step: whole[step] for step in (5, 6)}  # it did resume instead of starting again


@pytest.mark.parametrize(
    ("world", "other"), [(2, None), (4, {"_target_": AUTOMODEL, "dp_replicate_size": 2})]
)
def test_resuming_on_another_layout_continues_the_same_training(
    ranks: RankRunner, tmp_path: Path, world: int, other: dict[str, Any] | None
) -> None:
    first = run_of(tmp_path, "moved", 2, {"_target_": AUTOMODEL})
    ranks(train, 2, run_of(tmp_path, "whole", 2, {"_target_": AUTOMODEL}), init=False, timeout=120)
    first["trainer"]["max_steps"] = 4
    first["model"]["lr_scheduler"]["max_steps"] = STEPS
    ranks(train, 2, first, init=False, timeout=120)
    second = run_of(tmp_path, "moved", world, other)
    ranks(train, world, second, init=False, timeout=120)
    moved, whole = history(tmp_path, "moved"), history(tmp_path, "whole")
    assert moved.keys() == whole.keys()
    for step, (loss, norm) in whole.items():
        assert moved[step] == pytest.approx((loss, norm), rel=1e-3 if step > 4 else 1e-6)
