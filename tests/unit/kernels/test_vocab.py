"""A loss over a vocabulary spread over ranks equals the whole one, in value and in every gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from shoal.kernels.loss import token_losses
from shoal.kernels.vocab import (
    VocabShard,
)
from tests.zygote import RankRunner

IGNORE = -100
TOKENS, HIDDEN = 19, 6
# Divisible by the group, not divisible, and smaller than a group of four, which leaves ranks without ids.
VOCABULARIES = (24, 23, 9, 3, 2)
TERMS: dict[str, dict[str, float]] = {
    "plain": {},
    "softcap": {"softcap": 3.0},
    "scale": {"logit_scale": 0.3},
    "smoothing": {"label_smoothing": 0.1},
    "z-loss": {"z_loss": 0.01},
    "all": {"softcap": 2.0, "logit_scale": 0.5, "label_smoothing": 0.2, "z_loss": 0.1},
}
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 2e-2}


def problem(num_total: int, dtype: torch.dtype = torch.float64, ties: bool = False) -> dict[str, Tensor]:
    """Hidden states, weight, bias, and labels of which two thirds are given; with ties, of small integers."""
    generator = torch.Generator().manual_seed(num_total)

    def draw(*shape: int) -> Tensor:
        if ties:
            return torch.randint(-1, 2, shape, generator=generator).to(dtype)
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    labels = torch.randint(0, num_total, (TOKENS,), generator=generator)
    labels[::3] = IGNORE
    return {
        "hidden": draw(TOKENS, HIDDEN),
        "weight": draw(num_total, HIDDEN),
        "bias": draw(num_total),
        "labels": labels,
    }


def outcome(loss: Any, given: dict[str, Tensor], **terms: Any) -> dict[str, Tensor]:
    """Loss, hits and the gradients of a quarter of the loss, by name."""
    leaves = {name: value.detach().requires_grad_() for name, value in given.items() if name != "labels"}
    loss_sum, num_correct = loss(**leaves, labels=given["labels"], **terms)
    gradients = torch.autograd.grad(0.25 * loss_sum, list(leaves.values()))
    return {"loss": loss_sum.detach(), "correct": num_correct, **dict(zip(leaves, gradients, strict=True))}


def part_of(given: dict[str, Tensor], vocab: VocabShard) -> dict[str, Tensor]:
    own = slice(vocab.start, vocab.start + vocab.num_local)
    return {**given, "weight": given["weight"][own], "bias": given["bias"][own]}


def joined(given: dict[str, Tensor], loss: Any = token_losses, **terms: Any) -> dict[str, Tensor]:
    """This group's outcome in the shape of one process's: hidden gradients summed, the others put together.

    Raises RuntimeError where loss or hits differ between ranks in a single bit.
    """
    group = dist.group.WORLD
    assert group is not None
    vocab = VocabShard.of(len(given["weight"]), group)
    ours = outcome(loss, part_of(given, vocab), vocab=vocab, **terms)
    for name in ("loss", "correct"):
        values = [torch.empty_like(ours[name]) for _ in range(group.size())]
        dist.all_gather(values, ours[name])
        if not all(torch.equal(value, values[0]) for value in values):
            raise RuntimeError(f"{name} differs between ranks: {values}")
    dist.all_reduce(ours["hidden"])
    for name in ("weight", "bias"):
        whole = torch.zeros_like(given[name])
        whole[vocab.start : vocab.start + vocab.num_local] = ours[name]
        dist.all_reduce(whole)
        ours[name] = whole
    return ours


def errors(ours: dict[str, Tensor], reference: dict[str, Tensor]) -> dict[str, float]:
    """Largest difference of each entry, relative to the entry's largest value."""
    for name, expected in reference.items():
        if ours[name].dtype != expected.dtype or ours[name].shape != expected.shape:
            raise TypeError(f"{name}: {ours[name].dtype} {ours[name].shape}, not {expected.dtype}")
    return {
        name: float((ours[name] - expected).abs().max() / expected.abs().max().clamp(min=1e-30))
        for name, expected in reference.items()
    }


def against_one_process(rank: int, world: int, num_total: int, dtype: torch.dtype) -> dict[str, float]:
    """Every error of every term and chunk size, by name."""
    given, found = problem(num_total, dtype), {}
    for name, terms in TERMS.items():
        expected = outcome(token_losses, given, **terms)
        for chunk_size in (1, 5, None):
            ours = joined(given, **terms, chunk_size=chunk_size)
            found |= {f"{name}, {chunk_size}, {k}": e for k, e in errors(ours, expected).items()}
    return found


@pytest.mark.parametrize("num_total", VOCABULARIES)
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_equals_one_process(ranks: RankRunner, world: int, num_total: int) -> None:
    for found in ranks(against_one_process, world, num_total, torch.float64):
        assert len(found) == len(TERMS) * 3 * 5
        assert max(found.values()) <= 1e-10, found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_equals_one_process_in_less_precision(ranks: RankRunner, dtype: torch.dtype) -> None:
    for found in ranks(against_one_process, 3, 23, dtype):
        assert max(found.values()) <= TOLERANCE[dtype], found
        # Sums over ranks have another order, so that nothing at all would mean that nothing was spread.
        assert max(found.values()) > 0
