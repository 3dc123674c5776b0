"""Stopping a run early and cleanly: on a signal from the scheduler, or when the job's time is up.

A signal arrives in the middle of anything, on some ranks only. Its handler therefore does one thing: it sets
a flag. At the border of a step all ranks learn of it together (the flag is part of the step's header), write
one checkpoint together and leave with an exit code that tells the launcher to queue the job again.
"""

from __future__ import annotations

import contextlib
import re
import signal
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from types import FrameType
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from typing_extensions import override

from shoal.train.callbacks import ModelCheckpoint

# EX_TEMPFAIL of sysexits.h: "try again later". No Python, torch or Slurm failure uses it.
REQUEUE_EXIT_CODE = 75


class StoppedForRequeue(SystemExit):
    """Ends the process with `REQUEUE_EXIT_CODE` after a good save.

    Attributes:
        reason: what asked for the stop, in words.
        checkpoint: the checkpoint to resume from.
    """

    def __init__(self, reason: str, checkpoint: str, exit_code: int) -> None:
        super().__init__(exit_code)
        self.reason = reason
        self.checkpoint = checkpoint

    def __str__(self) -> str:
        return f"{self.reason}: saved {self.checkpoint}, exit code {self.code} asks to be queued again"


class SignalStop(pl.Callback):
    """Stops at the next step border after a signal or after `max_time`, with one checkpoint of all ranks.

    The training step puts `stop_requested()` into its header and stores the agreed answer as
    `module.stop_agreed`; for a module without that attribute, and during validation, this callback agrees by
    a collective of its own. A stop during validation saves the state before it, and the resumed run validates
    again. A run whose last step is done is left to end normally. A signal that comes after a step's header was
    agreed on is part of the next header, so that the run takes one more step.

    Args:
        signals: names of signals that ask for a stop; empty for none.
        max_time: `DD:HH:MM:SS` or a timedelta, counted from the creation of this object; None is no limit.
        exit_code: of the process after a stop.

    Raises:
        ValueError: an unknown signal, one that cannot be caught, or a malformed time.
    """

    def __init__(
        self,
        signals: Sequence[str] = ("SIGTERM", "SIGUSR1"),
        max_time: str | timedelta | None = None,
        exit_code: int = REQUEUE_EXIT_CODE,
    ) -> None:
        self.signals = tuple(_signal(name) for name in signals)
        self.max_time = parse_duration(max_time) if isinstance(max_time, str) else max_time
        self.exit_code = exit_code
        self._started = time.monotonic()
        self._received: int | None = None

    def stop_requested(self) -> bool:
        """Whether this rank wants to stop; without any communication."""
        return self._received is not None or self._time_is_up()

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not _checkpoint_callbacks(trainer):
            raise ValueError("SignalStop saves before it stops: add shoal's ModelCheckpoint to the callbacks")

    @override
    def on_sanity_check_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._install()

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._install()

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        agreed = getattr(pl_module, "stop_agreed", None)
        if agreed is None:
            agreed = any_rank(self.stop_requested(), trainer.strategy.root_device)
        if agreed:
            self._stop(trainer)

    @override
    def on_validation_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        during_fit = trainer.state.fn == "fit" and not trainer.sanity_checking
        if during_fit and any_rank(self.stop_requested(), trainer.strategy.root_device):
            self._stop(trainer, during_validation=True)

    def _stop(self, trainer: pl.Trainer, during_validation: bool = False) -> None:
        if trainer.max_steps != -1 and trainer.global_step >= trainer.max_steps:
            return
        path = _checkpoint_callbacks(trainer)[0].save_now(trainer, during_validation)
        stopped = StoppedForRequeue(self._reason(), path, self.exit_code)
        if trainer.is_global_zero:
            print(stopped, flush=True)
        raise stopped

    def _reason(self) -> str:
        if self._received is not None:
            return f"signal {signal.Signals(self._received).name}"
        return "time is up" if self._time_is_up() else "another rank asked to stop"

    def _time_is_up(self) -> bool:
        return self.max_time is not None and time.monotonic() - self._started >= self.max_time.total_seconds()

    def _install(self) -> None:
        # After Lightning has put up its own SIGTERM handler: that one starts a collective inside the handler,
        # which can meet a peer in the middle of another one. Lightning restores what it found before, at the end.
        if threading.current_thread() is threading.main_thread():  # Python accepts handlers from there only
            for number in self.signals:
                signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._received = number


def any_rank(flag: bool, device: torch.device) -> bool:
    """Whether `flag` is set on any rank; collective over the default group when there is one."""
    if not (dist.is_available() and dist.is_initialized()):
        return flag
    tensor = torch.tensor(int(flag), device=device)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return bool(tensor.item())


def parse_duration(text: str) -> timedelta:
    """Read `DD:HH:MM:SS`.

    Raises:
        ValueError: another form.
    """
    match = re.fullmatch(r"(\d+):(\d\d):(\d\d):(\d\d)", text.strip())
    if match is None:
        raise ValueError(f"max_time_per_run is {text!r}; write DD:HH:MM:SS, for example 00:03:50:00")
    days, hours, minutes, seconds = (int(part) for part in match.groups())
    return timedelta(days=days, hours=hours, minutes=minutes, seconds=seconds)


def _signal(name: str) -> signal.Signals:
    with contextlib.suppress(KeyError):
        number = signal.Signals[name]
        if number not in (signal.SIGKILL, signal.SIGSTOP):
            return number
    raise ValueError(f"{name!r} is not a signal that a process can catch; use for example SIGTERM or SIGUSR1")


def _checkpoint_callbacks(trainer: pl.Trainer) -> list[ModelCheckpoint]:
    return [callback for callback in trainer.checkpoint_callbacks if isinstance(callback, ModelCheckpoint)]
