"""Case 47: no supervised token on one rank, or in the whole step: 0/0 must not spread NaN."""

from __future__ import annotations

import pytest

from tests.parity.harness import Case, Layout, assert_parity, reference, run_layout
from tests.zygote import RankRunner

LAYOUTS = [Layout("ddp", 2, "ddp"), Layout("fsdp2", 2)]
ONE_RANK = Case(num_micro_batches=4, without_audio=(), unsupervised=(1, 3))
NOWHERE = Case(
    num_micro_batches=4, without_audio=(), unsupervised=(0, 1, 2, 3), max_norm=None, optimizer="sgd"
)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_a_rank_without_supervised_tokens_changes_nothing(ranks: RankRunner, layout: Layout) -> None:
    actual = ranks(run_layout, 2, ONE_RANK, layout)[0]
    assert_parity(actual, reference(ONE_RANK), ONE_RANK)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_a_step_without_any_has_zero_loss_and_zero_gradients(ranks: RankRunner, layout: Layout) -> None:
    actual = ranks(run_layout, 2, NOWHERE, layout)[0]
    assert actual.losses == [0.0, 0.0] and actual.norms == [0.0, 0.0]
    assert all((gradient == 0).all() for step in actual.gradients for gradient in step.values())
    assert all((actual.weights[name] == actual.initial[name]).all() for name in actual.initial)
