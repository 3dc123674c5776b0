"""What a cell of the tables of parity shows, and which cells break the law."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from scripts import parity_cells
from scripts.parity_cells import Cells, failure, shown
from tests.parity.harness import Case, Record

CASE = Case(max_norm=None)


@pytest.fixture(autouse=True)
def _commit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parity_cells, "commit", lambda: "0000000")


def record(gradient: float = 1.0, weight: float = 2.0, loss: float = 3.0, initial: float = 1.0) -> Record:
    def one(value: float) -> dict[str, torch.Tensor]:
        return {"layer.weight": torch.tensor([value], dtype=torch.float64)}

    return Record([loss], [1.0], [1], [one(gradient)], one(initial), one(weight))


@pytest.mark.parametrize("number", ["gradient", "weight", "loss"])
def test_a_number_off_the_limit_is_shown_by_name(number: str) -> None:
    value = {"gradient": 1.0, "weight": 2.0, "loss": 3.0}[number]
    off = record(**{number: value * (1 + 1e-9)})
    assert shown(off, record(), CASE, 1e-8) == "1e-09"
    assert shown(off, record(), CASE, 1e-10).startswith(f"DIFFERENT: {number}")
    assert shown(record(**{number: math.nan}), record(), CASE, 1e-8).startswith(f"DIFFERENT: {number}")


def test_initial_weights_must_be_the_same_and_no_gradient_may_lack() -> None:
    assert shown(record(), record(), CASE, 1e-10) == "0e+00"
    assert shown(record(initial=1 + 1e-15), record(), CASE, 1e-8).startswith(
        "DIFFERENT: initial layer.weight"
    )
    for gradients in ([{}], []):
        assert shown(replace(record(), gradients=gradients), record(), CASE, 1e-8).startswith("DIFFERENT: ")


@pytest.mark.parametrize(
    ("cell", "is_lawful"),
    [
        ("3e-11", True),
        ("3e-10", False),
        ("nan", False),
        ("DIFFERENT: loss", False),
        (failure("shoal.config.errors.ConfigError: x\n  limit: 1"), False),
        (failure("RuntimeError: x"), False),
    ],
)
def test_the_verdict(tmp_path: Path, cell: str, is_lawful: bool) -> None:
    cells = Cells(tmp_path / "cells.json", resume=False)
    cells.put("row", "column", "1e-12")
    cells.put("row", "other", cell)
    assert cells.verdict() == int(not is_lawful)
    assert Cells(tmp_path / "cells.json", resume=True).cells == cells.cells
    assert cells.verdict(lambda row: 1e-9) == int(not is_lawful and cell != "3e-10")


def test_only_the_refusals_that_are_meant_are_lawful(tmp_path: Path) -> None:
    cells = Cells(tmp_path / "cells.json", resume=False)
    cells.put("row", "column", failure("ConfigError\n limit: 1"))
    assert cells.cells["row"]["column"] == "refused: limit: 1"
    assert cells.verdict(may_refuse=lambda row, column: (row, column) == ("row", "column")) == 0
    assert cells.verdict(may_refuse=lambda row, column: False) == 1
    cells.put("row", "column", "1e-12")
    assert cells.verdict(may_refuse=lambda row, column: True) == 1
