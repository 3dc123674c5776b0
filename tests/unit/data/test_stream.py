"""Steps: the same stream for every layout, everything once an epoch, exact resume at every step.

Most tests use manifests whose audio files do not exist, which proves that sampling and resuming open none.
"""

from __future__ import annotations

import logging
import os
import random
from collections import Counter
from dataclasses import replace
from itertools import islice

import numpy as np
import pytest
import torch

from shoal.config.speech import InputConfig
from shoal.data.micro_batches import MicroBatchStream
from shoal.data.position import START, StreamPosition
from shoal.data.steps import StepSampler
from shoal.data.stream import build_train_loader, order_seed_of
from tests.unit.data import corpus
from tests.unit.data.corpus import CharPrompts, batch_ids, clips, dataset, plan_ids, woven

BUCKETED = {"use_bucketing": True, "num_buckets": 3, "bucket_buffer_size": 6, "batch_duration": 2.0}
SHUFFLED = {"shuffle": True, "shuffle_buffer_size": 8, "seed": 7}
VARIANTS = {
    "plain": {"batch_size": 3},
    "shuffled": {"batch_size": 3, **SHUFFLED},
    "duration": {"batch_duration": 2.0, "quadratic_duration": 4.0, **SHUFFLED},
    "tokens": {"batch_tokens": 60, "max_tokens": 40, **SHUFFLED},
    "bucketed": {**BUCKETED, **SHUFFLED},
    "bins": {"bucket_duration_bins": (0.3, 0.6), "bucket_batch_size": (4, 3, 2), **SHUFFLED},
}


def sampler(config, *, rank=0, dp=1, window=3, position=START, steps=None):
    stream = MicroBatchStream(config, CharPrompts(), shuffle=config.shuffle, report_skips=rank == 0)
    return StepSampler(
        stream,
        dp_rank=rank,
        dp_size=dp,
        global_micro_batches=window,
        order_seed=order_seed_of(config, config.seed),
        position=position,
        steps_per_epoch=steps,
    )


def steps_of(config, **keys):
    """The global micro-batches of each step, from all ranks together."""
    dp = keys.pop("dp", 1)
    return woven([[plan_ids(p) for p in sampler(config, rank=r, dp=dp, **keys)] for r in range(dp)])


def flat(steps):
    return [name for step in steps for names in step for name in names]


# ------------------------------------------------------------------------------------- layout independence


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("window", [1, 2, 4, 5])
def test_every_layout_deals_out_the_same_steps(tmp_path, variant, window):
    for seed in range(3):
        manifest = corpus.write_nemo(tmp_path / str(seed), clips(17 + 5 * seed, seed), audio=False)
        config = dataset(manifest, **VARIANTS[variant])
        alone = steps_of(config, window=window)
        assert Counter(flat(alone)) == Counter(f"clip{n}.wav" for n in range(17 + 5 * seed))
        for dp in (2, 3, 4):
            assert steps_of(config, window=window, dp=dp) == alone


