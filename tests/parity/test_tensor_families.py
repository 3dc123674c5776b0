"""Plans of families beyond those of the parity table; `scripts/tensor_families.py` compares all of them."""

from __future__ import annotations

import pytest

from tests.parity.tensor_families import error_of
from tests.zygote import RankRunner


@pytest.mark.parametrize(
    "family", ["gpt_neox", "cohere", "glm4", "granitemoeshared", "starcoder2", "qwen2_moe"]
)
def test_a_family_is_exact_with_sequences_sharded(ranks: RankRunner, family: str) -> None:
    error = error_of(ranks, family, sequence_parallel=True)
    assert isinstance(error, float) and error < 1e-10


@pytest.mark.parametrize(
    ("family", "why"),
    [("llama4_text", "does not name its backbone"), ("hrm_text", "no last norm that is known by name")],
)
def test_what_is_not_known_is_refused(ranks: RankRunner, family: str, why: str) -> None:
    assert why in str(error_of(ranks, family, sequence_parallel=True))
