"""Prompt formats, token by token."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from shoal.data.conversation import AudioTurn, Conversation, TextTurn
from shoal.speech.prompts import FORMATS, PromptFormatter
from shoal.speech.splice import plan
from tests.tiny import tiny_tokenizer

TAG = "<|audio|>"


def talk(*turns: tuple[str, str | None]) -> Conversation:
    """Turns as (role, text); None is a clip."""
    made: list[Any] = [
        AudioTurn(role, SimpleNamespace(duration=1.0)) if text is None else TextTurn(role, text)
        for role, text in turns
    ]
    return Conversation("talk-1", tuple(made))


ASR = talk(("user", "transcribe the"), ("user", None), ("assistant", "cat sat"))
TWO_ANSWERS = talk(
    ("system", "you hear"),
    ("user", None),
    ("user", "what is it"),
    ("assistant", "one two"),
    ("user", "say two"),
    ("assistant", "two"),
)


def shown(prompts: PromptFormatter, conversation: Conversation) -> str:
    """Tokens with [brackets] around the supervised ones."""
    encoded = prompts.encode(conversation)
    tokens = prompts.tokenizer.convert_ids_to_tokens(list(encoded.input_ids))
    pairs = zip(tokens, encoded.loss_mask, strict=True)
    return " ".join(f"[{token}]" if flag else token for token, flag in pairs).replace("\n", "\\n")


def test_plain() -> None:
    prompts = PromptFormatter(tiny_tokenizer(), "plain", TAG)
    assert shown(prompts, ASR) == "transcribe the <|audio|> [cat] [sat] [</s>]"
    assert prompts.eos_ids == (2,)


def test_llama2() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["[INST]", "[/INST]", "<<SYS>>", "<</SYS>>"])
    prompts = PromptFormatter(tokenizer, "llama2", TAG)
    assert shown(prompts, TWO_ANSWERS) == (
        "<s> [INST] <<SYS>> \\n you hear \\n <</SYS>> \\n \\n <|audio|> what is it [/INST] [one] [two] [</s>] "
        "<s> [INST] say two [/INST] [two] [</s>]"
    )
    assert shown(prompts, ASR) == "<s> [INST] transcribe the <|audio|> [/INST] [cat] [sat] [</s>]"


def test_llama3() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"], special_tokens=True)
    prompts = PromptFormatter(tokenizer, "llama3", TAG)
    before = "<s> <|start_header_id|> user <|end_header_id|> \\n \\n transcribe the <|audio|> <|eot_id|>"
    after = "<|start_header_id|> assistant <|end_header_id|> \\n \\n [cat] [sat] [<|eot_id|>]"
    assert shown(prompts, ASR) == f"{before} {after}"
    assert prompts.eos_ids == (2, tokenizer.convert_tokens_to_ids("<|eot_id|>"))


@pytest.mark.parametrize("name", ["chatml", "qwen"])
@pytest.mark.parametrize("own_template", [True, False])
def test_chatml(name: str, own_template: bool) -> None:
    tokenizer = tiny_tokenizer() if own_template else tiny_tokenizer(chat_template=None)
    prompts = PromptFormatter(tokenizer, name, TAG)
    assert shown(prompts, ASR) == (
        "<|im_start|> user \\n transcribe the <|audio|> <|im_end|> \\n "
        "<|im_start|> assistant \\n [cat] [sat] [<|im_end|>] \\n"
    )
    assert prompts.eos_ids == (2, 5)


def test_the_tokenizers_own_template_decides_about_defaults() -> None:
    template = (
        "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nyou hear<|im_end|>\n{% endif %}"
        + FORMATS["chatml"].template
    )
    prompts = PromptFormatter(tiny_tokenizer(chat_template=template), "qwen", TAG)
    assert shown(prompts, ASR).startswith("<|im_start|> system \\n you hear <|im_end|> \\n <|im_start|> user")


def test_whole_conversations_tokenize_as_the_chat_template_does() -> None:
    prompts = PromptFormatter(tiny_tokenizer(), "chatml", TAG)
    messages = [
        {"role": "system", "content": "you hear"},
        {"role": "user", "content": f"{TAG} what is it"},
        {"role": "assistant", "content": "one two"},
        {"role": "user", "content": "say two"},
        {"role": "assistant", "content": "two"},
    ]
    expected = prompts.tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False)
    assert list(prompts.encode(TWO_ANSWERS).input_ids) == expected
    asked = prompts.tokenizer.apply_chat_template(
        messages[:-1], tokenize=True, add_generation_prompt=True, return_dict=False
    )
    assert list(prompts.encode_prompt_only(TWO_ANSWERS).input_ids) == asked


@pytest.mark.parametrize("name", ["plain", "llama2", "chatml"])
@pytest.mark.parametrize("conversation", [ASR, TWO_ANSWERS])
def test_a_prompt_for_generation_is_what_stands_before_the_last_answer(
    name: str, conversation: Conversation
) -> None:
    prompts = PromptFormatter(tiny_tokenizer(), name, TAG)
    whole, asked = prompts.encode(conversation), prompts.encode_prompt_only(conversation)
    length = len(asked.input_ids)
    assert whole.input_ids[:length] == asked.input_ids
    assert not any(asked.loss_mask)
    assert whole.loss_mask[length] and not whole.loss_mask[length - 1]
    answer = conversation.turns[-1].text
    assert prompts.decode(whole.input_ids[length:]) == answer
    question = Conversation("q", conversation.turns[:-1])
    assert prompts.encode_prompt_only(question) == asked


def test_pad_equal_to_eos_hides_nothing() -> None:
    prompts = PromptFormatter(tiny_tokenizer(pad_is_eos=True), "plain", TAG)
    assert prompts.pad_id in prompts.eos_ids
    encoded = prompts.encode(ASR)
    ids = torch.tensor([encoded.input_ids + (prompts.pad_id,) * 2])
    mask = torch.tensor([encoded.loss_mask + (False, False)])
    layout = plan(
        ids,
        mask,
        torch.tensor([len(encoded.input_ids)]),
        torch.tensor([3]),
        placeholder_id=prompts.placeholder_id,
        sample_ids=["a"],
    )
    labelled = layout.labels[layout.labels >= 0].tolist()
    assert prompts.tokenizer.convert_ids_to_tokens(labelled) == ["cat", "sat", "</s>"]


def test_the_tag_is_added_once_behind_the_vocabulary() -> None:
    tokenizer = tiny_tokenizer()
    size = len(tokenizer)
    first = PromptFormatter(tokenizer, "chatml", TAG)
    second = PromptFormatter(tokenizer, "plain", TAG)
    assert first.placeholder_id == second.placeholder_id == size
    assert len(tokenizer) == size + 1
    assert second.eos_ids == (2,)


def byte_level_tokenizer(add_bos: bool) -> Any:
    """A byte-level BPE with merges, as Llama 3 and Qwen have; it may put <s> first by itself."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["transcribe the cat sat on the mat"] * 20, trainer)
    if add_bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


