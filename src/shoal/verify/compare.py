"""Law 1 as a comparison: every rank of a layout against the plain process, number by number."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shoal.verify.parity import RankRecord
from shoal.verify.record import Record, error_of, largest_entry, unclipped
from shoal.verify.task import LEARNING_RATE, Task, digest

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}
"""Bound of every relative error, by the dtype of the arithmetic."""

_NO_GRADIENT = 1e-9
"""Entries whose gradient is below this share of the largest one: AdamW turns their rounding noise into steps."""


@dataclass(frozen=True)
class Worst:
    """The largest error of a tensor over the ranks that hold it."""

    error: float
    rank: int


@dataclass
class Comparison:
    """Everything that was compared; an error is relative, see `shoal.verify.record.error_of`.

    Attributes:
        tolerance: Bound of every error.
        losses: (plain, layout, error) of each step; the layout's is that of the rank which is furthest off.
        norms: The same for the gradient norm.
        tokens: (plain, layout) supervised tokens of each step.
        initial: Errors of the weights before the first step, by name.
        gradients: Errors of the gradients by name, for each step; before clipping.
        clipped: Errors of the gradients as the optimizer got them.
        weights: Errors of weights and saved buffers after the last step.
        batches: What is wrong with the micro-batches that ranks saw; empty when nothing is.
        left_out: Entries of weights without a gradient to speak of, held to a bound of two learning rates.
    """

    tolerance: float
    losses: list[tuple[float, float, float]] = field(default_factory=list)
    norms: list[tuple[float, float, float]] = field(default_factory=list)
    tokens: list[tuple[int, int]] = field(default_factory=list)
    initial: dict[str, Worst] = field(default_factory=dict)
    gradients: list[dict[str, Worst]] = field(default_factory=list)
    clipped: list[dict[str, Worst]] = field(default_factory=list)
    weights: dict[str, Worst] = field(default_factory=dict)
    batches: list[str] = field(default_factory=list)
    left_out: int = 0

    @property
    def equal(self) -> bool:
        """Whether everything is within the tolerance."""
        scalars = [error for _, _, error in (*self.losses, *self.norms)]
        tensors = [worst.error for errors in self.tables for worst in errors.values()]
        counts = all(plain == layout for plain, layout in self.tokens)
        return counts and not self.batches and all(e <= self.tolerance for e in (*scalars, *tensors))

    @property
    def tables(self) -> list[dict[str, Worst]]:
        """Every table of tensor errors."""
        return [self.initial, *self.gradients, *self.clipped, self.weights]

    def wrong(self, errors: Mapping[str, Worst]) -> list[str]:
        """Names above the tolerance, in the order of the model."""
        return [name for name, worst in errors.items() if not worst.error <= self.tolerance]


def compare(task: Task, plain: Record, ranks: Sequence[RankRecord]) -> Comparison:
    """Compares what every rank of a layout has computed with the plain process."""
    result = Comparison(TOLERANCE[task.dtype])
    records = [rank.record for rank in ranks]
    for step in range(task.num_steps):
        result.losses.append(_scalar(plain.losses[step], [record.losses[step] for record in records]))
        result.norms.append(_scalar(plain.norms[step], [record.norms[step] for record in records]))
        counts = [record.tokens[step] for record in records]
        result.tokens.append((plain.tokens[step], max(counts, key=lambda n: abs(n - plain.tokens[step]))))
        before = [unclipped(record, task.max_norm)[step] for record in records]
        result.gradients.append(tensor_errors(before, plain.gradients[step]))
        clipped = _clipped(plain, task.max_norm, step)
        result.clipped.append(tensor_errors([record.gradients[step] for record in records], clipped))
    result.initial = tensor_errors([record.initial for record in records], plain.initial)
    masks, result.left_out = _without_gradient([plain, *records])
    result.weights = tensor_errors([record.weights for record in records], plain.weights, masks)
    result.batches = batch_problems(task, ranks)
    return result


def tensor_errors(
    actual: Sequence[Mapping[str, Tensor]],
    expected: Mapping[str, Tensor],
    ignore: Mapping[str, Tensor] | None = None,
) -> dict[str, Worst]:
    """The worst error of each tensor over ranks, in the order of `expected`.

    A tensor that no rank has, or that only ranks have, is infinitely wrong unless it is zero.

    Args:
        actual: Tensors by name, for each rank; a pipeline rank has those of its stage.
        expected: Of the plain process.
        ignore: True at entries that need only be within two learning rates.
    """
    largest = largest_entry(expected)
    errors: dict[str, Worst] = {}
    names = dict.fromkeys([*expected, *(name for tensors in actual for name in tensors)])
    for name in names:
        holders = [rank for rank, tensors in enumerate(actual) if name in tensors]
        if name not in expected or not holders:
            lone = expected[name] if name in expected else actual[holders[0]][name]
            errors[name] = Worst(math.inf if bool(lone.ne(0).any()) else 0.0, holders[0] if holders else 0)
            continue
        mask = None if ignore is None else ignore.get(name)
        each = [
            Worst(_masked_error(actual[rank][name], expected[name], largest, mask), rank) for rank in holders
        ]
        errors[name] = max(each, key=lambda worst: worst.error)
    return errors


def _masked_error(actual: Tensor, expected: Tensor, largest: float, mask: Tensor | None) -> float:
    if mask is None or actual.shape != expected.shape or not bool(mask.any()):
        return error_of(actual, expected, largest)
    if float((actual - expected)[mask].abs().max()) > 4 * LEARNING_RATE:
        return math.inf
    return error_of(torch.where(mask, expected, actual), expected, largest)


def _without_gradient(records: Sequence[Record]) -> tuple[dict[str, Tensor], int]:
    """Entries whose gradient is rounding noise in some step: next to nothing for all, and not zero for all."""
    masks: dict[str, Tensor] = {}
    for step in range(len(records[0].gradients)):
        gradients = [record.gradients[step] for record in records]
        floor = _NO_GRADIENT * largest_entry(gradients[0])
        for name, plain in gradients[0].items():
            held = [tensors[name] for tensors in gradients if name in tensors]
            if any(tensor.shape != plain.shape for tensor in held):
                continue
            sizes = torch.stack(held).abs()
            noise = (sizes < floor).all(0) & (sizes > 0).any(0)
            masks[name] = masks[name] | noise if name in masks else noise
    return masks, sum(int(mask.sum()) for mask in masks.values())


def _clipped(plain: Record, max_norm: float | None, step: int) -> dict[str, Tensor]:
    """Gradients of the plain process after torch's clipping."""
    if max_norm is None:
        return plain.gradients[step]
    factor = min(1.0, max_norm / (plain.norms[step] + 1e-6))
    return {name: gradient * factor for name, gradient in plain.gradients[step].items()}


