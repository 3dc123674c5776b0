"""Names the likely cause of a mismatch from what was measured."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from shoal.verify.compare import Comparison
from shoal.verify.groups import groups_of
from shoal.verify.layers import Difference
from shoal.verify.mixture import explain, missing_sum, mixture_of, ranks_disagree
from shoal.verify.parity import RankRecord
from shoal.verify.record import Record, unclipped
from shoal.verify.reference import Contributions


@dataclass(frozen=True)
class Cause:
    """What is wrong, as far as the numbers tell.

    Attributes:
        kind: A short name, such as ``averaged`` or ``missing-sum-tp``.
        words: The same in words.
        necessary: What makes the numbers right again when it is switched off: axes, and parts of the step.
        output: The first module whose output differs.
        gradient: The first layer, in the order of the backward, that gets a wrong gradient.
        parameter: The first parameter, in the order of the model, whose initial value or gradient differs.
        groups: Kinds of the parameters that differ.
    """

    kind: str
    words: str
    necessary: tuple[str, ...] = ()
    output: Difference | None = None
    gradient: Difference | None = None
    parameter: str | None = None
    groups: tuple[str, ...] = ()


@dataclass(frozen=True)
class Evidence:
    """What a cause is inferred from.

    Attributes:
        comparison: Of the first step.
        plain: The plain process, this step.
        ranks: The same on the layout.
        parts: What each micro-batch contributes.
        sizes: Size of each axis.
        max_norm: Bound of the gradient norm.
        necessary: See `Cause`.
        output: See `Cause`.
        gradient: See `Cause`.
        module_differs: The trainable module's own loss differs from the plain one in one process already.
    """

    comparison: Comparison
    plain: Record
    ranks: Sequence[RankRecord]
    parts: Contributions
    sizes: Mapping[str, int]
    max_norm: float | None
    necessary: tuple[str, ...] = ()
    output: Difference | None = None
    gradient: Difference | None = None
    module_differs: bool = False

    def gradients(self) -> list[dict[str, Tensor]]:
        """Of the first step, before clipping, for each rank."""
        return [unclipped(rank.record, self.max_norm)[0] for rank in self.ranks]

    def suspects(self) -> dict[str, int]:
        """Size of each axis, those first without which the mismatch goes away."""
        return dict(sorted(self.sizes.items(), key=lambda item: item[0] not in self.necessary))


_Guess = tuple[str, str, list[str]]
"""Kind, words, and the names of what differs."""


def infer(evidence: Evidence) -> Cause:
    """The first explanation that fits, from the data to the optimizer."""
    checks: tuple[Callable[[Evidence], _Guess | None], ...] = (
        _batches,
        _module,
        _initial,
        _tokens,
        _forward,
        _local_norm,
        _gradient,
        _norm,
        _update,
    )
    for check in checks:
        guess = check(evidence)
        if guess is not None:
            kind, words, names = guess
            return Cause(
                kind,
                words,
                evidence.necessary,
                evidence.output,
                evidence.gradient,
                names[0] if names else None,
                tuple(groups_of(names)),
            )
    return Cause("later-step", "the first step is right, a later one is not", evidence.necessary)


def _batches(evidence: Evidence) -> _Guess | None:
    problems = evidence.comparison.batches
    return ("batches", "; ".join(problems), []) if problems else None


def _module(evidence: Evidence) -> _Guess | None:
    if not evidence.module_differs:
        return None
    words = (
        "not the layout: in one process the trainable module's loss or gradient differs from that of transformers' "
        "own model on each document alone (labels, packing, padding or loss)"
    )
    return "trainable-module", words, []


def _initial(evidence: Evidence) -> _Guess | None:
    comparison = evidence.comparison
    names = comparison.wrong(comparison.initial)
    if not names:
        return None
    if ranks_disagree([rank.record.initial for rank in evidence.ranks], names):
        return (
            "initial-weights-of-ranks",
            "ranks start from different weights: initialisation depends on the rank",
            names,
        )
    return "initial-weights", "the layout starts from other weights than one process", names


def _tokens(evidence: Evidence) -> _Guess | None:
    plain, layout = evidence.comparison.tokens[0]
    if plain == layout:
        return None
    counts = {rank.coordinate.dp: rank.record.tokens[0] for rank in evidence.ranks}
    if len(counts) > 1 and sum(counts.values()) == plain:
        own = sorted(counts.values())
        words = f"each data-parallel rank divides by its own supervised tokens, {own}, not by {plain}"
        return "local-token-mean", words, _wrong_gradients(evidence)
    words = f"the step counts {layout} supervised tokens instead of {plain}"
    return "token-count", words + f" ({layout / max(plain, 1):.4g} times)", _wrong_gradients(evidence)


def _forward(evidence: Evidence) -> _Guess | None:
    comparison = evidence.comparison
    plain, layout, error = comparison.losses[0]
    names = _wrong_gradients(evidence)
    if evidence.output is not None and evidence.output.tokens is not None:
        have, want = evidence.output.tokens
        words = f"tokens are lost: {have} of {want} are left in the output of {evidence.output}"
        return "truncated", words, names
    if evidence.output is not None:
        return "forward", f"the forward differs, first in the output of {evidence.output}", names
    if error <= comparison.tolerance:
        return None
    if names:  # gradients know more than one number does
        mixed = _mixture(evidence, names)
        if mixed is not None:
            return mixed[0], f"{mixed[1]}; the loss is {layout / plain:.6g} times the right one", names
    ratio = layout / plain if plain else math.inf
    words = f"all modules put out the same, but the loss is {ratio:.6g} times the right one: "
    if not names:
        return "reported-loss", words + "the loss is only reported wrongly, gradients are right", names
    return "loss", words + "labels, their shift, or what the loss is summed over", names


def _wrong_gradients(evidence: Evidence) -> list[str]:
    return evidence.comparison.wrong(evidence.comparison.gradients[0])


def _local_norm(evidence: Evidence) -> _Guess | None:
    """Before gradients: each part of a gathered gradient was scaled by another rank's norm."""
    norms = [rank.record.norms[0] for rank in evidence.ranks]
    disagree = max(norms) - min(norms) > evidence.comparison.tolerance * max(norms)
    if not disagree or (evidence.max_norm is not None and "clipping" not in evidence.necessary):
        return None
    if evidence.max_norm is None and _wrong_gradients(evidence):
        return None
    return "local-norm", "ranks have different gradient norms: each takes the norm of its own part", []


