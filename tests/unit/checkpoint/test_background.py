"""Saving while training goes on: what is saved is the state of its step, failures surface on every rank."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import shoal.checkpoint.writing as writing
from shoal.checkpoint.background import BackgroundSaver
from shoal.checkpoint.snapshot import SaveOptions
from shoal.checkpoint.staging import Staging
from shoal.checkpoint.state import load_state
from shoal.checkpoint.store import CheckpointError, CheckpointStore
from tests.unit.checkpoint.tiny import build, differences, everything, train
from tests.zygote import ROOT, RankRunner


def _slowly(function: Any, seconds: float) -> Any:
    def wrapped(*arguments: Any, **options: Any) -> Any:
        time.sleep(seconds)
        return function(*arguments, **options)

    return wrapped


def save_and_go_on(rank: int, world: int, layout: str, directory: Path, model_format: str) -> list[str]:
    """Save step 2 in the background, train on at once, load what was saved; returns what differs from step 2."""
    # Slow copies: a step that did not wait for them would save a mixture of two steps.
    Staging.fill = _slowly(Staging.fill, 0.2)  # type: ignore[method-assign]
    torch.manual_seed(7 + rank)
    model, optimizer, schedule = build(layout, world)
    train(model, optimizer, schedule, 2)
    wanted = everything(model, optimizer)
    saver = BackgroundSaver()
    options = SaveOptions(model_format=model_format)  # type: ignore[arg-type]
    saver.save(
        directory / "step=2", model=model, optimizer=optimizer, scheduler=schedule, step=2, options=options
    )
    train(model, optimizer, schedule, 2)
    changed = differences(wanted, everything(model, optimizer))
    assert "head.weight" in changed and "count" in changed and "head.weight/exp_avg" in changed
    saver.save(
        directory / "step=4", model=model, optimizer=optimizer, scheduler=schedule, step=4, options=options
    )
    wanted_later = everything(model, optimizer)
    train(model, optimizer, schedule, 1)
    saver.wait()
    found = []
    for step, state in ((2, wanted), (4, wanted_later)):
        other, other_optimizer, other_schedule = build(layout, world)
        loaded = load_state(
            directory / f"step={step}", model=other, optimizer=other_optimizer, scheduler=other_schedule
        )
        assert loaded.step == step
        found += differences(state, everything(other, other_optimizer))
    return found


@pytest.mark.parametrize(
    ("layout", "world"), [("plain", 1), ("fsdp", 2), ("fsdp", 3), ("hsdp", 4), ("ddp", 2)]
)
def test_the_state_of_the_step_is_saved_although_training_goes_on(
    ranks: RankRunner, tmp_path: Path, layout: str, world: int
) -> None:
    assert ranks(save_and_go_on, world, layout, tmp_path, "torch_save") == [[]] * world


def test_models_in_safetensors_are_saved_in_the_background_too(ranks: RankRunner, tmp_path: Path) -> None:
    assert ranks(save_and_go_on, 2, "fsdp", tmp_path, "safetensors") == [[]] * 2


def order_of_events(rank: int, world: int, directory: Path) -> dict[str, Any]:
    model, optimizer, schedule = build("fsdp", world)
    train(model, optimizer, schedule, 1)
    writing.FileSystemWriter.write_data = _slowly(writing.FileSystemWriter.write_data, 0.5)  # type: ignore[method-assign]
    saver = BackgroundSaver()
    start = time.perf_counter()
    saver.save(directory / "step=1", model=model, optimizer=optimizer, step=1)
    returned = time.perf_counter() - start
    visible = CheckpointStore(directory).latest()
    train(model, optimizer, schedule, 1)
    saver.save(directory / "step=2", model=model, optimizer=optimizer, step=2)
    second = time.perf_counter() - start
    after = CheckpointStore(directory).latest()
    saver.wait()
    return {"returned": returned, "visible": visible, "second": second, "after": after}


def test_a_second_save_waits_for_the_first(ranks: RankRunner, tmp_path: Path) -> None:
    for report in ranks(order_of_events, 2, tmp_path):
        assert report["returned"] < 0.4 < 0.5 < report["second"]
        assert report["visible"] is None and report["after"] == tmp_path / "step=1"
    assert CheckpointStore(tmp_path).latest() == tmp_path / "step=2"


def failing_save(rank: int, world: int, directory: Path, phase: str, failing: int) -> list[str]:
    """The errors of: the failing save itself, the next one, and the one after that."""
    model, optimizer, schedule = build("fsdp", world)
    train(model, optimizer, schedule, 1)
    saver = BackgroundSaver()
    saver.save(directory / "step=1", model=model, optimizer=optimizer, step=1)
    saver.wait()

    def refuse(*arguments: Any, **options: Any) -> Any:
        raise OSError(28, "No space left on device")

    import shoal.checkpoint.background as background

    holder: Any = {
        "take_snapshot": background,
        "write_json": writing,
        "write_data": writing.FileSystemWriter,
    }[phase]
    honest = getattr(holder, phase)
    if rank == failing:
        setattr(holder, phase, refuse)
    errors = []
    for step in (2, 3, 4):
        try:
            saver.save(directory / f"step={step}", model=model, optimizer=optimizer, step=step)
            errors.append("")
        except CheckpointError as error:
            errors.append(str(error))
            setattr(holder, phase, honest)
        train(model, optimizer, schedule, 1)
    saver.wait()
    return errors


@pytest.mark.parametrize(("phase", "failing"), [("take_snapshot", 1), ("write_data", 1), ("write_json", 0)])
def test_a_failure_is_raised_by_the_next_save_on_every_rank(
    ranks: RankRunner, tmp_path: Path, phase: str, failing: int
) -> None:
    reports = ranks(failing_save, 2, tmp_path, phase, failing, timeout=60)
    assert reports[0] == reports[1]
    assert reports[0][0] == reports[0][2] == ""
    for part in (str(tmp_path / "step=2"), f"rank {failing}", "No space left", "step=1 is intact"):
        assert part in reports[0][1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step=1", "step=4"]


def test_nothing_is_lost_when_the_process_ends_right_after_a_save(tmp_path: Path) -> None:
    code = (
        "import sys, torch\n"
        "from pathlib import Path\n"
        "import shoal.checkpoint.writing as writing\n"
        "from shoal.checkpoint.background import BackgroundSaver\n"
        "from tests.unit.checkpoint.test_background import _slowly\n"
        "from tests.unit.checkpoint.tiny import build, train\n"
        "model, optimizer, schedule = build('plain', 1)\n"
        "train(model, optimizer, schedule, 1)\n"
        "writing.FileSystemWriter.write_data = _slowly(writing.FileSystemWriter.write_data, 1.0)\n"
        "BackgroundSaver().save(Path(sys.argv[1]) / 'step=1', model=model, optimizer=optimizer, step=1)\n"
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    model, optimizer, _ = build("plain", 1)
    assert load_state(tmp_path / "step=1", model=model, optimizer=optimizer).step == 1


def test_without_optimizers_everything_is_copied_at_once(tmp_path: Path) -> None:
    model, _, _ = build("plain", 1)
    wanted = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    Staging_fill, begun = Staging.fill, threading.Event()

    def late(self: Staging) -> None:
        begun.wait()
        Staging_fill(self)

    saver = BackgroundSaver()
    saver._staging.fill = late.__get__(saver._staging)  # type: ignore[method-assign]
    saver.save(tmp_path / "a", model=model, step=1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    begun.set()
    saver.wait()
    load_state(tmp_path / "a", model=model)
    assert differences(wanted, dict(model.state_dict())) == []
