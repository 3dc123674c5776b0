"""Does a speech LM listen? Its loss on each transcript with the clip's own audio and with another clip's.

A model that ignores audio loses nothing when the audio is exchanged. Clips are exchanged with clips of similar
length, so that length alone cannot give the answer away.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from shoal.data.conversation import AudioTurn, Conversation
from shoal.evaluate.inputs import ConversationLoader
from shoal.speech.prompts import PromptFormatter
from shoal.speech.salm import SALM
from shoal.train.step import to_device


@dataclass(frozen=True)
class ClipLosses:
    """Per conversation: sums of token losses and numbers of supervised tokens, in the order of the input."""

    loss_sums: tuple[float, ...]
    num_tokens: tuple[int, ...]

    @property
    def mean(self) -> float:
        """Loss per supervised token of the whole set."""
        return sum(self.loss_sums) / sum(self.num_tokens)


@dataclass(frozen=True)
class Listening:
    """Loss per token with the own audio, with exchanged audio, and how sure the difference is.

    Attributes:
        own: Mean loss with the clip's own audio.
        exchanged: Mean loss with the audio of another clip.
        low, high: Ends of the bootstrap interval of exchanged - own.
        level: Probability of that interval.
    """

    own: float
    exchanged: float
    low: float
    high: float
    level: float

    @property
    def ratio(self) -> float:
        """exchanged / own; 1 for a model that does not listen."""
        return self.exchanged / self.own

    def __str__(self) -> str:
        return (
            f"loss {self.own:.3f} with its own audio, {self.exchanged:.3f} with another clip's: ratio "
            f"{self.ratio:.2f}, difference {self.exchanged - self.own:.3f} "
            f"({100 * self.level:g} % interval {self.low:.3f} to {self.high:.3f})"
        )


def compare(
    own: ClipLosses, exchanged: ClipLosses, *, num_resamples: int = 10_000, level: float = 0.95, seed: int = 0
) -> Listening:
    """Compares two sets of losses on the same transcripts by a paired bootstrap over clips.

    Each resample draws clips with replacement and takes the difference of the token-weighted means; the interval
    is that of its percentiles (Efron 1979).

    Args:
        own: Losses with the own audio.
        exchanged: Losses of the same conversations with other audio.
        num_resamples: Resamples; the interval's ends have a standard error of about 1 % of its width at 10,000.
        level: Probability of the interval.
        seed: Of the resampling.

    Raises:
        ValueError: The two do not count the same tokens, or there are fewer than two clips.
    """
    if own.num_tokens != exchanged.num_tokens:
        raise ValueError("own and exchanged losses must count the same supervised tokens, clip by clip")
    if len(own.num_tokens) < 2:
        raise ValueError(f"{len(own.num_tokens)} clips: a comparison needs at least 2")
    tokens = np.asarray(own.num_tokens, dtype=np.float64)
    gains = np.asarray(exchanged.loss_sums) - np.asarray(own.loss_sums)
    rng = np.random.default_rng(seed)
    differences = np.empty(num_resamples)
    for index in range(num_resamples):
        drawn = rng.integers(len(tokens), size=len(tokens))
        differences[index] = gains[drawn].sum() / tokens[drawn].sum()
    low, high = np.quantile(differences, [(1 - level) / 2, (1 + level) / 2])
    return Listening(own.mean, exchanged.mean, float(low), float(high), level)


def partners(durations: Sequence[float]) -> list[int]:
    """Returns for each clip another one of similar length; every clip is used once.

    Clips are sorted by length and exchanged with their neighbours, an odd last one in a circle of three.

    Raises:
        ValueError: Fewer than two clips.
    """
    if len(durations) < 2:
        raise ValueError(f"{len(durations)} clips: audio can be exchanged between at least 2")
    order = sorted(range(len(durations)), key=lambda i: (durations[i], i))
    partner = [0] * len(order)
    num_pairs = len(order) // 2
    for pair in range(num_pairs):
        members = order[2 * pair : 2 * pair + 2] if pair < num_pairs - 1 else order[2 * pair :]
        for one, other in zip(members, members[1:] + members[:1], strict=True):
            partner[one] = other
    return partner


def exchange_audio(conversations: Sequence[Conversation]) -> list[Conversation]:
    """Returns the conversations, each with the audio of its partner; each must have one audio turn.

    Raises:
        ValueError: A conversation has no or several audio turns, or there are fewer than two.
    """
    wrong = [c.id for c in conversations if len(c.audio_turns) != 1]
    if wrong:
        raise ValueError(
            f"audio is exchanged between conversations with one audio turn, not {', '.join(wrong[:5])}"
        )
    exchanged = []
    for conversation, other in zip(conversations, partners([c.duration for c in conversations]), strict=True):
        audio = conversations[other].audio_turns[0]
        turns = tuple(
            replace(turn, cut=audio.cut, member=audio.member) if isinstance(turn, AudioTurn) else turn
            for turn in conversation.turns
        )
        exchanged.append(replace(conversation, turns=turns))
    return exchanged


@torch.no_grad()
def clip_losses(
    model: SALM,
    prompts: PromptFormatter,
    conversations: Sequence[Conversation],
    *,
    batch_size: int,
    device: torch.device,
) -> ClipLosses:
    """Returns the loss of each conversation; the model must be in eval mode.

    Raises:
        ValueError: The model is in training mode.
    """
    if model.training:
        raise ValueError("clip_losses in training mode: call model.eval() first")
    loader = ConversationLoader(prompts, model.perception.sampling_rate, prompt_only=False)
    sums: list[float] = []
    tokens: list[int] = []
    for start in range(0, len(conversations), batch_size):
        micro_batch = to_device(loader.load(conversations[start : start + batch_size]), device)
        out = model(micro_batch, mode="loss_per_row")
        sums += out["loss_sum"].tolist()
        tokens += [int(count) for count in out["num_tokens"].tolist()]
    return ClipLosses(tuple(sums), tuple(tokens))


def listens(
    model: SALM,
    prompts: PromptFormatter,
    conversations: Sequence[Conversation],
    *,
    batch_size: int = 8,
    device: torch.device,
) -> Listening:
    """Measures a model on held-out conversations with their own and with exchanged audio.

    Args:
        model: In eval mode, on `device`.
        prompts: Of the model.
        conversations: With one audio turn and a transcript each.
        batch_size: Conversations per batch.
        device: Where the model is.
    """
    own = clip_losses(model, prompts, conversations, batch_size=batch_size, device=device)
    other = clip_losses(model, prompts, exchange_audio(conversations), batch_size=batch_size, device=device)
    return compare(own, other)
