"""Audio in every form becomes mono at the model's rate, or a named reason."""

from __future__ import annotations

import numpy as np
import pytest
import soundfile
from lhotse import CutSet, Recording
from lhotse.audio import AudioSource
from lhotse.cut import MonoCut, MultiCut

from shoal.data.audio import AudioOptions, BadAudio, load_audio
from shoal.data.conversation import AudioTurn
from shoal.data.manifests import AudioLocator, read_nemo
from shoal.data.tar import TarMember
from tests.unit.data import corpus

RATE = 16000


def tone(seconds=1.0, rate=RATE, hertz=440.0):
    return np.sin(2 * np.pi * hertz * np.arange(round(seconds * rate)) / rate).astype(np.float32) / 2


def nemo_turn(tmp_path, name, duration, **fields):
    line = {"audio_filepath": name, "duration": duration, "text": "x", **fields}
    path = corpus.write_lines(tmp_path / "m.json", [line])
    (conversation,) = read_nemo(str(path), {}, AudioLocator(str(path), None))
    return conversation.audio_turns[0]


def reason(turn, **options):
    with pytest.raises(BadAudio) as caught:
        load_audio(turn, AudioOptions(**options))
    return caught.value.reason


@pytest.mark.parametrize("rate", [8000, 16000, 22050, 44100, 48000])
def test_every_rate_becomes_the_models(tmp_path, rate):
    corpus.write_wav(tmp_path / "a.wav", tone(rate=rate), rate)
    samples = load_audio(nemo_turn(tmp_path, "a.wav", 1.0), AudioOptions())
    assert samples.shape == (16000,)
    assert samples.dtype == np.float32
    inside = slice(200, -200)  # the filter rings at the ends
    np.testing.assert_allclose(samples[inside], tone()[inside], atol=2e-3)


def test_flac_reads_like_wav(tmp_path):
    soundfile.write(tmp_path / "a.flac", tone(), RATE)
    samples = load_audio(nemo_turn(tmp_path, "a.flac", 1.0), AudioOptions())
    np.testing.assert_allclose(samples, tone(), atol=2**-15)


def stereo(tmp_path, left, right):
    corpus.write_wav(tmp_path / "s.wav", np.stack([left, right], axis=1))
    return nemo_turn(tmp_path, "s.wav", len(left) / RATE)


def test_channel_rules(tmp_path):
    left, right = tone(hertz=300.0), tone(hertz=500.0)
    turn = stereo(tmp_path, left, right)
    np.testing.assert_array_equal(load_audio(turn, AudioOptions()), left)
    np.testing.assert_array_equal(load_audio(turn, AudioOptions(channel_selector=1)), right)
    average = load_audio(turn, AudioOptions(channel_selector="average"))
    np.testing.assert_allclose(average, (left + right) / 2, atol=1e-7)
    assert reason(turn, channel_selector=2) == "wrong_channels"
    assert reason(stereo(tmp_path, left, -left), channel_selector="average") == "anti_phase"


def test_a_cut_that_names_a_channel_has_chosen(tmp_path):
    left, right = tone(hertz=300.0), tone(hertz=500.0)
    stereo(tmp_path, left, right)
    recording = Recording.from_file(tmp_path / "s.wav")
    one = MonoCut("one", 0.0, 1.0, 1, recording=recording)
    np.testing.assert_array_equal(load_audio(AudioTurn("user", one), AudioOptions()), right)
    both = MultiCut("both", 0.0, 1.0, [0, 1], recording=recording)
    picked = load_audio(AudioTurn("user", both), AudioOptions(channel_selector=1))
    np.testing.assert_array_equal(picked, right)
    soundfile.write(tmp_path / "s.wav", left, RATE)
    assert reason(AudioTurn("user", one)) == "wrong_channels"


def test_a_recording_of_several_files_goes_through_lhotse(tmp_path):
    left, right = tone(hertz=300.0), tone(hertz=500.0)
    paths = [str(corpus.write_wav(tmp_path / f"{n}.wav", samples)) for n, samples in enumerate((left, right))]
    sources = [AudioSource("file", [channel], path) for channel, path in enumerate(paths)]
    recording = Recording("two", sources, RATE, RATE, 1.0)
    turn = AudioTurn("user", recording.to_cut())
    np.testing.assert_array_equal(load_audio(turn, AudioOptions(channel_selector=1)), right)


