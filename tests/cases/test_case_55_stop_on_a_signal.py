"""Case 55: a signal in the middle of a step.

Saving inside the handler hangs or saves half a backward pass, and a signal that reaches one rank only stops one
rank only. Here the handler sets a flag, all ranks agree at the end of the step, save once and leave with an exit
code that asks for a requeue; the resumed run equals the uninterrupted one.
"""

import signal
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.checkpoint.store import CheckpointStore
from shoal.train.callbacks import ModelCheckpoint
from shoal.train.resume import ResumeRun
from shoal.train.stop import REQUEUE_EXIT_CODE, SignalStop, StoppedForRequeue
from tests.unit.train.toy import Toy, trainer

MAX_STEPS = 8


class _Recorder(SignalStop):
    """Notes whether a checkpoint existed when the handler returned."""

    saved_inside_handler = False

    def _handle(self, number: int, frame: Any) -> None:
        super()._handle(number, frame)
        self.saved_inside_handler = CheckpointStore(self.directory).latest() is not None


def _fit(
    directory: Path, kind: str, world_size: int, kill_at: tuple[int, int] | None, validate: int = 2
) -> tuple[Toy, _Recorder]:
    module, stop = Toy(kill_self_at=kill_at), _Recorder(signals=["SIGTERM"])
    stop.directory = directory
    checkpoint = ModelCheckpoint(dirpath=directory, save_last=True, save_top_k=0)
    callbacks = [ResumeRun(CheckpointStore(directory).latest()), stop, checkpoint]
    trainer(kind, world_size, directory, callbacks, max_steps=MAX_STEPS, val_check_interval=validate).fit(
        module
    )
    return module, stop


def _interrupted(rank: int, world_size: int, directory: Path, kind: str) -> dict[str, Any]:
    """Rank 1 is told to stop in the middle of its fourth backward pass; then the run is started again."""
    whole, _ = _fit(directory / "whole", kind, world_size, None)
    handler = signal.getsignal(signal.SIGTERM)
    report: dict[str, Any] = {}
    module = Toy(kill_self_at=(3, world_size - 1))
    stop = _Recorder(signals=["SIGTERM"])
    stop.directory = directory / "parts"
    checkpoint = ModelCheckpoint(dirpath=directory / "parts", save_last=True, save_top_k=0)
    run = trainer(kind, world_size, directory, [stop, checkpoint], max_steps=MAX_STEPS, val_check_interval=2)
    try:
        run.fit(module)
    except StoppedForRequeue as stopped:
        assert isinstance(stopped, SystemExit)  # so the interpreter ends with its code
        report["exit code"], report["checkpoint"] = stopped.code, Path(stopped.checkpoint).name
        report["reason"] = stopped.reason
    report["steps"] = run.global_step
    report["saved inside handler"] = stop.saved_inside_handler
    report["handler restored"] = signal.getsignal(signal.SIGTERM) == handler
    report["saved"] = [one.name for one in CheckpointStore(directory / "parts").complete()]
    rest, _ = _fit(directory / "parts", kind, world_size, None)
    report["history equal"] = module.history + rest.history == whole.history
    report["weights equal"] = all(
        torch.equal(_local(a), _local(b))
        for a, b in zip(whole.model.parameters(), rest.model.parameters(), strict=True)
    )
    return report


def _local(parameter: Any) -> torch.Tensor:
    return parameter.to_local() if hasattr(parameter, "to_local") else parameter


@pytest.mark.parametrize(("kind", "world_size"), [("auto", 1), ("ddp", 2), ("model_parallel", 2)])
def test_one_agreed_step_one_checkpoint_and_an_exact_continuation(ranks, tmp_path, kind, world_size):
    reports = ranks(_interrupted, world_size, tmp_path, kind, init=False, timeout=120)
    reasons = [report.pop("reason") for report in reports]
    assert reasons == (["another rank asked to stop"] * (world_size - 1)) + ["signal SIGTERM"]
    for report in reports:
        assert report == {
            "exit code": REQUEUE_EXIT_CODE,
            "checkpoint": "step=4-last",
            "steps": 4,
            "saved inside handler": False,
            "handler restored": True,
            "saved": ["step=4-last"],
            "history equal": True,
            "weights equal": True,
        }


def _last_step(rank: int, world_size: int, directory: Path) -> int:
    module, _ = _fit(directory, "auto", world_size, (MAX_STEPS - 1, 0))
    return module.global_step


def test_a_run_whose_last_step_is_done_ends_normally(ranks, tmp_path):
    assert ranks(_last_step, 1, tmp_path, init=False) == [MAX_STEPS]


def _out_of_time(rank: int, world_size: int, directory: Path) -> tuple[Any, ...]:
    checkpoint = ModelCheckpoint(dirpath=directory, save_last=True, save_top_k=0)
    stop = SignalStop(signals=(), max_time=timedelta(seconds=3600) if rank else timedelta(0), exit_code=99)
    try:
        trainer("ddp", world_size, directory, [stop, checkpoint], max_steps=MAX_STEPS).fit(Toy())
    except StoppedForRequeue as stopped:
        return stopped.reason, stopped.code, Path(stopped.checkpoint).name
    return ()


def test_a_time_limit_that_one_rank_reaches_ends_the_run_in_the_same_way(ranks, tmp_path):
    reports = ranks(_out_of_time, 2, tmp_path, init=False, timeout=120)
    assert reports == [("time is up", 99, "step=1-last"), ("another rank asked to stop", 99, "step=1-last")]


class _KillInValidation(Toy):
    def validation_step(self, batch: int, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        if self.kill_in_validation and self.global_step == 4 and batch_idx == 1:
            signal.raise_signal(signal.SIGTERM)


def _stopped_in_validation(rank: int, world_size: int, directory: Path) -> list[tuple[Any, ...]]:
    whole, _ = _fit(directory / "whole", "auto", world_size, None)
    history: list[tuple[Any, ...]] = []
    for kill in (True, False):
        module = _KillInValidation()
        module.kill_in_validation = kill
        resume = ResumeRun(CheckpointStore(directory / "parts").latest())
        checkpoint = ModelCheckpoint(dirpath=directory / "parts", save_last=True, save_top_k=0)
        callbacks = [resume, SignalStop(["SIGTERM"]), checkpoint]
        run = trainer("auto", world_size, directory, callbacks, max_steps=MAX_STEPS, val_check_interval=2)
        try:
            run.fit(module)
        except StoppedForRequeue:
            # The cut-off validation is done again from its first batch.
            module.history = [e for e in module.history if e[:2] != ("val", 4)]
        history += module.history
    return [whole.history, history]


def test_a_stop_during_validation_is_not_delayed_and_the_validation_is_done_again(ranks, tmp_path):
    [(whole, parts)] = ranks(_stopped_in_validation, 1, tmp_path, init=False)
    assert parts == whole and len([e for e in whole if e[:2] == ("val", 4)]) == 3
