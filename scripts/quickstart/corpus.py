"""The clips of the quickstart: real ones by split, and what is made from them or synthesized for training."""

from __future__ import annotations

import hashlib
import random
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import soundfile
from numpy.typing import NDArray
from recordings import SAMPLE_RATE, Clip, Voice, at_speed, decode_g722, store_clip, stored_clip, synthesize
from sources import FALLBACK_SPEECH, SPEECH, TRANSCRIPTS
from transcripts import SPLITS, read_prompt_texts, split_of, spoken_words

WINDOW_SECONDS = 5  # what the encoder reads at once; longer clips are left out
MIN_SECONDS = 0.3
SPEEDS = (0.9, 0.95, 1.05, 1.1)
SEED = 20_260

Splits = dict[str, list[Clip]]


def telephone_prompts(debian: Path, data: Path) -> Splits:
    """Every usable prompt of the Asterisk packages, in the split that its text belongs to."""
    texts = read_prompt_texts(debian / TRANSCRIPTS.members[0])
    voice = (debian / SPEECH.members[0]).parent
    splits: Splits = {split: [] for split in SPLITS}
    unusable = 0
    for path in sorted(voice.rglob("*.g722")):
        key = path.relative_to(voice).with_suffix("").as_posix()
        words, samples = spoken_words(texts.get(key, "")), decode_g722(path)
        if words is None or not _fits(samples):
            unusable += 1
        else:
            splits[split_of(words)].append(store_clip(data / "real", key, samples, words, voice.name))
    print(f"  {unusable} prompts left out: longer than {WINDOW_SECONDS} s, not speech, or no certain wording")
    return splits


def fallback_sentences(pypi: Path, data: Path) -> Splits:
    """The few usable sentences of pocketsphinx's test data: two held out, two for validation, the rest to train on."""
    clips = []
    folder = (pypi / FALLBACK_SPEECH.members[0]).parents[1]
    for transcript in ("librivox/transcription", "cards/cards.transcription"):
        for words, name in re.findall(r"<s> (.*?) +</s> \((.*?)\)", (folder / transcript).read_text()):
            samples, rate = soundfile.read((folder / transcript).with_name(f"{name}.wav"), dtype="int16")
            if rate == SAMPLE_RATE and _fits(samples):
                clips.append(store_clip(data / "real", name, samples, words, transcript.split("/")[0]))
    return {"heldout": clips[:2], "dev": clips[2:4], "train": clips[4:]}


def speed_variants(clips: Sequence[Clip], data: Path) -> Iterator[Clip]:
    """Each clip at every speed of `SPEEDS`, where it still fits the window."""
    for clip in clips:
        for speed in SPEEDS:
            variant = at_speed(data / "real-speeds", clip, speed)
            if variant.seconds <= WINDOW_SECONDS:
                yield variant


def synthetic_clips(debian: Path, data: Path, phrases: Sequence[str]) -> Iterator[Clip]:
    """Each phrase in one voice, where it fits the window; voice, pitch and tempo come from a seeded draw."""
    rng = random.Random(SEED)
    with tempfile.TemporaryDirectory() as scratch:
        for words in phrases:
            voice = _draw_voice(rng)
            # Named by content: other phrases or voices never meet an older file of the same name.
            digest = hashlib.sha256(f"{words} {voice}".encode()).hexdigest()[:12]
            place = (data / "synthetic", f"{voice.name}-{digest}")
            speaker = f"flite-{voice.name}"
            if (stored := stored_clip(*place, words, speaker)) is not None:
                yield stored
                continue
            samples = synthesize(debian, words, voice, Path(scratch) / "speech.wav")
            if _fits(samples):
                yield store_clip(*place, samples, words, speaker)


def statistics(clips: Sequence[Clip]) -> Mapping[str, float]:
    """Counts of a manifest: clips, different texts, words, seconds."""
    return {
        "clips": len(clips),
        "texts": len({clip.words for clip in clips}),
        "words": sum(len(clip.words.split()) for clip in clips),
        "seconds": round(sum(clip.seconds for clip in clips), 1),
    }


def _fits(samples: NDArray[np.int16]) -> bool:
    return MIN_SECONDS <= len(samples) / SAMPLE_RATE <= WINDOW_SECONDS


def _draw_voice(rng: random.Random) -> Voice:
    name, pitch = rng.choice((("slt", 185), ("slt", 205), ("rms", 105), ("awb", 130), ("kal16", 110)))
    return Voice(name, round(pitch * rng.uniform(0.88, 1.15)), round(rng.uniform(0.8, 1.15), 2))
