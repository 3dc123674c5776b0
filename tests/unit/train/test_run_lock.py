"""A second run in a directory is refused on every rank before it touches anything; a run that ended is none."""

from __future__ import annotations

import dataclasses
import os
import socket
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest

from shoal.checkpoint.lock import LOCK_NAME, DirectoryLock, HeldElsewhereError
from shoal.config import LLMConfig, load_config
from shoal.config.speech import StrategyConfig
from shoal.train.callbacks import ModelCheckpoint, ProgressBar
from shoal.train.experiment import Experiment, setup_experiment
from shoal.train.llm_experiment import llm_experiment
from shoal.train.run_lock import RunLock
from shoal.train.trainer import StepPlanning, World, build_trainer
from tests.e2e.tiny_llm import configuration
from tests.unit.train.test_experiment import _config
from tests.unit.train.toy import Toy, trainer
from tests.zygote import RankRunner


def impatient(experiment: Experiment) -> list[pl.Callback]:
    """Its callbacks, without a bar; the lock is not waited for."""
    [lock] = [callback for callback in experiment.callbacks if isinstance(callback, RunLock)]
    lock.wait_seconds = 0
    return [callback for callback in experiment.callbacks if not isinstance(callback, ProgressBar)]


def contents(directory: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file() and path.name != LOCK_NAME
    }


def speech_run(rank: int, world: int, directory: Path) -> str:
    """What a run of the speech recipe's experiment says, with a logger that deletes what it finds."""
    manager = {
        "explicit_log_dir": str(directory),
        "create_csv_logger": True,
        "create_tensorboard_logger": False,
    }
    config = _config(
        trainer_options={"accelerator": "cpu", "strategy": StrategyConfig(kind="ddp")}, **manager
    )
    prepared = setup_experiment(config, world)
    planning = StepPlanning(2, 1, None, None)
    run = build_trainer(
        dataclasses.replace(config.trainer, enable_progress_bar=False),
        World(world, world, rank),
        planning,
        loggers=prepared.loggers,
        callbacks=impatient(prepared),
    )
    try:
        run.fit(Toy())
    except ValueError as error:
        return str(error)
    return "no error"


def test_a_second_run_is_refused_on_every_rank_and_touches_nothing(ranks: RankRunner, tmp_path: Path) -> None:
    for name in ("config.yaml", "metrics.csv", "checkpoints/step=26.incomplete/shard"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("of the run that lives")
    before = contents(tmp_path)
    live = DirectoryLock(tmp_path)
    live.acquire(0)
    try:
        messages = ranks(speech_run, 2, tmp_path, init=False)
    finally:
        live.release()
    holder = f"process {os.getpid()} on {socket.gethostname()}"
    wanted = (
        f"rank 0: exp_manager.explicit_log_dir = {str(tmp_path)!r}: another run ({holder}) is writing this "
        "directory; repair: stop that run, or name another directory"
    )
    assert messages == [wanted, wanted]
    assert contents(tmp_path) == before


def llm_callbacks(root: Path) -> list[pl.Callback]:
    config = load_config(configuration(root), world_size=1)
    assert isinstance(config, LLMConfig)
    return impatient(llm_experiment(config, 1))


def test_the_llm_recipe_is_refused_by_its_key_before_it_looks_for_checkpoints(tmp_path: Path) -> None:
    callbacks = llm_callbacks(tmp_path)
    live = DirectoryLock(tmp_path / "run")
    live.acquire(0)
    try:
        with pytest.raises(ValueError, match=r"^rank 0: checkpoint.checkpoint_dir = '.*/run': another run"):
            trainer("auto", 1, tmp_path, callbacks, max_steps=2).fit(Toy())
    finally:
        live.release()
    assert contents(tmp_path / "run") == {}


class Probe(pl.Callback):
    """Whether the directory is held, at the start of training and after a failure; fails at step 2 if told to."""

    def __init__(self, directory: Path, fails: bool) -> None:
        self.directory = directory
        self.fails = fails
        self.seen: list[bool] = []

    def is_held(self) -> bool:
        lock = DirectoryLock(self.directory)
        try:
            lock.acquire(0)
        except HeldElsewhereError:
            return True
        lock.release()
        return False

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.seen.append(self.is_held())
        if self.fails and trainer.global_step == 2:
            raise RuntimeError("the run fails")


@pytest.mark.parametrize("async_save", [False, True])
def test_held_during_a_fit_and_free_after_its_end_or_failure(async_save: bool, tmp_path: Path) -> None:
    for fails in (True, False):
        probe = Probe(tmp_path, fails)
        checkpoint = ModelCheckpoint(
            dirpath=tmp_path, filename=f"{fails}-{{step}}", every_n_train_steps=1, save_top_k=-1,
            async_save=async_save,
        )  # fmt: skip
        run = trainer("auto", 1, tmp_path, [RunLock(tmp_path, "key", 0), probe, checkpoint], max_steps=3)
        if fails:
            with pytest.raises(RuntimeError, match="the run fails"):
                run.fit(Toy())
        else:
            run.fit(Toy())
        assert probe.seen == [True] * (2 if fails else 3)
        assert not probe.is_held()
    assert not list(tmp_path.glob("*.incomplete"))
