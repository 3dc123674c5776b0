"""``shoal evaluate`` and ``shoal generate``: a trained model, a manifest, and what came out, as JSON lines.

Under a launcher each rank holds the whole model and answers its own share once.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from shoal.config.evaluate import EvaluateConfig, GenerateConfig
from shoal.data.conversation import ASSISTANT, Conversation, TextTurn
from shoal.evaluate.generate import Answer, answer, deal, reference_of
from shoal.evaluate.inputs import read_inputs
from shoal.evaluate.metrics import WordErrors, count_word_errors, text_normaliser
from shoal.mesh.collectives import all_gather_objects
from shoal.mesh.init import initialize_distributed
from shoal.models.meta import cast_stored
from shoal.speech.prompts import PromptFormatter
from shoal.speech.salm import SALM
from shoal.train.trained import load_trained


@dataclass(frozen=True)
class Session:
    """A model ready to answer on this rank."""

    model: SALM
    prompts: PromptFormatter
    device: torch.device
    rank: int
    world_size: int

    @property
    def group(self) -> ProcessGroup | None:
        """All ranks, or None for a single process."""
        return dist.group.WORLD if self.world_size > 1 else None


@dataclass
class Share:
    """What one rank answered; errors travel instead of being raised, so that all ranks stop together."""

    answers: list[Answer] = field(default_factory=list)
    seconds: float = 0.0
    error: str | None = None


def run_evaluation(config: EvaluateConfig, *, allow_commands: bool = False) -> int:
    """Answers a manifest that has transcripts; prints the word error rate, writes id, text and pred_text.

    Args:
        config: Arguments of the command.
        allow_commands: Whether cuts may name programs or addresses as their audio.

    Returns:
        The exit status, 0.

    Raises:
        ValueError: The model or the inputs are refused, or an example has no transcript; on every rank.
    """
    conversations = _read(config, allow_commands)
    references = [reference_of(conversation) for conversation in conversations]
    missing = [c.id for c, text in zip(conversations, references, strict=True) if not text]
    if missing:
        raise ValueError(
            f"inputs = {config.inputs!r}: {len(missing)} examples have no transcript to compare with "
            f"({', '.join(missing[:5])}, ...); use shoal generate for them"
        )
    session = _open(config)
    normalise = text_normaliser(config.use_normalizer)

    def show(one: Answer) -> str:
        return f"{conversations[one.index].id}\n  text: {references[one.index]}\n  pred: {one.text}"

    share = _answer_share(session, config, conversations, show)
    errors = count_word_errors(
        [normalise(str(references[one.index])) for one in share.answers],
        [normalise(one.text) for one in share.answers],
    )
    answers, seconds = _gathered(session, share)
    total: WordErrors = errors.summed(session.group, session.device)
    if session.rank == 0:
        rows = [
            {
                "id": conversations[one.index].id,
                "duration": round(conversations[one.index].duration, 3),
                "text": references[one.index],
                "pred_text": one.text,
            }
            for one in answers
        ]
        _write(config.output_manifest, rows)
        audio_seconds = sum(conversation.duration for conversation in conversations)
        print(f"WER  {total}")
        print(f"RTFx {audio_seconds / seconds:.2f} ({audio_seconds:.1f} s of audio in {seconds:.1f} s)")
    return 0


def run_generation(config: GenerateConfig, *, allow_commands: bool = False) -> int:
    """Answers a manifest; writes each conversation with the answer appended, prints tokens per second.

    Args:
        config: Arguments of the command.
        allow_commands: Whether cuts may name programs or addresses as their audio.

    Returns:
        The exit status, 0.

    Raises:
        ValueError: The model or the inputs are refused; on every rank.
    """
    conversations = _read(config, allow_commands)
    session = _open(config)
    share = _answer_share(
        session, config, conversations, lambda one: f"{conversations[one.index].id}\n  {one.text}"
    )
    answers, seconds = _gathered(session, share)
    if session.rank == 0:
        _write(config.output_manifest, [answered(conversations[one.index], one.text) for one in answers])
        num_tokens = sum(one.num_tokens for one in answers)
        print(f"{num_tokens} tokens in {seconds:.1f} s, {num_tokens / seconds:.1f} tokens/s")
    return 0


def answered(conversation: Conversation, text: str) -> dict[str, Any]:
    """Returns the JSON object of a conversation whose final answer is replaced by `text`."""
    turns = list(conversation.turns)
    if reference_of(conversation) is not None:
        turns.pop()
    shown: list[dict[str, Any]] = []
    for turn in turns:
        if isinstance(turn, TextTurn):
            shown.append({"from": turn.role, "value": turn.text, "type": "text"})
        else:
            source = turn.member.name if turn.member else turn.cut.recording.sources[0].source
            duration = round(turn.cut.duration, 3)
            shown.append({"from": turn.role, "value": source, "type": "audio", "duration": duration})
    shown.append({"from": ASSISTANT, "value": text, "type": "text"})
    return {"id": conversation.id, "conversations": shown}


def _read(config: GenerateConfig, allow_commands: bool) -> list[Conversation]:
    if config.inputs is None:
        raise ValueError("inputs: not given; name a manifest to answer")
    for key in ("prompt", "input_type", "seq_length"):
        if getattr(config, key) is not None:
            raise ValueError(
                f"{key} = {getattr(config, key)!r}: for language models; a speech model reads inputs"
            )
    return read_inputs(
        config.inputs,
        system_prompt=config.system_prompt,
        user_prompt=config.user_prompt,
        allow_commands=allow_commands,
    )


def _open(config: GenerateConfig) -> Session:
    info = initialize_distributed(
        {"cpu": "gloo", "cuda": "nccl", "auto": None}[config.device],
        config.timeout_minutes,
    )
    model, prompts, _ = load_trained(config.pretrained_name)
    cast_stored(model, getattr(torch, config.dtype))
    return Session(model.to(info.device).eval(), prompts, info.device, info.rank, info.world_size)


def _eos_ids(config: GenerateConfig, prompts: PromptFormatter) -> list[int]:
    unknown = prompts.tokenizer.unk_token_id
    extra = {token: prompts.tokenizer.convert_tokens_to_ids(token) for token in config.extra_eos_tokens}
    for token, index in extra.items():
        if index in (None, unknown):
            raise ValueError(f"extra_eos_tokens: {token!r} is no token of the model's tokenizer; remove it")
    return sorted({*prompts.eos_ids, *extra.values()})


def _answer_share(
    session: Session,
    config: GenerateConfig,
    conversations: Sequence[Conversation],
    show: Callable[[Answer], str],
) -> Share:
    """Answers this rank's batches; a failure ends the share and is raised on all ranks by `_gathered`."""
    share = Share()
    try:
        batches = deal(conversations, config.batch_size, session.rank, session.world_size)
        start = time.monotonic()
        for answers in answer(
            session.model,
            session.prompts,
            conversations,
            batches,
            max_new_tokens=config.max_new_tokens,
            eos_ids=_eos_ids(config, session.prompts),
            device=session.device,
        ):
            share.answers.extend(answers)
            if config.verbose and session.rank == 0:
                print("\n".join(show(one) for one in answers), flush=True)
        share.seconds = time.monotonic() - start
    except Exception as error:
        share.error = f"rank {session.rank}: {type(error).__name__}: {error}"
    return share


def _gathered(session: Session, share: Share) -> tuple[list[Answer], float]:
    """Returns all answers in the order of the input and the seconds of the slowest rank; collective."""
    shares = all_gather_objects(share, session.group)
    errors = [one.error for one in shares if one.error is not None]
    if errors:
        raise ValueError("\n".join(errors))
    answers = sorted((one for part in shares for one in part.answers), key=lambda one: one.index)
    return answers, max(part.seconds for part in shares)


def _write(path: str, rows: Sequence[dict[str, Any]]) -> None:
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(text, encoding="utf-8")
