"""The experiment of a run: its directory, loggers, checkpoints, resumption and the record of how it was made.

A run's directory holds `checkpoints/`, the loggers' files and, written once at start by rank 0, `config.yaml`
(resolved), `versions.json`, `git.json` and `layout.json`. When a run is started again in the same directory,
the previous start's four files move to `run_0/`, `run_1/`, ... first.

Rank 0 decides (the time in a directory's name, the newest checkpoint) and the others are told once they are
connected; nothing is written before that, and a failure is raised on every rank.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import inspect
import json
import platform
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import yaml
from lightning.pytorch.loggers import CSVLogger, Logger, MLFlowLogger, TensorBoardLogger, WandbLogger
from typing_extensions import override

from shoal.checkpoint.agree import from_origin
from shoal.checkpoint.store import CHECKPOINTS, CheckpointStore, stored
from shoal.config.speech import ExpManagerConfig, SpeechConfig
from shoal.mesh.sizes import resolve_sizes
from shoal.train.callbacks import ModelCheckpoint, ProgressBar
from shoal.train.resume import ResumeRun
from shoal.train.run_lock import RunLock
from shoal.train.stop import SignalStop

RECORDS = ("config.yaml", "versions.json", "git.json", "layout.json")
_LOGGERS: Mapping[str, type[Logger]] = {
    "tensorboard": TensorBoardLogger,
    "wandb": WandbLogger,
    "mlflow": MLFlowLogger,
    "csv": CSVLogger,
}
_PACKAGES = ("shoal", "torch", "transformers", "lightning", "lhotse", "peft", "numpy")


@dataclass(frozen=True)
class Experiment:
    """What a Trainer needs of an experiment.

    `log_dir` is rank 0's choice on rank 0; on other ranks it may differ in its time and nothing is written to
    it. `callbacks` lock, resume, stop, record, time and save; pass them and `loggers` to the Trainer.
    """

    log_dir: Path
    loggers: tuple[Logger, ...]
    callbacks: tuple[pl.Callback, ...]


def setup_experiment(config: SpeechConfig, world_size: int) -> Experiment:
    """Prepare the experiment of a training run; needs no process group and writes nothing yet.

    Without an `exp_manager` section the run keeps its newest checkpoint under `trainer.default_root_dir` if
    `trainer.enable_checkpointing` is set, and has no loggers.

    Args:
        config: a validated run.
        world_size: number of ranks, for the record of the layout.

    Raises:
        ValueError: a logger's package is missing, or a time limit has nothing to save with.
    """
    manager = config.exp_manager
    bar: list[pl.Callback] = [ProgressBar()] if config.trainer.enable_progress_bar else []
    if manager is None:
        log_dir = Path(config.trainer.default_root_dir or Path.cwd())
        saving: list[pl.Callback] = []
        if config.trainer.enable_checkpointing:
            # Not log_dir itself: it may be the working directory, where runs that save nothing write as well.
            lock = RunLock(log_dir / CHECKPOINTS, "trainer.default_root_dir")
            saving = [lock, ModelCheckpoint(dirpath=log_dir / CHECKPOINTS, filename="{step}")]
        return Experiment(log_dir, (), (*bar, *saving))
    log_dir = log_directory(manager)
    key = "exp_manager." + ("exp_dir" if manager.explicit_log_dir is None else "explicit_log_dir")
    records = RunRecord(log_dir, config.to_dict(), _layout(config, world_size), manager.files_to_copy)
    lock = RunLock(log_dir, key)
    callbacks: list[pl.Callback] = [*bar, lock, records, ResumeRun(_finder(manager, log_dir))]
    if manager.log_step_timing:
        callbacks.append(StepTiming())
    if manager.create_checkpoint_callback:
        stops = manager.create_preemption_callback or manager.max_time_per_run is not None
        callbacks += [_signal_stop(manager)] if stops else []
        callbacks.append(_checkpoint(manager, log_dir, config.data.validation_ds is not None))
    elif manager.max_time_per_run is not None:
        raise ValueError(
            f"exp_manager.max_time_per_run = {manager.max_time_per_run} saves before it stops; "
            "set exp_manager.create_checkpoint_callback: true"
        )
    return Experiment(log_dir, _loggers(manager, log_dir), tuple(callbacks))


def log_directory(manager: ExpManagerConfig, now: datetime | None = None) -> Path:
    """The directory of a run: `explicit_log_dir`, or `exp_dir/name/version`.

    Without a version, a run that may be resumed has none (it must find its directory again), and another one
    is named by the time or, without `use_datetime_version`, `version_N` with the first N that is free.
    """
    if manager.explicit_log_dir is not None:
        return Path(manager.explicit_log_dir).expanduser().absolute()
    base = Path(manager.exp_dir or "shoal_experiments").expanduser().absolute() / (manager.name or "default")
    if manager.version is not None:
        return base / manager.version
    if manager.resume_if_exists:
        return base
    if manager.use_datetime_version:
        return base / (now or datetime.now()).strftime("%Y-%m-%d_%H-%M-%S")
    number = 0
    while (base / f"version_{number}").exists():
        number += 1
    return base / f"version_{number}"


def resume_path(manager: ExpManagerConfig, log_dir: Path) -> Path | None:
    """The checkpoint to resume: `resume_from_checkpoint`, else the newest complete one with `resume_if_exists`.

    Raises:
        ValueError: the named one is not complete, or there is none to find and
            `resume_ignore_no_checkpoint` is not set.
    """
    if manager.resume_from_checkpoint is not None:
        path = Path(manager.resume_from_checkpoint).expanduser().absolute()
        if stored(path) is None:
            raise ValueError(
                f"exp_manager.resume_from_checkpoint = {path} is not a complete checkpoint; name one of the "
                f"directories in {CHECKPOINTS}/ of a run"
            )
        return path
    if not manager.resume_if_exists:
        return None
    latest = CheckpointStore(log_dir / CHECKPOINTS).latest()
    if latest is None and not manager.resume_ignore_no_checkpoint:
        raise ValueError(
            f"exp_manager.resume_if_exists = true, but {log_dir / CHECKPOINTS} holds no complete checkpoint; "
            "set exp_manager.resume_ignore_no_checkpoint: true to start from the beginning then"
        )
    return latest


class RunRecord(pl.Callback):
    """Writes down once how a run was made, on rank 0, when the ranks are connected.

    Args:
        log_dir: the run's directory.
        config: the resolved configuration as plain data.
        layout: sizes of the mesh.
        files_to_copy: copied next to the records.

    Raises:
        ValueError: (in `setup`, on every rank) the directory cannot be written.
    """

    def __init__(
        self,
        log_dir: Path,
        config: Mapping[str, Any],
        layout: Mapping[str, Any],
        files_to_copy: tuple[str, ...] = (),
    ) -> None:
        self.log_dir = log_dir
        self.config = config
        self.layout = layout
        self.files_to_copy = files_to_copy

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage == "fit":
            from_origin(self.write, None, ValueError)

    def write(self) -> None:
        """Move the previous start's records away and write this one's."""
        self.log_dir.mkdir(parents=True, exist_ok=True)
        _move_previous(self.log_dir)
        text = yaml.safe_dump(dict(self.config), sort_keys=False, allow_unicode=True)
        (self.log_dir / "config.yaml").write_text(text, encoding="utf-8")
        for name, content in (
            ("versions", versions()),
            ("git", git_state(Path.cwd())),
            ("layout", self.layout),
        ):
            (self.log_dir / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        for file in self.files_to_copy:
            shutil.copy(file, self.log_dir)


class StepTiming(pl.Callback):
    """Logs `train_step_timing`, the seconds from the start of a training step to its end."""

    def __init__(self) -> None:
        self._start = 0.0

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._start = time.perf_counter()

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        pl_module.log("train_step_timing", time.perf_counter() - self._start, batch_size=1)


def versions() -> dict[str, str | None]:
    """Python's version and those of the packages that decide what a run computes; None where one is missing."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    return found


