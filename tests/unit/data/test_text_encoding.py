"""Rows become token ids; exactly what the model should say is supervised."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shoal.config.text import TextDatasetConfig
from shoal.data.byte_tokenizer import byte_tokenizer
from shoal.data.conversation import EncodedPrompt
from shoal.data.text_encoding import PlainEncoder, messages_of, row_encoder
from tests.tiny import tiny_tokenizer


def words(encoded: EncodedPrompt, tokenizer: Any, *, supervised: bool) -> str:
    pairs = zip(encoded.input_ids, encoded.loss_mask, strict=True)
    return " ".join(tokenizer.convert_ids_to_tokens([i for i, mask in pairs if mask is supervised]))


def encode(row: dict[str, Any], tokenizer: Any = None, **config: Any) -> tuple[EncodedPrompt, Any]:
    tokenizer = tokenizer or tiny_tokenizer()
    return row_encoder(TextDatasetConfig(path="x", **config), tokenizer)(row), tokenizer


CHAT = {
    "messages": [
        {"role": "system", "content": "say what"},
        {"role": "user", "content": "one cat"},
        {"role": "assistant", "content": "two"},
        {"role": "user", "content": "three"},
        {"role": "assistant", "content": "four dog"},
    ]
}


def test_only_the_assistants_turns_and_their_ends_are_supervised() -> None:
    encoded, tokenizer = encode(CHAT, type="chat")
    assert words(encoded, tokenizer, supervised=True) == "two <|im_end|> four dog <|im_end|>"
    # The whole is what the template renders.
    rendered = tokenizer.apply_chat_template(CHAT["messages"], tokenize=False)
    assert list(encoded.input_ids) == tokenizer(rendered, add_special_tokens=False).input_ids


def test_every_token_may_be_supervised() -> None:
    encoded, _ = encode(CHAT, type="chat", answer_only_loss_mask=False)
    assert all(encoded.loss_mask)


def test_other_spellings_of_messages_and_another_column() -> None:
    row = {"turns": [{"from": "human", "value": "one"}, {"from": "gpt", "value": "two"}]}
    encoded, tokenizer = encode(row, type="chat", messages_column="turns")
    assert words(encoded, tokenizer, supervised=True) == "two <|im_end|>"


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], "at least one message"),
        ("hello", "a list"),
        ([{"role": "user", "content": "a", "tool_calls": [{"name": "f"}]}], "tool_calls"),
        ([{"content": "a"}], "role and content"),
        ([{"role": "user", "content": [{"type": "text"}]}], "content is a list"),
    ],
)
def test_messages_that_are_not_texts_are_refused(messages: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        messages_of(messages)


def test_a_column_that_is_null_everywhere_does_not_count() -> None:
    assert messages_of([{"role": "user", "content": "a", "tool_calls": None, "name": None}])[0].content == "a"


def test_chat_without_a_template_is_refused() -> None:
    with pytest.raises(ValueError, match="dataset.chat_template"):
        encode(CHAT, tiny_tokenizer(chat_template=None), type="chat")


def test_template_from_a_file_and_as_text(tmp_path: Path) -> None:
    text = "{% for m in messages %}{{ m['content'] }}{{ eos_token }}{% endfor %}"
    file = tmp_path / "mine.jinja"
    file.write_text(text)
    bare = tiny_tokenizer(chat_template=None)
    from_text, _ = encode(CHAT, bare, type="chat", chat_template=text)
    from_file, _ = encode(CHAT, bare, type="chat", chat_template=str(file))
    assert from_text == from_file
    assert words(from_text, bare, supervised=True) == "two </s> four dog </s>"


INSTRUCTION = {"c": "the cat", "q": "is it", "a": {"text": ["on", "mat"]}}
MAPPING = {"context": "c", "question": "q", "answer": "a.text.1"}


def test_instruction_with_a_chat_template_is_two_turns() -> None:
    encoded, tokenizer = encode(INSTRUCTION, type="instruction", column_mapping=MAPPING)
    assert words(encoded, tokenizer, supervised=True) == "mat <|im_end|>"


def test_instruction_without_a_template_is_prompt_and_answer() -> None:
    encoded, tokenizer = encode(
        INSTRUCTION, byte_tokenizer(), type="instruction", column_mapping=MAPPING, chat_template="none"
    )
    assert tokenizer.decode(encoded.input_ids) == "the cat\nis it mat<|end|>"
    told = [i for i, mask in zip(encoded.input_ids, encoded.loss_mask, strict=True) if mask]
    assert tokenizer.decode(told) == " mat<|end|>"
    everything, _ = encode(
        INSTRUCTION,
        byte_tokenizer(),
        type="instruction",
        column_mapping=MAPPING,
        chat_template="none",
        answer_only_loss_mask=False,
    )
    assert everything.input_ids == encoded.input_ids and all(everything.loss_mask)


def test_squad_and_hellaswag_rows() -> None:
    squad = {"context": "c", "question": "q", "answers": {"text": [" yes ", "no"], "answer_start": [0, 1]}}
    encoded, tokenizer = encode(squad, byte_tokenizer(), type="squad", chat_template="none")
    assert tokenizer.decode(encoded.input_ids) == "Context: c Question: q Answer: yes<|end|>"
    hellaswag = {"ctx": "He", "endings": ["sits.", "runs."], "label": "1"}
    encoded, tokenizer = encode(hellaswag, byte_tokenizer(), type="hellaswag", chat_template="none")
    assert tokenizer.decode(encoded.input_ids) == "He runs.<|end|>"
    assert sum(encoded.loss_mask) == len(" runs.") + 1


def test_plain_text_ends_and_begins_as_the_tokenizer_says() -> None:
    encoded, tokenizer = encode({"text": "the cat"}, type="text")
    assert words(encoded, tokenizer, supervised=True) == "the cat </s>"  # this tokenizer sets no first token
    whole = PlainEncoder(_with_first_token(), column="text")({"text": "the cat"})
    assert _with_first_token().convert_ids_to_tokens(whole.input_ids) == ["<s>", "the", "cat", "</s>"]


def _with_first_token() -> Any:
    from tokenizers.processors import TemplateProcessing

    tokenizer = tiny_tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.bos_token_id)]
    )
    return tokenizer


@pytest.mark.parametrize(
    ("row", "words"),
    [({"txt": "a"}, "no column 'text'; its columns are txt"), ({"text": 3}, "text is a int")],
)
def test_a_row_of_another_form_is_refused(row: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        encode(row, type="text")


@pytest.mark.parametrize("text", ["", "plain", "tschüß 你好 🐟\n\t \0", " leading", "<|im_start|>"])
def test_byte_tokenizer_is_the_texts_bytes(text: str) -> None:
    tokenizer = byte_tokenizer()
    ids = tokenizer(text, add_special_tokens=False).input_ids
    assert len(ids) == len(text.encode()) and tokenizer.decode(ids) == text
    assert len(tokenizer) == 258 and tokenizer.eos_token_id == 256 and tokenizer.pad_token_id == 257
