"""The experiment: directories, records, loggers, what is resumed, and a run that uses all of it."""

import dataclasses
import json
import subprocess
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import yaml

from shoal.checkpoint.store import MANIFEST_NAME, CheckpointStore, write_json
from shoal.config.schema import ParallelismSizes
from shoal.config.speech import (
    CheckpointCallbackConfig,
    DataConfig,
    DatasetConfig,
    ExpManagerConfig,
    SalmConfig,
    SpeechConfig,
    StrategyConfig,
    TrainerConfig,
)
from shoal.config.values import TargetConfig
from shoal.train import experiment
from shoal.train.callbacks import ModelCheckpoint, ProgressBar
from shoal.train.experiment import RECORDS, git_state, log_directory, resume_path, setup_experiment, versions
from shoal.train.resume import ResumeRun
from shoal.train.stop import SignalStop, parse_duration
from tests.unit.train.toy import Toy, trainer


def _config(
    validates: bool = True, trainer_options: dict[str, Any] | None = None, **manager: Any
) -> SpeechConfig:
    model = SalmConfig(
        pretrained_llm="llm",
        pretrained_asr="asr",
        prompt_format="llama3",
        audio_locator_tag="<audio>",
        optimizer=TargetConfig("torch.optim.AdamW", {"lr": 1e-3}),
    )
    data = DataConfig(train_ds=DatasetConfig(), validation_ds=DatasetConfig() if validates else None)
    options = {"max_steps": 4, **(trainer_options or {})}
    return SpeechConfig(
        model, TrainerConfig(**options), data, ExpManagerConfig(**manager) if manager else None
    )


def _saved(log_dir: Path, step: int) -> Path:
    with CheckpointStore(log_dir / "checkpoints").writing(f"step={step}") as path:
        write_json(path / MANIFEST_NAME, {"step": step})
    return log_dir / "checkpoints" / f"step={step}"


def _one(callbacks: Any, kind: type) -> Any:
    [found] = [callback for callback in callbacks if isinstance(callback, kind)]
    return found


NOW = datetime(2025, 3, 4, 5, 6, 7)


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({"explicit_log_dir": "{tmp}/here", "exp_dir": "{tmp}/not", "name": "not"}, "here"),
        ({"exp_dir": "{tmp}", "name": "salm"}, "salm/2025-03-04_05-06-07"),
        ({"exp_dir": "{tmp}", "name": "salm", "version": "a"}, "salm/a"),
        ({"exp_dir": "{tmp}", "name": "salm", "resume_if_exists": True}, "salm"),
        ({"exp_dir": "{tmp}", "name": "salm", "resume_if_exists": True, "version": "b"}, "salm/b"),
        ({"exp_dir": "{tmp}", "use_datetime_version": False}, "default/version_1"),
    ],
)
def test_where_a_run_writes(tmp_path, options, wanted):
    (tmp_path / "default" / "version_0").mkdir(parents=True)
    filled = {k: v.format(tmp=tmp_path) if isinstance(v, str) else v for k, v in options.items()}
    assert log_directory(ExpManagerConfig(**filled), NOW) == tmp_path / wanted


def test_which_checkpoint_is_resumed(tmp_path):
    def find(**options: Any) -> Path | None:
        return resume_path(ExpManagerConfig(**options), tmp_path)

    assert find() is None
    assert find(resume_if_exists=True, resume_ignore_no_checkpoint=True) is None
    with pytest.raises(
        ValueError, match=r"resume_if_exists.*no complete checkpoint.*resume_ignore_no_checkpoint"
    ):
        find(resume_if_exists=True)
    old, new = _saved(tmp_path, 3), _saved(tmp_path, 10)
    assert find(resume_if_exists=True) == new
    assert find(resume_if_exists=False) is None
    assert find(resume_if_exists=True, resume_from_checkpoint=str(old)) == old
    new.rename(tmp_path / "checkpoints" / "step=10.incomplete")
    assert find(resume_if_exists=True) == old
    for bad in (tmp_path / "checkpoints" / "step=10.incomplete", tmp_path / "nothing"):
        with pytest.raises(ValueError, match="resume_from_checkpoint.*not a complete checkpoint"):
            find(resume_from_checkpoint=str(bad))