def _gradient(evidence: Evidence) -> _Guess | None:
    names = _wrong_gradients(evidence)
    if not names:
        return None
    norm_is_right = evidence.comparison.norms[0][2] <= evidence.comparison.tolerance
    if norm_is_right and "clipping" in evidence.necessary:
        return "clipping", "the norm is right, but gradients are not scaled by max_norm / norm", names
    gradients = evidence.gradients()
    absent = [name for name in names if not any(name in tensors for tensors in gradients)]
    if absent:
        return "no-gradient", "no gradient reaches the optimizer: it was never synchronised", absent
    axis = missing_sum(evidence.ranks, gradients, evidence.plain.gradients[0], names)
    if axis is not None:
        words = (
            f"ranks hold parts of the gradient that add up to the right one over {axis}: that sum is missing"
        )
        return f"missing-sum-{axis}", words, names
    mixed = _mixture(evidence, names)
    if mixed is not None:
        return *mixed, names
    share = f"{len(names)} of {len(evidence.plain.gradients[0])} parameters"
    return "backward", f"the forward is right, the gradients of {share} are not", names


def _mixture(evidence: Evidence, names: list[str]) -> tuple[str, str] | None:
    """Over all wrong parameters, as the first rank that holds them all sees it."""
    for tensors in evidence.gradients():
        if all(name in tensors for name in names):
            mixture = mixture_of(tensors, evidence.parts.gradients, names)
            return explain(mixture, evidence.parts.tokens, evidence.suspects())
    return None


def _norm(evidence: Evidence) -> _Guess | None:
    plain, layout, error = evidence.comparison.norms[0]
    if error <= evidence.comparison.tolerance:
        return None
    counted = _counted_often(evidence, layout)
    if counted is not None:
        return "norm-counts-twice", counted, []
    return "norm", f"gradients are right, but their norm is {layout / plain:.6g} times the right one", []


def _counted_often(evidence: Evidence, layout: float) -> str | None:
    """A kind of parameters whose repeated counting gives the layout's norm."""
    gradients = evidence.plain.gradients[0]
    names = {
        group: [n for n in gradients if groups_of([n]) == [group]] for group in groups_of(list(gradients))
    }
    total = sum(float(gradient.square().sum()) for gradient in gradients.values())
    for group, members in [("all parameters", list(gradients)), *names.items()]:
        share = sum(float(gradients[name].square().sum()) for name in members)
        for axis, size in evidence.suspects().items():
            if size > 1 and abs(math.sqrt(total + (size - 1) * share) - layout) < 1e-9 * layout:
                return f"gradients are right, but the norm counts {group} {size} times, once for each {axis} rank"
    return None


def _update(evidence: Evidence) -> _Guess | None:
    comparison = evidence.comparison
    clipped, names = comparison.wrong(comparison.clipped[0]), comparison.wrong(comparison.weights)
    if clipped:
        return "clipping", "gradients and their norm are right, but clipping is not", clipped
    if not names:
        return None
    buffers = [name for name in names if name not in evidence.plain.initial]
    if len(buffers) == len(names):
        local = ranks_disagree([rank.record.weights for rank in evidence.ranks], names)
        words = "each rank has its own" if local else "all ranks have the same wrong values"
        return "running-statistics", f"running statistics of norms differ: {words}", names
    return "optimizer", "gradients are right, but the optimizer makes other weights of them", names
