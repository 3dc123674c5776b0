"""Losses per token of a vocabulary spread over ranks equal those of whole logits, in value and gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from shoal.kernels.vocab import VocabShard, reference_vocab_parallel_losses, vocab_parallel_losses
from tests.zygote import RankRunner

IGNORE = -100
TOKENS = 17
TERMS: dict[str, dict[str, float]] = {
    "plain": {},
    "smoothing": {"label_smoothing": 0.1},
    "z-loss": {"z_loss": 0.01},
    "both": {"label_smoothing": 0.2, "z_loss": 0.1},
}


def problem(num_total: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """Logits of the whole vocabulary, labels, and the gradient of the losses; nan where there is no label."""
    generator = torch.Generator().manual_seed(num_total)
    logits = 3.0 * torch.randn(TOKENS, num_total, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, num_total, (TOKENS,), generator=generator)
    labels[::4] = IGNORE
    logits[labels == IGNORE] = torch.nan
    return logits.to(dtype), labels, torch.randn(TOKENS, generator=generator, dtype=torch.float64).to(dtype)


def whole(num_total: int, dtype: torch.dtype, **terms: float) -> dict[str, Tensor]:
    """The same from torch's cross-entropy in one process."""
    logits, labels, grad = problem(num_total, dtype)
    logits = logits.nan_to_num().requires_grad_()
    z = logits if dtype == torch.float64 else logits.float()
    smoothing, labelled = terms.get("label_smoothing", 0.0), labels != IGNORE
    losses = F.cross_entropy(z, labels, label_smoothing=smoothing, reduction="none")
    losses = losses + terms.get("z_loss", 0.0) * z.logsumexp(-1).square().where(labelled, 0.0)
    (gradient,) = torch.autograd.grad(losses, logits, grad.to(losses.dtype))
    return {
        "losses": losses.detach(),
        "correct": (z.argmax(-1) == labels) & labelled,
        "gradient": gradient,
    }


def spread(rank: int, world: int, num_total: int, dtype: torch.dtype, reference: bool) -> dict[str, Any]:
    """Every term's losses, hits and this rank's columns of the gradient."""
    assert dist.group.WORLD is not None
    vocab, found = VocabShard.of(num_total, dist.group.WORLD), {}
    logits, labels, grad = problem(num_total, dtype)
    for name, terms in TERMS.items():
        own = logits[:, vocab.start : vocab.start + vocab.num_local].clone()
        if reference:
            own = own.nan_to_num()
        own.requires_grad_()
        loss = reference_vocab_parallel_losses if reference else vocab_parallel_losses
        losses, correct = loss(own, labels, vocab, **terms)
        (gradient,) = torch.autograd.grad(losses, own, grad.to(losses.dtype))
        found[name] = {"losses": losses, "correct": correct, "gradient": gradient}
    return found


def assert_equals_whole(results: list[dict[str, Any]], num_total: int, dtype: torch.dtype) -> None:
    tolerance = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 1e-2}[dtype]
    for name, terms in TERMS.items():
        expected, ranks_ = whole(num_total, dtype, **terms), [found[name] for found in results]
        assert 0 < expected["correct"].sum() < TOKENS
        ours = {**ranks_[0], "gradient": torch.cat([found["gradient"] for found in ranks_], -1)}
        for found in ranks_:
            assert torch.equal(found["losses"], ours["losses"]), name
            assert torch.equal(found["correct"], expected["correct"]), name
        for key in ("losses", "gradient"):
            assert ours[key].dtype == expected[key].dtype
            error = (ours[key] - expected[key]).abs().max() / expected[key].abs().max()
            assert error <= tolerance, f"{name}, {key}: {error:.1e}"


