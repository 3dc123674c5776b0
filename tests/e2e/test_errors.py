"""Failures stop every rank with one message that names the origin; nothing hangs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.config.schema import FSDP2Config
from tests.e2e.test_strategies import run_of, train_on_rank
from tests.e2e.tiny_run import AUTOMODEL
from tests.parity.harness import Case, Layout, run_layout
from tests.zygote import RankRunner

FSDP2 = {"_target_": AUTOMODEL}


def poisoned_run(rank: int, world: int, layout: Layout, tmp: str) -> str:
    """Makes one gradient infinite on rank 1 alone; returns what the step said, and whether weights moved."""
    import shoal.train.step as step_module

    honest = step_module.gradient_norm

    def poison(parameters: list[torch.nn.Parameter]) -> torch.Tensor:
        if rank == 1:
            grad = parameters[2].grad
            assert grad is not None
            getattr(grad, "_local_tensor", grad).view(-1)[0] = float("inf")
        return honest(parameters)

    step_module.gradient_norm = poison  # type: ignore[assignment]
    try:
        run_layout(rank, world, Case(num_steps=1), layout)
    except FloatingPointError as error:
        return str(error)
    return "nothing was noticed"


@pytest.mark.parametrize(
    "layout", [Layout("fsdp2", 2), Layout("offset", 2, fsdp2=FSDP2Config(reshard_after_forward=False))]
)
def test_a_non_finite_gradient_on_one_rank_stops_all_by_name(
    ranks: RankRunner, tmp_path: Path, layout: Layout
) -> None:
    said = ranks(poisoned_run, 2, layout, str(tmp_path))
    assert said[0] == said[1]
    assert "step 0: the gradient norm is inf; non-finite gradients in: llm.model.layers.0" in said[0]
    assert "optimizer has not stepped" in said[0]


def train_or_say(rank: int, world: int, run: dict[str, Any]) -> str:
    try:
        train_on_rank(rank, world, run)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "finished"


def test_unreadable_audio_on_one_rank_stops_all_by_sample(ranks: RankRunner, tmp_path: Path) -> None:
    run = run_of(tmp_path, 2, FSDP2, max_steps=6)
    run["data"]["train_ds"]["on_bad_audio"] = "error"
    manifest = Path(run["data"]["train_ds"]["input_cfg"][0]["manifest_filepath"])
    (manifest.parent / "7.wav").write_bytes(b"not audio at all")
    said = ranks(train_or_say, 2, run, init=False, timeout=60)
    assert said[0] == said[1]
    assert said[0].startswith("RuntimeError: data of this step failed:") and "7" in said[0]


def test_unreadable_audio_is_skipped_and_training_goes_on(ranks: RankRunner, tmp_path: Path) -> None:
    run = run_of(tmp_path, 2, FSDP2, max_steps=6)
    manifest = Path(run["data"]["train_ds"]["input_cfg"][0]["manifest_filepath"])
    (manifest.parent / "7.wav").write_bytes(b"not audio at all")
    assert ranks(train_or_say, 2, run, init=False, timeout=60) == ["finished", "finished"]


def test_a_missing_manifest_is_refused_on_every_rank(ranks: RankRunner, tmp_path: Path) -> None:
    run = run_of(tmp_path, 2, FSDP2, max_steps=3)
    run["data"]["train_ds"]["input_cfg"][0]["manifest_filepath"] = str(tmp_path / "absent.jsonl")
    said = ranks(train_or_say, 2, run, init=False, timeout=60)
    assert said[0] == said[1] and "absent.jsonl" in said[0]


def test_weights_of_another_architecture_are_refused_on_every_rank(ranks: RankRunner, tmp_path: Path) -> None:
    run = run_of(tmp_path, 2, FSDP2, max_steps=3)
    file = tmp_path / "llm" / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps({**config, "num_hidden_layers": 3}))
    said = ranks(train_or_say, 2, run, init=False, timeout=60)
    assert said[0] == said[1]
    assert "missing: model.layers.2." in said[0] and "pretrained_weights=false" in said[0]
