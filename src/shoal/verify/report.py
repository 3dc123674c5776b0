"""The result of a verification: as a table for people, as plain data for machines."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from shoal.verify.cause import Cause
from shoal.verify.compare import Comparison, Worst
from shoal.verify.groups import group_of
from shoal.verify.prepare import Prepared
from shoal.verify.ranks import RanksFailed
from shoal.verify.record import Record

NOT_PROVED = (
    "kernels of a GPU and NCCL (ranks are gloo processes on CPU)",
    "mixed precision (the proof runs in float64)",
    "the order of your data (micro-batches are drawn), loading and saving of weights, the learning rate's schedule",
)
"""What no verification says anything about."""


@dataclass
class Report:
    """What was verified, how it went, and on a mismatch why.

    Attributes:
        prepared: The small task.
        plain: Numbers of the plain process.
        comparison: None when ranks failed.
        failed: How ranks failed; None when they did not.
        cause: On a mismatch, unless it was not looked for.
        name: Of the configuration.
        configured: The configured layout in words.
        seconds: Time it took.
    """

    prepared: Prepared
    plain: Record
    comparison: Comparison | None = None
    failed: RanksFailed | None = None
    cause: Cause | None = None
    name: str = ""
    configured: str = ""
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        """Whether every number agrees."""
        return self.comparison is not None and self.comparison.equal

    def as_data(self) -> dict[str, Any]:
        """Everything as what JSON can hold; an infinite error is null."""
        prepared, layout = self.prepared, self.prepared.layout
        data: dict[str, Any] = {
            "config": self.name,
            "verdict": "pass" if self.passed else "fail",
            "seconds": round(self.seconds, 2),
            "layout": {
                "configured": self.configured,
                "verified": layout.describe(),
                "world": layout.world,
                "axes": layout.axes,
            },
            "model": {
                "sizes": {name: list(pair) for name, pair in prepared.sizes.items()},
                "lost": prepared.lost,
            },
            "independent_loss": prepared.task.plain_loss is not None,
            "uncovered": prepared.uncovered,
            "not_proved": list(NOT_PROVED),
        }
        if self.comparison is not None:
            data |= _numbers(self.comparison)
        if self.failed is not None:
            data["failed"] = {"message": str(self.failed), "output": self.failed.first.output[-3000:]}
        if self.cause is not None:
            data["cause"] = _cause_data(self.cause)
        return data

    def as_text(self) -> str:
        """The table."""
        lines = [*self._head(), ""]
        if self.comparison is not None:
            lines += [*_table(self.comparison), ""]
        if self.failed is not None:
            lines += ["ranks failed", *_indented(self.failed.first.output[-3000:].splitlines()), ""]
        if self.cause is not None:
            lines += [*_cause_lines(self.cause), ""]
        lines += ["not proved: " + "; ".join([*self.prepared.uncovered, *NOT_PROVED])]
        lines.append(f"verdict: {'PASS' if self.passed else 'FAIL'} ({self.seconds:.1f} s)")
        return "\n".join(lines)

    def _head(self) -> list[str]:
        prepared, layout, task = self.prepared, self.prepared.layout, self.prepared.task
        batches = len(task.draw(0))
        rounds = -(-batches // layout.axes["dp"])
        lines = [
            f"shoal verify {self.name}",
            f"  configured   {self.configured}",
            f"  verified     {layout.describe()}, on {layout.world} ranks, float64, precision policy off",
            f"  each step    {batches} micro-batches, {rounds} per rank, {self.plain.tokens[0]} supervised tokens",
            f"  reference    one process, {_reference(task.plain_loss is not None)}",
        ]
        sizes = ", ".join(
            f"{name} {_short(before)} -> {_short(after)}" for name, (before, after) in prepared.sizes.items()
        )
        lines.append(f"  model        {sizes or 'as configured'}")
        lines += [f"  NOT KEPT     {lost}" for lost in prepared.lost]
        return lines


def _reference(independent: bool) -> str:
    if independent:
        return "transformers' model on each document alone, torch's clipping and AdamW"
    return "the same module, torch's clipping and AdamW"


def _table(comparison: Comparison) -> list[str]:
    rows = [("", "one process", "layout", "error")]
    for step, (plain, layout, error) in enumerate(comparison.losses):
        rows.append((f"loss, step {step + 1}", f"{plain:.12g}", f"{layout:.12g}", _error(error)))
    for step, (plain, layout, error) in enumerate(comparison.norms):
        rows.append((f"gradient norm, step {step + 1}", f"{plain:.12g}", f"{layout:.12g}", _error(error)))
    for step, (plain, layout) in enumerate(comparison.tokens):
        rows.append(
            (
                f"supervised tokens, step {step + 1}",
                str(plain),
                str(layout),
                "-" if plain == layout else "wrong",
            )
        )
    for title, errors in _tensor_tables(comparison):
        for group, (count, name, worst) in _by_group(errors).items():
            rows.append(
                (f"{title}, {group} ({count})", "", "" if worst.error == 0 else name, _error(worst.error))
            )
    width = [max(len(row[column]) for row in rows) for column in range(4)]
    lines = ["  " + "  ".join(cell.ljust(width[i]) for i, cell in enumerate(row)).rstrip() for row in rows]
    peers = "the same for all peers, each global micro-batch dealt once" if not comparison.batches else ""
    lines.append("  micro-batches: " + (peers or "; ".join(comparison.batches)))
    if comparison.left_out:
        lines.append(
            f"  {comparison.left_out} entries of weights have no gradient but rounding noise, which AdamW enlarges: "
            "held to four learning rates"
        )
    lines.append(f"  tolerance {comparison.tolerance:.0e} for every error")
    return lines


def _tensor_tables(comparison: Comparison) -> list[tuple[str, dict[str, Worst]]]:
    tables = [("initial weights", comparison.initial)]
    tables += [(f"gradients, step {step + 1}", errors) for step, errors in enumerate(comparison.gradients)]
    tables += [
        (f"clipped gradients, step {step + 1}", e)
        for step, e in enumerate(comparison.clipped)
        if _bad(comparison, e)
    ]
    return [*tables, (f"weights after {len(comparison.losses)} steps", comparison.weights)]


def _bad(comparison: Comparison, errors: dict[str, Worst]) -> bool:
    return bool(comparison.wrong(errors))


def _by_group(errors: dict[str, Worst]) -> dict[str, tuple[int, str, Worst]]:
    """For each kind of parameters: how many, the worst one's name, its error."""
    groups: dict[str, list[tuple[str, Worst]]] = {}
    for name, worst in errors.items():
        groups.setdefault(group_of(name), []).append((name, worst))
    worst_of = {group: max(items, key=lambda item: item[1].error) for group, items in groups.items()}
    return {group: (len(groups[group]), *worst_of[group]) for group in groups}


