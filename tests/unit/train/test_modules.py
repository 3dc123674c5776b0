"""The LightningModule under a plain Trainer, in one process."""

from __future__ import annotations

from pathlib import Path

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader

from shoal.config.values import TargetConfig
from shoal.data.batch import StepBatch
from shoal.data.position import StreamPosition
from shoal.models.assemble import ModelPlan
from shoal.train.modules import ShoalModule
from shoal.train.precision import ShoalPrecision
from tests.parity.packed_text import build_packed, draw_packs, packed_case

CASE = packed_case("llama", 1)


def test_validation_leaves_nothing_that_training_cannot_use(tmp_path: Path) -> None:
    """Under torch's inference mode, Lightning's default without gloo, shards and cached indices would be kept of it."""
    module = ShoalModule(
        ModelPlan(lambda: build_packed(CASE), seed=7), TargetConfig("torch.optim.SGD", {"lr": 0.1})
    )
    seen: list[tuple[bool, bool]] = []
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        plugins=[ShoalPrecision("32-true")],
        max_steps=1,
        num_sanity_val_steps=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    )
    steps = DataLoader([StepBatch(draw_packs(CASE, 0), StreamPosition(), None, {})], batch_size=None)  # type: ignore[arg-type]

    class Watch(pl.Callback):
        def on_validation_batch_start(self, *_: object) -> None:
            seen.append((torch.is_inference_mode_enabled(), torch.is_grad_enabled()))

    trainer.callbacks.append(Watch())  # type: ignore[attr-defined]
    trainer.fit(module, steps, steps)
    trainer.validate(module, steps, verbose=False)
    assert trainer.global_step == 1 and len(seen) == 3  # before the step, after it, and by itself
    assert set(seen) == {(False, False)}
