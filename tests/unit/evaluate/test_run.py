"""The commands evaluate and generate, with a tiny model: what they write and print, on one rank and on two."""

import json
from pathlib import Path
from unittest import mock

import pytest
import torch

from shoal.config.evaluate import EvaluateConfig, GenerateConfig
from shoal.evaluate import run_evaluation, run_generation
from shoal.evaluate.generate import answer_lengths, deal
from shoal.evaluate.inputs import read_inputs
from shoal.evaluate.metrics import count_word_errors, text_normaliser
from shoal.speech.prompts import PromptFormatter
from shoal.speech.salm import SALM
from tests.tiny import tiny_salm, tiny_tokenizer
from tests.unit.evaluate import corpus
from tests.zygote import RankRunner


def trained(path: str) -> tuple[SALM, PromptFormatter, None]:
    """Stands in for loading a checkpoint: a tiny random model whose LLM knows the tokenizer's words alone."""
    prompts = PromptFormatter(tiny_tokenizer(), "plain", "<|audio|>")
    model = tiny_salm("whisper", vocab_size=prompts.placeholder_id)
    model.placeholder_id = prompts.placeholder_id
    return model, prompts, None


LOADER = mock.patch("shoal.evaluate.run.load_trained", trained)


def settings(folder: Path, **changes: object) -> dict[str, object]:
    return {
        "pretrained_name": "tiny",
        "inputs": str(folder / "nemo.jsonl"),
        "output_manifest": str(folder / "out" / "generations.jsonl"),
        "batch_size": 2,
        "max_new_tokens": 6,
        "verbose": False,
        "device": "cpu",
        "dtype": "float32",
        **changes,
    }


def written(folder: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (folder / "out" / "generations.jsonl").read_text().splitlines()]


def test_evaluation_writes_in_order_and_prints_the_rate_of_what_it_wrote(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    corpus.nemo_manifest(tmp_path)
    with LOADER:
        assert run_evaluation(EvaluateConfig(**settings(tmp_path, verbose=True))) == 0
    rows = written(tmp_path)
    assert [row["id"] for row in rows] == corpus.clip_names()
    assert [row["text"] for row in rows] == list(corpus.TEXTS)
    assert [row["duration"] for row in rows] == list(corpus.SECONDS)
    assert len({row["pred_text"] for row in rows}) > 1
    normalise = text_normaliser("english")
    errors = count_word_errors(
        [normalise(row["text"]) for row in rows], [normalise(row["pred_text"]) for row in rows]
    )
    printed = capsys.readouterr().out
    assert f"WER  {errors}" in printed
    assert "RTFx" in printed and "3.8 s of audio" in printed
    assert all(
        f"{name}\n  text: {text}" in printed
        for name, text in zip(corpus.clip_names(), corpus.TEXTS, strict=True)
    )


def evaluate_on_rank(rank: int, world_size: int, folder: str) -> None:
    with LOADER:
        run_evaluation(EvaluateConfig(**settings(Path(folder))))


def test_two_ranks_write_what_one_writes(ranks: RankRunner, tmp_path: Path) -> None:
    corpus.nemo_manifest(tmp_path)
    evaluate_on_rank(0, 1, str(tmp_path))
    alone = written(tmp_path)
    (tmp_path / "out" / "generations.jsonl").unlink()
    ranks(evaluate_on_rank, 2, str(tmp_path))
    assert written(tmp_path) == alone


def failing_evaluation(rank: int, world_size: int, folder: str) -> str:
    try:
        evaluate_on_rank(rank, world_size, folder)
    except ValueError as error:
        return str(error)
    return ""


def test_a_sample_one_rank_cannot_read_stops_all_ranks(ranks: RankRunner, tmp_path: Path) -> None:
    corpus.nemo_manifest(tmp_path)
    (tmp_path / "clip4.wav").write_bytes(b"no audio")
    first, second = ranks(failing_evaluation, 2, str(tmp_path))
    assert first == second
    assert "clip4" in first and not (tmp_path / "out").exists()


def test_generation_appends_the_answer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    corpus.nemo_manifest(tmp_path)
    with LOADER:
        assert run_generation(GenerateConfig(**settings(tmp_path, user_prompt="what is it"))) == 0
    rows = written(tmp_path)
    assert [row["id"] for row in rows] == corpus.clip_names()
    for row, name in zip(rows, corpus.clip_names(), strict=True):
        prompt, audio, answer = row["conversations"]
        assert prompt == {"from": "user", "value": "what is it", "type": "text"}
        assert audio["type"] == "audio" and audio["value"].endswith(f"{name}.wav")
        assert answer["from"] == "assistant" and answer["value"] not in corpus.TEXTS
    assert "tokens/s" in capsys.readouterr().out
    again = read_inputs(str(tmp_path / "out" / "generations.jsonl"))
    assert [conversation.id for conversation in again] == corpus.clip_names()


def test_extra_end_tokens_end_answers_and_unknown_ones_are_refused(tmp_path: Path) -> None:
    corpus.nemo_manifest(tmp_path)
    with LOADER:
        run_evaluation(EvaluateConfig(**settings(tmp_path)))
        longest = max((str(row["pred_text"]).split() for row in written(tmp_path)), key=len)
        stop = longest[1]
        run_evaluation(EvaluateConfig(**settings(tmp_path, extra_eos_tokens=(stop,))))
        for row in written(tmp_path):
            assert stop not in str(row["pred_text"]).split()[:-1]
        with pytest.raises(ValueError, match="extra_eos_tokens: 'elephant' is no token"):
            run_evaluation(EvaluateConfig(**settings(tmp_path, extra_eos_tokens=("elephant",))))


def test_examples_without_a_transcript_are_refused(tmp_path: Path) -> None:
    corpus.nemo_manifest(tmp_path)
    line = {"id": "silent", "audio_filepath": "clip0.wav", "duration": 0.9}
    corpus.write_lines(tmp_path / "nemo.jsonl", [line])
    with LOADER, pytest.raises(ValueError, match=r"1 examples have no transcript.*\(silent"):
        run_evaluation(EvaluateConfig(**settings(tmp_path)))


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_every_conversation_is_dealt_once(tmp_path: Path, world_size: int) -> None:
    conversations = read_inputs(str(corpus.nemo_manifest(tmp_path)))
    dealt = [deal(conversations, 2, rank, world_size) for rank in range(world_size)]
    flat = [index for rank in dealt for batch in rank for index in batch]
    assert sorted(flat) == list(range(5))
    assert dealt[0][0] == [2, 0]


def test_answers_end_with_their_first_end_token() -> None:
    tokens = torch.tensor([[5, 2, 3, 3], [5, 6, 7, 8], [9, 1, 2, 3]])
    assert answer_lengths(tokens, [2, 9]) == [2, 4, 1]
