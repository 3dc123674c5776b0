"""Case 50: one very long utterance breaks the batch budget, or the budget forgets about padding."""

import logging

import pytest

from shoal.data.stream import build_train_loader
from tests.unit.data.corpus import CharPrompts, Clip, batch_ids, dataset, write_nemo


def batches_of(config):
    loader = build_train_loader(config, CharPrompts(), dp_rank=0, dp_size=1, global_micro_batches=1)
    return list(loader)


def padded_seconds(batch):
    rows, samples = batch.micro_batches[0]["audios"].shape
    return rows * samples / 16000


@pytest.fixture
def manifest(tmp_path):
    return write_nemo(tmp_path, [Clip(0, 1.0), Clip(1, 50.0), *[Clip(n, 0.25 * n) for n in range(2, 10)]])


@pytest.mark.parametrize("bucketing", [False, True])
def test_it_is_left_out_counted_and_named(manifest, bucketing, caplog):
    config = dataset(manifest, batch_duration=5.0, use_bucketing=bucketing, num_buckets=2, shuffle=True)
    with caplog.at_level(logging.WARNING):
        batches = batches_of(config)
    assert all(padded_seconds(batch) <= 5.0 for batch in batches)
    assert [batch.skipped for batch in batches if batch.skipped] == [{"above_batch_budget": 1}]
    assert "'clip1.wav' (above_batch_budget)" in caplog.text
    seen = sorted(name for batch in batches for names in batch_ids(batch) for name in names)
    assert seen == sorted(f"clip{number}.wav" for number in range(10) if number != 1)


def test_or_it_is_alone(manifest):
    batches = batches_of(dataset(manifest, batch_duration=5.0, oversize="alone"))
    above = [batch_ids(batch) for batch in batches if padded_seconds(batch) > 5.0]
    assert above == [[["clip1.wav"]]]
    assert sum(len(names) for batch in batches for names in batch_ids(batch)) == 10


def test_padding_counts(tmp_path):
    # 4 + 3 + 3 = 10 s of audio, but 12 s of padded audio.
    manifest = write_nemo(tmp_path, [Clip(0, 4.0), Clip(1, 3.0), Clip(2, 3.0)])
    batches = batches_of(dataset(manifest, batch_duration=10.0))
    assert [padded_seconds(batch) for batch in batches] == [8.0, 3.0]
