"""Measures a trained speech model on held-out clips: word errors, transcripts, and whether it listens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from shoal.data.conversation import Conversation
from shoal.evaluate.generate import answer, deal, reference_of
from shoal.evaluate.inputs import read_inputs
from shoal.evaluate.listening import Listening, exchange_audio, listens
from shoal.evaluate.metrics import WordErrors, count_word_errors
from shoal.speech.prompts import PromptFormatter
from shoal.speech.salm import SALM
from shoal.train.recipes import load_trained

MIN_CLIPS = 50
MAX_WORD_ERROR_RATE = 0.2  # the untrained starting point hears something already; this it cannot pass
MAX_LOSS_RATIO = 0.8  # of the loss with the clip's own audio to that with another clip's
_BATCH_SIZE = 8
_MAX_NEW_TOKENS = 40
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Evaluation:
    """What a model does on held-out clips; hypotheses are in the order of the references."""

    references: tuple[str, ...]
    hypotheses: tuple[str, ...]
    durations: tuple[float, ...]
    own_audio: WordErrors
    other_audio: WordErrors
    listening: Listening

    @property
    def examples(self) -> list[tuple[str, str]]:
        """Three clips at a quarter, a half and three quarters of the range of lengths: (reference, hypothesis)."""
        order = sorted(range(len(self.durations)), key=lambda index: self.durations[index])
        chosen = [order[len(order) * quarter // 4] for quarter in (1, 2, 3)]
        return [(self.references[index], self.hypotheses[index]) for index in chosen]

    def failures(self) -> list[str]:
        """What speaks against the claim that this model transcribes what it hears; empty when nothing does."""
        ratio = self.listening.own / self.listening.exchanged
        checks = {
            f"only {len(self.references)} held-out clips, not {MIN_CLIPS}": len(self.references) < MIN_CLIPS,
            f"a word error rate of {self.own_audio.rate:.1%}, above {MAX_WORD_ERROR_RATE:.0%}": (
                self.own_audio.rate > MAX_WORD_ERROR_RATE
            ),
            f"own loss / other's loss is {ratio:.2f}, above {MAX_LOSS_RATIO}": ratio > MAX_LOSS_RATIO,
            "the interval of the difference of the losses includes 0": self.listening.low <= 0,
            "another clip's audio gives no more word errors": self.other_audio.rate <= self.own_audio.rate,
        }
        return [message for message, failed in checks.items() if failed]

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain data, for a JSON file."""
        return {
            "wer": self.own_audio.rate,
            "wer_other_audio": self.other_audio.rate,
            "clips": [
                {"text": text, "pred_text": said, "seconds": seconds}
                for text, said, seconds in zip(self.references, self.hypotheses, self.durations, strict=True)
            ],
            "word_errors": asdict(self.own_audio),
            "word_errors_other_audio": asdict(self.other_audio),
            "listening": asdict(self.listening),
        }


def evaluate(run: Path, manifest: Path) -> Evaluation:
    """Evaluate the newest checkpoint of a run on every clip of a cut manifest."""
    model, prompts, _ = load_trained(run)
    conversations = read_inputs(str(manifest))
    references = [str(reference_of(conversation)) for conversation in conversations]
    hypotheses = _transcribe(model, prompts, conversations)
    mistaken = _transcribe(model, prompts, exchange_audio(conversations))
    return Evaluation(
        references=tuple(references),
        hypotheses=tuple(hypotheses),
        durations=tuple(conversation.duration for conversation in conversations),
        own_audio=count_word_errors(references, hypotheses),
        other_audio=count_word_errors(references, mistaken),
        listening=listens(model, prompts, conversations, batch_size=_BATCH_SIZE, device=_CPU),
    )


def _transcribe(model: SALM, prompts: PromptFormatter, conversations: Sequence[Conversation]) -> list[str]:
    """Greedy answers in the order of `conversations`."""
    batches = deal(conversations, _BATCH_SIZE, rank=0, world_size=1)
    groups = answer(
        model,
        prompts,
        conversations,
        batches,
        max_new_tokens=_MAX_NEW_TOKENS,
        eos_ids=prompts.eos_ids,
        device=_CPU,
    )
    texts = {one.index: one.text for group in groups for one in group}
    return [texts[index] for index in range(len(conversations))]
