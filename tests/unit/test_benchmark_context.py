"""The benchmark of context parallelism refuses runs that differ and says which target it missed."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import context


def _report(loss: float) -> dict[str, Any]:
    return {"losses": [loss, 1.0], "gradient_norms": [0.5, 0.4]}


def test_imbalance_is_that_of_the_busiest_rank() -> None:
    assert context.imbalance([2.0, 2.0]) == 0.0
    assert context.imbalance([1.0, 3.0]) == pytest.approx(0.5)


def test_runs_that_do_not_compute_the_same_are_refused() -> None:
    assert context.refuse_different_work({1: _report(2.0), 2: _report(2.00001)}) == pytest.approx(5e-6)
    with pytest.raises(SystemExit, match="do not compute the same"):
        context.refuse_different_work({1: _report(2.0), 2: _report(2.001)})


def test_missed_targets_are_named() -> None:
    def result(memory: float, pairs: float) -> dict[str, Any]:
        return {
            "ragged_pack": {"ranks": {4: {"imbalance_of_pairs": pairs}}},
            "long_document": {"cp_size": {1: {"memory_ratio": 1.0}, 4: {"memory_ratio": memory}}},
        }

    assert context.missed(result(0.3, 0.01)) == []
    assert context.missed(result(0.5, 0.06)) == ["4 ranks: imbalance 0.060", "cp_size 4: memory ratio 0.50"]


@pytest.mark.slow
@pytest.mark.full
def test_a_short_document(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["context.py", "--tokens", "512", "--results", str(tmp_path)])
    assert context.main() == 0
    assert '"tokens": 512' in (tmp_path / "context.json").read_text()