def _numbers(comparison: Comparison) -> dict[str, Any]:
    def scalars(values: list[tuple[float, float, float]]) -> list[dict[str, float | None]]:
        return [{"plain": _finite(p), "layout": _finite(v), "error": _finite(e)} for p, v, e in values]

    def tensors(errors: dict[str, Worst]) -> dict[str, Any]:
        return {
            group: {"parameters": count, "worst": name, "rank": worst.rank, "error": _finite(worst.error)}
            for group, (count, name, worst) in _by_group(errors).items()
        }

    return {
        "tolerance": comparison.tolerance,
        "loss": scalars(comparison.losses),
        "gradient_norm": scalars(comparison.norms),
        "tokens": [{"plain": plain, "layout": layout} for plain, layout in comparison.tokens],
        "initial_weights": tensors(comparison.initial),
        "gradients": [tensors(errors) for errors in comparison.gradients],
        "clipped_gradients": [tensors(errors) for errors in comparison.clipped],
        "weights": tensors(comparison.weights),
        "batches": {"identical": not comparison.batches, "problems": comparison.batches},
        "entries_without_gradient": comparison.left_out,
    }


def _cause_data(cause: Cause) -> dict[str, Any]:
    return {
        "kind": cause.kind,
        "words": cause.words,
        "necessary": list(cause.necessary),
        "first_output": None if cause.output is None else str(cause.output),
        "first_gradient": None if cause.gradient is None else str(cause.gradient),
        "first_parameter": cause.parameter,
        "groups": list(cause.groups),
    }


def _cause_lines(cause: Cause) -> list[str]:
    necessary = ", ".join(cause.necessary) or "nothing that can be switched off"
    lines = [f"likely cause: {cause.kind}", f"  {cause.words}", f"  goes away without: {necessary}"]
    if cause.output is not None:
        lines.append(f"  first output that differs: {cause.output}")
    if cause.gradient is not None:
        lines.append(f"  first layer in backward order with a wrong gradient: {cause.gradient}")
    if cause.parameter is not None:
        lines.append(f"  first parameter: {cause.parameter} (kinds: {', '.join(cause.groups)})")
    return lines


def _indented(lines: list[str]) -> list[str]:
    return [f"  {line}" for line in lines]


def _short(value: Any) -> str:
    if isinstance(value, list | tuple) and len(value) > 6:
        return f"[{len(value)} entries]"
    return str(value)


def _error(value: float) -> str:
    return f"{value:.1e}" if math.isfinite(value) else "not comparable"


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
