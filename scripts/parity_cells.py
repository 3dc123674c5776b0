"""Cells of the tables of parity: what a cell shows, and which commit it was run at."""

from __future__ import annotations

import json
import math
import subprocess
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from shoal.config.errors import ConfigError
from tests.parity.harness import Case, Layout, Record, relative_errors, run_layout, unclipped
from tests.zygote import RankRunner, RanksFailed

ROOT = Path(__file__).resolve().parents[1]
LIMIT = 1e-10


def errors_of(actual: Record, expected: Record, case: Case) -> dict[str, float]:
    """The relative error of everything that law 1 names; infinite for initial weights that differ at all."""
    errors = {}
    for what, ours, theirs in (
        ("loss", actual.losses, expected.losses),
        ("norm", actual.norms, expected.norms),
    ):
        for step, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            errors[f"{what} of step {step}"] = abs(a - b) / max(abs(b), 1e-12)
    for step, (ours, theirs) in enumerate(zip(unclipped(actual, case), expected.gradients, strict=True)):
        assert ours, "no gradient"
        for name, error in relative_errors(ours, theirs).items():
            errors[f"gradient {step} of {name}"] = error
    for name, error in relative_errors(actual.weights, expected.weights).items():
        errors[f"weight {name}"] = error
    for name, error in relative_errors(actual.initial, expected.initial).items():
        errors[f"initial {name}"] = error and math.inf
    return {name: math.inf if math.isnan(error) else error for name, error in errors.items()}


def shown(actual: Record, expected: Record, case: Case, limit: float) -> str:
    """What the cell of two records shows: the largest error, or what differs by more than the limit."""
    try:
        errors = errors_of(actual, expected, case)
    except (AssertionError, ValueError) as error:  # other names, or other numbers of steps
        return "DIFFERENT: " + next(iter(str(error).splitlines()), repr(error))
    name = max(errors, key=lambda one: errors[one])
    return f"{errors[name]:.0e}" if errors[name] <= limit else f"DIFFERENT: {name} by {errors[name]:.1e}"


def cell_of(
    ranks: RankRunner,
    case: Case,
    layout: Layout,
    expected: Record,
    train: Callable[[int, int, Case, Layout], Record | None] = run_layout,
    limit: float = LIMIT,
) -> str:
    """Trains under a layout; what its cell shows."""
    try:
        actual = ranks(train, layout.world, case, layout, timeout=300)[0]
    except RanksFailed as error:
        return failure(str(error))
    return shown(actual, expected, case, limit)


def cells_of(
    ranks: RankRunner,
    pairs: Sequence[tuple[Case, Layout]],
    expected: Sequence[Record],
    train: Callable[[int, int, Case, Layout], Record | None],
    limits: Sequence[float],
) -> list[str]:
    """As `cell_of` for layouts of equally many ranks, which one job trains one after another.

    A job costs more to start than a tiny model to train. When anything but a refusal ends it, each cell is a job again.
    """
    try:
        outcomes = ranks(train_all, pairs[0][1].world, train, pairs, timeout=300 + 60 * len(pairs))[0]
    except RanksFailed:
        todo = zip(pairs, expected, limits, strict=True)
        return [cell_of(ranks, *pair, record, train, limit) for pair, record, limit in todo]
    return [
        failure(outcome) if isinstance(outcome, str) else shown(outcome, record, case, limit)
        for outcome, (case, _), record, limit in zip(outcomes, pairs, expected, limits, strict=True)
    ]


def train_all(
    rank: int, world: int, train: Callable[..., Record | None], pairs: Sequence[tuple[Case, Layout]]
) -> list[Record | str | None]:
    """Trains cases as one rank; a refusal, which every rank makes before the first collective, is its traceback."""
    outcomes: list[Record | str | None] = []
    for case, layout in pairs:
        try:
            outcomes.append(train(rank, world, case, layout))
        except ConfigError:
            outcomes.append(traceback.format_exc())
    return outcomes


def failure(message: str) -> str:
    """What the cell of a layout that raised shows: a refusal by its limit, any other error as a failure."""
    lines = [line for line in message.splitlines() if "limit:" in line or "Error" in line] or [message]
    kind = "refused" if "ConfigError" in message else "FAILED"
    return f"{kind}: {lines[-1].strip()}"


class Cells:
    """The cells of a table and the commit of each, on disk at any time."""

    def __init__(self, file: Path, resume: bool) -> None:
        self.file = file
        done = json.loads(file.read_text()) if resume and file.exists() else {"cells": {}, "commits": {}}
        self.cells: dict[str, dict[str, str]] = done["cells"]
        self.commits: dict[str, dict[str, str]] = done["commits"]

    def row(self, name: str) -> dict[str, str]:
        """The cells of a row, by column."""
        return self.cells.setdefault(name, {})

    def put(self, row: str, column: str, cell: str) -> None:
        """Keeps a cell, with the commit that it was run at."""
        self.row(row)[column] = cell
        self.commits.setdefault(row, {})[column] = commit()
        self.file.write_text(json.dumps({"cells": self.cells, "commits": self.commits}, indent=1) + "\n")

    def origin(self) -> str:
        """The commits of the cells, in words."""
        counts = Counter(name for row in self.commits.values() for name in row.values())
        return ", ".join(f"{name} ({count} cells)" for name, count in counts.items())

    def verdict(
        self,
        limit: Callable[[str], float] = lambda row: LIMIT,
        may_refuse: Callable[[str, str], bool] = lambda row, column: False,
    ) -> int:
        """Prints how many cells there are and which break the law, refusals that are none included; the exit status.

        Args:
            limit: The limit of a row.
            may_refuse: Whether the cell of a row and a column is a refusal; no other may be one.
        """
        every = [(row, name, cell) for row, cells in self.cells.items() for name, cell in cells.items()]
        bad = [one for one in every if not _lawful(one[2], limit(one[0]), may_refuse(*one[:2]))]
        print(f"{len(every)} cells, {len(bad)} outside the law: {bad}")
        return int(bool(bad))


def _lawful(cell: str, limit: float, is_refused: bool) -> bool:
    if is_refused or cell.startswith(("refused", "FAILED", "DIFFERENT")):
        return is_refused and cell.startswith("refused")
    return float(cell) <= limit


def commit() -> str:
    """The commit of the repository, and how many files that are no results have been changed since or are new."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(ROOT), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    changed = git("status", "--porcelain", "--", ".", ":!docs", ":!benchmarks/results").splitlines()
    return git("rev-parse", "--short", "HEAD") + (f" with {len(changed)} changed files" if changed else "")