def test_audio_in_memory(tmp_path):
    recording = Recording.from_bytes(corpus.wav_bytes(tone()), "memory")
    np.testing.assert_array_equal(load_audio(AudioTurn("user", recording.to_cut()), AudioOptions()), tone())


def test_bad_audio_is_named(tmp_path):
    whole = corpus.wav_bytes(tone())
    (tmp_path / "empty.wav").write_bytes(b"")
    (tmp_path / "noise.wav").write_bytes(bytes(range(256)) * 40)
    (tmp_path / "half.wav").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "header.wav").write_bytes(whole[:100])
    corpus.write_wav(tmp_path / "none.wav", tone()[:0])
    corpus.write_wav(tmp_path / "nan.wav", np.full(RATE, np.nan, dtype=np.float32))
    corpus.write_wav(tmp_path / "short.wav", tone(0.5))
    reasons = {
        name: reason(nemo_turn(tmp_path, f"{name}.wav", 1.0))
        for name in ("gone", "empty", "noise", "half", "header", "none", "nan", "short")
    }
    assert reasons == {
        "gone": "missing",
        "empty": "empty",
        "noise": "unreadable",
        "half": "truncated",
        "header": "truncated",
        "none": "empty",
        "nan": "not_finite",
        "short": "truncated",
    }


def test_a_cut_without_recording_is_missing(tmp_path):
    assert reason(AudioTurn("user", MonoCut("none", 0.0, 1.0, 0))) == "missing"


def test_rounded_durations_pass(tmp_path):
    corpus.write_wav(tmp_path / "a.wav", tone(0.987))
    assert load_audio(nemo_turn(tmp_path, "a.wav", 1.0), AudioOptions()).shape == (15792,)


def test_a_manifest_that_states_another_rate_is_not_believed(tmp_path):
    corpus.write_wav(tmp_path / "a.wav", tone(2.0, 8000), 8000)
    recording = Recording("a", [AudioSource("file", [0], str(tmp_path / "a.wav"))], RATE, RATE, 1.0)
    assert reason(AudioTurn("user", recording.to_cut())) == "wrong_rate"
    assert reason(nemo_turn(tmp_path, "a.wav", 1.0, sampling_rate=RATE)) == "wrong_rate"
    assert load_audio(nemo_turn(tmp_path, "a.wav", 2.0, sampling_rate=8000), AudioOptions()).shape == (32000,)


def test_bad_members_of_archives(tmp_path):
    archive = str(corpus.write_tar(tmp_path / "a.tar", {"a.wav": corpus.wav_bytes(tone()), "void.wav": b""}))
    cut = MonoCut("a", 0.0, 1.0, 0, recording=Recording("a", [AudioSource("shar", [0], "")], RATE, RATE, 1.0))

    def turn(name, path=archive):
        return AudioTurn("user", cut, None, TarMember(path, name))

    np.testing.assert_array_equal(load_audio(turn("a.wav"), AudioOptions()), tone())
    assert reason(turn("b.wav")) == "missing"
    assert reason(turn("void.wav")) == "empty"
    assert reason(turn("a.wav", str(tmp_path / "gone.tar"))) == "missing"
    (tmp_path / "junk.tar").write_bytes(b"junk" * 1000)
    assert reason(turn("a.wav", str(tmp_path / "junk.tar"))) == "unreadable"


def test_an_augmented_cut_goes_through_lhotse(tmp_path):
    recording = Recording.from_file(corpus.write_wav(tmp_path / "a.wav", tone()))
    cut = recording.to_cut().perturb_volume(0.5)
    CutSet.from_cuts([cut]).to_file(tmp_path / "cuts.jsonl")
    (loaded,) = CutSet.from_file(tmp_path / "cuts.jsonl")
    np.testing.assert_allclose(load_audio(AudioTurn("user", loaded), AudioOptions()), tone() / 2, atol=1e-6)
