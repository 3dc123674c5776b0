"""Conversations: what a training example is before anything is decoded or tokenized.

Everything here is metadata, small and picklable: the sampler composes micro-batches of conversations, and
only the worker that loads a micro-batch opens an audio file.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

from shoal.data.tar import TarMember

if TYPE_CHECKING:  # lhotse takes half a second to import, and a text-only run needs none of it
    from lhotse.cut import Cut

ASSISTANT = "assistant"
"""The role whose text is supervised."""


@dataclass(frozen=True)
class TextTurn:
    """A turn of text; `role` is one of system, user, assistant."""

    role: str
    text: str


@dataclass(frozen=True)
class AudioTurn:
    """A turn of audio: a lhotse cut whose samples are read later.

    Args:
        role: Who speaks: user, or assistant.
        cut: Where the audio is, with start and duration in seconds.
        text: The transcript, where there is one.
        member: The member of a tar archive that holds the recording; None for audio that the cut itself
            names.
    """

    role: str
    cut: Cut
    text: str | None = None
    member: TarMember | None = None


@dataclass(frozen=True)
class Conversation:
    """One example: turns in order, with a name that is unique in its source."""

    id: str
    turns: tuple[TextTurn | AudioTurn, ...]
    tags: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def audio_turns(self) -> tuple[AudioTurn, ...]:
        """Returns the turns that are audio, in order; each becomes one row of ``audios``."""
        return tuple(turn for turn in self.turns if isinstance(turn, AudioTurn))

    @property
    def duration(self) -> float:
        """Returns the seconds of audio in all turns together."""
        return float(sum(turn.cut.duration for turn in self.audio_turns))

    @property
    def longest_audio(self) -> float:
        """Returns the seconds of the longest audio turn, to which its batch is padded; 0 without audio."""
        return float(max((turn.cut.duration for turn in self.audio_turns), default=0.0))

    @property
    def has_target(self) -> bool:
        """Returns whether some assistant turn has text, without which nothing is supervised."""
        return any(isinstance(t, TextTurn) and t.role == ASSISTANT and t.text for t in self.turns)

    def audio_tokens(self, token_equivalent_duration: float) -> int:
        """Returns how many positions of the language model the audio takes.

        Each turn takes ceil(duration / token_equivalent_duration), at least one. Rounding up keeps a budget
        in tokens an upper bound, whatever the encoder does with the last partial frame.
        """
        return sum(
            max(1, math.ceil(turn.cut.duration / token_equivalent_duration - 1e-6))
            for turn in self.audio_turns
        )


@dataclass(frozen=True)
class EncodedPrompt:
    """Token ids of a conversation, one placeholder id per audio turn, and which ids are supervised."""

    input_ids: tuple[int, ...]
    loss_mask: tuple[bool, ...]


class PromptEncoder(Protocol):
    """Turns a conversation into token ids; implemented by the speech part, used here only through this."""

    @property
    def placeholder_id(self) -> int:
        """The id that stands for one audio turn."""

    @property
    def pad_id(self) -> int:
        """The id on padded positions."""

    def encode(self, conversation: Conversation) -> EncodedPrompt:
        """Returns the whole conversation, its assistant turns supervised."""

    def encode_prompt_only(self, conversation: Conversation) -> EncodedPrompt:
        """Returns the conversation up to and without the final assistant turn, for generation."""


def token_count(conversation: Conversation, prompts: PromptEncoder, token_equivalent_duration: float) -> int:
    """Returns the length of a conversation in positions of the language model: text plus audio tokens.

    Each audio turn is one placeholder among the text ids, replaced by its audio tokens.
    """
    text_ids = len(prompts.encode(conversation).input_ids) - len(conversation.audio_turns)
    return text_ids + conversation.audio_tokens(token_equivalent_duration)
