"""A callback that writes every step's numbers in full precision, for comparison and for plots."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from typing_extensions import override

from shoal.train.modules import ShoalModule


class StepHistory(pl.Callback):
    """Appends one JSON line per optimizer step: step, loss, gradient norm, accuracy, padding and counts.

    Loggers round to fp32; these lines hold what the training step computed. Rank 0 writes; the numbers are global
    sums over global counts, the same on every rank.

    Args:
        path: The file; its directory is created.
    """

    def __init__(self, path: str) -> None:
        self.path = Path(path)

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
        line = {
            "step": trainer.global_step,
            "loss": result.loss,
            "grad_norm": result.gradient_norm,
            "accuracy": result.accuracy,
            "padding_share": result.padding_share,
            "num_tokens": result.header.num_tokens,
            "num_samples": result.header.num_samples,
            "audio_seconds": result.header.audio_seconds,
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
