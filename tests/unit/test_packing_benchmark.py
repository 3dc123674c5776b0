"""The packing benchmark computes the gains it names and refuses unequal work; the committed result meets its target."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import packing
from benchmarks.packing import Pass


def passes() -> dict[str, list[Pass]]:
    """Packed: 100 useful positions in 1 s; padded: 250 positions in 2 s; bucketed: 125 in 1.25 s."""
    return {
        "packed": [Pass(1.0, 0.9, 7.0, 10, 100, 100)],
        "padded": [Pass(2.0, 1.8, 7.0, 10, 100, 250)],
        "bucketed": [Pass(1.25, 1.1, 7.0, 10, 100, 125)],
    }


def test_gains_are_what_the_formula_says() -> None:
    found = packing.gains(passes(), lambda one: one.seconds)
    assert found["useful_tokens_per_cpu_second"]["packed"] == 100.0
    padded = found["against"]["padded"]
    assert (padded["gain"], padded["ideal_gain"], padded["share"]) == pytest.approx((2.0, 2.5, 0.8))
    assert padded["padding_share"] == pytest.approx(0.6)
    assert found["against"]["bucketed"]["share"] == pytest.approx(1.0)
    assert packing.gains(passes(), lambda one: one.llm_seconds)["against"]["padded"]["gain"] == pytest.approx(
        2.0
    )


def test_ways_that_do_different_work_are_refused() -> None:
    first = {way: done[0] for way, done in passes().items()}
    packing.refuse_different_work(first)
    for wrong in (Pass(loss=7.1, tokens=10, useful=100), Pass(loss=7.0, tokens=10, useful=99)):
        with pytest.raises(SystemExit, match="do not do the same work"):
            packing.refuse_different_work({**first, "padded": wrong})


def test_measured_gains_meet_their_target() -> None:
    """The figures in the repository, on real lengths."""
    result = json.loads((Path(packing.__file__).parent / "results" / "packing.json").read_text())
    assert result["target"] == packing.TARGET == 0.9 and len(result["commit"]) == 40
    assert result["seconds"]["longest"] > 10 * result["seconds"]["median"]
    for what in ("whole step", "language model"):
        for way, found in result["measured"][what]["against"].items():
            assert found["ideal_gain"] > 1.0 and found["share"] >= packing.TARGET, (what, way)
