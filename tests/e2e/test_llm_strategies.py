"""Whole LLM runs: every strategy trains to the same numbers as one process, with rows and with packs."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from shoal.config import LLMConfig, load_config
from tests.e2e.tiny_llm import PACKED, configuration
from tests.zygote import RankRunner

STRATEGIES: dict[str, tuple[int, dict[str, Any]]] = {
    "fsdp2-1": (1, {"strategy": "fsdp2"}),
    "fsdp2-2": (2, {"strategy": "fsdp2", "activation_checkpointing": True}),
    "fsdp2-4": (4, {"strategy": "fsdp2"}),
    "hsdp-2x2": (4, {"strategy": "fsdp2", "dp_replicate_size": 2}),
    "ddp-2": (2, {"strategy": "ddp"}),
    "tp2-sp": (4, {"strategy": "fsdp2", "tp_size": 2, "sequence_parallel": True}),
    "cp2-ring": (4, {"strategy": "fsdp2", "cp_size": 2, "activation_checkpointing": True}),
    "cp2-ulysses-tp2-sp": (
        4,
        {"strategy": "fsdp2", "cp_size": 2, "cp_method": "ulysses", "tp_size": 2, "sequence_parallel": True},
    ),
}
KINDS: dict[str, dict[str, Any]] = {"rows": {}, "packs": PACKED}


def train(rank: int, world: int, mapping: dict[str, Any]) -> int:
    """Trains as `shoal train` does."""
    from shoal.train.llm_recipe import run_llm_training

    config = load_config(mapping, world_size=world)
    assert isinstance(config, LLMConfig)
    return run_llm_training(config)


def lines(folder: Path, name: str) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]


def run_of(root: Path, folder: Path, kind: str, distributed: dict[str, Any]) -> dict[str, Any]:
    run = configuration(
        root, **KINDS[kind], distributed=distributed, checkpoint={"checkpoint_dir": str(folder)}
    )
    return {**run, "precision": "64-true"}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("llm")


@pytest.fixture(scope="module")
def expected(ranks: RankRunner, root: Path) -> dict[str, Path]:
    """One process without sharding and without a process group."""
    folders = {kind: root / f"one-{kind}" for kind in KINDS}
    for kind, folder in folders.items():
        ranks(train, 1, run_of(root, folder, kind, {"strategy": "ddp"}), init=False, timeout=120)
    return folders


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", STRATEGIES)
def test_twenty_steps_are_the_same_under_every_strategy(
    ranks: RankRunner, root: Path, tmp_path: Path, expected: dict[str, Path], name: str, kind: str
) -> None:
    world, distributed = STRATEGIES[name]
    ranks(train, world, run_of(root, tmp_path / "run", kind, distributed), init=False, timeout=120)
    actual, reference = lines(tmp_path / "run", "training"), lines(expected[kind], "training")
    assert len(actual) == len(reference) == 20
    for mine, theirs in zip(actual, reference, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-8)
    validations = lines(tmp_path / "run", "validation")
    assert [line["step"] for line in validations] == [10, 20]
    for mine, theirs in zip(validations, lines(expected[kind], "validation"), strict=True):
        assert mine == pytest.approx(theirs, rel=1e-8)


def what_is_told(rank: int, world: int, mapping: dict[str, Any]) -> list[str]:
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("shoal").addHandler(handler)
    train(rank, world, mapping)
    return [line for line in told if "left out" in line]


def test_one_rank_tells_what_the_data_leaves_out(ranks: RankRunner, root: Path, tmp_path: Path) -> None:
    run = run_of(root, tmp_path / "run", "packs", {"strategy": "fsdp2", "cp_size": 2})
    run["packed_sequence"] = {"packed_sequence_size": 32, "long_documents": "drop"}
    run["step_scheduler"] = {**run["step_scheduler"], "max_steps": 4}
    first, *others = ranks(what_is_told, 4, run, init=False, timeout=120)
    assert len(first) == 2 and all("longer_than_pack" in line for line in first)
    assert others == [[], [], []]


def test_training_learns_and_validates_by_name(expected: dict[str, Path]) -> None:
    losses = [line["loss"] for line in lines(expected["rows"], "training")]
    assert sum(losses[-3:]) < 0.8 * sum(losses[:3])
    last = lines(expected["rows"], "validation")[-1]
    names = {
        f"val_{value}{suffix}" for value in ("loss", "ppl", "acc") for suffix in ("", "_default", "_train")
    }
    assert set(last) == {"step", *names}


def test_a_run_says_how_it_was_made(expected: dict[str, Path]) -> None:
    folder = expected["packs"]
    assert {"config.yaml", "versions.json", "git.json", "layout.json"} <= {
        path.name for path in folder.iterdir()
    }
    assert json.loads((folder / "layout.json").read_text())["strategy"] == "ddp"
    config = load_config(folder / "config.yaml")
    assert isinstance(config, LLMConfig) and config.packed_sequence.packed_sequence_size == 95
