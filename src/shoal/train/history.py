"""Callbacks that write the numbers of every step and validation in full precision, for comparison and for plots."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from typing_extensions import override

from shoal.train.modules import ShoalModule


class StepLines:
    """A file with one JSON line per step, in the order of the steps.

    A run that continues from a checkpoint takes again what came after it. Lines of that are moved to a file beside it,
    ``NAME.undone.jsonl``, with what a crash has left of a line.

    >>> import tempfile
    >>> lines = StepLines(Path(tempfile.mkdtemp()) / "losses.jsonl")
    >>> for step in (1, 2, 3):
    ...     lines.append({"step": step})
    >>> lines.begin(after=1)
    >>> lines.append({"step": 2, "again": True})
    >>> lines.path.read_text().splitlines()
    ['{"step": 1}', '{"step": 2, "again": true}']
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._is_begun = False

    def begin(self, after: int) -> None:
        """A run begins that has taken `after` steps: moves aside what stands here of later ones."""
        self._keep_below(after + 1)
        self._is_begun = False

    def append(self, line: Mapping[str, Any]) -> None:
        """Writes a line, whose ``step`` says where it belongs."""
        if (
            not self._is_begun
        ):  # a validation of the step that was saved is taken again, if it was still due then
            self._keep_below(line["step"])
            self._is_begun = True
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def _keep_below(self, step: int) -> None:
        if not self.path.is_file():
            return
        kept: list[str] = []
        undone: list[str] = []
        for line in self.path.read_text(encoding="utf-8").splitlines(keepends=True):
            (kept if _step_of(line) < step else undone).append(line)
        if not undone:
            return
        with self.path.with_suffix(f".undone{self.path.suffix}").open("a", encoding="utf-8") as file:
            file.writelines(line.rstrip("\n") + "\n" for line in undone)
        beside = self.path.with_suffix(".incomplete")
        beside.write_text("".join(kept), encoding="utf-8")
        os.replace(beside, self.path)


def _step_of(line: str) -> float:
    try:
        return float(json.loads(line)["step"])
    except ValueError:  # cut short
        return float("inf")


class StepHistory(pl.Callback):
    """Writes one JSON line per optimizer step: step, loss, gradient norm, accuracy, padding, counts, learning rate.

    Loggers round to fp32; these lines hold what the training step computed. Rank 0 writes; the numbers are global
    sums over global counts, the same on every rank. See `StepLines` for runs that continue.

    Args:
        path: The file; its directory is created.
    """

    def __init__(self, path: str) -> None:
        self.path = Path(path)
        self._lines = StepLines(self.path)

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.is_global_zero:
            self._lines.begin(after=trainer.global_step)

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if (
            not trainer.is_global_zero
            or not isinstance(pl_module, ShoalModule)
            or pl_module.last_result is None
        ):
            return
        result = pl_module.last_result
        self._lines.append(
            {
                "step": trainer.global_step,
                "loss": result.loss,
                "grad_norm": result.gradient_norm,
                "accuracy": result.accuracy,
                "padding_share": result.padding_share,
                "num_tokens": result.header.num_tokens,
                "num_samples": result.header.num_samples,
                "audio_seconds": result.header.audio_seconds,
                "learning_rate": pl_module.step_values["learning_rate"],
            }
        )


class ValidationHistory(pl.Callback):
    """Writes one JSON line per validation, in full precision: step, loss and perplexity of every set."""

    def __init__(self, path: Path) -> None:
        self._lines = StepLines(path)

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.is_global_zero:
            self._lines.begin(after=trainer.global_step)

    @override
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        values = getattr(pl_module, "last_validation", None)
        if trainer.is_global_zero and not trainer.sanity_checking and values:
            self._lines.append({"step": trainer.global_step, **values})
