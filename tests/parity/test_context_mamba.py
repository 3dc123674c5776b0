"""Mamba-2 mixing over documents on several ranks is that of one process: value and every gradient, by name."""

from __future__ import annotations

import functools

import pytest
from torch import Tensor

from shoal.config.schema import MambaContextMethod
from shoal.parallel.context.mamba import cheaper_method, sent_numbers
from shoal.parallel.context.split import DualChunks
from tests.parity.context import assert_close
from tests.parity.context_mamba import (
    FAULTS,
    Problem,
    in_one_process,
    inputs,
    joined,
    layer_of,
    on_a_rank,
    sent_on_a_rank,
)
from tests.zygote import RankRunner

METHODS: tuple[MambaContextMethod, ...] = ("all_to_all", "state")
PROBLEMS = {
    "ragged": Problem(),
    "one group": Problem(heads=8, groups=1),
    "a group a head": Problem(heads=8, groups=8),
    "one long document": Problem(lengths=(64,)),
    "one token": Problem(lengths=(1,)),
    "two taps": Problem(lengths=(9, 2), taps=2),
}
TABLE = [
    *(("ragged", method, world) for method in METHODS for world in (2, 4)),
    *((name, method, 4) for name in PROBLEMS if name != "ragged" for method in METHODS),
]


@functools.cache
def expected(name: str) -> dict[str, Tensor]:
    return in_one_process(PROBLEMS[name])


@pytest.mark.parametrize(("name", "method", "world"), TABLE)
def test_documents_over_ranks(ranks: RankRunner, name: str, method: MambaContextMethod, world: int) -> None:
    problem = PROBLEMS[name]
    assert_close(joined(ranks(on_a_rank, world, problem, method), problem), expected(name), 1e-10)


def test_heads_that_the_ranks_do_not_divide(ranks: RankRunner) -> None:
    """States need no divisibility; heads are refused on every rank, by the layer's name."""
    problem = Problem(heads=3, groups=1)
    for method in ("state", "auto"):
        results = ranks(on_a_rank, 2, problem, method)
        assert_close(joined(results, problem), in_one_process(problem), 1e-10)
    for outcome in ranks(on_a_rank, 2, problem, "all_to_all", expect_failure=True):
        assert outcome.error_type == "ValueError"
        assert (
            "the 3 heads of layer 3 cannot be dealt to cp_size = 2 ranks; repair: mamba_cp: state"
            in outcome.message
        )


@pytest.mark.parametrize("method", METHODS)
def test_without_a_document_every_parameter_still_has_a_gradient(
    ranks: RankRunner, method: MambaContextMethod
) -> None:
    for lengths in ((), (0, 0)):
        for result in ranks(on_a_rank, 2, Problem(lengths=lengths), method):
            assert all(
                result[name] is not None and not result[name].any() for name in ("weight", "bias", "log_a")
            )


@pytest.mark.parametrize(
    ("fault", "method"),
    [(fault, "all_to_all" if fault == "dual-chunk-order" else "state") for fault in FAULTS],
)
def test_a_planted_fault_is_seen(ranks: RankRunner, fault: str, method: MambaContextMethod) -> None:
    results = ranks(on_a_rank, 2, PROBLEMS["ragged"], method, fault)
    with pytest.raises(AssertionError, match=r"\w+: "):
        assert_close(joined(results, PROBLEMS["ragged"]), expected("ragged"), 1e-3)


def test_the_cheaper_method_is_taken() -> None:
    """A state of a chunk costs as much as some tokens: documents much longer than that are cheaper by states."""
    problem = Problem(heads=8, groups=1, width=64, states=128)
    layer = layer_of(problem, inputs(problem))
    assert cheaper_method(layer, DualChunks((100_000,), 4, 0)) == "state"
    assert cheaper_method(layer, DualChunks((50,) * 2000, 4, 0)) == "all_to_all"
    assert cheaper_method(layer, DualChunks((50,) * 2000, 3, 0)) == "state"  # 3 ranks do not divide 8 heads
    long, longer = (DualChunks((tokens,), 4, 0) for tokens in (8_000, 80_000))
    assert sent_numbers(layer, long, "state") == sent_numbers(layer, longer, "state")
    assert sent_numbers(layer, long, "all_to_all") * 10 == sent_numbers(layer, longer, "all_to_all")


@pytest.mark.parametrize("method", METHODS)
def test_what_is_sent_is_what_the_formula_says(ranks: RankRunner, method: MambaContextMethod) -> None:
    problem = Problem()
    promised = sent_numbers(layer_of(problem, inputs(problem)), DualChunks(problem.lengths, 2, 0), method)
    assert ranks(sent_on_a_rank, 2, problem, method) == [promised, promised]
