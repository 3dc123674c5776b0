"""A loss over a vocabulary spread over ranks equals the whole one, in value and in every gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from shoal.kernels import vocab as vocab_module
from shoal.kernels.loss import reference_token_losses, token_losses
from shoal.kernels.vocab import VocabShard
from tests.unit.kernels.largest import Largest
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


def reference_against_one_process(rank: int, world: int) -> dict[str, float]:
    given = problem(23)
    ours = joined(given, reference_token_losses, **TERMS["all"])
    return errors(ours, outcome(reference_token_losses, given, **TERMS["all"]))


def test_the_reference_gathers_and_equals_one_process(ranks: RankRunner) -> None:
    for found in ranks(reference_against_one_process, 3):
        assert max(found.values()) <= 1e-10, found


def with_a_fault(rank: int, world: int, fault: str) -> float | str:
    given, terms = problem(23), TERMS["all"]
    if fault == "no exchange":
        vocab_module._of_every_rank = lambda parts, vocab: parts[None]  # type: ignore[assignment]
    elif fault == "largest logit of this rank only":
        exchange = vocab_module._of_every_rank

        def without_peak(parts: Tensor, vocab: VocabShard | None) -> Tensor:
            every = exchange(parts, vocab)
            every[:, 0] = parts[0]
            return every

        vocab_module._of_every_rank = without_peak
    elif fault == "hidden gradient not summed":
        dist.all_reduce = _only_not(dist.all_reduce, given["hidden"].shape)
    try:
        return max(errors(joined(given, **terms), outcome(reference_token_losses, given, **terms)).values())
    except RuntimeError as error:
        return str(error)


def _only_not(all_reduce: Any, shape: torch.Size) -> Any:
    return lambda tensor, **options: None if tensor.shape == shape else all_reduce(tensor, **options)


@pytest.mark.parametrize(
    "fault", ["", "no exchange", "largest logit of this rank only", "hidden gradient not summed"]
)
def test_the_comparison_notices_what_is_not_exchanged(ranks: RankRunner, fault: str) -> None:
    for found in ranks(with_a_fault, 3, fault):
        if not fault:
            assert found <= 1e-10
        else:
            assert found > 1e-3 if isinstance(found, float) else "differs between ranks" in found


def ties(rank: int, world: int) -> tuple[float, float, int]:
    """Hits here and in one process, and how many labels share the largest logit with an id of another rank.

    Labels are in turn the first and the last of the ids with the largest logit.
    """
    given = problem(9, ties=True)
    logits = given["hidden"] @ given["weight"].t() + given["bias"]
    largest = [row.nonzero().flatten().tolist() for row in logits == logits.amax(-1, keepdim=True)]
    given["labels"] = torch.tensor([ids[-(token % 2)] for token, ids in enumerate(largest)])
    assert dist.group.WORLD is not None
    longest = VocabShard.of(9, dist.group.WORLD).num_longest
    num_spread = sum(ids[0] // longest < ids[-1] // longest for ids in largest)
    hits = (logits.argmax(-1) == given["labels"]).sum()
    return float(joined(given)["correct"]), float(hits), num_spread


def test_of_equal_logits_the_first_counts(ranks: RankRunner) -> None:
    for ours, expected, num_spread in ranks(ties, 3):
        assert num_spread >= 4
        assert ours == expected
        assert TOKENS / 2 < expected < TOKENS


def extreme_logits(rank: int, world: int) -> dict[str, float]:
    """The last rank's logits are 1000 above the others', the first's are all -inf (ids that are masked out)."""
    given = problem(9)
    given["bias"] = given["bias"] + torch.tensor([-torch.inf] * 3 + [0.0] * 3 + [1000.0] * 3)
    given["labels"] = given["labels"] % 6 + 3
    ours, expected = joined(given), outcome(token_losses, given)
    assert all(value.isfinite().all() for value in expected.values())
    return errors(ours, expected)


def test_logits_far_apart_neither_overflow_nor_vanish(ranks: RankRunner) -> None:
    for found in ranks(extreme_logits, 3):
        assert max(found.values()) <= 1e-10, found


def without_labels(rank: int, world: int) -> tuple[dict[str, Tensor], int]:
    given = problem(3)
    given["labels"] = torch.full_like(given["labels"], IGNORE)
    group = dist.group.WORLD
    assert group is not None
    vocab = VocabShard.of(3, group)
    with _Exchanges() as exchanges:
        found = outcome(token_losses, part_of(given, vocab), vocab=vocab, **TERMS["all"])
    return found, len(exchanges.shapes)


def test_without_labels_everything_is_zero_and_nothing_is_exchanged(ranks: RankRunner) -> None:
    for rank, (found, num_exchanges) in enumerate(ranks(without_labels, 4)):
        assert num_exchanges == 0
        assert found["weight"].shape == ((1, HIDDEN) if rank < 3 else (0, HIDDEN))
        for name, value in found.items():
            assert torch.equal(value, torch.zeros_like(value)), name


class _Exchanges:
    """Notes the shape of what this rank puts into each collective."""

    def __enter__(self) -> _Exchanges:
        self.shapes: list[tuple[int, ...]] = []
        self._gather, self._reduce = dist.all_gather_single, dist.all_reduce

        def gather(result: Tensor, tensor: Tensor, **options: Any) -> Any:
            self.shapes.append(tuple(tensor.shape))
            return self._gather(result, tensor, **options)

        def reduce(tensor: Tensor, **options: Any) -> Any:
            self.shapes.append(tuple(tensor.shape))
            return self._reduce(tensor, **options)

        dist.all_gather_single, dist.all_reduce = gather, reduce
        return self

    def __exit__(self, *_: object) -> None:
        dist.all_gather_single, dist.all_reduce = self._gather, self._reduce


