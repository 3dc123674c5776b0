"""Reads, synthesizes and stores audio, and writes the manifests that describe it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import av
import numpy as np
import soundfile
from lhotse import CutSet, MonoCut, Recording, SupervisionSegment
from numpy.typing import NDArray

SAMPLE_RATE = 16_000  # Hz


@dataclass(frozen=True)
class Clip:
    """One utterance on disk: a 16 kHz mono FLAC file and the words said in it."""

    id: str
    path: Path
    words: str
    speaker: str
    seconds: float


@dataclass(frozen=True)
class Voice:
    """A flite voice at a mean pitch (Hz; None = its own) and a tempo (1.2 = 20 % slower)."""

    name: str
    pitch: int | None = None
    stretch: float = 1.0


def decode_g722(path: Path) -> NDArray[np.int16]:
    """The samples of a headerless G.722 file at 16 kHz, int16 [T]."""
    with av.open(str(path), format="g722") as container:
        frames = [frame.to_ndarray().reshape(-1) for frame in container.decode(audio=0)]
    return np.concatenate(frames) if frames else np.zeros(0, dtype=np.int16)


def stored_clip(folder: Path, clip_id: str, words: str, speaker: str) -> Clip | None:
    """The clip as an earlier run left it under `folder`, or None."""
    path = folder / f"{clip_id}.flac"
    return Clip(clip_id, path, words, speaker, soundfile.info(path).duration) if path.exists() else None


def store_clip(folder: Path, clip_id: str, samples: NDArray[np.int16], words: str, speaker: str) -> Clip:
    """Write `samples` int16 [T] as FLAC under `folder`, by way of a rename so that no half file remains."""
    path = folder / f"{clip_id}.flac"
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    soundfile.write(partial, samples, SAMPLE_RATE, format="FLAC")
    partial.replace(path)
    return Clip(clip_id, path, words, speaker, len(samples) / SAMPLE_RATE)


def at_speed(folder: Path, clip: Clip, speed: float) -> Clip:
    """The clip played `speed` times as fast, pitch included, as a clip of its own."""
    name = f"{clip.id}-x{speed}"
    if (stored := stored_clip(folder, name, clip.words, clip.speaker)) is not None:
        return stored
    recording = Recording.from_file(clip.path).perturb_speed(speed)
    samples = np.clip(recording.load_audio()[0] * 32768, -32768, 32767).astype(np.int16)
    return store_clip(folder, name, samples, clip.words, clip.speaker)


def synthesize(unpacked: Path, words: str, voice: Voice, path: Path) -> NDArray[np.int16]:
    """Speak `words` with the flite that was unpacked under `unpacked`; return int16 [T] at 16 kHz."""
    libraries = sorted({str(file.parent) for file in unpacked.glob("usr/lib/*/lib*.so*")})
    settings = ["--setf", f"duration_stretch={voice.stretch}"]
    if voice.pitch is not None:
        settings += ["--setf", f"int_f0_target_mean={voice.pitch}"]
    command = [str(unpacked / "usr/bin/flite"), "-voice", voice.name, *settings, "-t", words, "-o", str(path)]
    environment = os.environ | {"LD_LIBRARY_PATH": os.pathsep.join(libraries)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"flite failed on {words!r}: {done.stderr.strip()}")
    samples, rate = soundfile.read(path, dtype="int16")
    if rate != SAMPLE_RATE:
        raise RuntimeError(f"flite voice {voice.name} speaks at {rate} Hz, not {SAMPLE_RATE} Hz")
    return samples


def write_cuts(clips: Iterable[Clip], path: Path) -> None:
    """Write a lhotse CutSet manifest with one cut and one supervision a clip, sorted by id."""
    cuts = [_cut(clip) for clip in sorted(clips, key=lambda clip: clip.id)]
    partial = path.with_name(f"partial-{path.name}")
    CutSet.from_cuts(cuts).to_file(partial)
    partial.replace(path)


def _cut(clip: Clip) -> MonoCut:
    recording = Recording.from_file(clip.path, recording_id=clip.id)
    supervision = SupervisionSegment(
        id=clip.id,
        recording_id=clip.id,
        start=0.0,
        duration=recording.duration,
        text=clip.words,
        speaker=clip.speaker,
        language="en",
    )
    return MonoCut(
        id=clip.id,
        start=0.0,
        duration=recording.duration,
        channel=0,
        recording=recording,
        supervisions=[supervision],
    )
