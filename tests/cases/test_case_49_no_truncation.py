"""Case 49: a feature extractor cuts every clip to 30 s while its transcript stays whole."""

import numpy as np
import pytest
import torch

from shoal.config.speech import PerceptionConfig
from shoal.data.micro_batches import MicroBatchStream
from shoal.data.stream import build_train_loader
from shoal.speech.perception import AudioPerception
from tests.tiny import HIDDEN, tiny_parakeet
from tests.unit.data.corpus import CharPrompts, dataset, write_lines, write_wav

SECONDS = (31.0, 62.455)


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    folder = tmp_path_factory.mktemp("long")
    rng = np.random.default_rng(0)
    lines = []
    for number, seconds in enumerate(SECONDS):
        noise = 0.1 * rng.standard_normal(round(seconds * 16000)).astype(np.float32)
        write_wav(folder / f"{number}.wav", noise)
        lines.append({"audio_filepath": f"{number}.wav", "duration": seconds, "text": "words"})
    return dataset(write_lines(folder / "m.json", lines), batch_tokens=2000)


def test_the_whole_clip_reaches_the_encoder(config):
    loader = build_train_loader(config, CharPrompts(), dp_rank=0, dp_size=1, global_micro_batches=1)
    ((one,),) = [batch.micro_batches for batch in loader]
    assert one["audio_lens"].tolist() == [496000, 999280]
    assert one["audios"].shape == (2, 999280)
    assert one["audios"][1, -1000:].abs().sum() > 0

    perception = AudioPerception(tiny_parakeet(), None, PerceptionConfig(), HIDDEN).eval()
    _, frames = perception.preprocessor(one["audios"], one["audio_lens"])
    assert frames.tolist() == [3100, 6245]
    with torch.no_grad():
        embeddings, lengths = perception(one["audios"], one["audio_lens"])
    assert lengths.tolist() == [388, 781]
    assert embeddings.shape[1] == 781


def test_the_budget_counts_every_token_of_the_clip(config):
    stream = MicroBatchStream(config, CharPrompts(), shuffle=False)
    ((first, second),) = list(stream.epoch(0, 0).batches)
    counted = [c.audio_tokens(config.token_equivalent_duration) for c in (first, second)]
    assert counted == [388, 781]
