"""Saving while training goes on.

The state is copied in memory while the next step computes its gradients; the optimizer waits for the copy before it
changes anything. Writing, the agreement between ranks and the publication of the directory happen in one thread per
rank, on a process group of their own, because collectives of the training must not meet them. There is one save at a
time: the next one waits for it. A failure is raised, on every rank, by the
next `save` or by `wait`; nothing that failed is ever visible as a checkpoint.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn

from shoal.checkpoint.agree import agreed, is_distributed
from shoal.checkpoint.snapshot import (
    DEFAULT_SAVE,
    OptimizerLike,
    SaveOptions,
    SchedulerLike,
    Snapshot,
    listed,
    take_snapshot,
)
from shoal.checkpoint.staging import Staging
from shoal.checkpoint.state import manifest_of
from shoal.checkpoint.store import CheckpointError, CheckpointStore
from shoal.checkpoint.writing import write_snapshot

_log = logging.getLogger(__name__)


class BackgroundSaver:
    """Saves checkpoints in a thread, one at a time.

    Creating it is collective over the default process group, if there is one. Its copy of the state stays allocated
    in host memory from the first save on. The interpreter does not exit before a running save has ended.
    """

    def __init__(self) -> None:
        self._group = dist.new_group(backend="gloo") if is_distributed() else None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="shoal-save")
        self._staging = Staging()
        self._running: Future[Path] | None = None
        self.path: Path | None = None

    def save(
        self,
        path: str | os.PathLike[str],
        *,
        model: nn.Module,
        optimizer: OptimizerLike = None,
        scheduler: SchedulerLike = None,
        position: Mapping[str, Any] | None = None,
        step: int,
        layout: Mapping[str, int] | None = None,
        extra: Mapping[str, Any] | None = None,
        options: SaveOptions = DEFAULT_SAVE,
        tokenizer: Any = None,
    ) -> None:
        """Start to save what `save_state` would save; arguments as there. Every rank calls it.

        The optimizers must be the ones that change the state: their next step waits for the copy. Whoever changes
        parameters in another way calls `wait` first.

        Raises:
            CheckpointError: on every rank, when the previous save failed; this one is not started then.
        """
        self.wait()
        path = Path(path)
        snapshot: Snapshot | None = None
        failure: Exception | None = None
        try:
            manifest = manifest_of(step, position, layout, None)
            taken = take_snapshot(
                model,
                optimizer=optimizer,
                scheduler=scheduler,
                manifest=manifest,
                extra=extra,
                options=options,
                tokenizer=tokenizer,
            )
            snapshot = self._staging.begin(taken, listed(optimizer))
        except Exception as error:  # the peers are told by the thread, which is where they wait
            failure = error
        self.path = path
        self._running = self._thread.submit(self._write, path, snapshot, failure, options)

    def wait(self) -> None:
        """Wait for the running save, if there is one.

        Raises:
            CheckpointError: it failed; the same error on every rank. It is raised once.
        """
        running, self._running, self.path = self._running, None, None
        if running is not None:
            running.result()

    def is_saving(self, path: str | os.PathLike[str]) -> bool:
        """Whether `path` has been begun and not been waited for; the same on every rank."""
        return self.path == Path(path)

    def _write(
        self, path: Path, snapshot: Snapshot | None, failure: Exception | None, options: SaveOptions
    ) -> Path:
        def taken() -> Snapshot:
            if snapshot is None:
                assert failure is not None
                raise failure
            self._staging.fill()
            return snapshot

        try:
            try:
                agreed_snapshot = agreed(taken, self._group)
            except CheckpointError as error:
                raise CheckpointStore(path.parent).failure(path.name, error) from error
            return write_snapshot(path, agreed_snapshot, options, self._group)
        except Exception as error:
            # A process that ends without another save or a `wait` would say nothing otherwise.
            _log.error("saving in the background failed: %s", error)
            raise
