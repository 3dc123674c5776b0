"""Word errors as exact corpus counts."""

import math

import pytest
import torch
import torch.distributed as dist

from shoal.evaluate.metrics import WordErrors, count_word_errors, text_normaliser
from tests.zygote import RankRunner

REFERENCES = ["the cat sat", "on the mat", "", "a b c d"]
HYPOTHESES = ["the dog sat", "on mat", "oh", "a b c d"]


def test_counts_by_hand() -> None:
    errors = count_word_errors(REFERENCES, HYPOTHESES)
    assert errors == WordErrors(hits=8, substitutions=1, deletions=1, insertions=1)
    assert errors.num_words == 10
    assert errors.rate == pytest.approx(0.3)
    assert str(errors) == "30.00 % of 10 words (1 inserted, 1 deleted, 1 substituted)"


def test_counts_add_up_over_any_split() -> None:
    whole = count_word_errors(REFERENCES, HYPOTHESES)
    for split in range(5):
        parts = [
            count_word_errors(REFERENCES[part], HYPOTHESES[part])
            for part in (slice(None, split), slice(split, None))
        ]
        assert parts[0] + parts[1] == whole


def test_nothing_to_compare() -> None:
    assert math.isnan(WordErrors().rate)
    assert count_word_errors([], []) == WordErrors()
    with pytest.raises(ValueError, match="1 references for 2 hypotheses"):
        count_word_errors(["a"], ["a", "b"])


def on_a_rank(rank: int, world_size: int) -> tuple[WordErrors, float]:
    part = slice(rank, None, world_size)
    own = count_word_errors(REFERENCES[part], HYPOTHESES[part])
    return own.summed(dist.group.WORLD, torch.device("cpu")), own.rate


def test_over_ranks_counts_are_summed_where_rates_would_not_average(ranks: RankRunner) -> None:
    results = ranks(on_a_rank, 2)
    whole = count_word_errors(REFERENCES, HYPOTHESES)
    assert [total for total, _ in results] == [whole, whole]
    assert sum(rate for _, rate in results) / 2 != pytest.approx(whole.rate)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("english", "mister smith has got 25 dogs"),
        ("basic", "mr smith s got twenty five dogs"),
        ("none", "Mr. Smith's got twenty-five dogs!"),
    ],
)
def test_normalisers(name: str, expected: str) -> None:
    assert text_normaliser(name)("Mr. Smith's got twenty-five dogs!") == expected


def test_an_unknown_normaliser_is_refused() -> None:
    with pytest.raises(ValueError, match="use_normalizer = 'german': use english, basic or none"):
        text_normaliser("german")
