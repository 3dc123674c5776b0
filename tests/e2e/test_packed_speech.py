"""A run with `model.packed_sequences: true`, through the command: the numbers of a padded run, without its padding."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from shoal.cli import main
from tests.e2e.tiny_run import AUTOMODEL, configuration
from tests.zygote import RankRunner

STEPS = 4


def mapping_of(root: Path, name: str, packed: bool, **trainer: Any) -> dict[str, Any]:
    mapping = configuration(
        root,
        precision="64-true",
        **{"max_steps": STEPS, **trainer},
        enable_progress_bar=False,
    )
    mapping["model"]["packed_sequences"] = packed
    mapping["exp_manager"] = {
        "explicit_log_dir": str(root / name),
        "create_tensorboard_logger": False,
        "create_csv_logger": True,
    }
    return mapping


def train(rank: int, world: int, file: str) -> int:
    return main(["train", file])


def logged(
    ranks: RankRunner, root: Path, name: str, mapping: dict[str, Any], world: int
) -> dict[str, list[float]]:
    """Runs the command on every rank; returns what the run's log holds, column by column."""
    file = root / f"{name}.yaml"
    file.write_text(yaml.safe_dump(mapping))
    assert list(ranks(train, world, str(file), init=False, timeout=180)) == [0] * world
    (metrics,) = (root / name).rglob("metrics.csv")
    with metrics.open() as lines:
        rows = list(csv.DictReader(lines))
    return {key: [float(row[key]) for row in rows if row[key]] for key in rows[0]}


def test_a_packed_run_is_a_padded_run_without_padding(ranks: RankRunner, tmp_path: Path) -> None:
    padded = logged(ranks, tmp_path, "padded", mapping_of(tmp_path, "padded", False, val_check_interval=8), 1)
    layout = {
        "devices": 2,
        "val_check_interval": 4,
        "strategy": {"_target_": AUTOMODEL, "activation_checkpointing_llm": True},
    }
    packed = logged(ranks, tmp_path, "packed", mapping_of(tmp_path, "packed", True, **layout), 2)
    assert len(packed["loss"]) == STEPS and len(packed["val_loss"]) == 1
    for key in ("loss", "grad_norm", "num_tokens", "train_accuracy", "val_loss", "val_acc_one"):
        assert packed[key] == pytest.approx(padded[key], rel=1e-6), key  # loggers round
    assert packed["padding_share"] == [0.0] * STEPS
    assert all(0.05 < share < 0.6 for share in padded["padding_share"])
    assert packed["audio_padding_share"] == padded["audio_padding_share"], "the encoder pads either way"


def test_packs_of_a_budget_in_tokens(ranks: RankRunner, tmp_path: Path) -> None:
    """Whole conversations up to `batch_tokens`, in training and in validation; then `shoal evaluate` on the run."""
    mapping = mapping_of(tmp_path, "budget", True, max_steps=3, val_check_interval=4)
    for block in (mapping["data"]["train_ds"], mapping["data"]["validation_ds"]):
        del block["batch_size"]
        block["batch_tokens"] = 120
    log = logged(ranks, tmp_path, "budget", mapping, 1)
    assert len(log["loss"]) == 3 and log["padding_share"] == [0.0] * 3 and len(log["val_loss"]) >= 1
    assert max(log["num_samples"]) > 4, "more than one conversation in a pack"
    output = tmp_path / "answers.jsonl"
    words = [
        f"pretrained_name={tmp_path / 'budget'}",
        f"inputs={tmp_path / 'valid' / 'manifest.jsonl'}",
        f"output_manifest={output}",
        "max_new_tokens=3",
        "batch_size=3",
    ]
    assert main(["evaluate", *words]) == 0
    assert len(output.read_text().splitlines()) == 7


def test_an_llm_that_cannot_be_packed_is_refused_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mapping = mapping_of(tmp_path, "refused", True)
    config = tmp_path / "llm" / "config.json"
    content = json.loads(config.read_text())
    config.write_text(json.dumps({**content, "attention_dropout": 0.1}))
    (tmp_path / "refused.yaml").write_text(yaml.safe_dump(mapping))
    assert main(["train", str(tmp_path / "refused.yaml")]) == 1
    assert "llama cannot be packed with attention_dropout=0.1" in capsys.readouterr().err
