"""The benchmark of broadcasting runs, and compares the same steps."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import broadcast


def test_ways_that_give_other_steps_are_not_compared() -> None:
    broadcast.same_steps([["a", "b"], ["a", "b"]])
    with pytest.raises(SystemExit, match="do not do the same work"):
        broadcast.same_steps([["a", "b"], ["a", "c"]])


def test_made_up_clips_are_a_corpus(tmp_path: Path) -> None:
    loader = broadcast.local_loader(broadcast.made_up_clips(tmp_path, 40), 0, 2)
    steps = list(loader)
    assert len(steps) == 2 and all(step.error is None and not step.skipped for step in steps)
    assert broadcast.digest(steps[0]) != broadcast.digest(steps[1])
    again = broadcast.local_loader(tmp_path / "manifest.json", 0, 2)
    assert [broadcast.digest(step) for step in again] == [broadcast.digest(step) for step in steps]


@pytest.mark.slow
def test_it_measures_every_case(tmp_path: Path) -> None:
    command = [
        sys.executable,
        broadcast.__file__,
        "--repetitions",
        "1",
        "--steps",
        "2",
        "--results",
        str(tmp_path),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    result = json.loads((tmp_path / "broadcast.json").read_text())
    assert list(result["cases"]) == list(broadcast.CASES)
    for name, case in result["cases"].items():
        seconds = case["cpu_seconds_per_step"]
        assert case["ratio"] == pytest.approx(seconds["broadcast"][0] / seconds["local"][0])
        assert set(seconds) == set(broadcast.KINDS)
        assert f"{name:<20} {case['ratio']:.3f} of local" in done.stdout
