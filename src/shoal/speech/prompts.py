"""Prompt formats: a conversation becomes token ids with exactly the assistant's tokens supervised.

A format is a chat template (Jinja), see `shoal.data.chat`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from shoal.data.chat import ChatTemplate, Message, pad_id_of
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
        tokenizer.add_tokens([audio_locator_tag], special_tokens=True)
        self.placeholder_id: int = tokenizer.convert_tokens_to_ids(audio_locator_tag)
        self.pad_id: int = pad_id_of(tokenizer)
        template = self._choose_template(prompt_format)
        self._chat = ChatTemplate(
            tokenizer, template, key="model.prompt_format", not_an_end=(audio_locator_tag,)
        )
        # The tokenizer's own habit decides about a first token where the format says nothing about it.
        self._prefix = tokenizer("").input_ids[:1] if prompt_format == "plain" else []
        if self._prefix != [tokenizer.bos_token_id]:
            self._prefix = []
        if "eos_token" in template and tokenizer.eos_token_id is None:
            raise ValueError(
                f"model.prompt_format = {prompt_format!r}: the tokenizer has no eos_token, so an answer "
                "would never end; use a tokenizer that has one"
            )
        self.eos_ids = self._chat.end_ids()

    def encode(self, conversation: Conversation) -> EncodedPrompt:
        """Returns the whole conversation; supervised are the assistant's texts with their end tokens."""
        return self._encode(_messages(conversation, self.audio_locator_tag), prompt_only=False)

    def encode_prompt_only(self, conversation: Conversation) -> EncodedPrompt:
        """Returns the conversation up to where the assistant's final answer begins; nothing is supervised."""
        messages = _messages(conversation, self.audio_locator_tag)
        if messages and messages[-1].role == ASSISTANT:
            messages.pop()
        return self._encode([*messages, Message(ASSISTANT, "")], prompt_only=True)

    def decode(self, tokens: Sequence[int]) -> str:
        """Returns the text of generated tokens without special ones."""
        text: str = self.tokenizer.decode(list(tokens), skip_special_tokens=True)
        return text.strip()

    def _encode(self, messages: list[Message], *, prompt_only: bool) -> EncodedPrompt:
        encoded = self._chat.encode(messages, prompt_only=prompt_only, prefix=self._prefix)
        pairs = zip(encoded.input_ids, encoded.loss_mask, strict=True)
        mask = tuple(supervised and token != self.placeholder_id for token, supervised in pairs)
        return EncodedPrompt(encoded.input_ids, mask)

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


def _messages(conversation: Conversation, tag: str) -> list[Message]:
    """Turns become messages; consecutive turns of a role are joined by a space, audio as its tag."""
    texts = (
        (turn.role, tag if isinstance(turn, AudioTurn) else turn.text)
        for turn in conversation.turns
        if isinstance(turn, AudioTurn) or turn.text
    )
    return [
        Message(role, " ".join(text for _, text in turns))
        for role, turns in groupby(texts, key=lambda t: t[0])
    ]
