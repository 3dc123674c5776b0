"""Saving and restoring a Lightning run through Shoal's checkpoints.

Lightning's own way (`trainer.save_checkpoint`, `fit(ckpt_path=...)`) is different for each strategy, writes
in
place, pickles, and restores the optimizer of a sharded model by stepping it. Here every strategy takes one
way: `save_run` writes model, optimizers, schedulers, data position and random state through
`shoal.checkpoint.state`, and Lightning's loops, callbacks and precision plugin as plain data next to them;
`ResumeRun` restores all of it in `on_fit_start`, when the model is sharded and the optimizers exist but no
loop has looked at its counters and no loader has been built. So `max_steps`, validation intervals, logged
steps and the best scores of callbacks continue as if the run had never stopped.
"""

from __future__ import annotations

import dataclasses
import os
import warnings
from collections.abc import Callable, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import lightning.pytorch as pl
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch.optim.lr_scheduler import LRScheduler
from typing_extensions import override

from shoal.checkpoint.agree import from_origin
from shoal.checkpoint.background import BackgroundSaver
from shoal.checkpoint.snapshot import DEFAULT_SAVE, SaveOptions
from shoal.checkpoint.state import LoadedState, load_state, save_state
from shoal.checkpoint.store import CheckpointError
from shoal.train.strategy import distributed_setup

_TRAIN_BATCHES = "epoch_loop.batch_progress"
_VAL_BATCHES = "epoch_loop.val_loop.batch_progress"
_BETWEEN_EPOCHS = "between_epochs"


_SAVERS: WeakKeyDictionary[pl.Trainer, BackgroundSaver] = WeakKeyDictionary()
"""One saver for all callbacks of a Trainer, so that their saves never overlap."""


def background_saver(trainer: pl.Trainer, create: bool = False) -> BackgroundSaver | None:
    """The Trainer's saver in the background, None before there is one. Creating it is collective."""
    if create and trainer not in _SAVERS:
        _SAVERS[trainer] = BackgroundSaver()
    return _SAVERS.get(trainer)


def save_run(
    trainer: pl.Trainer,
    path: str | os.PathLike[str],
    *,
    validation_pending: bool,
    options: SaveOptions = DEFAULT_SAVE,
    saver: BackgroundSaver | None = None,
) -> None:
    """Save the whole run as the checkpoint `path`. Collective; call it between steps only.

    Args:
        trainer: its module has `model` (the plain trainable module) and `stream_position`.
        path: the directory to publish.
        validation_pending: the run owes a validation of this step; the resumed run will do it from its start.
        options: how the model is written.
        saver: writes in the background; None returns when the checkpoint is complete.

    Raises:
        CheckpointError: on every rank, when any of them failed; with `saver`, when its previous save failed.
    """
    module: Any = trainer.lightning_module
    callbacks = {callback.state_key: callback.state_dict() for callback in _callbacks(trainer)}
    extra = {
        "loops": _loops(trainer, validation_pending),
        "callbacks": {key: state for key, state in callbacks.items() if state},
        "precision": trainer.precision_plugin.state_dict(),
    }
    (save_state if saver is None else saver.save)(
        path,
        model=module.model,
        optimizer=trainer.optimizers,
        scheduler=_schedulers(trainer),
        position=dataclasses.asdict(module.stream_position),
        step=trainer.global_step,
        layout=_layout(trainer),
        extra=extra,
        options=options,
        tokenizer=getattr(module, "tokenizer", None),
    )


def restore_run(trainer: pl.Trainer, module: pl.LightningModule, path: str | os.PathLike[str]) -> LoadedState:
    """Restore everything that `save_run` saved, except the random state (see `ResumeRun`). Collective.

    Args:
        trainer: in `on_fit_start`: its strategy is set up and its loops have not started.
        module: has `model` (in its final layout) and `stream_position`, which is set.
        path: a complete checkpoint.

    Raises:
        CheckpointError: not a complete checkpoint, or of another model, optimizer or scheduler.
    """
    shaped: Any = module
    loaded = load_state(
        path,
        model=shaped.model,
        optimizer=trainer.optimizers,
        scheduler=_schedulers(trainer),
        layout=_layout(trainer),
    )
    _load_loops(trainer, dict(loaded.extra["loops"]))
    trainer.precision_plugin.load_state_dict(loaded.extra["precision"])
    for callback in _callbacks(trainer):
        if state := loaded.extra["callbacks"].get(callback.state_key):
            callback.load_state_dict(deepcopy(state))
    shaped.stream_position = type(shaped.stream_position)(**loaded.position)
    if trainer.global_step != loaded.step:
        raise CheckpointError(
            f"{path} is of step {loaded.step}, but its loops are at step {trainer.global_step}"
        )
    return loaded


