"""`shoal verify` as a command, on YAML files of public shapes and on the quickstart's."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from shoal.cli import main
from tests.verify import configurations
from tests.zygote import RankRunner

ROOT = Path(__file__).parents[2]
QUICKSTART = ROOT / "examples/speechlm2/conf/quickstart.yaml"
LLAMA, QWEN3 = (str(configurations.FOLDER / f"{name}.yaml") for name in ("llama", "qwen3"))


def command(rank: int, world: int, words: list[str]) -> tuple[int, str]:
    """Runs the command in a process of its own; returns its exit status and what it printed."""
    import contextlib
    import io

    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        status = main(["verify", *words])
    return status, printed.getvalue()


def run(ranks: RankRunner, *words: str) -> dict[str, Any]:
    status, printed = ranks(command, 1, [*words, "--json"], init=False, timeout=300)[0]
    result: dict[str, Any] = json.loads(printed)
    assert status == (0 if result["verdict"] == "pass" else 1)
    return result


def model_folders(folder: Path) -> list[str]:
    """Configurations of the quickstart's models, without weights."""
    from transformers import GPT2Config, WhisperConfig

    no_dropout = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)
    sizes = {
        "vocab_size": 16003,
        "n_embd": 384,
        "n_head": 6,
        "n_layer": 8,
        "n_inner": 1536,
        "n_positions": 448,
    }
    GPT2Config(**sizes, **no_dropout).save_pretrained(folder / "llm")
    WhisperConfig(d_model=384, encoder_layers=4, dropout=0.0).save_pretrained(folder / "asr")
    return ["--model-config", str(folder / "llm"), "--encoder-config", str(folder / "asr")]


@pytest.mark.slow
@pytest.mark.parametrize("world", [4, 8])
def test_quickstart(ranks: RankRunner, tmp_path: Path, world: int) -> None:
    result = run(ranks, str(QUICKSTART), "--world-size", str(world), *model_folders(tmp_path))
    assert result["verdict"] == "pass"
    assert result["layout"]["axes"]["dp"] == world
    assert result["model"]["sizes"]["llm.vocab_size"] == [16003, 97]  # both odd
    assert {"projection", "attention"} <= set(result["gradients"][0])
    assert "encoder" not in result["gradients"][0]  # it is frozen


@pytest.mark.slow
@pytest.mark.parametrize("world", [4, 8])
def test_llama_under_tensor_and_sequence_parallelism(ranks: RankRunner, world: int) -> None:
    result = run(ranks, LLAMA, "--world-size", str(world))
    assert result["verdict"] == "pass" and result["independent_loss"]
    assert result["layout"]["axes"]["tp"] == world // 2
    assert "sequence parallel" in result["layout"]["verified"]
    heads = {
        name: pair[1] for name, pair in result["model"]["sizes"].items() if "num_key_value_heads" in name
    }
    assert heads == {"num_key_value_heads": world // 2}  # as many as tensor-parallel ranks, as configured


@pytest.mark.slow
@pytest.mark.parametrize("world", [4, 8])
def test_qwen3_with_tied_embeddings(ranks: RankRunner, world: int) -> None:
    result = run(ranks, QWEN3, "--world-size", str(world))
    assert result["verdict"] == "pass"
    assert result["layout"]["axes"]["tp"] == world // 2
    assert "head" not in result["gradients"][0]  # tied
    assert result["gradients"][0]["norms"]["parameters"] == 2 * 4 + 1  # of queries and keys, too


@pytest.mark.slow
def test_the_table_for_people(ranks: RankRunner, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(configurations.text()))
    status, printed = ranks(command, 1, [str(file), "distributed.dp_size=64"], init=False, timeout=300)[0]
    assert status == 0
    assert "configured   dp 64" in printed and "verified     fsdp2, dp 2" in printed
    assert "loss, step 2" in printed and "weights after 2 steps, attention" in printed
    assert printed.rstrip().splitlines()[-1].startswith("verdict: PASS")


@pytest.mark.slow
def test_what_only_ranks_know_is_refused_too(ranks: RankRunner, tmp_path: Path) -> None:
    """GPT-2 has no tensor-parallel plan, and dropout in its attention: all ranks refuse it, which is no mismatch."""
    file = tmp_path / "run.yaml"
    config = configurations.text("gpt2", {"distributed": {"tp_size": 2}})
    config["model"]["config"] = {"model_type": "gpt2", "n_layer": 2, "n_head": 4, "n_embd": 64}
    file.write_text(yaml.safe_dump(config))
    status, printed = ranks(command, 1, [str(file)], init=False, timeout=300)[0]
    assert (status, printed) == (2, "")


def test_refusals_come_before_torch(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", LLAMA, "distributed.tp_sise=2"]) == 2
    assert "tp_sise" in capfd.readouterr().err
    assert main(["verify", LLAMA, "--world-size", "0"]) == 2
    assert "--world-size" in capfd.readouterr().err
    code = (
        "import sys\nfrom shoal.cli import main\n"
        f"assert main(['verify', {LLAMA!r}, 'distributed.tp_sise=2']) == 2\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_fields_may_be_nested() -> None:
    """`rope_parameters` is a mapping in a mapping, which transformers fills in; training reads it the same way."""
    from shoal.config import LLMConfig, load_config
    from shoal.train.llm_plans import causal_lm_plan
    from shoal.verify.sources import read_architecture

    config = load_config(LLAMA)
    assert isinstance(config, LLMConfig) and config.model is not None
    fields = config.model.config
    assert fields is not None
    read = read_architecture(fields, "model.config", "--model-config", instead=None)
    assert read.rope_parameters["rope_type"] == "llama3" and read.num_hidden_layers == 32
    causal_lm_plan(config)


def test_a_model_that_cannot_be_had_is_refused(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from shoal.config import ConfigError
    from shoal.verify import sources

    def unreachable(*arguments: Any, **named: Any) -> Any:
        raise OSError("offline")

    monkeypatch.setattr(sources, "hf_hub_download", unreachable)
    with pytest.raises(ConfigError, match="--model-config FOLDER") as error:
        sources.read_architecture("meta-llama/Llama-3.2-1B", "model.config", "--model-config", instead=None)
    assert error.value.findings[0].value == "meta-llama/Llama-3.2-1B"
    with pytest.raises(ConfigError, match="a folder with a config.json"):
        sources.read_architecture("x", "model.config", "--model-config", instead=str(tmp_path))
