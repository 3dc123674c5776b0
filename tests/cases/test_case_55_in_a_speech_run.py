"""Case 55 on the whole recipe: a signal on one rank in the middle of a backward pass of a speech run.

The same run, started again, ends with the same weights, optimizer state and data position as the run that was
never stopped: bit for bit on the same layout, and up to rounding on another number of ranks.
"""

import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict_loader import load as load_tensors

from shoal.checkpoint.reader import TensorReader
from shoal.checkpoint.store import CheckpointStore, read_manifest
from shoal.config import SpeechConfig, load_config
from shoal.train import modules
from shoal.train.recipes import run_training
from shoal.train.stop import REQUEUE_EXIT_CODE, StoppedForRequeue
from tests.e2e.tiny_run import AUTOMODEL, configuration

MAX_STEPS = 9  # 23 clips in batches of 2, 4 batches a step: three steps an epoch
STRATEGIES: dict[str, dict[str, Any]] = {
    "ddp": {},
    "automodel": {"strategy": {"_target_": AUTOMODEL}},
}


def _train(rank: int, world_size: int, mapping: dict[str, Any], kill_at: int | None) -> Any:
    """Run the recipe; with `kill_at` the last rank sends itself SIGTERM inside that step's backward."""
    config = load_config(mapping, world_size=world_size)
    assert isinstance(config, SpeechConfig)
    original = modules.train_step

    def train_step(model: Any, batch: Any, optimizer: Any, *, step: int, **rest: Any) -> Any:
        if step == kill_at and rank == world_size - 1:
            model = replace(model, forward=_terminating(model.forward))
        return original(model, batch, optimizer, step=step, **rest)

    modules.train_step = train_step
    try:
        return run_training(config)
    except StoppedForRequeue as stopped:
        return stopped.code, Path(stopped.checkpoint).name


def _terminating(forward: Any) -> Any:
    def run(micro_batch: Any) -> Any:
        out = forward(micro_batch)
        out["loss_sum"].register_hook(lambda gradient: os.kill(os.getpid(), signal.SIGTERM))
        return out

    return run


def _mapping(root: Path, name: str, world_size: int, options: dict[str, Any]) -> dict[str, Any]:
    trainer = {
        "precision": "64-true",
        "max_steps": MAX_STEPS,
        "devices": world_size,
        "enable_progress_bar": False,
    }
    manager = {
        "explicit_log_dir": str(root / name),
        "create_tensorboard_logger": False,
        "resume_if_exists": True,
        "resume_ignore_no_checkpoint": True,
        "checkpoint_callback_params": {"every_n_epochs": 1, "save_top_k": 1},
    }
    return {**configuration(root, **trainer, **options), "exp_manager": manager}


def _final(root: Path, name: str) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    latest = CheckpointStore(root / name / "checkpoints").latest()
    assert latest is not None
    reader = TensorReader(latest)
    tensors = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype) for key, entry in reader.tensors().items()
    }
    load_tensors(tensors, storage_reader=reader, no_dist=True)
    return read_manifest(latest), tensors


@pytest.mark.parametrize("kind", list(STRATEGIES))
def test_a_stopped_speech_run_continues_exactly(ranks, tmp_path, kind):
    options = STRATEGIES[kind]
    assert ranks(_train, 2, _mapping(tmp_path, "whole", 2, options), None, init=False, timeout=150) == [0, 0]
    stopped = ranks(_train, 2, _mapping(tmp_path, "parts", 2, options), 4, init=False, timeout=150)
    # The signal came after the fifth step's header had been agreed on, so the sixth step is the agreed one.
    assert stopped == [(REQUEUE_EXIT_CODE, "step=6-last")] * 2
    shutil.copytree(tmp_path / "parts", tmp_path / "other")
    assert ranks(_train, 2, _mapping(tmp_path, "parts", 2, options), None, init=False, timeout=150) == [0, 0]

    manifest, wanted = _final(tmp_path, "whole")
    again, resumed = _final(tmp_path, "parts")
    assert manifest["step"] == MAX_STEPS and again == manifest
    assert wanted.keys() == resumed.keys()
    assert any(key.endswith(".exp_avg_sq") for key in wanted)
    assert [key for key in wanted if not torch.equal(wanted[key], resumed[key])] == []

    assert ranks(_train, 1, _mapping(tmp_path, "other", 1, {}), None, init=False, timeout=150) == [0]
    elsewhere, moved = _final(tmp_path, "other")
    assert (elsewhere["step"], elsewhere["position"]) == (manifest["step"], manifest["position"])
    for key, tensor in wanted.items():
        torch.testing.assert_close(moved[key], tensor, rtol=1e-9, atol=1e-9, msg=key)
