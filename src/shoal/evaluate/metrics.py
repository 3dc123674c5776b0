"""Word errors as exact corpus counts, which add up over clips, batches and ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass

import jiwer
import torch
from torch.distributed import ProcessGroup
from transformers.models.whisper.english_normalizer import BasicTextNormalizer, EnglishTextNormalizer

from shoal.mesh.collectives import all_reduce_sum


@dataclass(frozen=True)
class WordErrors:
    """Counts of an alignment of hypotheses with references, in words."""

    hits: int = 0
    substitutions: int = 0
    deletions: int = 0
    insertions: int = 0

    def __add__(self, other: WordErrors) -> WordErrors:
        return WordErrors(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    @property
    def num_words(self) -> int:
        """Words of the references."""
        return self.hits + self.substitutions + self.deletions

    @property
    def rate(self) -> float:
        """The word error rate; NaN without a reference word."""
        errors = self.substitutions + self.deletions + self.insertions
        return errors / self.num_words if self.num_words else math.nan

    def summed(self, group: ProcessGroup | None, device: torch.device) -> WordErrors:
        """Returns the sum over all ranks of `group`; collective."""
        counts = torch.tensor(astuple(self), dtype=torch.int64, device=device)
        return WordErrors(*all_reduce_sum(counts, group).tolist())

    def __str__(self) -> str:
        return (
            f"{100 * self.rate:.2f} % of {self.num_words} words ({self.insertions} inserted, "
            f"{self.deletions} deleted, {self.substitutions} substituted)"
        )


def count_word_errors(references: Sequence[str], hypotheses: Sequence[str]) -> WordErrors:
    """Aligns each hypothesis with its reference, word by word, at least edit distance.

    Raises:
        ValueError: The numbers of references and hypotheses differ.
    """
    if len(references) != len(hypotheses):
        raise ValueError(f"{len(references)} references for {len(hypotheses)} hypotheses")
    if not references:
        return WordErrors()
    found = jiwer.process_words(list(references), list(hypotheses))
    return WordErrors(found.hits, found.substitutions, found.deletions, found.insertions)


def text_normaliser(name: str) -> Callable[[str], str]:
    """Returns what is applied to both texts before their words are compared.

    Args:
        name: "english" is Whisper's English normaliser (numbers, contractions, titles; without its table of
            British spellings, which ships with a tokenizer), "basic" lower-cases and drops punctuation, "none"
            changes nothing.

    Raises:
        ValueError: Another name.
    """
    if name == "english":
        return _stripped(EnglishTextNormalizer({}))  # type: ignore[no-untyped-call]
    if name == "basic":
        return _stripped(BasicTextNormalizer())
    if name == "none":
        return str
    raise ValueError(f"use_normalizer = {name!r}: use english, basic or none")


def _stripped(normalise: Callable[[str], str]) -> Callable[[str], str]:
    return lambda text: normalise(text).strip()