@pytest.mark.parametrize("dp", [1, 2, 3, 4])
def test_every_rank_has_the_same_number_of_micro_batches_in_every_step(tmp_path, dp):
    config = dataset(corpus.write_nemo(tmp_path, clips(23), audio=False), **VARIANTS["bucketed"])
    counts = {len(p.micro_batches) for rank in range(dp) for p in sampler(config, rank=rank, dp=dp, window=5)}
    assert counts == {-(-5 // dp)}


def test_epochs_and_seeds_have_orders_of_their_own(tmp_path):
    config = dataset(corpus.write_nemo(tmp_path, clips(30), audio=False), **VARIANTS["bucketed"])
    orders = {}
    for seed in (0, 1):
        for epoch in (0, 1):
            position = StreamPosition(epoch)
            orders[seed, epoch] = flat(steps_of(replace(config, seed=seed), position=position))
    assert len({tuple(order) for order in orders.values()}) == 4
    assert all(sorted(order) == sorted(orders[0, 0]) for order in orders.values())


def test_several_weighted_sources_are_covered_once(tmp_path):
    paths = [
        str(
            corpus.write_nemo(
                tmp_path / str(i), [corpus.Clip(100 * i + n, 0.2) for n in range(c)], audio=False
            )
        )
        for i, c in enumerate((9, 4))
    ]
    entries = tuple(
        InputConfig(type="nemo", manifest_filepath=path, weight=weight)
        for path, weight in zip(paths, (1.0, 5.0), strict=True)
    )
    config = dataset(input_cfg=entries, **SHUFFLED, batch_size=2)
    alone = steps_of(config, window=2)
    assert sorted(flat(alone)) == sorted(
        f"clip{100 * i + n}.wav" for i, c in enumerate((9, 4)) for n in range(c)
    )
    assert steps_of(config, window=2, dp=2) == alone


@pytest.mark.parametrize("bucketing", [False, True])
@pytest.mark.parametrize("workers", [0, 2])
def test_the_loader_yields_what_the_sampler_planned(tmp_path, bucketing, workers):
    some = clips(13)
    by_name = {f"{clip.name}.wav": clip for clip in some}
    keys = VARIANTS["bucketed" if bucketing else "shuffled"]
    config = dataset(corpus.write_nemo(tmp_path, some), num_workers=workers, **keys)
    alone = steps_of(config, window=3)
    per_rank = []
    for rank in range(2):
        loader = build_train_loader(config, CharPrompts(), dp_rank=rank, dp_size=2, global_micro_batches=3)
        batches = list(loader)
        assert all(batch.error is None and not batch.skipped for batch in batches)
        per_rank.append([batch_ids(batch) for batch in batches])
        for batch in batches:
            for one in batch.micro_batches:
                assert_paired(one, by_name)
    assert woven(per_rank) == alone


def assert_paired(one, by_name):
    """Every row of a micro-batch holds its own clip's text and samples, and zeros after them."""
    if one["is_empty"]:
        return
    for row, name in enumerate(one["sample_ids"]):
        clip = by_name[name]
        ids = one["input_ids"][row, : one["text_lens"][row]]
        assert "".join(map(chr, ids[1:])) == clip.text
        assert one["loss_mask"][row].sum() == len(clip.text)
        length = int(one["audio_lens"][row])
        np.testing.assert_array_equal(one["audios"][row, :length].numpy(), clip.samples())
        assert not one["audios"][row, length:].any()


# -------------------------------------------------------------------------------------------------- resume


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("dp", "resumed_dp"), [(1, 1), (2, 3), (4, 1)])
def test_resume_from_every_step_equals_the_uninterrupted_run(tmp_path, variant, dp, resumed_dp):
    config = dataset(corpus.write_nemo(tmp_path, clips(19), audio=False), **VARIANTS[variant])
    total = 2 * len(steps_of(config)) + 1  # over two ends of epochs
    whole = [list(sampler(config, rank=r, dp=dp, steps=total)) for r in range(dp)]
    uninterrupted = woven([[plan_ids(plan) for plan in plans] for plans in whole])
    positions = [plan.position for plan in whole[0]]
    assert all([plan.position for plan in plans] == positions for plans in whole)
    for done, position in enumerate(positions[:-1], start=1):
        rest = steps_of(config, dp=resumed_dp, position=position, steps=total - done)
        assert rest == uninterrupted[done:]


def test_a_position_at_the_exact_end_of_an_epoch_starts_the_next(tmp_path):
    config = dataset(corpus.write_nemo(tmp_path, clips(12), audio=False), batch_size=2, **SHUFFLED)
    plans = list(sampler(config, window=2))
    assert plans[-1].position == StreamPosition(1)
    consumed = replace(
        plans[-2].position, consumed=12
    )  # as a run that counts without looking ahead would save
    assert steps_of(config, window=2, position=consumed) == steps_of(
        config, window=2, position=StreamPosition(1)
    )


def test_the_window_may_change_at_resume(tmp_path):
    config = dataset(corpus.write_nemo(tmp_path, clips(20), audio=False), **VARIANTS["shuffled"])
    first = list(islice(sampler(config, window=2), 2))
    rest = steps_of(config, window=3, position=first[-1].position)
    assert sorted(flat([plan_ids(plan) for plan in first]) + flat(rest)) == sorted(flat(steps_of(config)))


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 4), (2, 3), (3, 2)])
def test_micro_batches_may_have_another_size_at_resume(tmp_path, caplog, before, after):
    manifest = corpus.write_nemo(tmp_path, clips(23), audio=False)
    first = list(islice(sampler(dataset(manifest, batch_size=before, **SHUFFLED), window=2), 2))
    done = flat([plan_ids(plan) for plan in first])
    rest = flat(
        steps_of(dataset(manifest, batch_size=after, **SHUFFLED), window=2, position=first[-1].position)
    )
    whole = flat(steps_of(dataset(manifest, batch_size=after, **SHUFFLED), window=2))
    assert len(done) == 4 * before and done + rest == whole
    assert not caplog.records


