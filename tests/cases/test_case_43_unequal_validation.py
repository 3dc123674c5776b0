"""Case 43: ranks with different numbers of validation batches, or none, wait for each other for ever."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.e2e.test_strategies import run_of, train_on_rank
from tests.e2e.tiny_run import AUTOMODEL, write_manifest
from tests.zygote import RankRunner


def validated(ranks: RankRunner, root: Path, world: int) -> dict[str, Any]:
    strategy = {"_target_": AUTOMODEL} if world > 1 else None
    run = run_of(root, world, strategy, max_steps=3, precision="64-true")
    # One clip per micro-batch: over 2 ranks 5 clips are 3 and 2 batches, and 1 clip is one and none.
    run["data"]["validation_ds"] = {
        "batch_size": 1,
        "datasets": {
            name: {
                "input_cfg": [
                    {"type": "nemo", "manifest_filepath": str(write_manifest(root, name, num, seed=9))}
                ]
            }
            for name, num in (("five", 5), ("single", 1))
        },
    }
    done: dict[str, Any] = ranks(train_on_rank, world, run, init=False, timeout=60)[0]
    return done


@pytest.mark.parametrize("world", [2, 4])
def test_every_clip_counts_once_and_nobody_waits(ranks: RankRunner, tmp_path: Path, world: int) -> None:
    expected, actual = validated(ranks, tmp_path, 1), validated(ranks, tmp_path, world)
    assert len(actual["validations"]) == len(expected["validations"]) == 1
    assert {"val_loss_five", "val_loss_single", "val_acc_single", "val_loss"} <= actual["validations"][
        0
    ].keys()
    assert actual["validations"][0] == pytest.approx(expected["validations"][0], rel=1e-6)
