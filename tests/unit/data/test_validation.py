"""Validation: named sets, all of each once, the same number of steps on every rank, every time."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from shoal.config.speech import DatasetConfig
from shoal.config.values import FrozenDict
from shoal.data.stream import build_validation_loaders
from tests.unit.data import corpus
from tests.unit.data.corpus import CharPrompts, batch_ids, clips


def two_sets(tmp_path):
    shared = corpus.dataset(
        batch_duration=2.0, shuffle=True, drop_last=True, use_bucketing=True, num_buckets=2
    )
    sets = {
        name: replace(shared, manifest_filepath=str(corpus.write_nemo(tmp_path / name, clips(count, count))))
        for name, count in (("zulu", 11), ("alpha", 1))
    }
    return replace(shared, datasets=FrozenDict(sets))


@pytest.mark.parametrize("dp", [1, 2, 3, 4])
def test_every_rank_takes_the_same_steps_over_all_of_every_set(tmp_path, dp):
    config = two_sets(tmp_path)
    ranks = [build_validation_loaders(config, CharPrompts(), dp_rank=r, dp_size=dp) for r in range(dp)]
    assert all(list(loaders) == ["alpha", "zulu"] for loaders in ranks)
    for name, count in (("zulu", 11), ("alpha", 1)):
        for _ in range(2):  # each validation run is the same
            batches = [list(loaders[name]) for loaders in ranks]
            assert len({len(some) for some in batches}) == 1
            assert all(len(batch.micro_batches) == 1 for some in batches for batch in some)
            seen = Counter(n for some in batches for b in some for names in batch_ids(b) for n in names)
            assert seen == Counter(f"clip{number}.wav" for number in range(count))
            assert [len(loaders[name]) for loaders in ranks] == [len(batches[0])] * dp


def test_the_order_is_the_manifests(tmp_path):
    manifest = corpus.write_nemo(tmp_path, clips(9))
    config = corpus.dataset(manifest, batch_size=2, shuffle=True)
    (loader,) = build_validation_loaders(config, CharPrompts(), dp_rank=0, dp_size=1).values()
    order = [name for batch in loader for names in batch_ids(batch) for name in names]
    assert order == [f"clip{number}.wav" for number in range(9)]


def test_a_stopped_validation_starts_over(tmp_path):
    config = corpus.dataset(corpus.write_nemo(tmp_path, clips(9)), batch_size=2)
    (loader,) = build_validation_loaders(config, CharPrompts(), dp_rank=0, dp_size=1).values()
    first = batch_ids(next(iter(loader)))
    assert batch_ids(next(iter(loader))) == first
    assert len(list(loader)) == 5


def test_a_set_that_names_no_source_is_refused_with_its_key(tmp_path):
    config = DatasetConfig(batch_size=1, datasets=FrozenDict({"dev": DatasetConfig(batch_size=1)}))
    with pytest.raises(
        ValueError, match=r"data\.validation_ds\.datasets\.dev: give input_cfg or exactly one"
    ):
        build_validation_loaders(config, CharPrompts(), dp_rank=0, dp_size=1)
