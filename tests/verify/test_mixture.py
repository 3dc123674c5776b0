"""A wrong gradient is explained as a sum of micro-batches."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from shoal.verify.compare import tensor_errors
from shoal.verify.mixture import explain, mixture_of
from shoal.verify.record import Record, error_of, relative_errors, unclipped

TOKENS = [4, 10, 7, 3]
SIZES = {"dp": 2, "tp": 1}


def parts() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [{"w": torch.randn(5, 7, generator=generator, dtype=torch.float64)} for _ in TOKENS]


def kind_of(weights: list[float]) -> str | None:
    gradients = parts()
    total = {"w": sum(w * part["w"] for w, part in zip(weights, gradients, strict=True))}
    mixture = mixture_of(total, gradients, ["w"])
    assert mixture.weights == pytest.approx(weights)
    found = explain(mixture, TOKENS, SIZES)
    return None if found is None else found[0]


def test_weights_have_names() -> None:
    everything, ranks = sum(TOKENS), (TOKENS[0] + TOKENS[2], TOKENS[1] + TOKENS[3])
    assert kind_of([0.5] * 4) == "averaged"
    assert kind_of([2.0] * 4) == "multiplied"
    assert kind_of([3.0] * 4) == "scaled"
    assert kind_of([0.0] * 4) == "no-gradient"
    assert kind_of([everything / ranks[index % 2] for index in range(4)]) == "local-token-mean"
    assert kind_of([everything / tokens / 4 for tokens in TOKENS]) == "micro-batch-mean"
    assert kind_of([1.0, 0.0, 1.0, 0.0]) == "not-synchronised"
    assert kind_of([0.0, 0.0, 1.0, 1.0]) == "not-accumulated"
    assert kind_of([1.0, 1.0, 1.0, 0.0]) == "left-out"
    assert kind_of([1.0, 1.3, 0.2, 0.9]) == "mixture"


def test_what_is_no_sum_of_micro_batches_has_no_name() -> None:
    mixture = mixture_of({"w": torch.ones(5, 7, dtype=torch.float64)}, parts(), ["w"])
    assert not mixture.explains and explain(mixture, TOKENS, SIZES) is None


def test_a_micro_batch_without_gradient_has_no_weight() -> None:
    gradients = parts()
    gradients[1]["w"].zero_()
    mixture = mixture_of({"w": sum(part["w"] for part in gradients)}, gradients, ["w"])
    assert math.isnan(mixture.weights[1]) and mixture.explains


def test_errors_are_relative_and_never_pass_by_accident() -> None:
    one = torch.ones(2)
    assert error_of(one * 1.5, one, 1.0) == 0.5
    assert error_of(one * 1e-6, torch.zeros(2), 1.0) == pytest.approx(1e-3)
    assert error_of(torch.full((2,), math.nan), one, 1.0) == math.inf
    assert error_of(torch.ones(3), one, 1.0) == math.inf
    assert relative_errors({"a": one}, {"a": one, "b": one}) == {"a": 0.0, "b": math.inf}
    worst = tensor_errors([{"a": one}, {"a": 2 * one}, {"c": one}], {"a": one, "b": torch.zeros(2)})
    assert (worst["a"].error, worst["a"].rank) == (1.0, 1)
    assert worst["b"].error == 0.0 and worst["c"].error == math.inf


def test_clipping_is_undone() -> None:
    record = Record(norms=[4.0], gradients=[{"w": torch.ones(1)}])
    assert unclipped(record, 2.0)[0]["w"].item() == pytest.approx(2.0, rel=1e-5)
    assert unclipped(record, None)[0]["w"].item() == 1.0
