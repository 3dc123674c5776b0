"""A row of a text data set becomes token ids and a mask of what is supervised."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from shoal.config.text import TextDatasetConfig
from shoal.data.chat import ChatTemplate, Message
from shoal.data.conversation import ASSISTANT, EncodedPrompt
from shoal.data.text_rows import Row

RowEncoder = Callable[[Row], EncodedPrompt]


class ChatEncoder:
    """Encodes lists of messages with a chat template; the assistant's turns are supervised.

    Args:
        tokenizer: A transformers tokenizer.
        template: Jinja text; None takes the tokenizer's own.
        column: Column of the messages, each with role and content (or from and value).
        answer_only: False supervises every token.
    """

    def __init__(
        self, tokenizer: Any, template: str | None, *, column: str, answer_only: bool = True
    ) -> None:
        self._chat = ChatTemplate(tokenizer, template, key="dataset.chat_template")
        self._column = column
        self._answer_only = answer_only

    @property
    def end_ids(self) -> tuple[int, ...]:
        """The ids that end an answer."""
        return self._chat.end_ids()

    def __call__(self, row: Row) -> EncodedPrompt:
        """Returns the ids of a row and their mask."""
        return self.of_messages(messages_of(_column(row, self._column)))

    def of_messages(self, messages: Sequence[Message]) -> EncodedPrompt:
        """Returns the ids of messages and their mask."""
        encoded = self._chat.encode(messages)
        return encoded if self._answer_only else _all_supervised(encoded.input_ids)

    def prompt(self, messages: Sequence[Message]) -> EncodedPrompt:
        """Returns the ids up to where the assistant's answer begins, for generation; a final answer is left out."""
        asked = [*messages[:-1]] if messages and messages[-1].role == ASSISTANT else list(messages)
        return self._chat.encode([*asked, Message(ASSISTANT, "")], prompt_only=True)


class InstructionEncoder:
    """Encodes context, question and answer: as a chat of two turns, or as prompt and answer without a template.

    Args:
        columns: Gives (context and question, answer) of a row.
        chat: Encodes the two turns; None writes the prompt, a space where it does not end in white space, the
            answer and the end token.
        tokenizer: A transformers tokenizer.
        answer_only: False supervises the prompt too.
    """

    def __init__(
        self,
        columns: Callable[[Row], tuple[str, str]],
        chat: ChatEncoder | None,
        tokenizer: Any,
        *,
        answer_only: bool,
    ) -> None:
        self.columns = columns
        self._chat = chat
        self._plain = PlainEncoder(tokenizer, column="")
        self._answer_only = answer_only

    def __call__(self, row: Row) -> EncodedPrompt:
        """Returns the ids of a row and their mask."""
        prompt, answer = self.columns(row)
        if self._chat is not None:
            return self._chat.of_messages([Message("user", prompt), Message(ASSISTANT, answer)])
        return self._plain.completion(prompt, answer, answer_only=self._answer_only)

    @property
    def end_ids(self) -> tuple[int, ...]:
        """The ids that end an answer, beside the tokenizer's end token."""
        return () if self._chat is None else self._chat.end_ids

    def prompt(self, row: Row) -> EncodedPrompt:
        """Returns the ids up to where the answer begins, for generation."""
        prompt, _ = self.columns(row)
        return (
            self._plain.prompt(prompt) if self._chat is None else self._chat.prompt([Message("user", prompt)])
        )


class PlainEncoder:
    """Encodes a text with the tokenizer's first token, where it sets one, and its end token; all is supervised."""

    def __init__(self, tokenizer: Any, *, column: str) -> None:
        self._tokenizer = tokenizer
        self._column = column
        first = tokenizer("").input_ids[:1]
        self._prefix = tuple(first if first == [tokenizer.bos_token_id] else [])
        end = tokenizer.eos_token_id
        self._suffix = () if end is None else (end,)

    def __call__(self, row: Row) -> EncodedPrompt:
        """Returns the ids of a row and their mask."""
        text = _column(row, self._column)
        return _all_supervised((*self._prefix, *self._ids(_text(text, self._column)), *self._suffix))

    def completion(self, prompt: str, answer: str, *, answer_only: bool) -> EncodedPrompt:
        """Returns prompt and answer, tokenized apart so that the mask is exact."""
        gap = "" if not prompt or prompt[-1].isspace() else " "
        asked = (*self._prefix, *self._ids(prompt))
        told = (*self._ids(gap + answer), *self._suffix)
        mask = (not answer_only,) * len(asked) + (True,) * len(told)
        return EncodedPrompt(asked + told, mask)

    def prompt(self, text: str) -> EncodedPrompt:
        """Returns the ids of a text to continue."""
        ids = (*self._prefix, *self._ids(text))
        return EncodedPrompt(ids, (False,) * len(ids))

    def _ids(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer(text, add_special_tokens=False).input_ids)