def test_a_resume_under_another_seed_finishes_the_epoch_in_the_old_order(tmp_path, caplog):
    config = dataset(corpus.write_nemo(tmp_path, clips(20), audio=False), **VARIANTS["bucketed"])
    old = list(sampler(config))
    new = replace(config, seed=99)
    with caplog.at_level(logging.INFO, logger="shoal.data"):
        resumed = list(sampler(new, position=old[1].position, steps=len(old)))
    assert "goes on in the order of seed 7; seed 99 orders the epochs after it" in caplog.text
    left = len(old) - 2
    assert [plan_ids(p) for p in resumed[:left]] == [plan_ids(p) for p in old[2:]]
    following = [plan_ids(p) for p in sampler(new, position=StreamPosition(1))]
    assert [plan_ids(p) for p in resumed[left:]] == following[: len(old) - left]


def test_resume_into_a_changed_manifest(tmp_path, caplog):
    manifest = corpus.write_nemo(tmp_path, clips(20), audio=False)
    config = dataset(manifest, batch_size=2)
    position = list(islice(sampler(config), 2))[-1].position
    lines = manifest.read_text().splitlines(keepends=True)
    manifest.write_text("".join(lines[::-1]))
    next(iter(sampler(config, position=position)))
    assert "not the ones that were consumed before the checkpoint" in caplog.text
    manifest.write_text("".join(lines[:8]))
    with pytest.raises(ValueError, match="consumed 12 examples of epoch 0, and the epoch now has 8"):
        next(iter(sampler(config, position=position)))


def test_an_untouched_resume_warns_of_nothing(tmp_path, caplog):
    config = dataset(corpus.write_nemo(tmp_path, clips(20), audio=False), **VARIANTS["bucketed"])
    position = next(iter(sampler(config))).position
    next(iter(sampler(config, position=position)))
    assert not caplog.records


def test_positions_survive_a_checkpoint():
    position = StreamPosition(3, 14, 15, 92)
    assert StreamPosition.from_dict(position.to_dict()) == position


def test_the_loader_continues_where_it_was_consumed_and_not_where_workers_ran_ahead(tmp_path):
    config = dataset(corpus.write_nemo(tmp_path, clips(16)), num_workers=2, **VARIANTS["shuffled"])
    loader = build_train_loader(config, CharPrompts(), dp_rank=0, dp_size=1, global_micro_batches=1)
    whole = [batch_ids(batch) for batch in loader]
    loader.set_position(START)
    head = [batch_ids(batch) for batch in islice(iter(loader), 2)]
    assert loader.position.consumed == 6  # two micro-batches of three
    assert head + [batch_ids(batch) for batch in loader] == whole


# ---------------------------------------------------------------------------------- lengths of iterations