def what_it_costs(rank: int, world: int) -> tuple[list[tuple[int, ...]], int, int]:
    """What is exchanged, the numbers of the largest tensor, and those of the reference's."""
    given, group = problem(1001), dist.group.WORLD
    assert group is not None
    vocab = VocabShard.of(1001, group)
    with _Exchanges() as exchanges, Largest() as largest:
        outcome(token_losses, part_of(given, vocab), vocab=vocab, chunk_size=5, **TERMS["all"])
    with Largest() as of_reference:
        outcome(reference_token_losses, part_of(given, vocab), vocab=vocab, **TERMS["all"])
    return exchanges.shapes, largest.numbers, of_reference.numbers


def test_exchanges_five_numbers_per_token_and_never_holds_the_logits(ranks: RankRunner) -> None:
    labelled = TOKENS - len(range(0, TOKENS, 3))
    chunks = [min(5, labelled - start) for start in range(0, labelled, 5)]
    for shapes, largest, of_reference in ranks(what_it_costs, 4):
        assert shapes == [(5, rows) for rows in chunks]
        # A rank's weight [V_local, H] and its gradient are larger than a chunk's logits [5, V_local].
        assert largest <= 251 * HIDDEN < 1001 * TOKENS <= of_reference


def chosen_chunks(rank: int, world: int) -> list[tuple[int, ...]]:
    from shoal.kernels import loss

    loss.CHUNK_ELEMENTS = 24
    given, group = problem(9), dist.group.WORLD
    assert group is not None
    vocab = VocabShard.of(9, group)
    with _Exchanges() as exchanges:
        outcome(token_losses, part_of(given, vocab), vocab=vocab)
    return exchanges.shapes


def test_ranks_with_fewer_ids_choose_the_same_chunks(ranks: RankRunner) -> None:
    """Four ranks hold 3, 3, 3 and 0 of nine ids: chunks of 24 // 3 tokens on each."""
    assert ranks(chosen_chunks, 4) == [[(5, 8), (5, 4)]] * 4


def trained_parts(rank: int, world: int, names: tuple[str, ...]) -> float:
    given, group = problem(23), dist.group.WORLD
    assert group is not None
    vocab = VocabShard.of(23, group)
    part = part_of(given, vocab)
    expected = outcome(token_losses, part, vocab=vocab)
    for name in names:
        part[name] = part[name].clone().requires_grad_()
    loss_sum, _ = token_losses(**part, vocab=vocab)
    torch.testing.assert_close(loss_sum, expected["loss"], rtol=0, atol=0)
    assert loss_sum.requires_grad == bool(names)
    if names:
        (0.25 * loss_sum).backward()
    worst = [float((part[name].grad - expected[name]).abs().max()) for name in names]  # type: ignore[operator]
    return max(worst, default=0.0)


@pytest.mark.parametrize("names", [("hidden",), ("weight",), ("bias", "hidden"), ()])
def test_only_what_is_trained_gets_a_gradient(ranks: RankRunner, names: tuple[str, ...]) -> None:
    assert ranks(trained_parts, 2, names) == [0.0, 0.0]


def under_autocast(rank: int, world: int) -> tuple[dict[str, float], float]:
    given = problem(23, torch.float32)
    exact = outcome(token_losses, given)
    with torch.autocast("cpu", torch.bfloat16):
        ours, expected = joined(given, **TERMS["all"]), outcome(token_losses, given, **TERMS["all"])
        rounded = joined(given)
    return errors(ours, expected), float((rounded["hidden"] - exact["hidden"]).abs().max())


def test_autocast_multiplies_in_its_dtype(ranks: RankRunner) -> None:
    for found, rounding in ranks(under_autocast, 2):
        assert max(found.values()) <= TOLERANCE[torch.bfloat16], found
        assert rounding > 1e-5, "autocast had no effect"


def refusals(rank: int, world: int) -> list[str]:
    given, group = problem(23), dist.group.WORLD
    assert group is not None
    vocab = VocabShard.of(23, group)
    part, messages = part_of(given, vocab), []
    for change in (
        {"weight": given["weight"], "bias": given["bias"]},
        {"labels": given["labels"] + 23},
        {"label_smoothing": -0.1},
    ):
        with pytest.raises(ValueError) as error:
            token_losses(**{**part, **change}, vocab=vocab)  # type: ignore[arg-type]
        messages.append(str(error.value))
    for start, num_local in ((-1, 3), (20, 4), (0, -1)):
        with pytest.raises(ValueError, match="do not lie in a vocabulary of 23"):
            VocabShard(group, start, num_local, 23)
    return messages


def test_refuses_before_anything_is_exchanged(ranks: RankRunner) -> None:
    for num_local, messages in zip((12, 11), ranks(refusals, 2), strict=True):
        assert f"this rank's part has 23 ids, but VocabShard.num_local is {num_local}" in messages[0]
        assert "is neither in [0, 23) nor the ignored -100" in messages[1]
        assert "label_smoothing: -0.1 is outside [0, 1]" in messages[2]
