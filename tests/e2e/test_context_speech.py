"""A packed speech run whose ranks share tokens and clips, through the command: the numbers of a padded run on one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.test_packed_speech import STEPS, logged, mapping_of
from tests.e2e.tiny_run import AUTOMODEL
from tests.zygote import RankRunner


def test_two_ranks_share_each_conversation(ranks: RankRunner, tmp_path: Path) -> None:
    whole = logged(ranks, tmp_path, "padded", mapping_of(tmp_path, "padded", False, val_check_interval=8), 1)
    layout = {
        "devices": 2,
        "val_check_interval": 8,
        "strategy": {"_target_": AUTOMODEL, "cp_size": 2, "distributed_config": {"cp_method": "ring"}},
    }
    shared = logged(ranks, tmp_path, "shared", mapping_of(tmp_path, "shared", True, **layout), 2)
    assert len(shared["loss"]) == STEPS and len(shared["val_loss"]) == 1
    for key in ("loss", "grad_norm", "num_tokens", "train_accuracy", "val_loss", "val_acc_one"):
        assert shared[key] == pytest.approx(whole[key], rel=1e-6), key  # loggers round
    # Each conversation is rounded up to a multiple of four tokens.
    assert all(0.0 < share < 0.15 for share in shared["padding_share"])
