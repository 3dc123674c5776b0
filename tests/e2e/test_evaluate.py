"""From a finished run to a word error rate through the command line."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import yaml

from shoal.cli import main
from shoal.config import SpeechConfig, load_config
from shoal.evaluate.generate import answer
from shoal.evaluate.inputs import read_inputs
from shoal.evaluate.metrics import count_word_errors, text_normaliser
from shoal.train.recipes import run_training
from shoal.train.trained import load_trained
from tests.e2e.tiny_run import configuration


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("evaluate")
    settings = configuration(root, enable_progress_bar=False, limit_val_batches=0)
    settings["exp_manager"] = {"explicit_log_dir": str(root / "run"), "create_tensorboard_logger": False}
    config = load_config(settings, world_size=1)
    assert isinstance(config, SpeechConfig)
    assert run_training(config) == 0
    return root / "run"


def test_the_command_answers_with_the_trained_weights(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    inputs, output = run.parent / "valid" / "manifest.jsonl", run.parent / "answers.jsonl"
    arguments = [
        f"pretrained_name={run}",
        f"inputs={inputs}",
        f"output_manifest={output}",
        "user_prompt=say what you hear",
        "batch_size=3",
        "max_new_tokens=5",
        "dtype=float32",
        "device=cpu",
    ]
    assert main(["evaluate", *arguments]) == 0
    rows = [json.loads(line) for line in output.read_text().splitlines()]

    model, prompts, _ = load_trained(run)
    conversations = read_inputs(str(inputs), user_prompt="say what you hear")
    singly = answer(
        model,
        prompts,
        conversations,
        [[index] for index in range(len(conversations))],
        max_new_tokens=5,
        eos_ids=prompts.eos_ids,
        device=torch.device("cpu"),
    )
    assert [row["pred_text"] for row in rows] == [one.text for (one,) in singly]
    normalise = text_normaliser("english")
    errors = count_word_errors(
        [normalise(row["text"]) for row in rows], [normalise(row["pred_text"]) for row in rows]
    )
    assert f"WER  {errors}" in capsys.readouterr().out


def test_how_a_run_was_trained_does_not_decide_whether_it_opens(run: Path, tmp_path: Path) -> None:
    """Precision, a long warm-up, the user's own optimizer and allowed commands belong to the training alone."""
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    saved = yaml.safe_load((copy / "config.yaml").read_text())
    saved["model"] |= {"torch_dtype": "bfloat16", "optimizer": {"_target_": "my_optimizers.Mine", "lr": 1}}
    saved["model"]["lr_scheduler"]["warmup_steps"] = 10_000
    saved["trainer"] |= {"precision": "bf16-true", "accelerator": "gpu", "devices": 8}
    saved["data"]["train_ds"]["input_cfg"] = [{"type": "nemo", "manifest_filepath": "pipe:ssh there cat a"}]
    (copy / "config.yaml").write_text(yaml.safe_dump(saved))
    model, expected = load_trained(copy)[0], load_trained(run)[0]
    for name, tensor in expected.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor)
    (copy / "config.yaml").write_text("distributed: {}\n")
    with pytest.raises(ValueError, match="not the configuration of a speech run"):
        load_trained(copy)
