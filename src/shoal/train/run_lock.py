"""A run alone in its directory: a second one is refused before it writes or deletes anything there."""

from __future__ import annotations

import contextlib
from pathlib import Path

import lightning.pytorch as pl
from typing_extensions import override

from shoal.checkpoint.agree import from_origin
from shoal.checkpoint.lock import WAIT_SECONDS, DirectoryLock, HeldElsewhereError
from shoal.checkpoint.store import CheckpointError
from shoal.train.resume import background_saver


class RunLock(pl.Callback):
    """Holds a directory, on rank 0, from the time the ranks are connected to the end of the fit.

    Stands before every callback that writes there. Loggers write even before callbacks are set up (the one of CSV
    files deletes those it finds): `attach` takes the lock before them.

    Args:
        directory: what the run writes.
        key: key path of the directory, for messages.
        wait_seconds: how long another run, which may be dying, is waited for.

    Raises:
        ValueError: (in `setup`, on every rank) another run holds it, or it cannot be made.
    """

    def __init__(self, directory: Path, key: str, wait_seconds: float = WAIT_SECONDS) -> None:
        self.directory = directory
        self.key = key
        self.wait_seconds = wait_seconds
        self._lock = DirectoryLock(directory)
        self._agreed = False

    def attach(self, trainer: pl.Trainer) -> None:
        """Take the lock as soon as the ranks of `trainer` are connected, ahead of loggers."""
        strategy = trainer.strategy
        connect = strategy.setup_environment

        def connect_and_take() -> None:
            connect()
            if trainer.state.fn == "fit":
                self._take()

        # On the instance, as its class is the user's choice; Lightning has no hook for callbacks at this point.
        strategy.setup_environment = connect_and_take  # type: ignore[method-assign]

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage == "fit":
            self._take()

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage == "fit":
            self._release()

    @override
    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        saver = background_saver(trainer)
        if saver is not None:
            # It writes until it is done, whatever the run died of; it has logged how that went.
            with contextlib.suppress(CheckpointError):
                saver.wait()
        self._release()

    def _take(self) -> None:
        if not self._agreed:  # the same on every rank
            from_origin(self._acquire, None, ValueError)
            self._agreed = True

    def _acquire(self) -> None:
        named = f"{self.key} = {str(self.directory)!r}"
        try:
            self._lock.acquire(self.wait_seconds)
        except HeldElsewhereError as error:
            raise ValueError(
                f"{named}: another run ({error}) is writing this directory; "
                "repair: stop that run, or name another directory"
            ) from error
        except OSError as error:
            raise ValueError(
                f"{named}: this run cannot make its directory: {error}; "
                "repair: name one that is not there yet, or a directory, where you may write"
            ) from error

    def _release(self) -> None:
        self._agreed = False
        self._lock.release()