def _scalar(plain: float, layout: Sequence[float]) -> tuple[float, float, float]:
    """(plain, the value furthest from it, relative error)."""
    worst = max(layout, key=lambda value: abs(value - plain) if math.isfinite(value) else math.inf)
    difference = abs(worst - plain) if math.isfinite(worst) else math.inf
    return plain, worst, difference / abs(plain) if plain else difference


def batch_problems(task: Task, ranks: Sequence[RankRecord]) -> list[str]:
    """What is wrong with the micro-batches: peers of a data-parallel coordinate differ, or a step is not as drawn."""
    problems = []
    for step in range(task.num_steps):
        by_dp: dict[int, tuple[int, list[str]]] = {}
        for rank, record in enumerate(ranks):
            first, digests = by_dp.setdefault(record.coordinate.dp, (rank, record.digests[step]))
            if digests != record.digests[step]:
                problems.append(
                    f"step {step}: ranks {first} and {rank} share data-parallel coordinate {record.coordinate.dp} "
                    "but have different micro-batches"
                )
        empty = digest(task.empty())
        dealt = sorted(d for _, digests in by_dp.values() for d in digests if d != empty)
        drawn = sorted(digest(batch) for batch in task.draw(step))
        if dealt != drawn:
            problems.append(_dealt_wrongly(step, dealt, drawn))
    return problems


def _dealt_wrongly(step: int, dealt: Sequence[str], drawn: Sequence[str]) -> str:
    missing = sum(1 for name in set(drawn) if dealt.count(name) < drawn.count(name))
    repeated = sum(1 for name in set(drawn) if dealt.count(name) > drawn.count(name))
    unknown = sum(1 for name in dealt if name not in drawn)
    return (
        f"step {step}: of {len(drawn)} global micro-batches {missing} reached no data-parallel rank, {repeated} "
        f"reached several; {unknown} that ranks had are none of them"
    )