def test_a_whole_run_records_itself_saves_and_is_resumed_in_the_same_directory(tmp_path):
    manager = {
        "explicit_log_dir": str(tmp_path / "run"),
        "resume_if_exists": True,
        "resume_ignore_no_checkpoint": True,
        "files_to_copy": (__file__,),
        "checkpoint_callback_params": CheckpointCallbackConfig(every_n_train_steps=2, save_top_k=1),
    }
    history = []
    for max_steps in (4, 6):
        config = _config(trainer_options={"max_steps": max_steps, "enable_progress_bar": False}, **manager)
        prepared = setup_experiment(config, world_size=1)
        assert not (tmp_path / "run" / "config.yaml").exists() or max_steps == 6  # nothing is written yet
        run = trainer(
            "auto", 1, tmp_path, list(prepared.callbacks), max_steps=max_steps, val_check_interval=2
        )
        run._logger_connector.trainer.loggers = list(prepared.loggers)
        module = Toy()
        run.fit(module)
        history.append([event[1] for event in module.history if event[0] == "train"])
    assert history == [[1, 2, 3, 4], [5, 6]]
    log_dir = tmp_path / "run"
    assert {path.name for path in log_dir.iterdir()} >= {
        *RECORDS,
        "checkpoints",
        "run_0",
        Path(__file__).name,
    }
    assert yaml.safe_load((log_dir / "config.yaml").read_text())["trainer"]["max_steps"] == 6
    assert yaml.safe_load((log_dir / "run_0" / "config.yaml").read_text())["trainer"]["max_steps"] == 4
    assert sorted(path.name for path in (log_dir / "run_0").iterdir()) == sorted(RECORDS)
    assert json.loads((log_dir / "versions.json").read_text()) == versions()
    assert list(log_dir.glob("events.out.tfevents.*"))
    assert CheckpointStore(log_dir / "checkpoints").latest().name == "step=6-last"


def test_the_layout_is_recorded():
    strategy = StrategyConfig(kind="automodel", sizes=ParallelismSizes(dp_replicate_size=2))
    config = _config(trainer_options={"strategy": strategy}, explicit_log_dir="x")
    record = _one(setup_experiment(config, world_size=8).callbacks, experiment.RunRecord)
    assert record.layout["strategy"] == "automodel"
    assert {"world": 8, "dp_replicate": 2, "dp_shard": 4, "tp": 1}.items() <= record.layout.items()


def test_callback_options_reach_the_callbacks(tmp_path):
    params = CheckpointCallbackConfig(
        filename="{step}-{val_acc:.2f}", monitor="val_acc", mode="max", save_top_k=5, save_last=False,
        every_n_train_steps=7,
    )  # fmt: skip
    config = _config(
        explicit_log_dir=str(tmp_path), checkpoint_callback_params=params, max_time_per_run="00:03:50:00"
    )
    callbacks = setup_experiment(config, world_size=1).callbacks
    checkpoint = _one(callbacks, ModelCheckpoint)
    assert Path(checkpoint.dirpath) == tmp_path / "checkpoints"
    chosen = {
        name: getattr(checkpoint, name) for name in ("filename", "monitor", "mode", "save_top_k", "save_last")
    }
    assert chosen == {k: v for k, v in dataclasses.asdict(params).items() if k in chosen}
    assert checkpoint._every_n_train_steps == 7
    assert _one(callbacks, SignalStop).max_time == parse_duration("00:03:50:00")
    assert _one(callbacks, SignalStop).signals and _one(callbacks, ResumeRun) and _one(callbacks, ProgressBar)


def test_parts_can_be_switched_off(tmp_path):
    off = {
        "create_checkpoint_callback": False,
        "create_preemption_callback": False,
        "create_tensorboard_logger": False,
        "log_step_timing": False,
    }
    config = _config(trainer_options={"enable_progress_bar": False}, explicit_log_dir=str(tmp_path), **off)
    prepared = setup_experiment(config, world_size=1)
    assert prepared.loggers == ()
    assert [type(callback).__name__ for callback in prepared.callbacks] == [
        "RunLock",
        "RunRecord",
        "ResumeRun",
    ]
    with pytest.raises(ValueError, match=r"max_time_per_run.*create_checkpoint_callback: true"):
        setup_experiment(
            _config(create_checkpoint_callback=False, max_time_per_run="00:00:01:00"), world_size=1
        )


@pytest.mark.parametrize(
    ("save_top_k", "save_last", "wanted"), [(3, True, 0), (3, False, 1), (-1, True, -1), (0, True, 0)]
)
def test_without_validation_the_newest_checkpoint_is_kept(tmp_path, save_top_k, save_last, wanted):
    params = CheckpointCallbackConfig(save_top_k=save_top_k, save_last=save_last, every_n_train_steps=1)
    config = _config(validates=False, explicit_log_dir=str(tmp_path), checkpoint_callback_params=params)
    checkpoint = _one(setup_experiment(config, world_size=1).callbacks, ModelCheckpoint)
    assert (checkpoint.monitor, checkpoint.save_top_k) == (None, wanted)
    run = trainer("auto", 1, tmp_path, [checkpoint], max_steps=3, limit_val_batches=0)
    run.fit(Toy())
    assert CheckpointStore(tmp_path / "checkpoints").latest().name.startswith("step=3")


