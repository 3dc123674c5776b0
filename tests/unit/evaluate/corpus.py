"""A folder of short noise clips with transcripts, in the kinds of manifest an evaluation reads."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import soundfile
from lhotse import CutSet, MonoCut, Recording, SupervisionSegment

TEXTS = ("the cat sat", "one two", "a dog ran on the mat", "four five six", "ten")
SECONDS = (0.9, 0.5, 1.3, 0.7, 0.4)


def clip_names() -> list[str]:
    return [f"clip{index}" for index in range(len(TEXTS))]


def write_clips(folder: Path) -> list[Path]:
    rng = np.random.default_rng(0)
    paths = []
    for name, seconds in zip(clip_names(), SECONDS, strict=True):
        samples = (0.1 * rng.standard_normal(round(16000 * seconds))).astype(np.float32)
        paths.append(folder / f"{name}.wav")
        soundfile.write(paths[-1], samples, 16000, subtype="FLOAT")
    return paths


def write_lines(path: Path, lines: list[dict[str, object]]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def nemo_manifest(folder: Path) -> Path:
    rows = zip(clip_names(), write_clips(folder), SECONDS, TEXTS, strict=True)
    return write_lines(
        folder / "nemo.jsonl",
        [
            {"id": name, "audio_filepath": path.name, "duration": seconds, "text": text}
            for name, path, seconds, text in rows
        ],
    )


def cuts_manifest(folder: Path) -> Path:
    cuts = []
    for name, path, seconds, text in zip(clip_names(), write_clips(folder), SECONDS, TEXTS, strict=True):
        recording = Recording.from_file(path, recording_id=name)
        supervision = SupervisionSegment(name, name, 0.0, seconds, text=text)
        cuts.append(MonoCut(name, 0.0, seconds, 0, [supervision], recording=recording))
    CutSet.from_cuts(cuts).to_file(folder / "cuts.jsonl")
    return folder / "cuts.jsonl"


def conversation_manifest(folder: Path) -> Path:
    rows = zip(clip_names(), write_clips(folder), SECONDS, TEXTS, strict=True)
    return write_lines(
        folder / "talks.jsonl",
        [
            {
                "id": name,
                "conversations": [
                    {"from": "User", "value": path.name, "type": "audio", "duration": seconds},
                    {"from": "Assistant", "value": text, "type": "text"},
                ],
            }
            for name, path, seconds, text in rows
        ],
    )
