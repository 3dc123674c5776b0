"""Whole runs that save in the background and as Hugging Face folders, and what can be started from those."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from shoal.checkpoint.store import CheckpointStore, newest
from shoal.cli import main
from shoal.config import SpeechConfig, load_config
from tests.e2e import tiny_llm
from tests.e2e.test_llm_strategies import lines
from tests.e2e.test_llm_strategies import train as train_llm
from tests.e2e.test_resume import history, train
from tests.e2e.tiny_run import AUTOMODEL, configuration
from tests.unit.checkpoint.models import read_folder, unequal
from tests.zygote import RankRunner

FSDP2 = {"_target_": AUTOMODEL}


def speech_run(root: Path, name: str, strategy: dict[str, Any] | None, **saving: Any) -> dict[str, Any]:
    run = configuration(
        root,
        devices=2,
        max_steps=6,
        enable_progress_bar=False,
        callbacks=[
            {"_target_": "shoal.train.history.StepHistory", "path": str(root / name / "history.jsonl")}
        ],
        **({} if strategy is None else {"strategy": strategy}),
    )
    run["exp_manager"] = {
        "explicit_log_dir": str(root / name),
        "resume_if_exists": True,
        "resume_ignore_no_checkpoint": True,
        "create_tensorboard_logger": False,
        "checkpoint_callback_params": {
            "every_n_train_steps": 2, "monitor": "loss", "mode": "max", "save_top_k": 1, **saving,
        },
    }  # fmt: skip
    return run


def train_with_slow_copies(rank: int, world: int, run: dict[str, Any]) -> int:
    """A step that did not wait for the copy of the one before would save a mixture of both."""
    import time

    from shoal.checkpoint.staging import Staging

    honest = Staging.fill

    def slow(staging: Staging) -> None:
        time.sleep(0.3)
        honest(staging)

    Staging.fill = slow  # type: ignore[method-assign]
    return train(rank, world, run)


@pytest.mark.parametrize("strategy", [FSDP2, None], ids=["fsdp2", "ddp"])
def test_saving_in_the_background_keeps_what_saving_in_between_keeps(
    ranks: RankRunner, tmp_path: Path, strategy: dict[str, Any] | None
) -> None:
    """Same checkpoints on disk, same tensors in them, and the run resumes from them exactly."""
    for name, saving in (("plain", False), ("background", True)):
        run = speech_run(tmp_path, name, strategy, async_save=saving)
        ranks(train_with_slow_copies, 2, run, init=False, timeout=120)
    stores = [CheckpointStore(tmp_path / name / "checkpoints") for name in ("plain", "background")]
    names = [[one.name for one in store.complete()] for store in stores]
    assert names[0] == names[1] and len(names[0]) >= 2
    for one in names[0]:
        for store, name in zip(stores, ("plain", "background"), strict=True):
            assert main(["export", str(store.directory / one), str(tmp_path / f"{name}-{one}")]) == 0
        for part in ("llm", "perception"):
            left, right = (read_folder(tmp_path / f"{kind}-{one}" / part) for kind in ("plain", "background"))
            assert unequal(left, right) == []

    whole = speech_run(tmp_path, "background", strategy, async_save=True)
    whole["trainer"]["max_steps"] = 8
    whole["model"]["lr_scheduler"]["max_steps"] = 6
    other = speech_run(tmp_path, "plain", strategy)
    other["trainer"]["max_steps"] = 8
    other["model"]["lr_scheduler"]["max_steps"] = 6
    for run in (whole, other):
        ranks(train, 2, run, init=False, timeout=120)
    assert history(tmp_path, "background") == history(tmp_path, "plain")
    assert len(history(tmp_path, "plain")) == 8


def loss_of(model: Any, prompts: Any) -> float:
    """The loss of one fixed micro-batch."""
    from tests.tiny import ragged_micro_batches

    batch = ragged_micro_batches(1, seed=4)[0]
    batch["input_ids"] = batch["input_ids"].masked_fill(batch["input_ids"] == 70, prompts.placeholder_id)
    with torch.no_grad():
        return float(model(batch)["loss_sum"])


def test_an_exported_speech_model_needs_nothing_of_its_run(ranks: RankRunner, tmp_path: Path) -> None:
    from shoal.train.trained import load_trained

    run = speech_run(tmp_path, "run", FSDP2, save_consolidated="every", model_save_format="safetensors")
    ranks(train, 2, run, init=False, timeout=120)
    model, prompts, _ = load_trained(tmp_path / "run")
    expected = loss_of(model, prompts)
    checkpoint = newest(tmp_path / "run")
    shutil.copytree(checkpoint / "consolidated", tmp_path / "export")
    for folder in ("run", "llm", "asr"):
        shutil.rmtree(tmp_path / folder)
    model, prompts, config = load_trained(tmp_path / "export")
    assert loss_of(model, prompts) == expected
    assert config.model.pretrained_llm == str(tmp_path / "export" / "llm")
    llm = AutoModelForCausalLM.from_pretrained(tmp_path / "export" / "llm")
    assert unequal(dict(llm.state_dict()), dict(model.llm.state_dict())) == []
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "export" / "llm")
    assert tokenizer.convert_tokens_to_ids("<|audio|>") == prompts.placeholder_id


def weights_after_start(rank: int, world: int, run: dict[str, Any]) -> dict[str, torch.Tensor]:
    """What a run trains from: the weights before its first step."""
    from shoal.train.modules import ShoalModule
    from shoal.train.recipes import run_training
    from tests.unit.checkpoint.models import full

    seen: dict[str, torch.Tensor] = {}
    honest = ShoalModule.configure_optimizers

    def spying(module: ShoalModule) -> Any:
        seen.update({name: full(tensor) for name, tensor in module.model.state_dict().items()})
        return honest(module)

    ShoalModule.configure_optimizers = spying  # type: ignore[method-assign]
    config = load_config(run, world_size=world)
    assert isinstance(config, SpeechConfig)
    run_training(config)
    return seen


@pytest.mark.parametrize("strategy", [FSDP2, None], ids=["fsdp2", "ddp"])
def test_another_run_starts_from_an_exported_speech_model(
    ranks: RankRunner, tmp_path: Path, strategy: dict[str, Any] | None
) -> None:
    ranks(train, 2, speech_run(tmp_path, "run", FSDP2), init=False, timeout=120)
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "export"), "--max-shard-size", "20KB"]) == 0
    second = speech_run(tmp_path, "second", strategy)
    second["model"]["init_from_checkpoint"] = str(tmp_path / "export")
    second["trainer"]["max_steps"] = 1
    second["model"]["lr_scheduler"] = None
    for seen in ranks(weights_after_start, 2, second, init=False, timeout=120):
        for part in ("llm", "perception"):
            own = {n.removeprefix(f"{part}."): t for n, t in seen.items() if n.startswith(f"{part}.")}
            assert unequal(own, read_folder(tmp_path / "export" / part)) == []


def llm_run(root: Path, folder: Path, **sections: Any) -> dict[str, Any]:
    checkpoint = {
        "checkpoint_dir": str(folder),
        "model_save_format": "safetensors",
        **sections.pop("checkpoint", {}),
    }
    return tiny_llm.configuration(
        root,
        checkpoint=checkpoint,
        distributed=sections.pop("distributed", {"strategy": "fsdp2"}),
        step_scheduler={"max_steps": 6, "ckpt_every_steps": 2},
        **sections,
    )


LLM_LAYOUTS = [{"strategy": "fsdp2"}, {"strategy": "fsdp2", "tp_size": 2, "sequence_parallel": True}]


@pytest.mark.parametrize("distributed", LLM_LAYOUTS, ids=["fsdp2", "tp2-sp"])
def test_an_llm_run_leaves_a_folder_that_transformers_opens(
    ranks: RankRunner, tmp_path: Path, distributed: dict[str, Any]
) -> None:
    run = llm_run(
        tmp_path,
        tmp_path / "run",
        checkpoint={"is_async": True, "save_consolidated": "final"},
        distributed=distributed,
    )
    ranks(train_llm, 2, run, init=False, timeout=120)
    steps = {one.step: one.path for one in CheckpointStore(tmp_path / "run").complete()}
    assert set(steps) == {2, 4, 6}
    assert [step for step, path in steps.items() if (path / "consolidated").is_dir()] == [6]
    assert [step for step, path in steps.items() if (path / "consolidate.sh").is_file()] == [2, 4]
    model = AutoModelForCausalLM.from_pretrained(steps[6] / "consolidated")
    assert unequal(read_folder(tmp_path / "llm"), dict(model.state_dict())) != []
    assert AutoTokenizer.from_pretrained(steps[6] / "consolidated").chat_template
    assert main(["export", str(steps[4]), str(tmp_path / "four")]) == 0
    assert read_folder(tmp_path / "four").keys() == read_folder(tmp_path / "llm").keys()


@pytest.mark.parametrize("distributed", LLM_LAYOUTS, ids=["fsdp2", "tp2-sp"])
def test_an_llm_run_with_adapters_leaves_them_for_peft_and_another_run(
    ranks: RankRunner, tmp_path: Path, distributed: dict[str, Any]
) -> None:
    peft = {"dim": 2, "alpha": 8, "target_modules": ["q_proj", "down_proj"]}
    options = {"peft": peft, "checkpoint": {"save_consolidated": "final"}, "distributed": distributed}
    run = llm_run(tmp_path, tmp_path / "run", **options)
    ranks(train_llm, 2, run, init=False, timeout=120)
    adapter = newest(tmp_path / "run") / "consolidated"
    assert {path.name for path in adapter.glob("*.safetensors")} == {"adapter_model.safetensors"}
    opened = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tmp_path / "llm"), adapter)
    assert any(p.any() for name, p in opened.named_parameters() if ".lora_B." in name)

    again = {**peft, "adapter_path": str(adapter)}
    second = llm_run(tmp_path, tmp_path / "second", peft=again, distributed=distributed)
    third = llm_run(tmp_path, tmp_path / "third", peft=peft, distributed=distributed)
    for one in (second, third):
        one["step_scheduler"]["max_steps"] = 1
        one["lr_scheduler"] |= {"lr_decay_steps": 6}
        ranks(train_llm, 2, one, init=False, timeout=120)
    continued, fresh = (lines(tmp_path / name, "training")[0]["loss"] for name in ("second", "third"))
    assert fresh == lines(tmp_path / "run", "training")[0]["loss"]
    assert continued < fresh - 0.01
