"""The LightningModule under a plain Trainer, in one process."""

from __future__ import annotations

from pathlib import Path

import lightning.pytorch as pl
import pytest
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


def module_of() -> ShoalModule:
    return ShoalModule(
        ModelPlan(lambda: build_packed(CASE), seed=7), TargetConfig("torch.optim.SGD", {"lr": 0.1})
    )


def trainer_of(folder: Path, max_steps: int) -> pl.Trainer:
    return pl.Trainer(
        accelerator="cpu",
        devices=1,
        plugins=[ShoalPrecision("32-true")],
        max_steps=max_steps,
        num_sanity_val_steps=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )


def steps_of(*skipped: dict[str, int]) -> DataLoader[StepBatch]:
    batches = [StepBatch(draw_packs(CASE, 0), StreamPosition(), None, counts) for counts in skipped]
    return DataLoader(batches, batch_size=None)  # type: ignore[arg-type]


def test_what_the_data_leaves_out_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Each reason when it comes up, and all sums at the end."""
    module = module_of()
    with caplog.at_level("WARNING", logger="shoal"):
        trainer_of(tmp_path, 3).fit(
            module, steps_of({"longer_than_pack": 3}, {"longer_than_pack": 2}, {"corrupt": 1})
        )
    told = [record.getMessage() for record in caplog.records if "left out" in record.getMessage()]
    assert len(told) == 3, told
    assert "3 left out of the data, or cut: longer_than_pack" in told[0]
    assert "1 left out of the data, or cut: corrupt" in told[1]
    assert "{'longer_than_pack': 5, 'corrupt': 1}" in told[2]


def test_validation_leaves_nothing_that_training_cannot_use(tmp_path: Path) -> None:
    """Under torch's inference mode, Lightning's default without gloo, shards and cached indices would be kept of it."""
    module, trainer, steps = module_of(), trainer_of(tmp_path, 1), steps_of({})
    seen: list[tuple[bool, bool]] = []

    class Watch(pl.Callback):
        def on_validation_batch_start(self, *_: object) -> None:
            seen.append((torch.is_inference_mode_enabled(), torch.is_grad_enabled()))

    trainer.callbacks.append(Watch())  # type: ignore[attr-defined]
    trainer.fit(module, steps, steps)
    trainer.validate(module, steps, verbose=False)
    assert trainer.global_step == 1 and len(seen) == 3  # before the step, after it, and by itself
    assert set(seen) == {(False, False)}
