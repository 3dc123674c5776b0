"""The benchmark of the loss compares what it says it compares, and writes what it measured."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import loss


@pytest.mark.slow
def test_measures_ways_that_do_the_same_work(tmp_path: Path) -> None:
    command = [sys.executable, loss.__file__, "--repetitions", "1", "--scale", "0.05"]
    command += ["--only", "Gemma", "--results", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    result = json.loads((tmp_path / "loss.json").read_text())
    assert [*result["cases"]] == ["vocabulary and soft-cap of Gemma 2"]
    for name, case in result["cases"].items():
        assert f"{case['memory_ratio']:.3f} of the memory" in done.stdout
        dtype = loss.CASES[name]["dtype"]
        assert 0 < case["largest_difference"]["chunked"] < loss.TOLERANCE[dtype]
        assert case["peak_megabytes"].keys() == case["cpu_seconds"].keys() >= {"full", "chunked"}
    assert any("M(chunked) / M(full)" in line for line in result["formula"]) and len(result["commit"]) == 40


def test_refuses_to_compare_different_work() -> None:
    reference = {"loss": 4.0, "gradient_norms": [2.0, 1.0], "gradient_samples": [[1.0, -2.0], [0.5]]}
    assert loss.difference(reference, reference) == 0
    for key, value, expected in [
        ("loss", 4.4, 0.1),
        ("gradient_norms", [2.0, 1.2], 0.2),
        ("gradient_samples", [[1.0, -1.0], [0.5]], 0.5),
    ]:
        assert loss.difference({**reference, key: value}, reference) == pytest.approx(expected)
    loss.refuse_different_work({"chunked": 1e-5, "torch": 1e-5}, "float32")
    with pytest.raises(SystemExit, match="do not compute the same"):
        loss.refuse_different_work({"chunked": 1e-6, "torch": 1e-3}, "float32")
    with pytest.raises(SystemExit, match="do not compute the same"):
        loss.refuse_different_work({"chunked": 0.1, "torch": 0.0}, "bfloat16")
    loss.refuse_different_work({"chunked": 0.01, "torch": 0.1}, "bfloat16")
