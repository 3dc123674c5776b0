"""LLM runs that stop and go on: exactly, in the middle and at the end of an epoch, on other layouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shoal.config import LLMConfig, load_config
from tests.e2e.test_llm_strategies import lines, train
from tests.e2e.tiny_llm import PACKED, configuration
from tests.zygote import RankRunner

STEPS = 20
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "fsdp2-4": (4, {"strategy": "fsdp2"}),
    "ddp-2": (2, {"strategy": "ddp"}),
    "one": (1, {"strategy": "ddp"}),
}


def run_of(
    root: Path, folder: Path, kind: str, layout: str, max_steps: int = STEPS, restore: str | None = None
) -> dict[str, Any]:
    kinds: dict[str, dict[str, Any]] = {"rows": {}, "packs": PACKED}
    sections: dict[str, Any] = {**kinds[kind], "distributed": LAYOUTS[layout][1]}
    sections["step_scheduler"] = {**sections.get("step_scheduler", {}), "max_steps": max_steps}
    sections["lr_scheduler"] = {"lr_decay_steps": STEPS}
    sections["checkpoint"] = {"checkpoint_dir": str(folder), "restore_from": restore}
    return {**configuration(root, **sections), "precision": "64-true"}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("llm")


@pytest.fixture(scope="module")
def whole(ranks: RankRunner, root: Path) -> dict[str, list[dict[str, float]]]:
    """The steps of uninterrupted runs on one process."""
    found = {}
    for kind in ("rows", "packs"):
        ranks(train, 1, run_of(root, root / kind, kind, "one"), init=False, timeout=120)
        found[kind] = lines(root / kind, "training")
    return found


@pytest.mark.parametrize(
    ("kind", "first", "second", "stop"),
    [
        ("rows", "fsdp2-4", "ddp-2", 9),  # in the middle of the second epoch
        ("packs", "ddp-2", "fsdp2-4", 5),
        ("packs", "fsdp2-4", "one", 8),
        ("rows", "one", "fsdp2-4", 6),  # the last step of the first epoch
    ],
)
def test_stopped_and_resumed_elsewhere_is_the_uninterrupted_run(
    ranks: RankRunner,
    root: Path,
    tmp_path: Path,
    whole: dict[str, list[dict[str, float]]],
    kind: str,
    first: str,
    second: str,
    stop: int,
) -> None:
    ranks(train, LAYOUTS[first][0], run_of(root, tmp_path, kind, first, stop), init=False, timeout=120)
    assert len(lines(tmp_path, "training")) == stop
    resumed = run_of(root, tmp_path, kind, second, restore="latest")
    ranks(train, LAYOUTS[second][0], resumed, init=False, timeout=120)
    steps = lines(tmp_path, "training")
    assert [line["step"] for line in steps] == list(range(1, STEPS + 1))  # it did go on
    for mine, theirs in zip(steps, whole[kind], strict=True):
        assert mine == pytest.approx(theirs, rel=1e-8)


@pytest.mark.parametrize(
    ("first", "second"),
    [(("fsdp2-4", 2), ("ddp-2", 1)), (("ddp-2", 1), ("one", 8)), (("one", 4), ("ddp-2", 2))],
)
def test_rows_of_a_micro_batch_may_change_at_resume(
    ranks: RankRunner,
    root: Path,
    tmp_path: Path,
    whole: dict[str, list[dict[str, float]]],
    first: tuple[str, int],
    second: tuple[str, int],
) -> None:
    for (layout, rows), stop, restore in (
        (first, 3, None),
        (second, 8, "latest"),
    ):  # on into the second epoch
        run = run_of(root, tmp_path, "rows", layout, stop, restore)
        run["step_scheduler"]["local_batch_size"] = rows
        ranks(train, LAYOUTS[layout][0], run, init=False, timeout=120)
    steps = lines(tmp_path, "training")
    assert [line.pop("step") for line in steps] == list(range(1, 9))
    for mine, theirs in zip(steps, whole["rows"], strict=False):
        del mine["padding_share"]  # that of other micro-batches
        assert mine == pytest.approx({key: theirs[key] for key in mine}, rel=1e-8)


def test_the_first_epoch_of_the_rows_has_six_steps(root: Path) -> None:
    """What the stop at the end of an epoch above relies on."""
    from shoal.train.llm_data import TextData
    from shoal.train.llm_plans import load_llm_tokenizer

    config = load_config(run_of(root, root / "x", "rows", "one"))
    assert isinstance(config, LLMConfig)
    assert TextData(config, load_llm_tokenizer(config)).steps_per_epoch == 6


def test_a_fresh_run_does_not_write_into_anothers_directory(
    ranks: RankRunner, root: Path, tmp_path: Path
) -> None:
    run = run_of(root, tmp_path, "rows", "one", 2)
    ranks(train, 1, run, init=False, timeout=60)
    before = sorted(path.name for path in tmp_path.iterdir())
    (outcome,) = ranks(train, 1, run, init=False, timeout=60, expect_failure=True)
    assert "restore_from=latest" in outcome.message
    assert sorted(path.name for path in tmp_path.iterdir()) == before


@pytest.mark.parametrize("is_async", [False, True])
def test_keep_last_and_the_ends_of_epochs(
    ranks: RankRunner, root: Path, tmp_path: Path, is_async: bool
) -> None:
    run = run_of(root, tmp_path, "rows", "one", 14)
    run["step_scheduler"] |= {"ckpt_every_steps": 4, "save_checkpoint_every_epoch": True}
    run["checkpoint"] |= {"keep_last": 2, "is_async": is_async}
    ranks(train, 1, run, init=False, timeout=60)
    saved = {path.name for path in tmp_path.iterdir() if path.is_dir()}
    assert saved == {"step=8", "step=12", "step=14-last"}  # epochs ended at 6 and 12


def test_latest_of_nothing_is_the_beginning(ranks: RankRunner, root: Path, tmp_path: Path) -> None:
    run = run_of(root, tmp_path / "new", "rows", "one", 1, restore="latest")
    ranks(train, 1, run, init=False, timeout=60)
    assert len(lines(tmp_path / "new", "training")) == 1
    gone = run_of(root, tmp_path / "new", "rows", "one", 2, restore=str(tmp_path / "absent"))
    (outcome,) = ranks(train, 1, gone, init=False, timeout=60, expect_failure=True)
    assert "not a complete checkpoint" in outcome.message
