"""Interleaving and shuffling: everything once, in proportion, decided by the seed."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from shoal.config.speech import DatasetConfig, InputConfig
from shoal.data.mixing import interleave, read_epoch, shuffled
from shoal.data.sources import open_sources
from tests.unit.data import corpus
from tests.unit.data.corpus import Clip


def test_interleave_draws_in_proportion_and_takes_everything_once():
    streams = [iter([("a", i) for i in range(3000)]), iter([("b", i) for i in range(1000)])]
    drawn = list(interleave(streams, [0.75, 0.25], random.Random(1)))
    head = Counter(name for name, _ in drawn[:2000])
    assert head["a"] / 2000 == pytest.approx(0.75, abs=0.03)
    assert Counter(drawn) == Counter([("a", i) for i in range(3000)] + [("b", i) for i in range(1000)])
    assert [i for name, i in drawn if name == "b"] == list(range(1000))


@pytest.mark.parametrize("buffer_size", [1, 3, 100, 1000])
def test_shuffled_keeps_everything(buffer_size):
    items = list(range(100))
    out = list(shuffled(iter(items), buffer_size, random.Random(0)))
    assert sorted(out) == items
    assert (out == items) == (buffer_size == 1)


def corpus_of_shards(tmp_path):
    paths = []
    for shard in range(4):
        some = [Clip(10 * shard + number, 0.1) for number in range(5)]
        paths.append(str(corpus.write_nemo(tmp_path / str(shard), some, audio=False)))
    entries = (
        InputConfig(type="nemo", manifest_filepath=tuple(paths[:3]), weight=3.0),
        InputConfig(type="nemo", manifest_filepath=paths[3], weight=1.0),
    )
    return open_sources(DatasetConfig(input_cfg=entries))


def names(sources, **keys):
    keys = {"order_seed": 0, "epoch": 0, "shuffle": True, "buffer_size": 4, **keys}
    return [conversation.id for conversation in read_epoch(sources, **keys)]


def test_an_epoch_has_everything_once_and_its_own_order(tmp_path):
    sources = corpus_of_shards(tmp_path)
    orders = [names(sources, epoch=epoch, order_seed=seed) for seed in (0, 1) for epoch in (0, 1)]
    assert all(sorted(order) == sorted(orders[0]) and len(set(order)) == 20 for order in orders)
    assert len({tuple(order) for order in orders}) == 4
    assert names(sources, epoch=1) == names(sources, epoch=1)


def test_without_shuffle_each_source_keeps_its_order(tmp_path):
    order = names(corpus_of_shards(tmp_path), shuffle=False)
    numbers = [int(name.removeprefix("clip").removesuffix(".wav")) for name in order]
    first, second = [n for n in numbers if n < 30], [n for n in numbers if n >= 30]
    assert first == sorted(first)
    assert second == sorted(second)
    assert len(first) + len(second) == 20


def test_shards_are_shuffled_beyond_the_buffer(tmp_path):
    sources = corpus_of_shards(tmp_path)[:1]
    starts = {names(sources, buffer_size=1, epoch=epoch)[0] for epoch in range(20)}
    assert starts == {"clip0.wav", "clip10.wav", "clip20.wav"}


def test_the_buffer_shuffles_anew_every_epoch(tmp_path):
    manifest = corpus.write_nemo(tmp_path, [Clip(number, 0.1) for number in range(20)], audio=False)
    sources = open_sources(DatasetConfig(manifest_filepath=str(manifest)))
    orders = {tuple(names(sources, buffer_size=100, epoch=epoch)) for epoch in range(3)}
    assert len(orders) == 3