@pytest.mark.parametrize("steps", [1, 2, 5, 9])
def test_an_iteration_may_be_shorter_or_longer_than_a_data_epoch(tmp_path, steps):
    config = dataset(corpus.write_nemo(tmp_path, clips(10), audio=False), **VARIANTS["shuffled"])
    long = steps_of(config, window=2, steps=18)
    taken, position = [], START
    while len(taken) < 18:
        plans = list(sampler(config, window=2, position=position, steps=steps))
        assert len(plans) == steps
        taken += plans
        position = plans[-1].position
    assert [plan_ids(plan) for plan in taken][:18] == long


def test_len_is_known_only_with_steps_per_epoch(tmp_path):
    config = dataset(corpus.write_nemo(tmp_path, clips(10)))
    keys = {"dp_rank": 0, "dp_size": 1, "global_micro_batches": 2}
    assert len(build_train_loader(config, CharPrompts(), **keys, steps_per_epoch=7)) == 7
    with pytest.raises(TypeError, match="not known"):
        len(build_train_loader(config, CharPrompts(), **keys))


def test_drop_last_drops_the_partial_window_and_counts_it(tmp_path):
    config = dataset(corpus.write_nemo(tmp_path, clips(11), audio=False), batch_size=2, drop_last=True)
    for dp in (1, 2):
        plans = [list(sampler(config, rank=rank, dp=dp, window=2)) for rank in range(dp)]
        assert len(plans[0]) == 2
        assert sum(Counter(plan.skipped)["drop_last"] for rank in plans for plan in rank) == 3


# -------------------------------------------------------------------------------------------------- seeds


def test_shard_seed(tmp_path):
    manifest = corpus.write_nemo(tmp_path, clips(20), audio=False)
    config = dataset(manifest, shuffle=True, batch_size=2, seed=1)
    derived = steps_of(config)
    assert derived != steps_of(replace(config, seed=2))
    fixed = replace(config, shard_seed=5)
    assert steps_of(fixed) == steps_of(replace(fixed, seed=2)) == steps_of(replace(config, seed=5))
    trng = replace(config, shard_seed="trng")
    with pytest.raises(ValueError, match="draw it on one rank"):
        sampler(trng)
    drawn = StreamPosition(order_seed=5)
    plans = list(sampler(trng, position=drawn, steps=12))
    assert [plan_ids(plan) for plan in plans] == [plan_ids(plan) for plan in sampler(fixed, steps=12)]
    assert {plan.position.order_seed for plan in plans} == {5}


# --------------------------------------------------------------------------------------- what is left out


def test_left_out_examples_are_counted_once_and_named(tmp_path, caplog):
    some = [corpus.Clip(n, seconds) for n, seconds in enumerate([0.1, 0.5, 0.5, 2.0, 9.0, 0.5])]
    manifest = corpus.write_nemo(tmp_path, some, audio=False)
    with manifest.open("a") as file:
        file.write('{"audio_filepath": "mute.wav", "duration": 0.5}\n')
        file.write('{"audio_filepath": "void.wav", "duration": 0.0, "text": "x"}\n')
    config = dataset(manifest, batch_duration=1.0, min_duration=0.2, max_duration=5.0)
    plans = [plan for rank in range(2) for plan in sampler(config, rank=rank, dp=2, window=2)]
    assert sum((Counter(plan.skipped) for plan in plans), Counter()) == {
        "min_duration": 1,
        "max_duration": 1,
        "above_batch_budget": 1,
        "no_assistant_text": 1,
        "zero_duration": 1,
    }
    names = {"clip0.wav", "clip3.wav", "clip4.wav", "mute.wav", "void.wav"}
    assert all(caplog.text.count(repr(name)) == 1 for name in names)


def test_a_flood_of_left_out_examples_is_named_only_at_first(tmp_path, caplog):
    config = dataset(corpus.write_nemo(tmp_path, clips(40, longest=0.9), audio=False), min_duration=0.8)
    list(sampler(config))
    assert len(caplog.records) == 10
    assert "further ones are only counted" in caplog.records[-1].message


