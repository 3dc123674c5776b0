"""The benchmark of Mamba-2 layers: what it calls the same work, a line, and a target that is missed."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import ssd


def row(tokens: int, **changes: Any) -> dict[str, Any]:
    sizes = {kind: {"seconds": 1.0, "bytes": 1000.0 + 10 * tokens} for kind in ssd.KINDS}
    return {
        "case": "a",
        "part": ssd.SPEED_PART,
        "tokens": tokens,
        **sizes,
        "time_ratio": 2.5,
        "largest_difference": 1e-6,
        **changes,
    }


def test_a_line_is_found() -> None:
    fit = ssd.linear_fit([row(tokens) for tokens in ssd.TOKENS], "shoal")
    assert fit["bytes_per_token"] == pytest.approx(10) and fit["intercept_bytes"] == pytest.approx(1000)
    assert fit["r2"] == pytest.approx(1) and fit["excess"] < 1e-9


def test_memory_that_grows_with_the_square_is_no_line() -> None:
    rows = [row(tokens, shoal={"bytes": float(tokens**2)}) for tokens in ssd.TOKENS]
    fits = {"a": {"shoal": ssd.linear_fit(rows, "shoal")}}
    assert any("off a line" in missed for missed in ssd.verdicts([], fits))


def test_missed_targets_are_named() -> None:
    assert ssd.verdicts([row(512, time_ratio=1.5), row(2048)], {}) == []
    assert ssd.verdicts([row(2048, time_ratio=1.5)], {}) == [
        "a, convolution and scan, 2048 tokens: 1.50 times as fast < 2.0"
    ]
    assert ssd.verdicts([row(2048, part="layer", time_ratio=1.5)], {}) == []  # bounded by its projections
    (wrong,) = ssd.verdicts([row(512, largest_difference=1e-2)], {})
    assert "numbers differ by 1.0e-02" in wrong


def test_a_difference_in_any_gradient_counts() -> None:
    result = {"output": [1.0, 2.0], "gradients": {"w": [4.0, 1.0], "b": [1.0]}}
    assert ssd.difference(result, result) == 0
    assert ssd.difference(result, {**result, "gradients": {"w": [4.0, 2.0], "b": [1.0]}}) == 0.25
    with pytest.raises(AssertionError):
        ssd.difference(result, {**result, "gradients": {"w": [4.0, 2.0]}})


def test_what_was_measured() -> None:
    """The figures in the repository."""
    result = json.loads((ssd.RESULTS / "ssd.json").read_text())
    assert result["modified_files"] == 0 and Path(ssd.__file__).name == "ssd.py"
    assert result["missed"] == ssd.verdicts(result["rows"], result["memory_fits"])
    at_target = {(r["case"], r["part"]): r["time_ratio"] for r in result["rows"] if r["tokens"] == 2048}
    assert result["missed"] == [] and result["bounds"] == ssd.bounds(result["rows"])
    assert all(at_target[case, ssd.SPEED_PART] >= ssd.SPEED_LIMIT for case in ssd.CASES)
    assert all(1 < at_target[case, "layer"] < result["bounds"][case] for case in ssd.CASES)
    assert max(r["largest_difference"] for r in result["rows"]) <= ssd.TOLERANCE
    assert max(fit["shoal"]["excess"] for fit in result["memory_fits"].values()) <= ssd.FIT_LIMIT
