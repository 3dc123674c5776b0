"""The loss options and the accuracy of a language model whose head is spread over ranks, against one process."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shoal.config.schema import ParallelismSizes
from shoal.models.assemble import Numerics, assemble
from shoal.models.causal_lm import CausalLM
from shoal.parallel.setup import DistributedSetup
from tests.parity.harness import (
    CPU,
    Case,
    Layout,
    assert_parity,
    micro_batches_of,
    plan_of,
    reference,
    replace,
    run_layout,
)
from tests.parity.vocab_text import Kind, partly_predicted, smoothed_case
from tests.zygote import RankRunner

TP2 = ParallelismSizes(tp_size=2)


@pytest.mark.parametrize("family", ["llama-odd", "llama-tied"])
@pytest.mark.parametrize("kind", ["chunked", "full"])
def test_options_of_the_loss(ranks: RankRunner, kind: Kind, family: str) -> None:
    case = smoothed_case(kind, family)
    actual = ranks(run_layout, 2, case, Layout("tp2", 2, sizes=TP2))[0]
    assert_parity(actual, reference(case), case)


def sums(model: nn.Module, case: Case) -> list[dict[str, float]]:
    """What validation takes of each micro-batch."""
    model.eval()
    with torch.no_grad():
        return [
            {name: float(value) for name, value in model(batch).items()}
            for batch in micro_batches_of(case, 0)
        ]


def sums_on_rank(rank: int, world: int, case: Case) -> tuple[list[dict[str, float]], int]:
    """The sums, and how many rows of the head this rank has."""
    setup = DistributedSetup.build(parallelism_sizes=TP2, world_size=world)
    model = assemble(plan_of(case), setup, Numerics(stored=case.dtype), CPU).module
    assert isinstance(model, CausalLM) and model.tensor_parallel is not None
    assert model.tensor_parallel.vocab is not None
    return sums(model, case), model.tensor_parallel.vocab.num_local


@pytest.mark.parametrize("kind", ["chunked", "full"])
def test_validation_on_spread_logits(ranks: RankRunner, kind: Kind) -> None:
    case = replace(smoothed_case(kind, "llama-odd", unsupervised=()), draw=partly_predicted)
    plain = assemble(plan_of(case), None, Numerics(stored=case.dtype), CPU).module
    expected = sums(plain, case)
    assert 0 < sum(each["num_correct"] for each in expected) < sum(each["num_tokens"] for each in expected)
    for found, num_local in ranks(sums_on_rank, 2, case):
        assert 0 < num_local < plain.llm.config.vocab_size
        for ours, theirs in zip(found, expected, strict=True):
            assert ours == {**theirs, "loss_sum": pytest.approx(theirs["loss_sum"], rel=1e-10)}