@pytest.mark.parametrize("reference", [False, True], ids=["ours", "reference"])
@pytest.mark.parametrize(("world", "num_total"), [(1, 7), (2, 8), (3, 8), (4, 9), (4, 3)])
def test_equals_whole_logits(ranks: RankRunner, world: int, num_total: int, reference: bool) -> None:
    results = ranks(spread, world, num_total, torch.float64, reference)
    assert_equals_whole(results, num_total, torch.float64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_equals_whole_logits_in_less_precision(ranks: RankRunner, dtype: torch.dtype) -> None:
    assert_equals_whole(ranks(spread, 2, 9, dtype, False), 9, dtype)


def without_labels(rank: int, world: int) -> list[float]:
    assert dist.group.WORLD is not None
    vocab = VocabShard.of(3, dist.group.WORLD)
    logits = torch.randn(TOKENS, vocab.num_local, requires_grad=True)
    losses, correct = vocab_parallel_losses(logits, torch.full((TOKENS,), IGNORE), vocab, z_loss=0.1)
    losses.sum().backward()
    assert logits.grad is not None and logits.grad.shape == logits.shape
    return [float(value.abs().sum()) for value in (losses.detach(), correct.float(), logits.grad)]


def test_without_labels_everything_is_zero_and_not_absent(ranks: RankRunner) -> None:
    assert ranks(without_labels, 2) == [[0.0, 0.0, 0.0]] * 2


def differentiated_twice(rank: int, world: int) -> tuple[str, bool]:
    assert dist.group.WORLD is not None
    vocab = VocabShard.of(8, dist.group.WORLD)
    logits, labels, _ = problem(8)
    own = logits[:, vocab.start : vocab.start + vocab.num_local].requires_grad_()
    before = own.detach().clone()
    losses, _ = vocab_parallel_losses(own, labels, vocab)
    losses.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError) as error:
        losses.sum().backward()
    with torch.no_grad():
        assert not vocab_parallel_losses(own, labels, vocab)[0].requires_grad
    return str(error.value), torch.equal(own.detach().nan_to_num(), before.nan_to_num())


def test_backward_runs_once_and_the_logits_stay_as_they_are(ranks: RankRunner) -> None:
    for message, unchanged in ranks(differentiated_twice, 2):
        assert "call backward once" in message and unchanged


def refusals(rank: int, world: int) -> list[str]:
    assert dist.group.WORLD is not None
    vocab, messages = VocabShard.of(8, dist.group.WORLD), []
    logits, labels, _ = problem(8)
    own = logits[:, vocab.start : vocab.start + vocab.num_local]
    for given in ((logits, labels), (own, labels[1:]), (own[None], labels), (own, labels + 8)):
        with pytest.raises(ValueError) as error:
            vocab_parallel_losses(*given, vocab)
        messages.append(str(error.value))
    return messages


def test_refuses_before_anything_is_exchanged(ranks: RankRunner) -> None:
    for messages in ranks(refusals, 2):
        assert "this rank's part has 8 ids, but VocabShard.num_local is 4" in messages[0]
        assert "labels [16] do not fit; give [N, 4] and [N]" in messages[1]
        assert "logits [1, 17, 4]" in messages[2]
        assert "is neither in [0, 8)" in messages[3]


def ranges(rank: int, world: int, num_totals: tuple[int, ...]) -> list[tuple[bool, int]]:
    """Whether a DTensor's shard holds exactly the ids of the range, and how many."""
    assert dist.group.WORLD is not None
    mesh, found = init_device_mesh("cpu", (world,)), []
    for num_total in num_totals:
        shard = distribute_tensor(torch.arange(num_total), mesh, [Shard(0)]).to_local()
        vocab = VocabShard.of(num_total, dist.group.WORLD)
        ids = torch.arange(vocab.start, vocab.start + vocab.num_local)
        found.append((torch.equal(shard, ids), vocab.num_local))
    return found


def test_ranges_are_those_of_a_sharded_tensor(ranks: RankRunner) -> None:
    results = ranks(ranges, 4, (12, 13, 9, 3))
    assert all(equal for found in results for equal, _ in found)
    assert [[count for _, count in found] for found in results] == [
        [3, 4, 3, 1],
        [3, 4, 3, 1],
        [3, 4, 3, 1],
        [3, 1, 0, 0],
    ]
