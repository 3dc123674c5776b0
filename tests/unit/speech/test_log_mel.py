"""The log-mel front ends equal transformers' feature extractors, and a clip does not feel its batch."""

import numpy as np
import pytest
import torch
from transformers import ParakeetFeatureExtractor, WhisperFeatureExtractor

from shoal.speech.log_mel import MelSettings, ParakeetLogMel, WhisperLogMel

PARAKEET = MelSettings(16000, 80, 512, 400, 160, preemphasis=0.97)
WHISPER = MelSettings(16000, 80, 400, 400, 160)
LENGTHS = [16000, 7999, 12345, 1600]  # the deviation of two or three frames would only amplify rounding


def clips(lengths: list[int], seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [(0.1 * rng.standard_normal(length)).astype(np.float32) for length in lengths]


def padded(arrays: list[np.ndarray], width: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    batch = torch.zeros(len(arrays), width or max(map(len, arrays)))
    for row, array in zip(batch, arrays, strict=True):
        row[: len(array)] = torch.from_numpy(array)
    return batch, torch.tensor([len(array) for array in arrays])


@pytest.mark.parametrize("num_mels", [80, 128])
def test_parakeet_features_equal_the_extractor(num_mels: int) -> None:
    arrays = clips(LENGTHS)
    extractor = ParakeetFeatureExtractor(feature_size=num_mels)
    expected = extractor(arrays, sampling_rate=16000, return_tensors="pt")
    settings = MelSettings.read(extractor.to_dict(), MelSettings(16000, num_mels, 512, 400, 160, 0.97))
    mel, lens = ParakeetLogMel(settings)(*padded(arrays))
    torch.testing.assert_close(mel, expected.input_features, rtol=1e-5, atol=1e-5)
    assert lens.tolist() == expected.attention_mask.sum(1).tolist()


@pytest.mark.parametrize("length", [15999, 16000, 16001, 15900, 8000, 999, 47950])
def test_whisper_features_equal_the_extractor(length: int) -> None:
    """Also where a clip ends at, or just before, the end of a window, where the extractor mirrors samples."""
    arrays = clips([length])
    windows = max(1, -(-(length // 160) // 100))
    extractor = WhisperFeatureExtractor(chunk_length=1)
    expected = extractor(
        arrays, sampling_rate=16000, return_tensors="pt", max_length=windows * 16000, truncation=True
    ).input_features.transpose(1, 2)
    mel, lens = WhisperLogMel(WHISPER, 100)(*padded(arrays))
    torch.testing.assert_close(mel, expected, rtol=1e-5, atol=1e-5)
    assert lens.tolist() == [length // 160]


@pytest.mark.parametrize("make", [lambda: ParakeetLogMel(PARAKEET), lambda: WhisperLogMel(WHISPER, 100)])
def test_features_do_not_depend_on_the_batch(make) -> None:
    front = make()
    arrays = clips([16000, 40000, 15950, 320, 7000])
    together, lens = front(*padded(arrays, width=52345))
    for index, array in enumerate(arrays):
        alone, length = front(*padded([array]))
        assert int(length) == int(lens[index])
        torch.testing.assert_close(together[index, :length], alone[0, :length], rtol=1e-5, atol=1e-5)


def test_mirrored_samples_behind_a_full_window_do_not_set_the_clips_floor() -> None:
    """A burst at the very end of a window is louder in the mirrored frames than in the clip's own."""
    audios = 1e-3 * torch.randn(2, 32000, generator=torch.Generator().manual_seed(0))
    audios[0, 15990:16000] = 1.0
    audios[0, 16000:] = 0.0
    front = WhisperLogMel(WHISPER, 100)
    together, _ = front(audios, torch.tensor([16000, 32000]))
    alone, _ = front(audios[:1, :16000], torch.tensor([16000]))
    torch.testing.assert_close(together[0, :100], alone[0], rtol=1e-5, atol=1e-5)


def test_parakeet_zeroes_what_lies_behind_the_clip_and_survives_single_frames() -> None:
    mel, lens = ParakeetLogMel(PARAKEET)(torch.randn(3, 8000), torch.tensor([8000, 160, 100]))
    assert lens.tolist() == [50, 1, 0]
    assert mel.isfinite().all()
    assert mel[0, :50].abs().sum() > 0
    assert torch.count_nonzero(mel[1]) == 0 and torch.count_nonzero(mel[2]) == 0


def test_a_clip_longer_than_the_window_keeps_all_its_frames() -> None:
    mel, lens = WhisperLogMel(WHISPER, 3000)(torch.randn(1, 999280), torch.tensor([999280]))
    assert lens.tolist() == [6245]
    assert mel.shape == (1, 9000, 80)


def test_features_are_float32_whatever_the_module_was_cast_to() -> None:
    front = ParakeetLogMel(PARAKEET).to(torch.bfloat16)
    audio, lens = padded(clips([8000]))
    torch.testing.assert_close(
        front(audio, lens)[0], ParakeetLogMel(PARAKEET)(audio, lens)[0], rtol=0, atol=0
    )


def test_settings_that_do_not_fit_the_encoder_are_refused() -> None:
    with pytest.raises(ValueError, match="feature_size = 128: the encoder takes num_mel_bins = 80"):
        MelSettings.read({"feature_size": 128}, WHISPER)
    with pytest.raises(ValueError, match="dither = 0.1"):
        MelSettings.read({"dither": 0.1}, WHISPER)
