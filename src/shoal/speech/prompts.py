"""Prompt formats: a conversation becomes token ids with exactly the assistant's tokens supervised.

A format is a chat template (Jinja). It is rendered with marks in place of the messages, so that the template
decides what stands around them and the mask never depends on how a tokenizer splits a string: supervised and
other text are tokenized apart, and a prompt for generation is always a prefix of the training example.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from shoal.data.conversation import ASSISTANT, AudioTurn, Conversation, EncodedPrompt

_PLAIN = (
    "{% for m in messages %}{{ m['content'] }}"
    "{% if m['role'] == 'assistant' %}{{ eos_token }}{% endif %}"
    "{% endfor %}"
)
_LLAMA2 = (
    "{% for m in messages %}"
    "{% if m['role'] == 'system' %}{{ bos_token }}[INST] <<SYS>>\n{{ m['content'] }}\n<</SYS>>\n\n"
    "{% elif m['role'] == 'user' %}"
    "{% if loop.first or loop.previtem['role'] != 'system' %}{{ bos_token }}[INST] {% endif %}"
    "{{ m['content'] }} [/INST]"
    "{% else %}{{ m['content'] }}{{ eos_token }}{% endif %}"
    "{% endfor %}"
)
_LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}"
    "<|start_header_id|>{{ m['role'] }}<|end_header_id|>\n\n{{ m['content'] }}<|eot_id|>"
    "{% endfor %}"
)
_CHATML = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"


@dataclass(frozen=True)
class PromptFormat:
    """A built-in format.

    Attributes:
        template: Jinja text over `messages`, `bos_token` and `eos_token`.
        markers: Strings that must be single tokens of the tokenizer.
        own_template: Whether the tokenizer's chat template, where it has one, replaces `template`; it must
            then use the same markers.
    """

    template: str
    markers: tuple[str, ...] = ()
    own_template: bool = False


FORMATS = {
    "plain": PromptFormat(_PLAIN),
    "llama2": PromptFormat(_LLAMA2),
    "llama3": PromptFormat(_LLAMA3, ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")),
    "chatml": PromptFormat(_CHATML, ("<|im_start|>", "<|im_end|>"), own_template=True),
    "qwen": PromptFormat(_CHATML, ("<|im_start|>", "<|im_end|>"), own_template=True),
}

_MARK = re.compile("\ue000(\\d+)\ue001")  # private-use characters, which no template trims or interprets


@dataclass(frozen=True)
class _Message:
    role: str
    content: str


class PromptFormatter:
    """Encodes conversations for one tokenizer and one format; the `PromptEncoder` of the data part.

    The locator tag is added to the tokenizer as a special token; the embedding table keeps its size, because
    the tag's id is replaced before it is looked up. Padding is told from text by lengths alone, so a pad id
    equal to the end token hides nothing.

    Args:
        tokenizer: A transformers tokenizer; it is changed (the tag is added).
        prompt_format: A key of `FORMATS`.
        audio_locator_tag: Text that stands for one clip.

    Raises:
        ValueError: Unknown format, or the tokenizer lacks what the format needs.
    """

    def __init__(self, tokenizer: Any, prompt_format: str, audio_locator_tag: str) -> None:
        if prompt_format not in FORMATS:
            raise ValueError(
                f"model.prompt_format = {prompt_format!r}: not supported; use one of {', '.join(FORMATS)}"
            )
        if not audio_locator_tag.strip():
            raise ValueError(
                f"model.audio_locator_tag = {audio_locator_tag!r}: write a tag such as <|audio|>"
            )
        self.tokenizer = tokenizer
        self.audio_locator_tag = audio_locator_tag
        special = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
        self._end_tokens = tuple(sorted(special.union(tokenizer.all_special_tokens) - {audio_locator_tag}))
        tokenizer.add_tokens([audio_locator_tag], special_tokens=True)
        self.placeholder_id: int = tokenizer.convert_tokens_to_ids(audio_locator_tag)
        self.pad_id: int = _first(tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id, 0)
        self._template = self._choose_template(prompt_format)
        # The tokenizer's own habit decides about a first token where the format says nothing about it.
        self._prefix = tokenizer("").input_ids[:1] if prompt_format == "plain" else []
        if self._prefix != [tokenizer.bos_token_id]:
            self._prefix = []
        self.eos_ids = self._find_eos_ids(prompt_format)

    def encode(self, conversation: Conversation) -> EncodedPrompt:
        """Returns the whole conversation; supervised are the assistant's texts with their end tokens."""
        return self._encode(_messages(conversation, self.audio_locator_tag), prompt_only=False)

    def encode_prompt_only(self, conversation: Conversation) -> EncodedPrompt:
        """Returns the conversation up to where the assistant's final answer begins; nothing is supervised."""
        messages = _messages(conversation, self.audio_locator_tag)
        if messages and messages[-1].role == ASSISTANT:
            messages.pop()
        return self._encode([*messages, _Message(ASSISTANT, "")], prompt_only=True)

    def decode(self, tokens: Sequence[int]) -> str:
        """Returns the text of generated tokens without special ones."""
        text: str = self.tokenizer.decode(list(tokens), skip_special_tokens=True)
        return text.strip()

    def _encode(self, messages: list[_Message], *, prompt_only: bool) -> EncodedPrompt:
        pieces = list(self._pieces(messages))
        if prompt_only:
            pieces = pieces[: max(i for i, (_, supervised) in enumerate(pieces) if supervised)]
        ids: list[int] = list(self._prefix)
        mask = [False] * len(ids)
        for supervised, run in groupby(pieces, key=lambda piece: piece[1]):
            tokens = self._tokenize("".join(text for text, _ in run))
            ids += tokens
            mask += [supervised and not prompt_only and token != self.placeholder_id for token in tokens]
        return EncodedPrompt(tuple(ids), tuple(mask))

    def _tokenize(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer(text, add_special_tokens=False).input_ids
        return ids

    def _pieces(self, messages: list[_Message]) -> Iterator[tuple[str, bool]]:
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
                "answer would never end; use another model.prompt_format"
            )
        return min(ends)[1]

    def _choose_template(self, prompt_format: str) -> str:
        chosen = FORMATS[prompt_format]
        unknown = self.tokenizer.unk_token_id
        for marker in chosen.markers:
            if self.tokenizer.convert_tokens_to_ids(marker) in (None, unknown):
                raise ValueError(
                    f"model.prompt_format = {prompt_format!r}: the tokenizer has no token {marker!r}; use "
                    "the format the LLM was trained with, or plain"
                )
        own = self.tokenizer.chat_template if chosen.own_template else None
        if own and not all(marker in own for marker in chosen.markers):
            raise ValueError(
                f"model.prompt_format = {prompt_format!r}: the tokenizer's chat template is of another kind "
                f"(it has no {' and '.join(chosen.markers)}); use the format the LLM was trained with"
            )
        return own or chosen.template

    def _find_eos_ids(self, prompt_format: str) -> tuple[int, ...]:
        """Returns the ids that end an answer: the format's end of turn and the tokenizer's end token."""
        if "eos_token" in self._template and self.tokenizer.eos_token_id is None:
            raise ValueError(
                f"model.prompt_format = {prompt_format!r}: the tokenizer has no eos_token, so an answer "
                "would never end; use a tokenizer that has one"
            )
        probe = list(self._pieces([_Message("user", "a"), _Message(ASSISTANT, "")]))
        ending = next(text for text, supervised in probe if supervised)
        ids = (self._tokenize(ending)[-1], self.tokenizer.eos_token_id)
        return tuple(sorted({token for token in ids if token is not None}))


def _messages(conversation: Conversation, tag: str) -> list[_Message]:
    """Turns become messages; consecutive turns of a role are joined by a space, audio as its tag."""
    texts = (
        (turn.role, tag if isinstance(turn, AudioTurn) else turn.text)
        for turn in conversation.turns
        if isinstance(turn, AudioTurn) or turn.text
    )
    return [
        _Message(role, " ".join(text for _, text in turns))
        for role, turns in groupby(texts, key=lambda t: t[0])
    ]


def _first(*values: int | None) -> int:
    return next(value for value in values if value is not None)
