"""Attention over the documents on all ranks: outputs and gradients are those of one process, in float64."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor

from shoal.config.schema import ContextMethod
from tests.parity.context import Problem, assert_close, in_one_process, joined, on_a_rank
from tests.zygote import RankRunner

METHODS: tuple[ContextMethod, ...] = ("ring", "allgather", "ulysses")
PROBLEMS = {
    "plain": Problem(),
    "issue": Problem(lengths=(7, 3, 1)),  # padded to 8, 4, 4 on two ranks
    "window-1": Problem(window=1),
    "window-5": Problem(window=5),
    "window-20": Problem(window=20),
    "softcap": Problem(softcap=2.0),
    "sinks": Problem(sinks=True, window=6),
    "sinks-softcap": Problem(sinks=True, softcap=2.0, window=3),
    "one-kv-head": Problem(kv_heads=1),
    "own-kv-heads": Problem(kv_heads=4),
    "wide-values": Problem(value_width=12),
    "narrow-values": Problem(value_width=4, softcap=3.0),
    "tiny": Problem(lengths=(1,)),
    "nothing": Problem(lengths=(0, 2, 0)),
    "many-heads": Problem(heads=12, kv_heads=3),
}
TABLE = [
    *((name, method, 2) for name in PROBLEMS for method in METHODS),
    *((name, method, 4) for name in ("plain", "sinks", "tiny", "softcap") for method in METHODS),
    *((name, "ring", 4) for name in ("window-1", "window-5", "window-20")),
    *((name, "ring", 3) for name in ("plain", "window-5")),
    ("many-heads", "ulysses", 4),
    ("many-heads", "ulysses", 3),
    ("plain", "ring", 1),
]


@functools.cache
def expected(name: str) -> dict[str, Tensor]:
    return in_one_process(PROBLEMS[name])


@pytest.mark.parametrize(("name", "method", "world"), TABLE)
def test_ranks_compute_what_one_process_computes(
    ranks: RankRunner, name: str, method: ContextMethod, world: int
) -> None:
    problem = PROBLEMS[name]
    results = ranks(on_a_rank, world, problem, method)
    assert_close(joined(results, problem), expected(name), 1e-12)


BIDIRECTIONAL = [Problem(causal=False), Problem(causal=False, window=4)]


@pytest.mark.parametrize("method", ["ring", "ulysses"])
@pytest.mark.parametrize("problem", BIDIRECTIONAL)
def test_attention_without_a_direction(ranks: RankRunner, problem: Problem, method: ContextMethod) -> None:
    results = ranks(on_a_rank, 2, problem, method)
    assert_close(joined(results, problem), in_one_process(problem), 1e-12)


def test_chunked_attention_by_heads(ranks: RankRunner) -> None:
    problem = Problem(document_chunk=5)
    assert_close(joined(ranks(on_a_rank, 2, problem, "ulysses"), problem), in_one_process(problem), 1e-12)


@pytest.mark.parametrize("method", METHODS)
def test_half_precision_stays_close(ranks: RankRunner, method: ContextMethod) -> None:
    problem = Problem(dtype=torch.bfloat16)
    exact = in_one_process(Problem())
    actual = {name: x.double() for name, x in joined(ranks(on_a_rank, 2, problem, method), problem).items()}
    assert_close(actual, exact, 3e-2)


def message_of(rank: int, world: int, problem: Problem, method: ContextMethod) -> str:
    try:
        on_a_rank(rank, world, problem, method)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("problem", "method", "words"),
    [
        (Problem(document_chunk=5), "ring", ("'ring'", "chunks of 5", "cp_method: ulysses")),
        (Problem(document_chunk=5), "allgather", ("'allgather'", "chunks of 5", "cp_method: ulysses")),
        (Problem(causal=False), "allgather", ("'allgather'", "causal", "cp_method: ulysses")),
        (Problem(heads=3, kv_heads=1), "ulysses", ("3 query heads", "cp_size = 2", "cp_method: ring")),
    ],
)
def test_what_a_method_cannot_do_is_refused_on_every_rank(
    ranks: RankRunner, problem: Problem, method: ContextMethod, words: tuple[str, ...]
) -> None:
    for message in ranks(message_of, 2, problem, method):
        assert all(word in message for word in words), message