def git_state(directory: Path) -> dict[str, Any] | None:
    """Commit of the repository around `directory` and whether it has changes; None outside of any."""
    try:
        commit = _git(directory, "rev-parse", "HEAD")
        return {"commit": commit, "dirty": bool(_git(directory, "status", "--porcelain"))}
    except (OSError, subprocess.SubprocessError):
        return None


def _git(directory: Path, *arguments: str) -> str:
    command = ["git", "-C", str(directory), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=30).stdout.strip()


def _move_previous(log_dir: Path) -> None:
    existing = [log_dir / name for name in RECORDS if (log_dir / name).exists()]
    if not existing:
        return
    number = 0
    while (log_dir / f"run_{number}").exists():
        number += 1
    target = log_dir / f"run_{number}"
    target.mkdir()
    for file in existing:
        file.rename(target / file.name)


def _layout(config: SpeechConfig, world_size: int) -> dict[str, Any]:
    sizes = resolve_sizes(config.trainer.strategy.sizes, world_size)
    return {"strategy": config.trainer.strategy.kind, **dataclasses.asdict(sizes)}


def _finder(manager: ExpManagerConfig, log_dir: Path) -> Callable[[], Path | None]:
    return lambda: resume_path(manager, log_dir)


def _signal_stop(manager: ExpManagerConfig) -> SignalStop:
    signals = ("SIGTERM", "SIGUSR1") if manager.create_preemption_callback else ()
    return SignalStop(signals, manager.max_time_per_run)


