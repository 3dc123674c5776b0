"""Whole runs with tensor parallelism: one rank of each data-parallel coordinate loads, all of them train alike."""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from typing import Any

import pytest

from shoal.config import LLMConfig, load_config
from shoal.data.broadcast import BroadcastingDataLoader
from shoal.data.stream import StepLoader
from shoal.train.llm_data import TextData
from tests.e2e.test_llm_strategies import lines
from tests.e2e.tiny_llm import PACKED, configuration
from tests.zygote import RankRunner


def train(rank: int, world: int, mapping: dict[str, Any], without_data: int | None = None) -> dict[str, Any]:
    """Trains as `shoal train` does, on a rank that may lack its data; returns what this rank built and saw."""
    from shoal.train import llm_recipe
    from shoal.train.modules import ShoalModule

    seen: dict[str, Any] = {"built": [], "losses": [], "workers": set(), "positions": [], "batches": []}

    class Watched(TextData):
        def train_loader(self, *arguments: Any) -> StepLoader:
            if rank == without_data:
                raise ValueError("dataset.path: no such file on this node")
            seen["built"].append("training")
            return super().train_loader(*arguments)

        def validation_loaders(self, *arguments: Any) -> Any:
            loaders = super().validation_loaders(*arguments)
            seen["built"] += sorted(loaders)
            return loaders

        def train_dataloader(self) -> Any:
            loader = super().train_dataloader()
            seen["kind"] = type(loader).__name__
            return loader

    class Module(ShoalModule):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            seen["batches"].append([one["sample_ids"] for one in batch.micro_batches])
            seen["workers"].add(len(multiprocessing.active_children()))
            loss = super().training_step(batch, batch_idx)
            seen["losses"].append(float(loss))
            seen["positions"].append(self.stream_position)
            return loss

    llm_recipe.TextData, llm_recipe.ShoalModule = Watched, Module  # type: ignore[misc, attr-defined]
    config = load_config(mapping, world_size=world)
    assert isinstance(config, LLMConfig)
    assert llm_recipe.run_llm_training(config) == 0
    return seen


def run_of(root: Path, folder: Path, distributed: dict[str, Any], **steps: Any) -> dict[str, Any]:
    sections = {
        **PACKED,
        "step_scheduler": {**PACKED["step_scheduler"], "max_steps": 12, "val_every_steps": 6, **steps},
        "lr_scheduler": {"lr_decay_steps": 12},
    }
    checkpoint = {"checkpoint_dir": str(folder)}
    workers = {"num_workers": 1}
    run = configuration(root, **sections, distributed=distributed, checkpoint=checkpoint, dataloader=workers)
    return {**run, "precision": "64-true"}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("llm")


def test_peers_train_on_what_one_of_them_loads(ranks: RankRunner, root: Path) -> None:
    plain = ranks(train, 1, run_of(root, root / "one", {"strategy": "ddp"}), init=False, timeout=120)[0]
    tensor = {"strategy": "fsdp2", "tp_size": 2}
    found = ranks(train, 4, run_of(root, root / "four", tensor), init=False, timeout=180)
    assert plain["kind"] == StepLoader.__name__
    for rank, one in enumerate(found):
        assert one["kind"] == BroadcastingDataLoader.__name__
        loads = rank in (0, 2)
        assert one["built"] == (["training", "default", "train"] if loads else [])
        assert max(one["workers"]) == (1 if loads else 0)  # it ends with the last epoch
        assert one["losses"] == pytest.approx(plain["losses"], rel=1e-8) and len(one["losses"]) == 12
        assert one["positions"] == plain["positions"]
    assert found[0]["batches"] == found[1]["batches"] != found[2]["batches"] == found[3]["batches"]
    woven = [[batch for pair in zip(a, b, strict=True) for batch in pair if batch != [""]]
             for a, b in zip(found[0]["batches"], found[2]["batches"], strict=True)]  # fmt: skip
    assert woven == [[batch for batch in step if batch != [""]] for step in plain["batches"]]
    mine, theirs = lines(root / "four", "validation"), lines(root / "one", "validation")
    assert len(mine) == len(theirs) == 2
    for one, other in zip(mine, theirs, strict=True):
        assert one == pytest.approx(other, rel=1e-8)


def test_a_run_goes_on_where_its_peers_stopped(ranks: RankRunner, root: Path) -> None:
    tensor = {"strategy": "fsdp2", "tp_size": 2}
    whole = ranks(train, 2, run_of(root, root / "whole", tensor, max_steps=7), init=False, timeout=180)
    ranks(train, 2, run_of(root, root / "parts", tensor, max_steps=4), init=False, timeout=180)
    rest = run_of(root, root / "parts", tensor, max_steps=7)
    rest["checkpoint"]["restore_from"] = "latest"
    resumed = ranks(train, 2, rest, init=False, timeout=180)
    assert whole[0]["batches"] == whole[1]["batches"]
    for one, other in zip(whole, resumed, strict=True):
        assert other["batches"] == one["batches"][4:] and other["positions"] == one["positions"][4:]
        assert other["losses"] == pytest.approx(one["losses"][4:], rel=1e-8)


@pytest.mark.parametrize("distributed", [{"strategy": "fsdp2", "tp_size": 2}, {"strategy": "ddp"}])
def test_a_rank_without_its_data_stops_all(
    ranks: RankRunner, root: Path, tmp_path: Path, distributed: dict[str, Any]
) -> None:
    run = run_of(root, tmp_path, distributed)
    outcomes = ranks(train, 4, run, 2, init=False, timeout=180, expect_failure=True, grace=60)
    assert [(one.kind, one.error_type) for one in outcomes] == [("raised", "ValueError")] * 4
    (message,) = {one.message for one in outcomes}
    assert message.startswith("rank 2: ") and message.endswith("dataset.path: no such file on this node")