def test_without_an_experiment_section(tmp_path):
    options = {"default_root_dir": str(tmp_path), "enable_progress_bar": False}
    assert setup_experiment(_config(trainer_options=options), world_size=1).callbacks == ()
    saving = _config(trainer_options={**options, "enable_checkpointing": True})
    lock, checkpoint = setup_experiment(saving, world_size=1).callbacks
    assert Path(checkpoint.dirpath) == lock.directory == tmp_path / "checkpoints"


@pytest.mark.parametrize("package", ["tensorboard", "wandb"])
def test_a_missing_logger_package_is_named(tmp_path, monkeypatch, package):
    real = experiment.importlib.util.find_spec
    monkeypatch.setattr(
        experiment.importlib.util, "find_spec", lambda name: None if name == package else real(name)
    )
    with pytest.raises(ValueError, match=rf"create_{package}_logger needs.*pip install {package}"):
        setup_experiment(
            _config(explicit_log_dir=str(tmp_path), **{f"create_{package}_logger": True}), world_size=1
        )


def test_an_option_that_tensorboard_does_not_have_is_named_before_training(tmp_path):
    with pytest.raises(
        ValueError, match="^tensorboard: no option foo; use the keys of Lightning's TensorBoardLogger"
    ):
        experiment.logger_of("tensorboard", {"foo": 1, "flush_secs": 5}, tmp_path, key="tensorboard")
    experiment.logger_of("tensorboard", {"flush_secs": 5, "name": "run"}, tmp_path, key="tensorboard")


def test_weights_and_biases_gets_the_users_arguments(tmp_path, monkeypatch):
    monkeypatch.setattr(experiment, "_need_package", lambda package, key: None)
    monkeypatch.setitem(experiment._LOGGERS, "wandb", dict)
    config = _config(
        explicit_log_dir=str(tmp_path),
        create_tensorboard_logger=False,
        create_wandb_logger=True,
        wandb_logger_kwargs={"project": "speech", "name": "one"},
    )
    [logger] = setup_experiment(config, world_size=1).loggers
    assert logger == {"save_dir": tmp_path, "project": "speech", "name": "one"}


def test_git_state_is_null_outside_of_a_repository_and_knows_changes(tmp_path):
    assert git_state(tmp_path) is None

    def git(*words: str) -> None:
        identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", "-C", str(tmp_path), *identity, *words], check=True, capture_output=True)

    git("init")
    (tmp_path / "file").write_text("1")
    git("add", "file")
    git("commit", "-m", "first")
    state = git_state(tmp_path)
    assert state is not None and len(state["commit"]) == 40 and state["dirty"] is False
    (tmp_path / "file").write_text("2")
    assert git_state(tmp_path)["dirty"] is True


def _unwritable(rank: int, world_size: int, directory: Path) -> str:
    config = _config(explicit_log_dir=str(directory / "file" / "run"), create_tensorboard_logger=False)
    prepared = setup_experiment(config, world_size)
    run = trainer(
        "ddp", world_size, directory, [c for c in prepared.callbacks if not isinstance(c, ProgressBar)]
    )
    try:
        run.fit(Toy())
    except ValueError as error:
        return str(error)
    return "no error"


def test_a_directory_that_cannot_be_written_is_an_error_on_every_rank(ranks, tmp_path):
    (tmp_path / "file").write_text("in the way")
    messages = ranks(_unwritable, 2, tmp_path, init=False)
    assert messages[0] == messages[1]
    key = f"exp_manager.explicit_log_dir = {str(tmp_path / 'file' / 'run')!r}"
    assert messages[0].startswith(f"rank 0: {key}: this run cannot make its directory")
    assert "repair: name one" in messages[0]


@pytest.mark.parametrize("text", ["3:50", "00:3:50:00", "1 hour", "00:00:00:00:00"])
def test_malformed_durations_are_refused(text):
    with pytest.raises(ValueError, match="DD:HH:MM:SS"):
        parse_duration(text)


@pytest.mark.parametrize("name", ["SIGKILL", "TERM", "nothing"])
def test_signals_that_cannot_be_caught_are_refused(name):
    with pytest.raises(ValueError, match="not a signal that a process can catch"):
        SignalStop([name])
