"""Runs under Lightning's Trainer: every checkpoint resumes to exactly the uninterrupted run."""

from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.checkpoint.store import CheckpointStore
from shoal.train.callbacks import ModelCheckpoint
from shoal.train.resume import ResumeRun
from tests.unit.train.toy import Toy, trainer

MAX_STEPS = 13
SCHEDULES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    # name -> (Trainer options, ModelCheckpoint options); five steps per epoch
    "steps, no monitor": (
        {"val_check_interval": 2},
        {"every_n_train_steps": 1},
    ),
    "steps, monitored": (
        {"val_check_interval": 2, "check_val_every_n_epoch": None},
        {"every_n_train_steps": 2, "monitor": "val_loss"},
    ),
    "before validation at epoch ends": ({}, {"every_n_train_steps": 1}),
    "validation at epoch ends": ({}, {"every_n_epochs": 1, "monitor": "val_loss"}),
    "epoch ends, no validation": (
        {"limit_val_batches": 0},
        {"every_n_epochs": 1, "save_on_train_epoch_end": True},
    ),
    "several validations an epoch": ({"val_check_interval": 2}, {"every_n_epochs": 1, "monitor": "val_loss"}),
}


def _run(
    directory: Path, name: str, sized: bool, path: Path | None, kind: str = "auto", world_size: int = 1
) -> dict[str, Any]:
    options, saving = SCHEDULES[name]
    checkpoint = ModelCheckpoint(dirpath=directory, save_top_k=-1, filename="{step}", **saving)
    module = Toy(sized)
    run = trainer(kind, world_size, directory, [ResumeRun(path), checkpoint], max_steps=MAX_STEPS, **options)
    run.fit(module)
    scores = {Path(p).name: float(score) for p, score in checkpoint.best_k_models.items()}
    state = {
        name: getattr(p, "full_tensor", lambda p=p: p)().detach()
        for name, p in module.model.named_parameters()
    }
    return {
        "history": module.history,
        "state": state,
        "scores": scores,
        "counts": (run.global_step, run.current_epoch, run.fit_loop.epoch_loop._batches_that_stepped),
        "saved": sorted(one.name for one in CheckpointStore(directory).complete()),
    }


def _after(history: list[tuple[Any, ...]], step: int, validated: bool) -> list[tuple[Any, ...]]:
    """What happens after a checkpoint of `step`: later steps, and this step's validation unless it was done."""
    return [
        event
        for event in history
        if event[1] > step or (event[0] == "val" and event[1] == step and not validated)
    ]


def _compare_every_checkpoint(
    rank: int, world_size: int, directory: Path, name: str, sized: bool, kind: str
) -> list[str]:
    whole = _run(directory, name, sized, None, kind, world_size)
    problems = []
    validated = "monitor" in SCHEDULES[name][1]
    for saved in whole["saved"]:
        if saved == f"step={MAX_STEPS}":
            continue  # nothing is left to do
        resumed = _run(directory / "again" / saved, name, sized, directory / saved, kind, world_size)
        step = int(saved.partition("=")[2])
        for key in ("counts", "history"):
            wanted = _after(whole[key], step, validated) if key == "history" else whole[key]
            if resumed[key] != wanted:
                problems.append(f"{saved} {key}: {resumed[key]} instead of {wanted}")
        if not all(torch.equal(whole["state"][n], resumed["state"][n]) for n in whole["state"]):
            problems.append(f"{saved}: final parameters differ")
        new = [other for other in whole["saved"] if int(other.partition("=")[2]) > step]
        if resumed["saved"] != new:
            problems.append(f"{saved}: saved {resumed['saved']} instead of {new}")
    return problems if len(whole["saved"]) >= 2 else [f"only {whole['saved']} were saved"]


@pytest.mark.parametrize("sized", [True, False], ids=["sized", "unsized"])
@pytest.mark.parametrize("name", list(SCHEDULES))
def test_resuming_any_checkpoint_equals_the_uninterrupted_run(ranks, tmp_path, name, sized):
    if not sized and "several" in name:
        pytest.skip("an interval inside an epoch needs its length")
    assert ranks(_compare_every_checkpoint, 1, tmp_path, name, sized, "auto", init=False, timeout=200) == [[]]


@pytest.mark.parametrize("kind", ["ddp", "model_parallel"])
def test_resuming_under_lightnings_own_strategies(ranks, tmp_path, kind):
    name = "steps, monitored"
    reports = ranks(_compare_every_checkpoint, 2, tmp_path, name, True, kind, init=False, timeout=200)
    assert reports == [[], []]
