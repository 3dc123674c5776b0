"""`shoal evaluate` and `shoal generate` on language models: exact for any number of ranks and any way to open them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from shoal.cli import main
from shoal.config import LoadOptions, load_arguments
from shoal.config.evaluate import EvaluateConfig
from shoal.train.llm_trained import kind_of, load_trained_llm
from tests.e2e.test_llm_strategies import lines, train
from tests.e2e.tiny_llm import PACKED, configuration, write_chats
from tests.zygote import RankRunner


def evaluate(rank: int, world: int, words: list[str]) -> int:
    from shoal.evaluate.llm import run_llm_evaluation

    return run_llm_evaluation(load_arguments(EvaluateConfig, words, options=LoadOptions()))


@pytest.fixture(scope="module")
def run(ranks: RankRunner, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of two ranks, packed, with a consolidated last checkpoint; its root holds the data."""
    root = tmp_path_factory.mktemp("llm")
    checkpoint = {
        "checkpoint_dir": str(root / "run"),
        "save_consolidated": "final",
        "model_save_format": "safetensors",
    }
    mapping = configuration(root, **PACKED, checkpoint=checkpoint)
    ranks(train, 2, mapping, init=False, timeout=120)
    return root / "run"


def results_of(file: Path) -> dict[str, dict[str, float]]:
    return {row.pop("name"): row for row in map(json.loads, file.read_text().splitlines())}


@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_run_is_evaluated_on_its_validation_sets(
    ranks: RankRunner, run: Path, tmp_path: Path, world: int
) -> None:
    """What training said about packs on two ranks is what rows on any number of ranks say."""
    words = [f"pretrained_name={run}", "dtype=float32", "batch_size=2", f"output_manifest={tmp_path / 'out'}"]
    ranks(evaluate, world, words, init=False, timeout=60)
    results, last = results_of(tmp_path / "out"), lines(run, "validation")[-1]
    assert set(results) == {"default", "train"}
    for name, row in results.items():
        assert row["loss"] == pytest.approx(last[f"val_loss_{name}"], rel=1e-5)
        assert row["accuracy"] == pytest.approx(last[f"val_acc_{name}"], rel=1e-5)
        assert row["perplexity"] == pytest.approx(math.exp(row["loss"]))


def test_the_checkpoint_and_the_consolidated_folder_are_the_same_model(run: Path, tmp_path: Path) -> None:
    (checkpoint,) = [path for path in run.iterdir() if path.is_dir()]
    data = write_chats(tmp_path, "fresh", 9, seed=7)
    found = []
    for number, path in enumerate((run, checkpoint, checkpoint / "consolidated")):
        out = tmp_path / str(number)
        words = [f"pretrained_name={path}", f"inputs={data}", "dtype=float32", f"output_manifest={out}"]
        assert evaluate(0, 1, words) == 0
        found.append(results_of(out)["fresh"])
    assert found[0] == found[1] == pytest.approx(found[2], rel=1e-6)
    assert found[2]["loss"] == pytest.approx(_by_hand(checkpoint / "consolidated", data), rel=1e-5)


