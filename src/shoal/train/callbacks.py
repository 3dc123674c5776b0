"""Callbacks: atomic checkpoints with Lightning's keys, and a compact progress bar."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import re
import time
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint as LightningModelCheckpoint
from lightning.pytorch.callbacks import TQDMProgressBar
from torch import Tensor
from typing_extensions import override

from shoal.checkpoint.agree import from_origin
from shoal.checkpoint.consolidate import consolidate_in_place
from shoal.checkpoint.snapshot import ModelFormat, SaveOptions
from shoal.checkpoint.store import CheckpointError, CheckpointStore, stored
from shoal.train.resume import background_saver, save_run, validation_is_due

_log = logging.getLogger(__name__)
_LAST = re.compile(r"step=\d+-last(-v\d+)?")


class ModelCheckpoint(LightningModelCheckpoint):
    """Lightning's ModelCheckpoint that writes complete-or-invisible directories, under any strategy.

    All keys of Lightning's class keep their meaning (`monitor`, `mode`, `save_top_k`, `save_last`,
    `filename`, `every_n_train_steps`, `every_n_epochs`, `train_time_interval`, `save_on_train_epoch_end`,
    ...), with these
    differences:

    - a checkpoint is a directory without an extension; `/` in a formatted name becomes `_`;
    - `save_last` costs nothing when the step was saved as one of the best: that directory is the last one
      too. Otherwise it is `step=N-last`, and at most one of those exists. `save_last: link` is the same;
    - a step is ranked by its own value only: a save that is due waits for a validation that follows at once, and
      without one it is made for `save_last` alone;
    - `save_last` includes the step that ends the run;
    - the newest complete checkpoint is never deleted;
    - `save_weights_only` is refused: such a checkpoint could not be resumed.

    Args:
        args, kwargs: Lightning's.
        model_save_format: `safetensors` shards in `model/`, or `torch_save`, torch's distributed format.
        save_consolidated: `every` checkpoint also holds the model as a Hugging Face folder `consolidated/`, only the
            `final` one does (which is then saved in any case), or none does (False); those without carry a
            `consolidate.sh`.
        async_save: write in the background. A failure is raised by the next save, or at the end of the run, and a
            checkpoint that a new one replaces is deleted when the new one is complete.
        model_part: `trainable` leaves frozen parameters out: with LoRA a checkpoint holds the adapters alone.

    Raises:
        ValueError: `save_weights_only`, or `save_on_exception` (ranks may be anywhere when one fails).
    """

    FILE_EXTENSION = ""

    def __init__(
        self,
        *args: Any,
        model_save_format: ModelFormat = "torch_save",
        save_consolidated: bool | Literal["final", "every"] = False,
        async_save: bool = False,
        model_part: Literal["all", "trainable"] = "all",
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.save_consolidated = "final" if save_consolidated is True else save_consolidated
        self.save_options = SaveOptions(model_save_format, model_part, self.save_consolidated == "every")
        self.async_save = async_save
        self._superseded: list[str] = []
        self._is_validation_value = False
        self._validated_step = -1
        if self.save_weights_only:
            raise ValueError(
                "save_weights_only: true is refused, the run could not resume; export the model instead"
            )
        if self.save_on_exception:
            raise ValueError(
                "save_on_exception: true is refused: after an error on one rank the others cannot save"
            )

    # --------------------------------------------------------------------------------------------- saving

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._should_skip_saving_checkpoint(trainer) or not self._is_due(trainer):
            return
        if self.monitor is not None and validation_is_due(trainer):
            self._defer_save_until_validation = True
            return
        candidates = self._monitor_candidates(trainer)
        self._save_topk_checkpoint(trainer, candidates)
        self._save_last_checkpoint(trainer, candidates)

    @override
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        validated = trainer.fit_loop.epoch_loop.val_loop._results.metrics(on_step=False)["callback"]
        self._is_validation_value = self.monitor in validated
        self._validated_step = trainer.global_step
        if self._defer_save_until_validation and not self._should_skip_saving_checkpoint(trainer):
            # Lightning makes up for it only when validations do not coincide with the ends of epochs.
            candidates = self._monitor_candidates(trainer)
            self._save_topk_checkpoint(trainer, candidates)
            self._save_last_checkpoint(trainer, candidates)
            self._defer_save_until_validation = False
            return
        super().on_validation_end(trainer, pl_module)

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        if self.async_save:
            background_saver(trainer, create=True)

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not self._should_skip_saving_checkpoint(trainer):
            self._save_last_checkpoint(trainer, self._monitor_candidates(trainer))
        if self.save_consolidated == "final" and not getattr(trainer, "fast_dev_run", False):
            final = self.save_now(trainer)
            from_origin(lambda: consolidate_in_place(final), None)
        self._finish_saving(trainer)

    @override
    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        super().on_exception(trainer, pl_module, exception)
        saver = background_saver(trainer)
        if saver is not None:
            # What is being written is a good checkpoint; how it went is logged, the exception is what matters now.
            with contextlib.suppress(CheckpointError):
                saver.wait()

    def _finish_saving(self, trainer: pl.Trainer) -> None:
        """Wait for the save in the background and delete what it replaced; raises its failure on every rank."""
        saver = background_saver(trainer)
        if saver is not None:
            saver.wait()
        superseded, self._superseded = self._superseded, []
        for path in superseded:
            self._remove_checkpoint(trainer, path)

    @override
    def file_exists(self, filepath: str | Path, trainer: pl.Trainer) -> bool:
        saver = background_saver(trainer)
        if saver is not None and saver.is_saving(filepath):
            return True
        found: bool = super().file_exists(filepath, trainer)
        return found

    @override
    def _save_topk_checkpoint(self, trainer: pl.Trainer, monitor_candidates: dict[str, Tensor]) -> None:
        if self.monitor in monitor_candidates:
            old = self._is_validation_value and self._validated_step != trainer.global_step
        else:
            old = self.monitor is not None and not trainer.fit_loop.epoch_loop.val_loop._has_run
        if not old:  # a name that no validation logs is an error that Lightning raises
            super()._save_topk_checkpoint(trainer, monitor_candidates)

    def save_now(
        self, trainer: pl.Trainer, during_validation: bool = False, *, in_background: bool = False
    ) -> str:
        """Save this step, if it is not saved yet, outside the ranking by score; returns the path. Collective.

        The resumed run does not count it as this callback's save of the step: after a validation that was cut
        off it saves the step again, with its score. The checkpoint is complete when this returns, also with
        `async_save`, unless `in_background` lets it be written as the others are then.
        """
        self._finish_saving(trainer)
        if self._last_global_step_saved == trainer.global_step and self._last_checkpoint_saved:
            return self._last_checkpoint_saved
        previous, self.last_model_path = self.last_model_path, self._last_name(trainer)
        pending = during_validation or validation_is_due(trainer)
        save_run(
            trainer,
            self.last_model_path,
            validation_pending=pending,
            options=self.save_options,
            saver=background_saver(trainer) if in_background and self.async_save else None,
        )
        self._remove_unless_best(trainer, previous)
        return self.last_model_path

    @override
    def _save_checkpoint(self, trainer: pl.Trainer, filepath: str) -> None:
        self._finish_saving(trainer)
        # Before saving: they are part of the saved state of this callback.
        self._last_global_step_saved = trainer.global_step
        self._last_checkpoint_saved = filepath
        save_run(
            trainer,
            filepath,
            validation_pending=validation_is_due(trainer),
            options=self.save_options,
            saver=background_saver(trainer) if self.async_save else None,
        )

    @override
    def _save_last_checkpoint(self, trainer: pl.Trainer, monitor_candidates: dict[str, Tensor]) -> None:
        if not self.save_last:
            return
        previous = self.last_model_path
        if self._last_global_step_saved == trainer.global_step and self._last_checkpoint_saved:
            self.last_model_path = self._last_checkpoint_saved
        else:
            self.last_model_path = self._last_name(trainer)
            self._save_checkpoint(trainer, self.last_model_path)
        self._remove_unless_best(trainer, previous)
        # What a killed run could not remove any more; names that users choose do not match.
        for checkpoint in CheckpointStore(str(self.dirpath)).complete() if trainer.is_global_zero else ():
            if _LAST.fullmatch(checkpoint.name) and checkpoint.step < trainer.global_step:
                self._remove_unless_best(trainer, str(checkpoint.path))

    @override
    def state_dict(self) -> dict[str, Any]:
        saved = {"saved_step": self._last_global_step_saved, "saved_path": self._last_checkpoint_saved}
        return super().state_dict() | saved

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._last_global_step_saved = state_dict["saved_step"]
        self._last_checkpoint_saved = state_dict["saved_path"]

    def _last_name(self, trainer: pl.Trainer) -> str:
        name = filepath = os.path.join(str(self.dirpath), f"step={trainer.global_step}-last")
        version = self.STARTING_VERSION
        while self.file_exists(filepath, trainer):
            filepath = f"{name}-v{version}"
            version += 1
        return filepath

    def _is_due(self, trainer: pl.Trainer) -> bool:
        if self._every_n_train_steps >= 1:
            return trainer.global_step % self._every_n_train_steps == 0
        if self._train_time_interval is None or self._last_time_checked is None:
            return False
        now = time.monotonic()
        elapsed = now - self._last_time_checked >= self._train_time_interval.total_seconds()
        due: bool = trainer.strategy.broadcast(elapsed)  # clocks of ranks differ
        if due:
            self._last_time_checked = now
        return due

    # ----------------------------------------------------------------------------------- names, retention

    @override
    def format_checkpoint_name(
        self,
        metrics: dict[str, Tensor],
        filename: str | None = None,
        ver: int | None = None,
        prefix: str | None = None,
    ) -> str:
        formatted = super().format_checkpoint_name(metrics, filename, ver, prefix)
        if self.dirpath is None:
            return formatted.replace("/", "_")
        name = os.path.relpath(formatted, self.dirpath)
        return os.path.join(str(self.dirpath), name.replace("/", "_"))

    @override
    def _remove_checkpoint(self, trainer: pl.Trainer, filepath: str) -> None:
        """Delete a checkpoint that left the best ones, unless it is still the last one."""
        if filepath == self.last_model_path or not trainer.is_global_zero or stored(filepath) is None:
            return
        saver = background_saver(trainer)
        if saver is not None and saver.path is not None:
            self._superseded.append(filepath)  # until the one that replaces it is complete
            return
        path = Path(filepath)
        try:
            CheckpointStore(path.parent).delete(path.name)
        except CheckpointError as error:
            _log.warning("%s", error)  # an old checkpoint too many is no reason to stop the run

    def _remove_unless_best(self, trainer: pl.Trainer, filepath: str) -> None:
        is_best = filepath in self.best_k_models or filepath == self.best_model_path
        # With save_top_k: -1 all are among the best, and without a monitor Lightning keeps no list of them.
        is_best |= self.save_top_k == -1 and _LAST.fullmatch(Path(filepath).name) is None
        if (
            filepath
            and not is_best
            and self._should_remove_checkpoint(trainer, filepath, self.last_model_path)
        ):
            self._remove_checkpoint(trainer, filepath)


class ProgressBar(TQDMProgressBar):
    """One line per epoch with loss, tokens/s, seconds of audio/s, padding share, learning rate and memory.

    Shows the values of the last step (`module.step_values`, or what was logged) under the names in `COLUMNS`, and
    everything that was logged with `prog_bar=True`.
    """

    # logged name -> column and format
    COLUMNS = {
        "loss": ("loss", "{:.4f}"),
        "tokens_per_second": ("tok/s", "{:,.0f}"),
        "audio_seconds_per_second": ("audio", "{:.1f}s/s"),
        "padding_share": ("pad", "{:.0%}"),
        "learning_rate": ("lr", "{:.2e}"),
        "memory_gb": ("mem", "{:.1f}GB"),
    }

    @override
    def get_metrics(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule
    ) -> dict[str, int | str | float | dict[str, float]]:
        shown = dict(super().get_metrics(trainer, pl_module))
        shown.pop("v_num", None)
        logged = {**trainer.callback_metrics, **getattr(pl_module, "step_values", {})}
        for name, (column, form) in self.COLUMNS.items():
            if name in logged and math.isfinite(value := float(logged[name])):
                shown.pop(name, None)
                shown[column] = form.format(value)
        return shown
