"""Chat templates with exact masks: which part of a rendered conversation each message is.

A template is rendered with marks in place of the messages, so that the template decides what stands around them
and the mask never depends on how a tokenizer splits a string: supervised and other text are tokenized apart, and
a prompt for generation is always a prefix of the training example.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from shoal.data.conversation import ASSISTANT, EncodedPrompt

_MARK = re.compile("\ue000(\\d+)\ue001")  # private-use characters, which no template trims or interprets


@dataclass(frozen=True)
class Message:
    """One turn of a chat; `role` is system, user, assistant or whatever else the template knows."""

    role: str
    content: str


class ChatTemplate:
    """Renders and tokenizes messages with one tokenizer and one template.

    Args:
        tokenizer: A transformers tokenizer.
        template: Jinja text; None takes the tokenizer's own.
        key: Key of the configuration that chose the template, for messages.
        not_an_end: Special tokens that never end a turn.
    """

    def __init__(
        self, tokenizer: Any, template: str | None, *, key: str, not_an_end: Sequence[str] = ()
    ) -> None:
        self.tokenizer = tokenizer
        self._template = template
        self._key = key
        special = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
        self._end_tokens = tuple(sorted(special.union(tokenizer.all_special_tokens) - set(not_an_end)))

    def encode(
        self, messages: Sequence[Message], *, prompt_only: bool = False, prefix: Sequence[int] = ()
    ) -> EncodedPrompt:
        """Returns the token ids; supervised are the assistant's texts with their end tokens.

        Args:
            messages: In order. With `prompt_only` the last one must be the assistant's; it is left out.
            prompt_only: Stops where the last assistant's text begins; nothing is supervised then.
            prefix: Ids in front, never supervised.

        Raises:
            ValueError: The template does not show every message once, or ends no turn by a special token.
        """
        pieces = list(self.pieces(messages))
        if prompt_only:
            pieces = pieces[: max(i for i, (_, supervised) in enumerate(pieces) if supervised)]
        ids = list(prefix)
        mask = [False] * len(ids)
        for supervised, run in groupby(pieces, key=lambda piece: piece[1]):
            tokens = self.tokenize("".join(text for text, _ in run))
            ids += tokens
            mask += [supervised and not prompt_only] * len(tokens)
        return EncodedPrompt(tuple(ids), tuple(mask))

    def tokenize(self, text: str) -> list[int]:
        """Returns the ids of a text without the tokens that a tokenizer adds around it."""
        ids: list[int] = self.tokenizer(text, add_special_tokens=False).input_ids
        return ids

    def pieces(self, messages: Sequence[Message]) -> Iterator[tuple[str, bool]]:
        """Yields (text, supervised) in order; an assistant's message and its end token are one piece."""
        marked = [{"role": m.role, "content": f"\ue000{i}\ue001"} for i, m in enumerate(messages)]
        rendered: str = self.tokenizer.apply_chat_template(
            marked, chat_template=self._template, tokenize=False, add_generation_prompt=False
        )
        parts = _MARK.split(rendered)
        if [int(index) for index in parts[1::2]] != list(range(len(messages))):
            roles = ", ".join(m.role for m in messages)
            raise ValueError(
                f"the chat template does not show every message of the roles {roles} once, in order"
            )
        yield parts[0], False
        for index, after in zip(parts[1::2], parts[2::2], strict=True):
            message = messages[int(index)]
            end = self._end_of_turn(after) if message.role == ASSISTANT else 0
            yield message.content + after[:end], message.role == ASSISTANT
            yield after[end:], False

    def _end_of_turn(self, after: str) -> int:
        """Returns where the first special token of `after` ends."""
        ends = [
            (after.index(token), after.index(token) + len(token))
            for token in self._end_tokens
            if token in after
        ]
        if not ends:
            raise ValueError(
                f"the chat template ends an assistant turn by {after!r}, without a special token, so an "
                f"answer would never end; use another {self._key}"
            )
        return min(ends)[1]

    def end_ids(self) -> tuple[int, ...]:
        """Returns the ids that end an answer: the template's end of turn and the tokenizer's end token."""
        probe = list(self.pieces([Message("user", "a"), Message(ASSISTANT, "")]))
        ending = next(text for text, supervised in probe if supervised)
        ids = (self.tokenize(ending)[-1], self.tokenizer.eos_token_id)
        return tuple(sorted({token for token in ids if token is not None}))


def pad_id_of(tokenizer: Any) -> int:
    """Returns the id on padded positions: the tokenizer's, else one that every tokenizer has."""
    candidates = (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id, 0)
    return next(value for value in candidates if value is not None)