def _by_hand(folder: Path, data: Path) -> float:
    """Mean loss over the assistant's tokens, with nothing but transformers."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    losses = []
    for row in map(json.loads, data.read_text().splitlines()):
        ids: list[int] = []
        answered: list[bool] = []
        for message in row["messages"]:
            head = tokenizer(f"<|im_start|>{message['role']}\n", add_special_tokens=False).input_ids
            body = tokenizer(f"{message['content']}<|im_end|>", add_special_tokens=False).input_ids
            tail = tokenizer("\n", add_special_tokens=False).input_ids
            ids += [*head, *body, *tail]
            answered += (
                [False] * len(head) + [message["role"] == "assistant"] * len(body) + [False] * len(tail)
            )
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0, :-1]
        token_losses = torch.nn.functional.cross_entropy(logits, torch.tensor(ids[1:]), reduction="none")
        losses += token_losses[torch.tensor(answered[1:])].tolist()
    return sum(losses) / len(losses)


def test_kinds_of_paths(run: Path, tmp_path: Path) -> None:
    (checkpoint,) = [path for path in run.iterdir() if path.is_dir()]
    assert kind_of(run) == kind_of(checkpoint) == kind_of(checkpoint / "consolidated") == "llm"
    assert kind_of("somebody/model") == "llm"
    with pytest.raises(ValueError, match="neither a run"):
        kind_of(tmp_path)
    (tmp_path / "config.yaml").write_text("model: {}\ntrainer: {}\ndata: {}\n")
    assert kind_of(tmp_path) == "speech"


@pytest.mark.parametrize("batch_size", [1, 4])
def test_generation_continues_what_transformers_continues(run: Path, tmp_path: Path, batch_size: int) -> None:
    data = write_chats(tmp_path, "fresh", 6, seed=7)
    out = tmp_path / "out"
    words = [
        "generate", f"pretrained_name={run}", f"inputs={data}", "dtype=float32", "max_new_tokens=12",
        f"batch_size={batch_size}", f"output_manifest={out}", "verbose=false",
    ]  # fmt: skip
    assert main(words) == 0
    trained = load_trained_llm(run)
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(rows) == 6
    end = trained.tokenizer.convert_tokens_to_ids(["<|im_end|>", "</s>"])
    for row, given in zip(rows, map(json.loads, data.read_text().splitlines()), strict=True):
        assert row["prompt"] == given["messages"][:-1]
        prompt = trained.tokenizer.apply_chat_template(
            row["prompt"], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        llm: Any = trained.model.llm
        tokens = llm.generate(**prompt, max_new_tokens=12, do_sample=False, eos_token_id=end, pad_token_id=3)
        text = trained.tokenizer.decode(tokens[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)
        assert row["pred_text"] == text.strip()


def test_generation_from_a_prompt(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    words = [f"pretrained_name={run}", "dtype=float32", "max_new_tokens=3", f"output_manifest={out}"]
    assert main(["generate", *words, "prompt=the cat"]) == 0
    assert json.loads(out.read_text())["prompt"] == [{"role": "user", "content": "the cat"}]
    assert main(["generate", *words, "prompt=the cat", "input_type=text"]) == 0
    assert json.loads(out.read_text())["prompt"] == "the cat"
    with pytest.raises(ValueError, match="exactly one"):
        _generate(words)


def _generate(words: list[str]) -> int:
    from shoal.config.evaluate import GenerateConfig
    from shoal.evaluate.llm_generate import run_llm_generation

    return run_llm_generation(load_arguments(GenerateConfig, words, options=LoadOptions()))


@pytest.mark.parametrize(
    ("rows", "words", "message"),
    [
        ([{"a": "b"}], [], "its columns are a"),
        ([{"messages": [{"role": "user", "content": "a"}]}], [], "not one supervised token"),
    ],
)
def test_what_cannot_be_evaluated_is_refused(
    run: Path, tmp_path: Path, rows: list[dict[str, Any]], words: list[str], message: str
) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(ValueError, match=message):
        evaluate(0, 1, [f"pretrained_name={run}", f"inputs={file}", "dtype=float32", *words])


def test_texts_are_cut_at_the_models_last_position(run: Path, tmp_path: Path) -> None:
    text = " ".join(["cat dog"] * 400)  # 800 tokens, and the model has 512 positions
    (tmp_path / "long.txt").write_text(text)
    out = tmp_path / "out"
    words = [f"pretrained_name={run}", f"inputs={tmp_path / 'long.txt'}", "dtype=float32"]
    evaluate(0, 1, [*words, f"output_manifest={out}"])
    assert results_of(out)["long"]["num_tokens"] == 801 - 2  # with the end token, without two first ones
    evaluate(0, 1, [*words, "seq_length=100", f"output_manifest={out}"])
    assert results_of(out)["long"]["num_tokens"] == 801 - 9
