"""Case 52: files of different sampling rates are batched as if they were equal."""

import numpy as np
import pytest
from lhotse import CutSet, Recording, SupervisionSegment

from shoal.config.speech import DatasetConfig
from shoal.data.stream import build_train_loader
from tests.unit.data.corpus import CharPrompts, dataset, write_lines, write_wav


def tone(rate):
    return (np.sin(2 * np.pi * 440 * np.arange(rate) / rate) / 2).astype(np.float32)


@pytest.mark.parametrize("kind", ["nemo", "lhotse"])
def test_one_second_is_one_second_at_every_rate(tmp_path, kind):
    rates = (16000, 8000, 44100)
    for rate in rates:
        write_wav(tmp_path / f"{rate}.wav", tone(rate), rate)
    if kind == "nemo":
        lines = [{"audio_filepath": f"{rate}.wav", "duration": 1.0, "text": "x"} for rate in rates]
        config = dataset(write_lines(tmp_path / "m.json", lines), batch_size=3)
    else:
        cuts = [Recording.from_file(tmp_path / f"{rate}.wav").to_cut() for rate in rates]
        CutSet.from_cuts(cuts).map(with_text).to_file(tmp_path / "cuts.jsonl")
        config = DatasetConfig(cuts_path=str(tmp_path / "cuts.jsonl"), batch_size=3)
    loader = build_train_loader(config, CharPrompts(), dp_rank=0, dp_size=1, global_micro_batches=1)
    ((one,),) = [batch.micro_batches for batch in loader]
    assert one["audio_lens"].tolist() == [16000, 16000, 16000]
    for row in one["audios"].numpy():
        np.testing.assert_allclose(row[200:-200], tone(16000)[200:-200], atol=2e-3)


def with_text(cut):
    cut.supervisions = [SupervisionSegment(cut.id, cut.recording.id, 0.0, cut.duration, text="x")]
    return cut