def test_nothing_left_is_an_error_and_not_an_endless_loop(tmp_path):
    config = dataset(corpus.write_nemo(tmp_path, clips(4), audio=False), min_duration=99.0)
    with pytest.raises(ValueError, match=r"not one step in epoch 0.*min_duration.*4"):
        list(sampler(config, steps=5))


def test_text_without_any_limit_on_text_is_refused(tmp_path):
    (tmp_path / "a.txt").write_text("hello\n")
    entries = (InputConfig(type="txt", paths=str(tmp_path / "a.txt")),)
    with pytest.raises(ValueError, match="has no audio, and batch_duration is the only limit"):
        list(sampler(dataset(input_cfg=entries, batch_duration=5.0)))
    assert flat(steps_of(dataset(input_cfg=entries, batch_tokens=5))) == [f"{tmp_path}/a.txt:1"]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"dp_rank": 2, "dp_size": 2, "global_micro_batches": 1}, r"dp_rank: 2 must be in \[0, dp_size\)"),
        ({"dp_rank": 0, "dp_size": 1, "global_micro_batches": 0}, "global_micro_batches 0"),
        ({"dp_rank": 0, "dp_size": 1, "global_micro_batches": 1, "steps_per_epoch": 0}, "steps_per_epoch 0"),
    ],
)
def test_impossible_sizes_are_refused(tmp_path, keys, message):
    config = dataset(corpus.write_nemo(tmp_path, clips(4), audio=False))
    with pytest.raises(ValueError, match=message):
        build_train_loader(config, CharPrompts(), **keys)


def test_a_configuration_without_a_limit_is_refused(tmp_path):
    manifest = corpus.write_nemo(tmp_path, clips(4), audio=False)
    keys = {"dp_rank": 0, "dp_size": 1, "global_micro_batches": 1}
    with pytest.raises(ValueError, match=r"data\.train_ds: batch_size, batch_duration, batch_tokens"):
        build_train_loader(replace(dataset(manifest), batch_size=None), CharPrompts(), **keys)
    with pytest.raises(ValueError, match="measure_total_length"):
        build_train_loader(dataset(manifest, measure_total_length=False), CharPrompts(), **keys)


# ------------------------------------------------------------------------------------- failures and side effects


@pytest.mark.parametrize("workers", [0, 1])
def test_a_failure_of_the_sampler_is_the_error_of_a_step_and_not_raised_on_one_rank(tmp_path, workers):
    manifest = corpus.write_nemo(tmp_path, clips(6))
    with manifest.open("a") as file:
        file.write("{broken\n")
    config = dataset(manifest, batch_size=1, num_workers=workers)
    loader = build_train_loader(config, CharPrompts(), dp_rank=1, dp_size=2, global_micro_batches=3)
    *good, failed = list(loader)
    assert [batch.error for batch in good] == [None] * len(good)
    assert "manifest.json:7: not JSON" in failed.error
    assert [one["is_empty"] for one in failed.micro_batches] == [True, True]


class DyingPrompts(CharPrompts):
    def encode(self, conversation):
        os._exit(1)


def test_a_worker_that_dies_is_the_error_of_a_step(tmp_path):
    config = dataset(corpus.write_nemo(tmp_path, clips(2)), num_workers=1)
    loader = build_train_loader(config, DyingPrompts(), dp_rank=0, dp_size=1, global_micro_batches=1)
    (failed,) = list(loader)
    assert "exited unexpectedly" in failed.error


@pytest.mark.parametrize("workers", [0, 1])
def test_loading_leaves_the_global_generators_alone(tmp_path, workers):
    config = dataset(corpus.write_nemo(tmp_path, clips(4)), num_workers=workers, shuffle=True)
    loader = build_train_loader(config, CharPrompts(), dp_rank=0, dp_size=1, global_micro_batches=1)
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    assert len(list(loader)) == 2
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1:] == (random.getstate(), np.random.get_state()[1].tolist())
