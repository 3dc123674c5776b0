"""Loads what a step plan names: decodes audio, encodes prompts, collates micro-batches.

Runs in data workers. Nothing here raises for bad data: the origin of a failure travels in the step batch, so
that all ranks can agree on it before any of them stops.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from shoal.config.seeds import derive_seed
from shoal.data.audio import AudioOptions, BadAudio, Samples, load_audio
from shoal.data.batch import MicroBatch, StepBatch, empty_micro_batch
from shoal.data.conversation import Conversation, EncodedPrompt, PromptEncoder
from shoal.data.position import StepPlan

logger = logging.getLogger(__name__)

Item = TypeVar("Item")


@dataclass(frozen=True)
class Loaded:
    """An example with its audio in memory: one array [T] per audio turn."""

    conversation: Conversation
    audios: tuple[Samples, ...]
    prompt: EncodedPrompt


class PlanDataset(Dataset[StepBatch], Generic[Item], ABC):
    """Maps a step plan to a step batch; what it loads for one micro-batch is the subclass's part.

    Args:
        pad_id: Fills an empty micro-batch.
    """

    def __init__(self, pad_id: int) -> None:
        self.pad_id = pad_id

    def __getitem__(self, plan: StepPlan) -> StepBatch:
        """Loads one step."""
        skipped = Counter(plan.skipped)
        try:
            batches = [
                self.micro_batch(cast("Sequence[Item]", items), plan.epoch, skipped)
                for items in plan.micro_batches
            ]
        except SampleError as error:
            logger.error("%s", error)
            batches = [self.empty() for _ in plan.micro_batches]
            return StepBatch(batches, plan.position, str(error), dict(skipped))
        return StepBatch(batches, plan.position, None, dict(skipped))

    def empty(self) -> MicroBatch:
        """Returns an empty micro-batch."""
        return empty_micro_batch(self.pad_id)

    @abstractmethod
    def micro_batch(self, items: Sequence[Item], epoch: int, skipped: Counter[str]) -> MicroBatch:
        """Loads one micro-batch, an empty one without items; counts in `skipped` what it leaves out.

        Raises:
            SampleError: naming the sample that cannot be loaded.
        """


class StepDataset(PlanDataset[Conversation]):
    """Maps a step plan of conversations to a step batch.

    Args:
        prompts: Encodes conversations.
        audio: The form audio is brought into.
        seed: The run's seed, from which each sample's seed derives.
        on_bad_audio: ``skip`` leaves a conversation with unusable audio out, counted and named; ``error``
            reports it as the step's error.
        prompt_only: Leaves the final assistant turn out, for generation.
    """

    def __init__(
        self,
        prompts: PromptEncoder,
        audio: AudioOptions,
        *,
        seed: int,
        on_bad_audio: Literal["skip", "error"] = "skip",
        prompt_only: bool = False,
    ) -> None:
        super().__init__(prompts.pad_id)
        self._prompts = prompts
        self._audio = audio
        self._seed = seed
        self._on_bad_audio = on_bad_audio
        self._encode = prompts.encode_prompt_only if prompt_only else prompts.encode

    def micro_batch(self, items: Sequence[Conversation], epoch: int, skipped: Counter[str]) -> MicroBatch:
        """See `PlanDataset.micro_batch`."""
        loaded = [example for item in items if (example := self._load(item, skipped)) is not None]
        if not loaded:
            return self.empty()
        return collate(loaded, self._prompts.pad_id, seed=self._seed, epoch=epoch)

    def _load(self, conversation: Conversation, skipped: Counter[str]) -> Loaded | None:
        """Returns the example, or None after counting why it is left out.

        Raises:
            SampleError: naming the sample, for anything that is not a matter of its audio.
        """
        try:
            audios = tuple(load_audio(turn, self._audio) for turn in conversation.audio_turns)
            return Loaded(conversation, audios, self._encoded(conversation))
        except BadAudio as error:
            if self._on_bad_audio == "error":
                raise SampleError(conversation.id, error) from error
            skipped[error.reason] += 1
            logger.warning("left out sample %r: %s", conversation.id, error)
            return None
        except Exception as error:
            # Whatever it is, a worker that raises stops one rank and leaves the others waiting for it.
            raise SampleError(conversation.id, error) from error

    def _encoded(self, conversation: Conversation) -> EncodedPrompt:
        prompt = self._encode(conversation)
        placeholders = prompt.input_ids.count(self._prompts.placeholder_id)
        if placeholders != len(conversation.audio_turns):
            raise ValueError(
                f"the prompt has {placeholders} audio placeholders for {len(conversation.audio_turns)} "
                "audio turns; does a text contain the audio_locator_tag?"
            )
        if len(prompt.input_ids) != len(prompt.loss_mask):
            raise ValueError(f"{len(prompt.input_ids)} token ids and {len(prompt.loss_mask)} mask entries")
        return prompt


class SampleError(Exception):
    """A failure with the name of the sample it came from."""

    def __init__(self, name: str, error: Exception) -> None:
        super().__init__(f"sample {name!r}: {type(error).__name__}: {error}")


def collate(loaded: Sequence[Loaded], pad_id: int, *, seed: int, epoch: int) -> MicroBatch:
    """Pads examples to one micro-batch.

    Returns:
        A dict of ``audios`` float32 [B_aud, T] right-padded with zeros, ``audio_lens`` int64 [B_aud]
        (samples), ``input_ids`` int64 [B, S] right-padded with `pad_id`, ``loss_mask`` bool [B, S] (False on
        pads), ``text_lens`` int64 [B], ``sample_ids`` list of str (B), ``sample_seeds`` int64 [B] of 31 bits
        from (seed, epoch, sample id), ``is_empty`` False. Rows of ``audios`` follow the placeholders of
        ``input_ids`` row by row; without any audio it is [0, 0].
    """
    audios = [audio for example in loaded for audio in example.audios]
    ids = [example.conversation.id for example in loaded]
    return {
        "audios": pad_rows([torch.from_numpy(np.ascontiguousarray(a)) for a in audios], 0.0, torch.float32),
        "audio_lens": torch.tensor([len(audio) for audio in audios], dtype=torch.int64),
        "input_ids": pad_rows([torch.tensor(e.prompt.input_ids) for e in loaded], pad_id, torch.int64),
        "loss_mask": pad_rows([torch.tensor(e.prompt.loss_mask) for e in loaded], False, torch.bool),
        "text_lens": torch.tensor([len(e.prompt.input_ids) for e in loaded], dtype=torch.int64),
        "sample_ids": ids,
        "sample_seeds": torch.tensor(
            [derive_seed("sample", seed, epoch, name) for name in ids], dtype=torch.int64
        ),
        "is_empty": False,
    }


def pad_rows(rows: Sequence[Tensor], value: float, dtype: torch.dtype) -> Tensor:
    """Returns [N, longest], right-padded; [0, 0] without rows."""
    longest = max((len(row) for row in rows), default=0)
    padded = torch.full((len(rows), longest), value, dtype=dtype)
    for target, row in zip(padded, rows, strict=True):
        target[: len(row)] = row
    return padded
