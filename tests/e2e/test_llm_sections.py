"""Sections of an LLM run do what they say: adapters, clipping, loggers, precision, data errors, the tiny example."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from shoal.config import LLMConfig, load_config
from shoal.config.llm import PeftConfig
from shoal.data.text_corpus import TokenCorpus
from shoal.kernels.attention_hf import PACKED_ATTENTION, registered_backend
from shoal.train.llm_plans import attention_name, causal_lm_plan, lora_arguments, precision_name
from tests.e2e.test_llm_strategies import lines, train
from tests.e2e.tiny_llm import configuration
from tests.zygote import RankRunner

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("llm")


def run_of(root: Path, folder: Path, *, max_steps: int = 4, **sections: Any) -> dict[str, Any]:
    sections["step_scheduler"] = {
        "max_steps": max_steps,
        "val_every_steps": None,
        **sections.get("step_scheduler", {}),
    }
    sections["checkpoint"] = {"checkpoint_dir": str(folder), **sections.get("checkpoint", {})}
    return configuration(root, **sections)


def test_adapters_train_alike_under_every_strategy(ranks: RankRunner, root: Path, tmp_path: Path) -> None:
    peft = {"dim": 4, "alpha": 8, "target_modules": ["*_proj"], "exclude_modules": ["o_proj"]}
    optimizer = {"_target_": "torch.optim.AdamW", "lr": 0.03}
    found = {}
    for name, world, distributed in (
        ("one", 1, {"strategy": "ddp"}),
        ("fsdp2", 2, {"strategy": "fsdp2"}),
        ("ddp", 3, {"strategy": "ddp"}),
    ):
        run = run_of(
            root, tmp_path / name, max_steps=12, peft=peft, distributed=distributed, optimizer=optimizer,
            step_scheduler={"global_batch_size": 12},
        )  # fmt: skip
        ranks(train, world, {**run, "precision": "64-true"}, init=False, timeout=90)
        found[name] = [(line["loss"], line["grad_norm"]) for line in lines(tmp_path / name, "training")]
    for name in ("fsdp2", "ddp"):
        for mine, theirs in zip(found[name], found["one"], strict=True):
            assert mine == pytest.approx(theirs, rel=1e-8)
    losses = [loss for loss, _ in found["one"]]
    assert losses[-1] < 0.9 * losses[0]


def test_names_of_adapted_modules() -> None:
    assert lora_arguments(PeftConfig(target_modules=("q_proj", "v_proj")))["target_modules"] == [
        "q_proj",
        "v_proj",
    ]
    assert lora_arguments(PeftConfig(match_all_linear=True))["target_modules"] == "all-linear"
    import re

    pattern = lora_arguments(PeftConfig(target_modules=("*.mlp.*", "q_proj")))["target_modules"]
    names = (
        "model.layers.0.mlp.up_proj",
        "model.layers.0.self_attn.q_proj",
        "model.layers.0.self_attn.k_proj",
    )
    assert [re.fullmatch(pattern, name) is not None for name in names] == [True, True, False]
    assert re.fullmatch(pattern, "model.layers.0.self_attn.seq_proj") is None


@pytest.mark.parametrize(("clip", "moved"), [({"max_norm": 1e-6}, False), ({"max_norm": None}, True)])
def test_clipping_bounds_the_update_or_is_off(
    ranks: RankRunner, root: Path, tmp_path: Path, clip: dict[str, Any], moved: bool
) -> None:
    run = run_of(
        root, tmp_path, max_steps=3, clip_grad_norm=clip, optimizer={"_target_": "torch.optim.SGD", "lr": 0.3},
        step_scheduler={"global_batch_size": 44},
    )  # fmt: skip
    del run["lr_scheduler"]
    run["optimizer"].pop("weight_decay")
    ranks(train, 1, run, init=False, timeout=60)
    losses = [line["loss"] for line in lines(tmp_path, "training")]
    assert (abs(losses[-1] - losses[0]) > 1e-2) is moved


def test_validation_at_the_end_of_an_epoch_and_the_logger(
    ranks: RankRunner, root: Path, tmp_path: Path
) -> None:
    run = run_of(root, tmp_path, max_steps=7, tensorboard={}, step_scheduler={"gc_every_steps": 2})
    ranks(train, 1, run, init=False, timeout=60)
    assert [line["step"] for line in lines(tmp_path, "validation")] == [6]
    assert list(tmp_path.glob("events.out.tfevents.*"))


def test_a_package_of_a_logger_that_is_missing_is_named(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from shoal.train import experiment
    from shoal.train.llm_experiment import llm_experiment

    config = load_config(run_of(root, tmp_path, wandb={"project": "x"}))
    assert isinstance(config, LLMConfig)
    monkeypatch.setattr(experiment.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="wandb"):
        llm_experiment(config, 1)


def test_a_row_that_cannot_be_read_ends_every_rank_with_its_name(
    ranks: RankRunner, root: Path, tmp_path: Path
) -> None:
    file = tmp_path / "bad.jsonl"
    good = {"messages": [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]}
    bad = {"messages": [{"role": "user", "content": "one"}, {"role": "assistant", "content": None}]}
    file.write_text("".join(json.dumps(row) + "\n" for row in [*[good] * 9, bad]))
    run = run_of(root, tmp_path / "run", dataset={"path": str(file)}, dataloader={"shuffle": False})
    outcomes = ranks(train, 2, run, init=False, timeout=60, expect_failure=True)
    assert all("row 9" in outcome.message for outcome in outcomes)


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        ({}, "bf16-mixed"),
        ({"model": {"torch_dtype": "bfloat16"}}, "bf16-true"),
        ({"model": {"torch_dtype": "float32"}}, "bf16-mixed"),
        ({"model": {"torch_dtype": "auto"}, "precision": "32-true"}, "32-true"),
    ],
)
def test_precision_follows_from_the_stored_dtype(sections: dict[str, Any], expected: str) -> None:
    model = {"config": {"model_type": "llama"}, **sections.pop("model", {})}
    config = load_config({"model": model, **sections})
    assert isinstance(config, LLMConfig)
    assert precision_name(config) == expected


@pytest.mark.parametrize(
    ("model", "size", "expected"),
    [
        ({}, 0, None),
        ({}, 8, "shoal"),
        ({"backend": {"attn": "flash"}}, 8, "flash_attention_2"),
        ({"backend": {"attn": "te"}}, 8, "shoal"),
        ({"backend": {"attn": "te"}}, 0, "shoal"),
        ({"attn_implementation": "eager"}, 0, "eager"),
        ({"attn_implementation": "shoal"}, 0, "shoal"),
    ],
)
def test_choice_of_attention(
    model: dict[str, Any], size: int, expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.config.rules.llm.find_spec", lambda name: name)  # as if all were installed
    config = load_config(
        {
            "model": {"config": {"model_type": "llama"}, **model},
            "packed_sequence": {"packed_sequence_size": size},
        }
    )
    assert isinstance(config, LLMConfig)
    assert attention_name(config) == expected
    causal_lm_plan(config)
    if expected == PACKED_ATTENTION:
        named = model.get("backend", {}).get("attn", "auto")
        assert registered_backend(PACKED_ATTENTION) == named


def test_mixed_precision_stays_close(ranks: RankRunner, root: Path, tmp_path: Path) -> None:
    found = {}
    for precision in ("32-true", "bf16-mixed", "bf16-true"):
        run = run_of(root, tmp_path / precision, distributed={"strategy": "fsdp2"})
        ranks(train, 2, {**run, "precision": precision}, init=False, timeout=90)
        found[precision] = [line["loss"] for line in lines(tmp_path / precision, "training")]
    for precision in ("bf16-mixed", "bf16-true"):
        assert found[precision] == pytest.approx(found["32-true"], rel=0.02)
        assert found[precision] != found["32-true"]


def test_the_tiny_example_trains_without_any_download(ranks: RankRunner, tmp_path: Path) -> None:
    run = yaml.safe_load((ROOT / "examples" / "llm" / "pretrain_tiny.yaml").read_text())
    run["dataset"]["path"], run["validation_dataset"]["path"] = (
        str(ROOT / "docs"),
        str(ROOT / "CONTRIBUTING.md"),
    )
    run["checkpoint"]["checkpoint_dir"] = str(tmp_path)
    run["step_scheduler"] |= {"max_steps": 6, "val_every_steps": 6}
    ranks(train, 2, run, init=False, timeout=90)
    losses = [line["loss"] for line in lines(tmp_path, "training")]
    assert losses[-1] < losses[0] - 0.5


def test_a_corpus_written_by_the_script_trains(ranks: RankRunner, tmp_path: Path) -> None:
    script, corpus = ROOT / "scripts" / "tokenize_corpus.py", tmp_path / "corpus"
    words = [
        "--tokenizer",
        "bytes",
        "--output",
        str(corpus),
        str(ROOT / "CONTRIBUTING.md"),
        str(ROOT / "README.md"),
    ]
    subprocess.run([sys.executable, str(script), *words], check=True, capture_output=True)
    opened = TokenCorpus(corpus)
    assert len(opened) == 2 and bytes(opened.tokens(0)[:-1].astype("uint8")) != b""
    run = yaml.safe_load((ROOT / "examples" / "llm" / "pretrain_tiny.yaml").read_text())
    run["dataset"] = {"type": "tokens", "path": str(corpus), "seq_length": 128}
    del run["validation_dataset"], run["tokenizer"], run["packed_sequence"]
    run["checkpoint"]["checkpoint_dir"] = str(tmp_path / "run")
    run["step_scheduler"] |= {"max_steps": 6, "val_every_steps": None}
    ranks(train, 1, run, init=False, timeout=90)
    steps = lines(tmp_path / "run", "training")
    assert steps[0]["num_tokens"] == 8 * 127
    assert steps[-1]["loss"] < steps[0]["loss"]
    assert torch.isfinite(torch.tensor([step["grad_norm"] for step in steps])).all()