@pytest.mark.parametrize("add_bos", [True, False])
def test_plain_begins_as_the_tokenizer_begins_and_keeps_every_character(add_bos: bool) -> None:
    prompts = PromptFormatter(byte_level_tokenizer(add_bos), "plain", TAG)
    encoded = prompts.encode(talk(("user", "transcribe:"), ("user", None), ("assistant", "Ça va, the cat?")))
    assert (encoded.input_ids[0] == 0) == add_bos
    text = prompts.tokenizer.decode(list(encoded.input_ids))
    assert text == ("<s>" if add_bos else "") + f"transcribe: {TAG}Ça va, the cat?</s>"
    answer = [token for token, flag in zip(encoded.input_ids, encoded.loss_mask, strict=True) if flag]
    assert prompts.tokenizer.decode(answer) == "Ça va, the cat?</s>"
    assert prompts.pad_id == 1


def test_what_the_tokenizer_lacks_is_refused() -> None:
    with pytest.raises(ValueError, match="prompt_format = 'canary': not supported; use one of plain, llama2"):
        PromptFormatter(tiny_tokenizer(), "canary", TAG)
    with pytest.raises(ValueError, match=r"no token '<\|start_header_id\|>'"):
        PromptFormatter(tiny_tokenizer(), "llama3", TAG)
    with pytest.raises(ValueError, match="chat template is of another kind"):
        PromptFormatter(tiny_tokenizer(chat_template="{{ messages }}"), "chatml", TAG)
    with pytest.raises(ValueError, match="audio_locator_tag = ' '"):
        PromptFormatter(tiny_tokenizer(), "plain", " ")
    endless = tiny_tokenizer()
    endless.eos_token = None
    with pytest.raises(ValueError, match="has no eos_token, so an answer would never end"):
        PromptFormatter(endless, "plain", TAG)


def test_a_template_that_loses_a_message_is_refused() -> None:
    lossy = (
        "{% for m in messages if m['role'] != 'system' %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"
    )
    prompts = PromptFormatter(tiny_tokenizer(chat_template=lossy), "chatml", TAG)
    with pytest.raises(ValueError, match="does not show every message of the roles system, user, assistant"):
        prompts.encode(talk(("system", "you hear"), ("user", "the"), ("assistant", "cat")))
