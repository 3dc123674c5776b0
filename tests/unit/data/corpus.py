"""Small corpora written by the tests themselves, and a prompt encoder on characters."""

from __future__ import annotations

import json
import tarfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
from lhotse import CutSet, MonoCut, Recording, SupervisionSegment

from shoal.config.speech import DatasetConfig
from shoal.data.batch import StepBatch
from shoal.data.conversation import AudioTurn, Conversation, EncodedPrompt
from shoal.data.position import StepPlan

RATE = 16000


class CharPrompts:
    """One token per character; the assistant's characters are supervised."""

    placeholder_id = 1
    pad_id = 0

    def encode(self, conversation: Conversation) -> EncodedPrompt:
        ids: list[int] = []
        mask: list[bool] = []
        for turn in conversation.turns:
            if isinstance(turn, AudioTurn):
                ids.append(self.placeholder_id)
                mask.append(False)
            else:
                ids += [ord(character) for character in turn.text]
                mask += [turn.role == "assistant"] * len(turn.text)
        return EncodedPrompt(tuple(ids), tuple(mask))

    def encode_prompt_only(self, conversation: Conversation) -> EncodedPrompt:
        turns = conversation.turns
        while turns and turns[-1].role == "assistant":
            turns = turns[:-1]
        return self.encode(Conversation(conversation.id, turns, conversation.tags))


@dataclass(frozen=True)
class Clip:
    """An utterance whose samples encode its number, so that a wrong pairing of audio and text is seen."""

    number: int
    seconds: float

    @property
    def name(self) -> str:
        return f"clip{self.number}"

    @property
    def text(self) -> str:
        return f"text {self.number}"

    def samples(self, rate: int = RATE) -> np.ndarray:
        return np.full(round(self.seconds * rate), (self.number + 1) / 1024, dtype=np.float32)


def clips(count: int, seed: int = 0, longest: float = 1.0) -> list[Clip]:
    """Clips of 0.05 s to `longest`."""
    rng = np.random.default_rng(seed)
    return [Clip(number, round(float(rng.uniform(0.05, longest)), 3)) for number in range(count)]


def write_wav(path: Path, samples: np.ndarray, rate: int = RATE) -> Path:
    """Writes float samples [T] or [T, C]; FLOAT keeps them exact."""
    path.parent.mkdir(parents=True, exist_ok=True)
    soundfile.write(path, samples, rate, subtype="FLOAT")
    return path


def write_lines(path: Path, items: Iterable[Mapping[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(item) + "\n" for item in items))
    return path


def nemo_line(clip: Clip, **fields: Any) -> dict[str, Any]:
    return {"audio_filepath": f"{clip.name}.wav", "duration": clip.seconds, "text": clip.text, **fields}


def write_nemo(folder: Path, some: Sequence[Clip], *, audio: bool = True) -> Path:
    """Writes a manifest, and its audio unless the test proves that none is opened."""
    folder.mkdir(parents=True, exist_ok=True)
    for clip in some if audio else ():
        write_wav(folder / f"{clip.name}.wav", clip.samples())
    return write_lines(folder / "manifest.json", [nemo_line(clip) for clip in some])


def make_cut(folder: Path, clip: Clip, **custom: Any) -> MonoCut:
    recording = Recording.from_file(write_wav(folder / f"{clip.name}.wav", clip.samples()))
    text = SupervisionSegment(clip.name, recording.id, 0.0, recording.duration, text=clip.text)
    return MonoCut(clip.name, 0.0, recording.duration, 0, [text], recording=recording, custom=custom or None)


def write_cuts(folder: Path, some: Sequence[Clip], **custom: Any) -> Path:
    path = folder / "cuts.jsonl.gz"
    folder.mkdir(parents=True, exist_ok=True)
    CutSet.from_cuts(make_cut(folder, clip, **custom) for clip in some).to_file(path)
    return path


def write_tar(path: Path, members: Mapping[str, bytes]) -> Path:
    import io

    with tarfile.open(path, "w") as tar:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def wav_bytes(samples: np.ndarray, rate: int = RATE) -> bytes:
    import io

    buffer = io.BytesIO()
    soundfile.write(buffer, samples, rate, format="WAV", subtype="FLOAT")
    return buffer.getvalue()


def dataset(manifest: Path | None = None, **keys: Any) -> DatasetConfig:
    """A configuration of a NeMo manifest; batch_size 2 unless a limit is given."""
    if not {"batch_size", "batch_duration", "batch_tokens", "bucket_batch_size"} & keys.keys():
        keys["batch_size"] = 2
    return DatasetConfig(manifest_filepath=None if manifest is None else str(manifest), **keys)


def plan_ids(plan: StepPlan) -> list[list[str]]:
    """The names in each micro-batch of a plan; an empty one gives []."""
    return [[item.id for item in items] for items in plan.micro_batches]


def batch_ids(batch: StepBatch) -> list[list[str]]:
    return [[] if one["is_empty"] else one["sample_ids"] for one in batch.micro_batches]


def woven(per_rank: Sequence[Sequence[list[list[str]]]]) -> list[list[list[str]]]:
    """The global micro-batches of each step, from the micro-batches [rank][step][i] that the ranks took."""
    steps = []
    for ranks in zip(*per_rank, strict=True):
        rows = zip(*ranks, strict=True)
        steps.append([names for row in rows for names in row if names])
    return steps
