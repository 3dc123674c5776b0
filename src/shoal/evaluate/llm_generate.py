"""``shoal generate`` with a language model: continues prompts, in batches of similar length."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shoal.config.evaluate import GenerateConfig
from shoal.config.text import TextDatasetConfig
from shoal.data.chat import Message, pad_id_of
from shoal.data.conversation import ASSISTANT
from shoal.data.text_encoding import ChatEncoder, InstructionEncoder, PlainEncoder, messages_of, row_encoder
from shoal.data.text_rows import Row, open_rows
from shoal.evaluate.generate import answer_lengths
from shoal.evaluate.llm import input_set, open_llm
from shoal.mesh.collectives import all_gather_objects
from shoal.mesh.init import DistInfo
from shoal.train.llm_trained import TrainedLM


@dataclass(frozen=True)
class Prompt:
    """A prompt: what is shown of it in the output, its token ids, and the ids that end an answer."""

    shown: Any
    input_ids: tuple[int, ...]
    end_ids: tuple[int, ...]


def run_llm_generation(config: GenerateConfig) -> int:
    """Continues `prompt`, or every row of `inputs`; writes JSON lines of prompt and pred_text.

    Returns:
        The exit status, 0.

    Raises:
        ValueError: The model or the inputs are refused; on every rank.
    """
    session, trained = open_llm(config)
    if trained.tokenizer is None:
        raise ValueError(
            f"pretrained_name = {config.pretrained_name!r}: has no tokenizer, so it has no prompts"
        )
    prompts = _prompts(config, trained)
    start = time.monotonic()
    mine, error = _answered(config, trained, prompts, session)
    group = dist.group.WORLD if session.world_size > 1 else None
    shares = all_gather_objects((mine, error), group)
    errors = [text for _, text in shares if text is not None]
    if errors:
        raise ValueError("\n".join(errors))
    if session.rank == 0:
        answers = dict(sorted(item for share, _ in shares for item in share.items()))
        rows = [{"prompt": prompts[index].shown, "pred_text": text} for index, (text, _) in answers.items()]
        _write(config, rows)
        num_tokens, seconds = sum(count for _, count in answers.values()), time.monotonic() - start
        print(f"{num_tokens} tokens in {seconds:.1f} s, {num_tokens / seconds:.1f} tokens/s")
    return 0


def _answered(
    config: GenerateConfig, trained: TrainedLM, prompts: Sequence[Prompt], session: DistInfo
) -> tuple[dict[int, tuple[str, int]], str | None]:
    """This rank's answers by index, with their tokens; a failure travels instead of being raised."""
    order = sorted(range(len(prompts)), key=lambda index: (-len(prompts[index].input_ids), index))
    size = config.batch_size
    batches = [order[start : start + size] for start in range(0, len(order), size)]
    found: dict[int, tuple[str, int]] = {}
    try:
        for batch in batches[session.rank :: session.world_size]:
            found |= dict(
                zip(batch, _continue(config, trained, [prompts[i] for i in batch], session), strict=True)
            )
    except Exception as error:
        return {}, f"rank {session.rank}: {type(error).__name__}: {error}"
    return found, None


@torch.no_grad()
def _continue(
    config: GenerateConfig, trained: TrainedLM, prompts: Sequence[Prompt], session: DistInfo
) -> list[tuple[str, int]]:
    """Greedy continuations of a batch: their texts and numbers of tokens."""
    pad, longest = pad_id_of(trained.tokenizer), max(len(prompt.input_ids) for prompt in prompts)
    rows = [[pad] * (longest - len(prompt.input_ids)) + list(prompt.input_ids) for prompt in prompts]
    mask = [[0] * (longest - len(p.input_ids)) + [1] * len(p.input_ids) for p in prompts]
    end_ids = list(prompts[0].end_ids)
    llm: Any = trained.model.llm
    output = llm.generate(
        input_ids=torch.tensor(rows, device=session.device),
        attention_mask=torch.tensor(mask, device=session.device),
        max_new_tokens=config.max_new_tokens,
        eos_token_id=end_ids or None,
        pad_token_id=pad,
        do_sample=False,
    )[:, longest:]
    lengths = answer_lengths(output, end_ids) if end_ids else [output.shape[1]] * len(prompts)
    return [
        (trained.tokenizer.decode(row[:length], skip_special_tokens=True).strip(), length)
        for row, length in zip(output.tolist(), lengths, strict=True)
    ]


def _prompts(config: GenerateConfig, trained: TrainedLM) -> list[Prompt]:
    """Prompts from the command line or from a file, as the model was trained to see them."""
    if (config.prompt is None) == (config.inputs is None):
        raise ValueError("prompt, inputs: give exactly one of a text and a file")
    tokenizer = trained.tokenizer
    if config.prompt is not None:
        is_chat = tokenizer.chat_template is not None and config.input_type in (None, "chat")
        dataset = TextDatasetConfig(path="", type="chat" if is_chat else "text")
        rows: list[Row] = [
            {"messages": [{"role": "user", "content": config.prompt}]} if is_chat else {"text": config.prompt}
        ]
    else:
        assert config.inputs is not None
        dataset = input_set(config, config.inputs)
        if dataset.type == "tokens":
            raise ValueError(f"inputs = {config.inputs!r}: a corpus of tokens has no prompts; give texts")
        opened = open_rows(dataset, "inputs")
        rows = [opened[index] for index in range(len(opened))]
    encoder: Any = row_encoder(dataset, tokenizer)
    return [_prompt(config, dataset, encoder, tokenizer, row) for row in rows]


def _prompt(
    config: GenerateConfig, dataset: TextDatasetConfig, encoder: Any, tokenizer: Any, row: Row
) -> Prompt:
    end = () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)
    if isinstance(encoder, ChatEncoder):
        messages = messages_of(row[dataset.messages_column])
        if config.system_prompt is not None and messages[0].role != "system":
            messages = [Message("system", config.system_prompt), *messages]
        shown = [
            {"role": m.role, "content": m.content}
            for m in messages
            if m is not messages[-1] or m.role != ASSISTANT
        ]
        return Prompt(shown, encoder.prompt(messages).input_ids, encoder.end_ids)
    if isinstance(encoder, InstructionEncoder):
        prompt, _ = encoder.columns(row)
        return Prompt(prompt, encoder.prompt(row).input_ids, encoder.end_ids or end)
    assert isinstance(encoder, PlainEncoder)
    return Prompt(row[dataset.text_column], encoder.prompt(row[dataset.text_column]).input_ids, end)


def _write(config: GenerateConfig, rows: Sequence[dict[str, Any]]) -> None:
    if config.verbose:
        for row in rows:
            print(f"{row['prompt']}\n  {row['pred_text']}", flush=True)
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    Path(config.output_manifest).parent.mkdir(parents=True, exist_ok=True)
    Path(config.output_manifest).write_text(text, encoding="utf-8")
