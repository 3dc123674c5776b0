"""Whole runs through Lightning: every strategy trains to the same numbers as one process."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.distributed.tensor import DTensor

from shoal.config import SpeechConfig, load_config
from shoal.train.data import SpeechData
from shoal.train.plans import prompts_of
from shoal.train.recipes import speech_module
from shoal.train.trainer import build_trainer, dp_size_of, launched_world, plan_steps
from tests.e2e.tiny_run import AUTOMODEL, configuration
from tests.zygote import RankRunner

STEPS = 20
STRATEGIES: dict[str, tuple[int, dict[str, Any] | None]] = {
    "automodel-1": (1, {"_target_": AUTOMODEL}),
    "automodel-2": (2, {"_target_": AUTOMODEL, "activation_checkpointing_llm": True}),
    "automodel-3": (3, {"_target_": AUTOMODEL, "activation_checkpointing_perception": True}),
    "automodel-hsdp": (4, {"_target_": AUTOMODEL, "dp_replicate_size": 2}),
    "ddp-2": (2, None),
    "ddp-4": (4, {"_target_": "lightning.pytorch.strategies.DDPStrategy", "gradient_as_bucket_view": True}),
    "model-parallel-2": (
        2,
        {"_target_": "nemo.core.ModelParallelStrategy", "data_parallel": 2, "tensor_parallel": 1},
    ),
    "automodel-tp2-sp": (
        4,
        {
            "_target_": AUTOMODEL,
            "tp_size": 2,
            "distributed_config": {"sequence_parallel": True},
            "activation_checkpointing_llm": True,
        },
    ),
    "nemo-tp2": (
        2,
        {"_target_": "nemo.core.ModelParallelStrategy", "data_parallel": 1, "tensor_parallel": 2},
    ),
    "lightning-dp2-tp2": (
        4,
        {
            "_target_": "lightning.pytorch.strategies.ModelParallelStrategy",
            "data_parallel_size": 2,
            "tensor_parallel_size": 2,
        },
    ),
}


class Recorder(pl.Callback):
    """Keeps what the training step reported."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.rates: list[float] = []
        self.validations: list[dict[str, float]] = []

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.losses.append(float(outputs["loss"]))
        self.norms.append(pl_module.step_values["grad_norm"])
        self.rates.append(pl_module.step_values["learning_rate"])

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        metrics = {
            name: float(value) for name, value in trainer.callback_metrics.items() if name.startswith("val_")
        }
        self.validations.append({"step": float(trainer.global_step), **metrics})


def train_on_rank(rank: int, world: int, mapping: dict[str, Any]) -> dict[str, Any]:
    """Trains as `shoal train` does, with a recorder."""
    import os

    config = load_config(mapping, world_size=world)
    assert isinstance(config, SpeechConfig)
    launched = launched_world(os.environ, config.trainer)
    planning = plan_steps(config.trainer, dp_size_of(config.trainer, launched))
    prompts = prompts_of(config.model)
    module, recorder = speech_module(config, prompts), Recorder()
    data = SpeechData(
        config.data,
        prompts,
        global_micro_batches=planning.global_micro_batches,
        steps_per_epoch=planning.steps_per_epoch,
    )
    trainer = build_trainer(config.trainer, launched, planning, callbacks=[recorder])
    trainer.fit(module, data)
    weights = {
        name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()
        for name, p in module.model.named_parameters()
    }
    return {
        "losses": recorder.losses,
        "norms": recorder.norms,
        "rates": recorder.rates,
        "validations": recorder.validations,
        "weights": weights,
        "layout": module.layout,
        "position": module.stream_position,
    }


def run_of(root: Path, world: int, strategy: dict[str, Any] | None, **trainer: Any) -> dict[str, Any]:
    options = {
        "precision": "64-true",
        "max_steps": STEPS,
        "devices": world,
        "enable_progress_bar": False,
        **trainer,
    }
    if strategy is not None:
        options["strategy"] = strategy
    return configuration(root, **options)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("run")


@pytest.fixture(scope="module")
def expected(ranks: RankRunner, root: Path) -> dict[str, Any]:
    """One process without a process group."""
    return ranks(train_on_rank, 1, run_of(root, 1, None), init=False)[0]


@pytest.mark.parametrize("name", STRATEGIES)
def test_twenty_steps_are_the_same_under_every_strategy(
    ranks: RankRunner, root: Path, expected: dict[str, Any], name: str
) -> None:
    world, strategy = STRATEGIES[name]
    for actual in ranks(train_on_rank, world, run_of(root, world, strategy), init=False, timeout=120):
        assert len(actual["losses"]) == STEPS
        assert actual["losses"] == pytest.approx(expected["losses"], rel=1e-8)
        assert actual["norms"] == pytest.approx(expected["norms"], rel=1e-8)
        assert actual["rates"] == expected["rates"]
        assert actual["position"] == expected["position"]
        assert len(actual["validations"]) == len(expected["validations"]) > 0
        for mine, theirs in zip(actual["validations"], expected["validations"], strict=True):
            assert mine == pytest.approx(theirs, rel=1e-6)
        for weight, reference in expected["weights"].items():
            torch.testing.assert_close(actual["weights"][weight], reference, rtol=1e-8, atol=1e-8)


def test_training_learns(expected: dict[str, Any]) -> None:
    first, last = sum(expected["losses"][:3]), sum(expected["losses"][-3:])
    assert last < 0.8 * first


def test_layout_table_names_every_axis_and_count(ranks: RankRunner, root: Path) -> None:
    run = run_of(
        root, 4, {"_target_": AUTOMODEL, "dp_replicate_size": 2}, max_steps=3, precision="bf16-mixed"
    )
    layout = ranks(train_on_rank, 4, run, init=False)[0]["layout"]
    rows = dict(line.split(maxsplit=1) for line in layout.splitlines()[1:])
    sizes = {"world": "4", "pp": "1", "dp_replicate": "2", "dp_shard": "2", "cp": "1", "tp": "1", "ep": "1"}
    assert {key: rows[key] for key in sizes} == sizes
    assert rows["ep_shard"] == "4" and rows["strategy"] == "fsdp2" and rows["precision"] == "bf16-mixed"
    assert rows["attention"] == "sdpa" and rows["experts"] == "none"
    assert re.fullmatch(r"attention sdpa \de-0\d, loss \de-0\d from the reference", rows["checked"])
    total, trainable = int(rows["parameters"].replace(",", "")), int(rows["trainable"].replace(",", ""))
    local = int(layout.splitlines()[-1].split()[-1].replace(",", ""))
    assert total > trainable > 0 and local < 0.6 * total