class ResumeRun(pl.Callback):
    """Continues a saved run.

    The checkpoint is looked for by rank 0, as soon as the ranks are connected. It is loaded when the model is
    in its layout; the random state is set just before the first training step, after everything that draws
    numbers on the way there (loaders draw a seed when they start). Without a checkpoint nothing happens.

    Args:
        source: a complete checkpoint directory, None for a fresh run, or a function that finds one of these.

    Raises:
        ValueError: (in `setup`, on every rank) the function refused.
    """

    def __init__(self, source: str | os.PathLike[str] | None | Callable[[], Path | None]) -> None:
        self.path = None if source is None or callable(source) else Path(source)
        self._find = source if callable(source) else None
        self._loaded: LoadedState | None = None

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage == "fit" and self._find is not None:
            self.path = from_origin(self._find, None, ValueError)

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self.path is None:
            return
        self._loaded = restore_run(trainer, pl_module, self.path)
        # Lightning looks for a `state_dict` of the loader; ours starts at the module's stream position instead.
        warnings.filterwarnings("ignore", message="You're resuming from a checkpoint that ended before")
        if trainer.is_global_zero:
            loaded = self._loaded
            print(f"resumed {self.path} at step {loaded.step}, data position {loaded.position}", flush=True)

    @override
    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # A loader without a length is read one batch ahead. After a resumed validation at the end of an epoch
        # that batch would be lost, because Lightning starts the loader again.
        loader: Any = trainer.train_dataloader
        if hasattr(loader, "set_position"):
            loader.set_position(pl_module.stream_position)

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self._loaded is not None and self._loaded.rng is not None:
            self._loaded.rng.restore()
        self._loaded = None


def validation_is_due(trainer: pl.Trainer) -> bool:
    """Whether Lightning validates right after the training batch that has just ended."""
    progress = trainer.fit_loop.epoch_loop.batch_progress.state_dict()["current"]
    if trainer.validating or progress["completed"] == progress["processed"] or not trainer.enable_validation:
        return False
    fetcher = trainer.fit_loop._data_fetcher
    return fetcher is not None and trainer.fit_loop.epoch_loop._should_check_val_fx(fetcher)


def _loops(trainer: pl.Trainer, validation_pending: bool) -> dict[str, Any]:
    """State of Lightning's loops, brought into one of three positions that a resumed run continues from exactly.

    Left as they are, the counters lose or repeat a batch or an epoch when the checkpoint is of an epoch's last
    step, forget a validation that was due, and continue one that had begun without its first sums. So:

    - in the middle of an epoch: this step's batch is processed and not yet completed;
    - before a validation: the batch is completed, one validation batch has started, none is processed;
    - between epochs: everything is completed and no batch of the next epoch is ready.
    """
    fit = trainer.fit_loop
    state: dict[str, Any] = deepcopy(fit.state_dict())
    total, current = fit.epoch_loop.batch_progress.total.ready, fit.epoch_loop.batch_progress.current.ready
    between = fit.epoch_loop._num_ready_batches_reached() and not validation_pending
    finished = fit.epoch_progress.current.ready - (0 if between else 1)
    completed = 0 if between or validation_pending else 1
    for counts in state["epoch_progress"].values():
        counts |= {"processed": finished, "completed": finished}
    batches = state[_TRAIN_BATCHES]
    batches["total"] = _counts(total, total - completed)
    batches["current"] = _counts(0, 0) if between else _counts(current, current - completed)
    batches["is_last_batch"] = batches["is_last_batch"] and validation_pending
    state["epoch_loop.state_dict"]["_batches_that_stepped"] = total if between else total - 1
    if validation_pending:
        begun = _counts(1, 0) | {"processed": 0}
        state[_VAL_BATCHES] |= {"total": begun, "current": _counts(0, 0), "is_last_batch": False}
    return state | {_BETWEEN_EPOCHS: between}


def _counts(number: int, completed: int) -> dict[str, int]:
    return {"ready": number, "started": number, "processed": number, "completed": completed}


def _load_loops(trainer: pl.Trainer, state: dict[str, Any]) -> None:
    between = state.pop(_BETWEEN_EPOCHS)
    fit = trainer.fit_loop
    fit.load_state_dict(state)
    if between:
        # An epoch that starts is not a restart. The validation loop keeps its mark, which suppresses the sanity
        # check of a fresh run.
        fit._restarting = fit.epoch_loop._restarting = False


def _callbacks(trainer: pl.Trainer) -> list[pl.Callback]:
    return list(trainer.callbacks)  # type: ignore[attr-defined]


def _schedulers(trainer: pl.Trainer) -> list[LRScheduler]:
    return [config.scheduler for config in trainer.lr_scheduler_configs]


def _layout(trainer: pl.Trainer) -> Mapping[str, int]:
    if isinstance(trainer.strategy, SingleDeviceStrategy):
        return {"world": 1}
    setup = distributed_setup(trainer.strategy)
    return {"world": 1} if setup is None else dataclasses.asdict(setup.mesh_context.sizes)