def row_encoder(config: TextDatasetConfig, tokenizer: Any) -> RowEncoder:
    """Returns the encoder that a data set's type asks for.

    Raises:
        ValueError: There is no chat template where one is needed.
    """
    if config.type == "text":
        return PlainEncoder(tokenizer, column=config.text_column)
    template = read_template(config.chat_template)
    has_chat = config.chat_template != "none" and (
        template is not None or tokenizer.chat_template is not None
    )
    if config.type == "chat" and not has_chat:
        raise ValueError(
            "dataset.type = 'chat': the tokenizer has no chat template; give dataset.chat_template (a file or "
            "Jinja text)"
        )
    chat = None
    if has_chat:
        answer_only = config.answer_only_loss_mask
        chat = ChatEncoder(tokenizer, template, column=config.messages_column, answer_only=answer_only)
    if config.type == "chat":
        assert chat is not None
        return chat
    columns = _columns_of(config)
    return InstructionEncoder(columns, chat, tokenizer, answer_only=config.answer_only_loss_mask)


def read_template(template: str | None) -> str | None:
    """Returns Jinja text: of the file that is named, or the text itself; None without one."""
    if template in (None, "none"):
        return None
    assert template is not None
    is_file = "{" not in template and Path(template).is_file()
    return Path(template).read_text(encoding="utf-8") if is_file else template


def messages_of(raw: Any) -> list[Message]:
    """Reads messages of ``{role, content}`` or ``{from, value}``.

    Raises:
        ValueError: Something else, such as calls of tools or content that is not a text.
    """
    if not isinstance(raw, Sequence) or isinstance(raw, str) or not raw:
        raise ValueError("messages: a list of at least one message")
    return [_message(item) for item in raw]


_ROLES = {"human": "user", "gpt": ASSISTANT, "bot": ASSISTANT}


def _message(item: Any) -> Message:
    given = {name: value for name, value in dict(item).items() if value not in (None, [])}
    role = given.pop("role", given.pop("from", None))
    content = given.pop("content", given.pop("value", None))
    if role is None or given:
        raise ValueError(
            f"a message has the keys {sorted(dict(item))}; role and content (or from and value) are read"
        )
    return Message(_ROLES.get(role, role), _text(content, "content"))


def _columns_of(config: TextDatasetConfig) -> Callable[[Row], tuple[str, str]]:
    if config.type == "squad":
        return _squad
    if config.type == "hellaswag":
        return _hellaswag
    mapping = config.column_mapping

    def mapped(row: Row) -> tuple[str, str]:
        asked = [
            _text(_column(row, mapping[name]), name) for name in ("context", "question") if name in mapping
        ]
        return "\n".join(part for part in asked if part), _text(_column(row, mapping["answer"]), "answer")

    return mapped


def _squad(row: Row) -> tuple[str, str]:
    answers = row["answers"]["text"]
    prompt = f"Context: {row['context']} Question: {row['question']} Answer: "
    return prompt, answers[0].strip() if answers else ""


def _hellaswag(row: Row) -> tuple[str, str]:
    return _text(row["ctx"], "ctx"), _text(row["endings"][int(row["label"])], "endings").strip()


def _column(row: Row, path: str) -> Any:
    """Returns a column, or what a dotted path (``answers.text.0``) leads to inside it."""
    value: Any = row
    for part in [path] if path in row else path.split("."):
        if isinstance(value, Mapping) and part in value:
            value = value[part]
        elif isinstance(value, Sequence) and part.isdigit() and int(part) < len(value):
            value = value[int(part)]
        else:
            raise ValueError(f"the row has no column {path!r}; its columns are {', '.join(row)}")
    return value


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{name} is a {type(value).__name__}, and a text is read here")
    return value


def _all_supervised(ids: Sequence[int]) -> EncodedPrompt:
    return EncodedPrompt(tuple(ids), (True,) * len(ids))
