"""A covering selection of the product that `make parity-full` runs: every model, and every pair of the factors."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import pytest

from tests.parity.context_product import expected, layouts, may_refuse, models
from tests.parity.harness import assert_parity
from tests.zygote import RankRunner

SELECTED = (
    ("mistral", "ring cp2 tp1 hsdp4"),
    ("gemma3", "ring cp4 tp1 dp2"),
    ("smollm3", "ring cp2 tp1 dp1"),
    ("qwen3-moe", "ring cp2 tp1 dp1"),
    ("llama", "allgather cp2 tp1 dp1"),
    ("phi3", "allgather cp2 tp1 dp1"),
    ("gemma3, LoRA", "allgather cp2 tp1 dp1"),
    ("gpt-oss", "allgather cp2 tp2 sp dp2"),
    ("qwen3", "ulysses cp2 tp1 dp2"),
    ("llama, LoRA", "ulysses cp2 tp2 dp1"),
    ("deepseek-v3", "ulysses cp2 tp1 dp1"),
    ("granite-hybrid, all_to_all", "ring cp4 tp1 dp1"),
    ("bamba, state", "ring cp2 tp2 dp2"),
    ("nemotron-h, all_to_all", "allgather cp2 tp1 hsdp4"),
    ("bamba, state", "allgather cp2 tp2 sp dp1"),
    ("granite-hybrid, all_to_all", "ulysses cp2 tp2 dp1"),
    ("nemotron-h, all_to_all", "ulysses cp2 tp2 sp dp1"),
    ("mamba2, state", "ulysses cp4 tp1 dp1"),
    ("SALM, whisper", "ring cp4 tp2 sp dp1"),
    ("SALM, parakeet", "ring cp2 tp1 dp2"),
    ("SALM, whisper", "allgather cp4 tp2 dp1"),
    ("SALM, frozen-encoder-lora", "allgather cp2 tp1 dp1"),
    ("SALM, whisper", "ulysses cp2 tp1 hsdp4"),
)


@pytest.mark.parametrize(("model", "layout"), SELECTED)
def test_layout_never_changes_the_numbers(ranks: RankRunner, model: str, layout: str) -> None:
    chosen, row = models()[model], layouts()[layout]
    actual = ranks(chosen.train, row.world, chosen.case, chosen.under(row), timeout=300)[0]
    assert_parity(actual, expected(model), chosen.case)
    assert set(actual.gradients[0]) == set(expected(model).gradients[0])


def pairs(rows: Iterable[tuple[str, str]]) -> set[frozenset[str]]:
    """Pairs of method, cp, tp, data parallelism, kind of model; and of a scan's method with the first three."""
    found: set[frozenset[str]] = set()
    for model, layout in rows:
        method, cp, tp, *sequence, dp = layout.split()
        axes, chosen = (method, cp, " ".join([tp, *sequence])), models()[model]
        found |= {frozenset(two) for two in itertools.combinations((*axes, dp, chosen.kind), 2)}
        if chosen.kind == "Scan":
            found |= {frozenset((chosen.mamba_cp, axis)) for axis in axes}
    return found


def test_the_selection_covers_every_model_and_every_pair() -> None:
    """All but the pairs that need more than eight ranks."""
    small = [name for name, layout in layouts().items() if layout.world <= 8 and layout.sizes.cp_size > 1]
    runs = [pair for pair in itertools.product(models(), small) if not may_refuse(*pair)]
    assert pairs(SELECTED) == pairs(runs)
    assert {_family(model) for model, _ in SELECTED} == {_family(model) for model in models()}


def _family(model: str) -> str:
    chosen = models()[model]
    return model.removesuffix(f", {chosen.mamba_cp}") if chosen.kind == "Scan" else model