def _checkpoint(manager: ExpManagerConfig, log_dir: Path, validates: bool) -> ModelCheckpoint:
    params = manager.checkpoint_callback_params
    ranked = validates or not params.monitor.startswith("val")
    # Without validation there is nothing to rank by: the newest one is kept instead.
    top_k = params.save_top_k if ranked or params.save_top_k == -1 else int(not params.save_last)
    return ModelCheckpoint(
        dirpath=log_dir / CHECKPOINTS,
        filename=params.filename or "{step}",
        monitor=params.monitor if ranked else None,
        mode=params.mode,
        save_top_k=top_k,
        save_last=params.save_last,
        every_n_train_steps=params.every_n_train_steps,
        every_n_epochs=params.every_n_epochs,
        async_save=params.async_save,
        model_save_format=params.model_save_format,
        save_consolidated=params.save_consolidated,
    )


def _loggers(manager: ExpManagerConfig, log_dir: Path) -> tuple[Logger, ...]:
    wanted = {
        "tensorboard": (manager.create_tensorboard_logger, {}),
        "wandb": (manager.create_wandb_logger, manager.wandb_logger_kwargs),
        "mlflow": (manager.create_mlflow_logger, manager.mlflow_logger_kwargs),
        "csv": (manager.create_csv_logger, {}),
    }
    return tuple(
        logger_of(name, options, log_dir, key=f"exp_manager.create_{name}_logger")
        for name, (enabled, options) in wanted.items()
        if enabled
    )


def logger_of(name: str, options: Mapping[str, Any], log_dir: Path, *, key: str) -> Logger:
    """A logger of Lightning by its short name, writing to `log_dir` unless `options` say otherwise.

    Raises:
        ValueError: Its package is missing, or it does not take these options.
    """
    folder = str(log_dir / "mlruns") if name == "mlflow" else log_dir
    defaults: dict[str, Any] = {"save_dir": folder}
    if name in ("tensorboard", "csv"):
        defaults |= {"name": "", "version": ""}
    if name != "csv":
        _need_package(name, key)
    try:
        if name == "tensorboard":
            _check_writer_options(options)
        return _LOGGERS[name](**{**defaults, **options})
    except TypeError as error:
        raise ValueError(f"{key}: {error}; use the keys of Lightning's {_LOGGERS[name].__name__}") from error


def _check_writer_options(options: Mapping[str, Any]) -> None:
    """Raises the TypeError of an option that Lightning would hand to torch's writer with the first number only."""
    from torch.utils.tensorboard import SummaryWriter  # needs the package tensorboard

    known = {*inspect.signature(TensorBoardLogger).parameters, *inspect.signature(SummaryWriter).parameters}
    unknown = sorted(set(options) - known)
    if unknown:
        raise TypeError(f"no option {', '.join(unknown)}")


def _need_package(package: str, key: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise ValueError(
            f"{key} needs the package {package}, which is not installed; "
            f"install it (pip install {package}) or remove {key}"
        )
