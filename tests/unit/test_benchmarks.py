"""The benchmarks run, compare what they say they compare, and write what they measured."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import overhead


@pytest.mark.slow
def test_overhead_measures_two_loops_that_do_the_same_work(tmp_path: Path) -> None:
    command = [
        sys.executable,
        overhead.__file__,
        "--repetitions",
        "1",
        "--steps",
        "7",
        "--results",
        str(tmp_path),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    result = json.loads((tmp_path / "overhead.json").read_text())
    for name, ratio in result["ratios"].items():
        assert 0.5 < ratio < 3
        assert f"{name:<9} {ratio:.3f}" in done.stdout
    assert result["largest_loss_difference"] < overhead.LOSS_TOLERANCE
    assert "S(shoal) / S(bare)" in result["formula"] and len(result["commit"]) == 40


def test_overhead_refuses_to_compare_loops_that_do_different_work() -> None:
    bare = [{"losses": [7.0, 6.0]}, {"losses": [8.0, 6.0]}]
    assert overhead.compare_losses(bare, [{"losses": [7.5, 6.0]}]) == 0
    with pytest.raises(SystemExit, match="do not do the same work"):
        overhead.compare_losses(bare, [{"losses": [7.5, 6.1]}])


def test_overhead_leaves_the_first_steps_out_of_the_median() -> None:
    clock = overhead.Clock()
    clock.ends = [10.0, 19.0, 28.0, 37.0, 46.0, 47.0, 49.0, 52.0]  # five slow steps, then 1, 2 and 3 seconds
    assert clock.report() == {"startup": 10.0, "step": 2.0, "losses": []}
