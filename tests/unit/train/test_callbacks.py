"""ModelCheckpoint's names and retention, and the progress bar's columns."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from shoal.checkpoint.store import CheckpointError, CheckpointStore
from shoal.train.callbacks import ModelCheckpoint, ProgressBar
from shoal.train.llm_experiment import SaveEveryEpoch
from shoal.train.resume import ResumeRun
from tests.unit.train.toy import Toy, trainer


def _fit(directory: Path, max_steps: int, resume: bool = False, **saving: Any) -> ModelCheckpoint:
    checkpoint = ModelCheckpoint(dirpath=directory, filename="{step}", **saving)
    path = CheckpointStore(directory).latest() if resume else None
    # A validation every step, whose score is lowest at steps 3, 6, 9, ... and falls slowly.
    options = {"val_check_interval": 1, "check_val_every_n_epoch": None, "max_steps": max_steps}
    trainer("auto", 1, directory, [ResumeRun(path), checkpoint], **options).fit(Toy())
    return checkpoint


def _names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


MONITORED = {"monitor": "val_loss", "save_top_k": 2, "save_last": True, "every_n_train_steps": 1}


def test_the_best_and_the_last_are_kept_and_the_last_is_no_second_copy(tmp_path):
    checkpoint = _fit(tmp_path, 9, **MONITORED)
    assert _names(tmp_path) == ["step=6", "step=9"]
    assert Path(checkpoint.last_model_path).name == "step=9" == Path(checkpoint.best_model_path).name


def test_a_last_one_that_is_not_among_the_best_has_its_own_name(tmp_path):
    checkpoint = _fit(tmp_path, 8, **MONITORED)
    assert _names(tmp_path) == ["step=3", "step=6", "step=8-last"]
    assert Path(checkpoint.last_model_path).name == "step=8-last"


def test_ranking_and_retention_continue_after_a_resumption(tmp_path):
    whole = _fit(tmp_path / "whole", 10, **MONITORED)
    for stop in (4, 7, 10):
        parts = _fit(tmp_path / "parts", stop, resume=True, **MONITORED)
    assert _names(tmp_path / "parts") == _names(tmp_path / "whole") == ["step=10-last", "step=6", "step=9"]
    for name in ("best_k_models", "best_model_path", "last_model_path", "best_model_score", "kth_value"):
        one, other = getattr(whole, name), getattr(parts, name)
        assert str(one).replace("/whole/", "/parts/") == str(other), name


@pytest.mark.parametrize("max_steps", [7, 8, 9])
def test_saving_in_the_background_keeps_the_same_ones(tmp_path, max_steps):
    for name, saving in (("between", False), ("background", True)):
        checkpoint = _fit(tmp_path / name, max_steps, async_save=saving, **MONITORED)
        assert CheckpointStore(tmp_path / name).latest() == Path(checkpoint.last_model_path)
    assert _names(tmp_path / "background") == _names(tmp_path / "between")


def test_a_checkpoint_is_deleted_only_when_the_one_that_replaces_it_is_complete(tmp_path, monkeypatch):
    import shoal.checkpoint.background as background

    seen = []
    honest = background.write_snapshot

    def watching(path: Path, *arguments: Any) -> Path:
        seen.append((path.name, _names(tmp_path) if tmp_path.exists() else []))
        return honest(path, *arguments)

    monkeypatch.setattr(background, "write_snapshot", watching)
    _fit(tmp_path, 3, every_n_train_steps=1, save_top_k=1, async_save=True)
    assert seen == [("step=1", []), ("step=2", ["step=1"]), ("step=3", ["step=2"])]
    assert _names(tmp_path) == ["step=3"]


def test_the_end_of_an_epoch_is_saved_in_the_background_too(tmp_path, monkeypatch):
    import shoal.checkpoint.background as background

    written = []
    honest = background.write_snapshot

    def watching(path: Path, *arguments: Any) -> Path:
        written.append(path.name)
        return honest(path, *arguments)

    monkeypatch.setattr(background, "write_snapshot", watching)
    saving = ModelCheckpoint(dirpath=tmp_path, filename="{step}", every_n_train_steps=4, async_save=True)
    epochs = {"max_epochs": 2, "max_steps": -1}  # of five steps each
    trainer("auto", 1, tmp_path, [SaveEveryEpoch(saving), saving], **epochs).fit(Toy())
    assert written[:2] == ["step=4", "step=5-last"]


def test_a_save_in_the_background_that_fails_ends_the_run(tmp_path, monkeypatch):
    import shoal.checkpoint.writing as writing

    def refuse(*arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(writing, "_write_own", refuse)
    with pytest.raises(CheckpointError, match="step=2 was not saved: .*No space left on device"):
        _fit(tmp_path, 4, every_n_train_steps=2, async_save=True)
    with pytest.raises(CheckpointError, match="step=4 was not saved"):  # the last one, found at the end
        _fit(tmp_path, 4, every_n_train_steps=4, async_save=True)
    assert _names(tmp_path) == []


def test_all_are_kept_without_a_limit(tmp_path):
    _fit(tmp_path, 5, every_n_train_steps=2, save_top_k=-1, save_last=True)
    assert _names(tmp_path) == ["step=2", "step=4", "step=5-last"]


def test_leftover_last_checkpoints_of_a_killed_run_are_removed(tmp_path):
    _fit(tmp_path, 2, save_top_k=0, save_last=True, every_n_train_steps=1)
    assert _names(tmp_path) == ["step=2-last"]
    _fit(tmp_path, 7, **MONITORED)  # a fresh run, which knows nothing of the other's
    assert _names(tmp_path) == ["step=3", "step=6", "step=7-last"]


def _fit_rarely_validated(directory: Path, **saving: Any) -> ModelCheckpoint:
    checkpoint = ModelCheckpoint(dirpath=directory, filename="{step}", monitor="val_loss", **saving)
    options = {"val_check_interval": 4, "check_val_every_n_epoch": None, "max_steps": 7}
    trainer("auto", 1, directory, [checkpoint], **options).fit(Toy())
    return checkpoint


def test_a_step_is_not_ranked_by_the_value_of_an_earlier_one(tmp_path):
    checkpoint = _fit_rarely_validated(tmp_path, every_n_train_steps=2, save_top_k=-1, save_last=False)
    assert _names(tmp_path) == ["step=4"] == [Path(path).name for path in checkpoint.best_k_models]


def test_the_last_one_is_saved_between_validations_and_at_the_end(tmp_path):
    checkpoint = _fit_rarely_validated(tmp_path, every_n_train_steps=2, save_top_k=-1, save_last=True)
    assert _names(tmp_path) == ["step=4", "step=7-last"]
    assert Path(checkpoint.last_model_path).name == "step=7-last"


def test_a_monitor_that_no_validation_logs_is_an_error(tmp_path):
    with pytest.raises(MisconfigurationException, match="could not find the monitored key"):
        _fit(tmp_path, 4, monitor="val_los", every_n_train_steps=1)


def test_without_a_monitor_the_newest_is_kept(tmp_path):
    _fit(tmp_path, 4, every_n_train_steps=2)
    assert _names(tmp_path) == ["step=4"]


def test_nothing_is_saved_without_top_k_and_last(tmp_path):
    _fit(tmp_path / "a", 4, save_top_k=0, every_n_train_steps=1)
    assert not (tmp_path / "a").exists() or _names(tmp_path / "a") == []


def test_existing_names_get_a_version_and_are_not_overwritten(tmp_path):
    _fit(tmp_path, 2, every_n_train_steps=2)
    before = (tmp_path / "step=2" / "shoal.json").stat().st_mtime_ns
    _fit(tmp_path, 2, every_n_train_steps=2)
    assert _names(tmp_path) == ["step=2", "step=2-v1"]
    assert (tmp_path / "step=2" / "shoal.json").stat().st_mtime_ns == before


def test_users_file_names(tmp_path):
    checkpoint = ModelCheckpoint(dirpath=tmp_path, monitor="val/loss")
    metrics = {"step": torch.tensor(7), "epoch": torch.tensor(1), "val/loss": torch.tensor(0.25)}
    for pattern, name in [
        ("{step}", "step=7"),
        ("{epoch:02d}-{val/loss:.2f}", "epoch=01-val_loss=0.25"),
        (None, "epoch=1-step=7"),
    ]:
        assert Path(checkpoint.format_checkpoint_name(dict(metrics), pattern)) == tmp_path / name


@pytest.mark.parametrize("option", ["save_weights_only", "save_on_exception"])
def test_options_that_cannot_be_honoured_are_refused(tmp_path, option):
    with pytest.raises(ValueError, match=option):
        ModelCheckpoint(dirpath=tmp_path, **{option: True})


def test_the_progress_bar_shows_the_logged_values_compactly():
    logged = {
        "loss": torch.tensor(2.34567),
        "tokens_per_second": torch.tensor(12345.6),
        "audio_seconds_per_second": torch.tensor(98.76),
        "padding_share": torch.tensor(0.234),
        "learning_rate": torch.tensor(3e-4),
        "memory_gb": torch.tensor(1.25),
        "grad_norm": torch.tensor(1.0),
    }
    module = SimpleNamespace()
    run = SimpleNamespace(callback_metrics=logged, progress_bar_metrics={"val_loss": 1.5}, loggers=[])
    shown = ProgressBar().get_metrics(run, module)
    assert shown == {
        "val_loss": 1.5,
        "loss": "2.3457",
        "tok/s": "12,346",
        "audio": "98.8s/s",
        "pad": "23%",
        "lr": "3.00e-04",
        "mem": "1.2GB",
    }
    logged["tokens_per_second"] = torch.tensor(float("nan"))  # the first step has no duration
    assert "tok/s" not in ProgressBar().get_metrics(run, module)
