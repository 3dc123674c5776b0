"""Explains a wrong gradient: which micro-batches are in it, how often, and over which axis a sum is missing."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.verify.parity import RankRecord
from shoal.verify.record import error_of, largest_entry

_FIT = 1e-6
"""Relative error up to which an explanation holds; a least-squares fit is less exact than a gradient."""


_SAME = 1e-9
"""Relative difference up to which two ranks have the same values."""


@dataclass(frozen=True)
class Mixture:
    """Weights with which the micro-batches' own gradients add up to a gradient; all 1 in a right one.

    Attributes:
        weights: By global micro-batch; NaN for one that contributes nothing.
        error: Relative error of the sum.
    """

    weights: list[float]
    error: float

    @property
    def explains(self) -> bool:
        """Whether the gradient is such a sum at all."""
        return self.error < _FIT


def mixture_of(
    gradient: Mapping[str, Tensor], parts: Sequence[Mapping[str, Tensor]], names: Sequence[str]
) -> Mixture:
    """Fits the weights of micro-batches to a gradient.

    Args:
        gradient: By name.
        parts: The contribution of each micro-batch; they add up to the right gradient.
        names: Parameters to look at.
    """
    target = torch.cat([gradient[name].flatten() for name in names])
    columns = torch.stack(
        [
            torch.cat(
                [
                    part[name].flatten() if name in part else torch.zeros_like(gradient[name]).flatten()
                    for name in names
                ]
            )
            for part in parts
        ],
        dim=1,
    )
    used = [index for index in range(columns.shape[1]) if bool(columns[:, index].ne(0).any())]
    weights = [math.nan] * columns.shape[1]
    if not used:
        return Mixture(weights, math.inf)
    solved = torch.linalg.lstsq(columns[:, used], target[:, None], driver="gelsd").solution[:, 0]
    for index, weight in zip(used, solved.tolist(), strict=True):
        weights[index] = weight
    scale = max(float(target.norm()), float(columns.sum(1).norm()), 1e-300)
    return Mixture(weights, float((columns[:, used] @ solved - target).norm()) / scale)


def missing_sum(
    ranks: Sequence[RankRecord],
    gradients: Sequence[Mapping[str, Tensor]],
    expected: Mapping[str, Tensor],
    names: Sequence[str],
) -> str | None:
    """The axis over which the gradients of peers still have to be added to be right; None when there is none."""
    if not ranks_disagree(
        gradients, names
    ):  # all have the same wrong value: nothing is missing on some of them
        return None
    largest = largest_entry(expected)
    for axis in ("tp", "cp", "dp_shard", "dp_replicate", "dp"):
        peers = [group for group in _peers(ranks, axis) if len(group) > 1]
        if peers and all(
            error_of(_sum(gradients, group, name), expected[name], largest) < _FIT
            for group in peers
            for name in names
        ):
            return axis
    return None


def _sum(gradients: Sequence[Mapping[str, Tensor]], group: Sequence[int], name: str) -> Tensor:
    held = [gradients[rank][name] for rank in group if name in gradients[rank]]
    return torch.stack(held).sum(0) if held else torch.zeros(0)


def _peers(ranks: Sequence[RankRecord], axis: str) -> Iterator[list[int]]:
    """Ranks that differ along `axis` alone."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank, record in enumerate(ranks):
        place = record.coordinate
        own = {"pp": place.pp, "dp_replicate": place.dp_replicate, "dp_shard": place.dp_shard}
        own |= {"cp": place.cp, "tp": place.tp}
        dropped = ("dp_replicate", "dp_shard") if axis == "dp" else (axis,)
        groups.setdefault(tuple(v for name, v in own.items() if name not in dropped), []).append(rank)
    yield from groups.values()


def ranks_disagree(gradients: Sequence[Mapping[str, Tensor]], names: Sequence[str]) -> bool:
    """Whether ranks that hold the same parameter whole have different values for it, beyond rounding."""
    for name in names:
        held = [tensors[name] for tensors in gradients if name in tensors]
        if any(error_of(other, held[0], largest_entry({name: held[0]})) > _SAME for other in held[1:]):
            return True
    return False


# ---------------------------------------------------------------------------------------------- in words


def explain(mixture: Mixture, tokens: Sequence[int], sizes: Mapping[str, int]) -> tuple[str, str] | None:
    """What kind of mistake gives these weights, as (kind, words); None when they say nothing.

    Args:
        mixture: Of the wrong parameters.
        tokens: Supervised tokens of each micro-batch.
        sizes: Size of each axis.
    """
    if not mixture.explains:
        return None
    known = [index for index, weight in enumerate(mixture.weights) if not math.isnan(weight)]
    weights = [mixture.weights[index] for index in known]
    dp = sizes["dp"]
    if _near(weights, [weights[0]] * len(weights)):
        return _constant(weights[0], sizes)
    if _inverse(weights, [sum(tokens[index % dp :: dp]) for index in known]):
        words = "each data-parallel rank divides by its own supervised tokens instead of the step's"
        return "local-token-mean", words
    if _inverse(weights, [tokens[index] for index in known]):
        return "micro-batch-mean", "each micro-batch divides by its own supervised tokens: a mean of means"
    return _left_out(weights, known, dp) or (
        "mixture",
        "the gradient counts micro-batches with weights "
        + ", ".join(f"{weight:.4g}" for weight in weights)
        + " instead of 1",
    )


def _constant(weight: float, sizes: Mapping[str, int]) -> tuple[str, str]:
    if _near([weight], [0.0]):
        return "no-gradient", "the gradient is zero"
    for axis, size in sizes.items():
        if size > 1 and _near([weight], [1.0 / size]):
            return (
                "averaged",
                f"the gradient is 1/{size} of the right one: averaged over {axis} instead of summed",
            )
        if size > 1 and _near([weight], [float(size)]):
            words = f"loss multiplied by {axis}_size, or a complete gradient summed over {axis} again"
            return "multiplied", f"the gradient is {size} times the right one: {words}"
    return "scaled", f"the gradient is {weight:.6g} times the right one, for every micro-batch alike"


def _left_out(weights: Sequence[float], known: Sequence[int], dp: int) -> tuple[str, str] | None:
    """Micro-batches that are missing altogether, by rank or by turn."""
    if not all(_near([w], [0.0]) or _near([w], [1.0]) for w in weights):
        return None
    missing = [index for index, weight in zip(known, weights, strict=True) if _near([weight], [0.0])]
    of_ranks, turns = {index % dp for index in missing}, {index // dp for index in missing}
    if all(index in missing for index in known if index % dp in of_ranks):
        return (
            "not-synchronised",
            f"micro-batches of data-parallel ranks {sorted(of_ranks)} are missing: gradients were not summed over dp",
        )
    if all(index in missing for index in known if index // dp in turns):
        return (
            "not-accumulated",
            f"micro-batches of turn {sorted(turns)} of every rank are missing: not accumulated",
        )
    return "left-out", f"micro-batches {missing} are missing"


def _inverse(weights: Sequence[float], counts: Sequence[int]) -> bool:
    """Whether weights are the same number, not zero, divided by each count."""
    products = [weight * count for weight, count in zip(weights, counts, strict=True)]
    return _near(products, [products[0]] * len(products)) and not _near(products[:1], [0.0])


def _near(values: Sequence[float], expected: Sequence[float]) -> bool:
    return all(abs(a - b) < 1e-4 * max(1.0, abs(b)) for a, b in zip(values, expected, strict=True))
