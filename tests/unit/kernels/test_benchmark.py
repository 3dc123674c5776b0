"""The benchmarks of the losses compare what they say they compare, and write what they measured."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import loss, vocab_loss


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


@pytest.mark.full
@pytest.mark.slow
def test_measures_spread_losses_that_do_the_same_work(tmp_path: Path) -> None:
    command = [sys.executable, vocab_loss.__file__, "--repetitions", "1", "--scale", "0.05"]
    command += ["--only", "Llama", "--results", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    result = json.loads((tmp_path / "vocab_loss.json").read_text())
    (case,) = result["cases"].values()
    assert f"{case['memory_ratio']:.3f} (limit 0.25)" in done.stdout
    assert f"{case['against_whole']:.3f} (limit 1.0)" in done.stdout
    assert case["peak_megabytes_per_rank"].keys() == {"whole", "gathered", "unchunked", "parallel"}
    assert case["largest_difference"].keys() == {"gathered", "unchunked", "parallel"}
    assert max(case["largest_difference"].values()) < vocab_loss.TOLERANCE["float32"]
    assert (
        any("M(parallel) / M(gathered)" in line for line in result["formula"]) and len(result["commit"]) == 40
    )
