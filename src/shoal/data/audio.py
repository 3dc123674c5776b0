"""Reads the audio of one turn: mono, float32, at the model's rate, or says why it cannot be used."""

from __future__ import annotations

from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from lhotse.audio import AudioLoadingError, DurationMismatchError
from lhotse.audio.backend import read_audio
from lhotse.augmentation import get_or_create_resampler
from lhotse.cut import Cut, MonoCut, MultiCut
from numpy.typing import NDArray

from shoal.data.conversation import AudioTurn
from shoal.data.manifests import RATE_IN_HEADER
from shoal.data.tar import read_member

Samples = NDArray[np.float32]

DURATION_TOLERANCE = 0.1
"""Seconds by which audio may be shorter than its manifest says; manifests round."""

ANTI_PHASE_ENERGY = 1e-3
"""An average of channels with less than this share of their energy has cancelled, not mixed."""

# What lhotse and libsndfile raise for data they cannot read.
_UNREADABLE = (AudioLoadingError, DurationMismatchError, OSError, ValueError, RuntimeError, AssertionError)


class BadAudio(Exception):
    """Audio that cannot be used; `reason` is one of a few words that are counted."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason


@dataclass(frozen=True)
class AudioOptions:
    """How audio is brought into one form.

    Args:
        sample_rate: Samples per second of the result; other rates are resampled.
        channel_selector: Which channel of several is taken, or ``average``. A cut that names one channel of
            its recording has chosen already.
    """

    sample_rate: int = 16000
    channel_selector: int | Literal["average"] = 0


def load_audio(turn: AudioTurn, options: AudioOptions) -> Samples:
    """Returns the samples of a turn, float32 [T], at ``options.sample_rate``.

    The whole turn is returned, however long. A rate in the header of the file is believed; a manifest that
    states another one describes other audio.

    Raises:
        BadAudio: for missing, empty, corrupt or too short audio, samples that are not finite, a rate or a
            channel that contradicts the manifest, and channels that cancel when averaged.
    """
    channels, rate = _read(turn)
    mono = _to_mono(channels, turn.cut, options)
    available = mono.shape[0] / rate
    if mono.shape[0] == 0:
        raise BadAudio("empty", "no sample")
    if available < turn.cut.duration - DURATION_TOLERANCE:
        raise BadAudio("truncated", f"{available:.3f} s of audio, {turn.cut.duration:.3f} s in the manifest")
    if not np.isfinite(mono).all():
        raise BadAudio("not_finite", "samples are NaN or infinite")
    return _resample(mono, rate, options.sample_rate)


def _read(turn: AudioTurn) -> tuple[Samples, int]:
    """Returns samples [C, T] and their true rate."""
    if not turn.cut.has_recording:
        raise BadAudio("missing", "the cut has no recording")
    try:
        if _is_plain(turn.cut):
            return _read_plain(turn)
        loaded: Samples = np.atleast_2d(turn.cut.load_audio()).astype(np.float32, copy=False)
        return loaded, int(turn.cut.sampling_rate)
    except (FileNotFoundError, KeyError) as error:
        raise BadAudio("missing", str(error)) from error
    except _UNREADABLE as error:
        raise BadAudio("unreadable", f"{type(error).__name__}: {error}") from error


def _is_plain(cut: Cut) -> bool:
    """Returns whether a cut is a stretch of one file, whose header we can read ourselves.

    Mixed cuts, recordings of several files, augmented recordings, and the commands and URLs that a user
    allowed are loaded by lhotse.
    """
    if not isinstance(cut, MonoCut | MultiCut):
        return False
    recording = cut.recording
    if len(recording.sources) != 1 or recording.transforms or recording.has_video:
        return False
    return recording.sources[0].type in ("file", "memory", "shar")


def _read_plain(turn: AudioTurn) -> tuple[Samples, int]:
    cut = turn.cut
    samples, rate = read_audio(_open(turn), offset=cut.start, duration=cut.duration)
    stated = cut.recording.sampling_rate
    if rate != stated and not _rate_in_header(cut):
        raise BadAudio("wrong_rate", f"the file has {rate} Hz, its manifest says {stated} Hz")
    return np.atleast_2d(samples).astype(np.float32, copy=False), int(rate)


def _open(turn: AudioTurn) -> Any:
    """Returns a path or a file object with the whole recording."""
    source = turn.cut.recording.sources[0]
    if turn.member is not None:
        return BytesIO(_not_empty(read_member(turn.member), turn.member.name))
    if source.type == "memory":
        return BytesIO(_not_empty(source.source, "in-memory recording"))
    if Path(source.source).stat().st_size == 0:
        raise BadAudio("empty", f"{source.source} has no byte")
    return source.source


def _not_empty(data: bytes, name: str) -> bytes:
    if not data:
        raise BadAudio("empty", f"{name} has no byte")
    return data


def _rate_in_header(cut: Cut) -> bool:
    return bool((cut.custom or {}).get(RATE_IN_HEADER))


def _to_mono(channels: Samples, cut: Cut, options: AudioOptions) -> Samples:
    """Returns one channel [T] of [C, T]: the cut's own choice, else what the options name."""
    if _is_plain(cut) and not _rate_in_header(cut):
        rows = {channel: row for row, channel in enumerate(cut.recording.channel_ids)}
        named = [cut.channel] if isinstance(cut.channel, int) else list(cut.channel)
        picked = [rows[channel] for channel in named if channel in rows]
        if len(picked) < len(named) or max(picked) >= channels.shape[0]:
            raise BadAudio(
                "wrong_channels", f"the cut names channels {named}, the file has {channels.shape[0]}"
            )
        channels = channels[picked]
    if channels.shape[0] == 1:
        return _row(channels, 0)
    if options.channel_selector == "average":
        return _average(channels)
    if options.channel_selector >= channels.shape[0]:
        raise BadAudio(
            "wrong_channels",
            f"channel_selector {options.channel_selector}, and there are {channels.shape[0]} channels",
        )
    return _row(channels, options.channel_selector)


def _row(channels: Samples, index: int) -> Samples:
    row: Samples = channels[index]
    return row


def _average(channels: Samples) -> Samples:
    mean: Samples = channels.mean(axis=0)
    energy = float(np.square(channels).mean())
    if energy > 0 and float(np.square(mean).mean()) < ANTI_PHASE_ENERGY * energy:
        raise BadAudio("anti_phase", "the channels cancel when averaged; set channel_selector to one channel")
    return mean


def _resample(samples: Samples, rate: int, target: int) -> Samples:
    if rate == target:
        return samples
    resampled: Samples = get_or_create_resampler(rate, target)(torch.from_numpy(samples[None])).numpy()[0]
    return resampled
