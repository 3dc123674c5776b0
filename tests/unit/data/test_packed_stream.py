"""Speech packs come from the stream itself: within their budget, whole, and the same for every layout."""

from __future__ import annotations

from collections import Counter

import pytest

from shoal.data.conversation import token_count
from shoal.data.micro_batches import MicroBatchStream
from shoal.data.position import START
from shoal.data.steps import StepSampler
from shoal.data.stream import build_train_loader, build_validation_loaders, order_seed_of
from tests.unit.data import corpus
from tests.unit.data.corpus import CharPrompts, clips, dataset, plan_ids, woven

BUDGET = 64
SHUFFLED = {"shuffle": True, "shuffle_buffer_size": 8, "seed": 7}
VARIANTS = {
    "best fit": {"batch_tokens": BUDGET, **SHUFFLED},
    "of a few": {"batch_tokens": BUDGET, "batch_size": 3, **SHUFFLED},
    "in buckets": {"batch_tokens": BUDGET, "bucket_duration_bins": (14.0,), **SHUFFLED},
}


def sets(tmp_path, **keys):
    manifest = corpus.write_nemo(tmp_path, clips(60, longest=2.0), audio=False)
    return dataset(manifest, **keys)


def packs(config, *, packed=True):
    """Every micro-batch of an epoch, as the tokens of its conversations."""
    stream = MicroBatchStream(config, CharPrompts(), shuffle=config.shuffle, packed=packed)
    for batch in stream.epoch(0, 0).batches:
        yield [token_count(item, CharPrompts(), config.token_equivalent_duration) for item in batch]


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_conversation_is_in_one_pack_within_the_budget(tmp_path, variant):
    config = sets(tmp_path, **VARIANTS[variant])
    ours, padded = list(packs(config)), list(packs(config, packed=False))
    assert sum(len(pack) for pack in ours) == 60
    assert Counter(n for pack in ours for n in pack) == Counter(n for batch in padded for n in batch)
    assert all(sum(pack) <= BUDGET for pack in ours)
    assert any(len(pack) * max(pack) > BUDGET for pack in ours), "counts padding that is not there"
    assert len(ours) < len(padded)


def test_packs_are_nearly_full(tmp_path):
    ours = list(packs(sets(tmp_path, **VARIANTS["best fit"])))
    assert sum(map(sum, ours)) / (BUDGET * len(ours)) > 0.9


def test_without_a_limit_in_tokens_a_pack_holds_what_a_padded_batch_would(tmp_path):
    config = sets(tmp_path, batch_size=3, **SHUFFLED)
    assert list(packs(config)) == list(packs(config, packed=False))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dp", [2, 3])
def test_every_layout_deals_out_the_same_packs(tmp_path, variant, dp):
    config = sets(tmp_path, **VARIANTS[variant])

    def steps(dp_size):
        ranks = []
        for rank in range(dp_size):
            stream = MicroBatchStream(config, CharPrompts(), shuffle=True, packed=True, report_skips=False)
            plans = StepSampler(
                stream,
                dp_rank=rank,
                dp_size=dp_size,
                global_micro_batches=3,
                order_seed=order_seed_of(config, config.seed),
                position=START,
                steps_per_epoch=None,
            )
            ranks.append([plan_ids(plan) for plan in plans])
        return woven(ranks)

    assert steps(dp) == steps(1)


def test_the_loaders_of_training_and_validation_pack(tmp_path):
    manifest = corpus.write_nemo(tmp_path, clips(20, longest=2.0))
    config = dataset(manifest, batch_tokens=BUDGET)
    train = build_train_loader(
        config, CharPrompts(), dp_rank=0, dp_size=1, global_micro_batches=2, packed=True
    )
    valid = build_validation_loaders(config, CharPrompts(), dp_rank=0, dp_size=1, packed=True)["default"]
    expected = sorted(map(len, packs(config)))
    for loader in (train, valid):
        batches = [mb for step in loader for mb in step.micro_batches if not mb["is_empty"]]
        assert sorted(len(mb["sample_ids"]) for mb in batches) == expected
        assert sorted(name for mb in batches for name in mb["sample_ids"]) == sorted(
            name for step in loader for mb in step.micro_batches for name in mb["sample_ids"] if name
        )
