"""Case 53: stereo gives rows of another rank, or channels are averaged and cancel."""

import numpy as np
import pytest

from shoal.data.stream import build_train_loader
from tests.unit.data.corpus import CharPrompts, dataset, write_lines, write_wav

LEFT = (np.sin(np.arange(1600) / 5) / 2).astype(np.float32)


def load(tmp_path, **keys):
    write_wav(tmp_path / "anti.wav", np.stack([LEFT, -LEFT], axis=1))
    write_wav(tmp_path / "mono.wav", LEFT[:800])
    lines = [
        {"audio_filepath": "anti.wav", "duration": 0.1, "text": "stereo"},
        {"audio_filepath": "mono.wav", "duration": 0.05, "text": "mono"},
    ]
    config = dataset(write_lines(tmp_path / "m.json", lines), batch_size=2, **keys)
    loader = build_train_loader(config, CharPrompts(), dp_rank=0, dp_size=1, global_micro_batches=1)
    (batch,) = list(loader)
    return batch


@pytest.mark.parametrize(("selector", "sign"), [(0, 1), (1, -1)])
def test_one_channel_is_taken(tmp_path, selector, sign):
    (one,) = load(tmp_path, channel_selector=selector).micro_batches
    # The mono file has one channel, which is taken whatever the selector says.
    assert one["sample_ids"] == ["anti.wav", "mono.wav"]
    assert one["audios"].shape == (2, 1600)
    np.testing.assert_array_equal(one["audios"][0].numpy(), sign * LEFT)
    np.testing.assert_array_equal(one["audios"][1, :800].numpy(), LEFT[:800])


def test_an_average_that_cancels_is_left_out_and_not_silence(tmp_path):
    batch = load(tmp_path, channel_selector="average")
    (one,) = batch.micro_batches
    assert one["sample_ids"] == ["mono.wav"]
    assert one["audios"].shape == (1, 800)
    assert batch.skipped == {"anti_phase": 1}
