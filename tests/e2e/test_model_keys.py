"""Keys of the model section do what they say, in whole runs of the tiny model."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor

from shoal.checkpoint.store import CheckpointStore
from shoal.config import SpeechConfig, load_config
from shoal.models import hub
from shoal.train import recipes
from shoal.train.modules import ShoalModule
from shoal.train.plans import prompts_of, salm_plan
from tests.e2e.test_strategies import Recorder
from tests.e2e.tiny_run import AUTOMODEL, configuration
from tests.zygote import RankRunner

FSDP2 = {"_target_": AUTOMODEL}


def mapping_of(root: Path, model: dict[str, Any] | None = None, **trainer: Any) -> dict[str, Any]:
    options = {"precision": "64-true", "max_steps": 2, "limit_val_batches": 0, "enable_progress_bar": False}
    mapping = configuration(root, **{**options, **trainer})
    mapping["model"] |= {"lr_scheduler": None, **(model or {})}
    return mapping


def trained(rank: int, world: int, mapping: dict[str, Any]) -> dict[str, Any]:
    """Runs the recipe; returns losses, first and last weights in full, and what trains."""
    config = load_config(mapping, world_size=world)
    assert isinstance(config, SpeechConfig)
    seen: dict[str, Any] = {}
    recorder = Watcher(seen)
    build = recipes.build_trainer
    recipes.build_trainer = lambda *args, callbacks=(), **rest: build(
        *args, callbacks=[*callbacks, recorder], **rest
    )
    try:
        recipes.run_training(config)
    finally:
        recipes.build_trainer = build
    return {**seen, "losses": recorder.losses}


class Watcher(Recorder):
    """Keeps the weights before the first and after the last step as well."""

    def __init__(self, seen: dict[str, Any]) -> None:
        super().__init__()
        self.seen = seen

    def on_train_start(self, trainer: Any, pl_module: ShoalModule) -> None:
        self.seen["first"] = full(pl_module)
        self.seen["trainable"] = {n for n, p in pl_module.model.named_parameters() if p.requires_grad}
        self.seen["chunk"] = pl_module.model.perception.chunk_samples

    def on_train_end(self, trainer: Any, pl_module: ShoalModule) -> None:
        self.seen["last"] = full(pl_module)


def full(module: ShoalModule) -> dict[str, torch.Tensor]:
    return {
        name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()
        for name, p in module.model.named_parameters()
    }


def saving(root: Path, name: str) -> dict[str, Any]:
    return {"explicit_log_dir": str(root / name), "create_tensorboard_logger": False}


def test_init_from_checkpoint_takes_weights_and_nothing_else(ranks: RankRunner, tmp_path: Path) -> None:
    earlier = ranks(
        trained, 1, {**mapping_of(tmp_path), "exp_manager": saving(tmp_path, "a")}, init=False, timeout=90
    )[0]
    checkpoint = CheckpointStore(tmp_path / "a" / "checkpoints").latest()
    file = tmp_path / "weights" / "model.safetensors"
    file.parent.mkdir()
    # Whole tensors under the module's own names, as an export holds them.
    tensors = dict(earlier["last"])
    tensors |= {n: t for n, t in earlier_buffers(tmp_path).items() if n not in tensors}
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file)
    for world, strategy in ((1, None), (2, FSDP2)):
        for path in (checkpoint, file, file.parent):
            model = {"init_from_checkpoint": str(path)}
            options = {"devices": world, **({"strategy": strategy} if strategy else {})}
            run = ranks(trained, world, mapping_of(tmp_path, model, **options), init=False, timeout=90)[0]
            for name, weight in earlier["last"].items():
                torch.testing.assert_close(run["first"][name], weight, rtol=0, atol=0, msg=name)
            # It sees the first batch of the epoch again, with a fresh optimizer.
            assert len(run["losses"]) == 2 and run["losses"][0] < earlier["losses"][0]


def earlier_buffers(root: Path) -> dict[str, torch.Tensor]:
    from shoal.train.trained import load_trained

    model = load_trained(root / "a")[0]
    kept = model.state_dict()
    return {name: buffer for name, buffer in model.named_buffers() if name in kept}


def test_pretrained_weights_false_starts_from_the_seed(ranks: RankRunner, tmp_path: Path) -> None:
    loaded = ranks(trained, 1, mapping_of(tmp_path), init=False, timeout=90)[0]["first"]
    mapping = mapping_of(tmp_path, {"pretrained_weights": False})
    fresh = ranks(trained, 1, mapping, init=False, timeout=90)[0]["first"]
    sharded = mapping_of(tmp_path, {"pretrained_weights": False}, devices=2, strategy=FSDP2)
    again = ranks(trained, 2, sharded, init=False, timeout=90)[0]["first"]
    mapping["data"]["train_ds"]["seed"] = 6
    other = ranks(trained, 1, mapping, init=False, timeout=90)[0]["first"]
    for name in ("llm.model.layers.0.self_attn.q_proj.weight", "perception.encoder.layers.0.fc1.weight"):
        assert torch.equal(fresh[name], again[name])
        assert not torch.equal(fresh[name], loaded[name]) and not torch.equal(fresh[name], other[name])
        assert 0 < float(fresh[name].std()) < 1


def test_freezing_keeps_values_and_names_patterns_that_match_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = {
        "freeze_params": [r"^llm\..+$", r"^perception\..+$", r"^embed_tokens\..+$"],
        "prevent_freeze_params": [r"^perception\.proj\.weight$"],
    }
    with caplog.at_level(logging.WARNING):
        run = trained(0, 1, mapping_of(tmp_path, model))
    assert run["trainable"] == {"perception.proj.weight"}
    moved = {name for name in run["first"] if not torch.equal(run["first"][name], run["last"][name])}
    assert moved == {"perception.proj.weight"}
    named = [record.getMessage() for record in caplog.records if "matches no parameter" in record.message]
    assert len(named) == 1 and "embed_tokens" in named[0]


def test_lora_in_either_spelling_trains_adapters_alone(tmp_path: Path) -> None:
    freeze = {"freeze_params": [r"^llm\..+$", r"^perception\..+$"]}
    spellings = (
        {"r": 4, "lora_alpha": 8, "lora_dropout": 0.1, "target_modules": ["q_proj"]},
        {"dim": 4, "alpha": 8, "dropout": 0.1, "target_modules": ["q_proj"]},
    )
    runs = [trained(0, 1, mapping_of(tmp_path, {**freeze, "lora": lora})) for lora in spellings]
    assert runs[0]["losses"] == runs[1]["losses"]
    assert {name.rsplit(".", 3)[1] for name in runs[0]["trainable"]} == {"lora_A", "lora_B"}
    shape = runs[0]["first"]["llm.model.layers.0.self_attn.q_proj.lora_A.default.weight"].shape
    assert shape == (4, 32)


def test_an_adapter_for_no_module_is_refused_by_its_key(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"model\.lora\.target_modules: .*nope"):
        trained(0, 1, mapping_of(tmp_path, {"lora": {"r": 4, "target_modules": ["nope"]}}))


def test_tokenizer_path_replaces_the_tokenizer_of_the_llm(tmp_path: Path) -> None:
    mapping = mapping_of(tmp_path)
    usual = trained(0, 1, mapping)
    llm, other = Path(mapping["model"]["pretrained_llm"]), tmp_path / "tokenizer"
    other.mkdir()
    for file in [*llm.glob("tokenizer*"), *llm.glob("*.jinja"), *llm.glob("special_tokens*")]:
        shutil.move(file, other / file.name)
    mapping["model"]["tokenizer_path"] = str(other)
    assert trained(0, 1, mapping)["losses"] == usual["losses"]
    del mapping["model"]["tokenizer_path"]
    with pytest.raises((ValueError, OSError)):
        trained(0, 1, mapping)


def test_encoder_chunks_have_the_configured_length(tmp_path: Path) -> None:
    whole = trained(0, 1, mapping_of(tmp_path))
    cut = trained(0, 1, mapping_of(tmp_path, {"encoder_chunk_size_seconds": 0.4}))
    assert whole["chunk"] is None and cut["chunk"] == 6400
    assert whole["losses"] != cut["losses"]


@pytest.mark.parametrize("section", ["train_ds", "validation_ds"])
def test_a_missing_manifest_is_found_before_anything_is_built(
    section: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recipes, "prompts_of", lambda config: pytest.fail("the tokenizer was loaded"))
    mapping = mapping_of(tmp_path)
    block = mapping["data"][section]
    block = block["datasets"]["one"] if section == "validation_ds" else block
    block["input_cfg"][0]["manifest_filepath"] = str(tmp_path / "absent.json")
    with pytest.raises(ValueError, match=rf"data\.{section}.*no such file: .*absent\.json"):
        trained(0, 1, mapping)


def test_an_optimizer_that_refuses_its_arguments_is_named(tmp_path: Path) -> None:
    optimizer = {"_target_": "torch.optim.AdamW", "lr": -1.0}
    with pytest.raises(ValueError, match=r"model\.optimizer: torch\.optim\.AdamW does not take .*-1\.0"):
        trained(0, 1, mapping_of(tmp_path, {"optimizer": optimizer}))


@pytest.mark.parametrize("trusted", [False, True])
def test_code_of_a_hub_model_is_fetched_only_when_it_is_trusted(
    trusted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[str]] = []

    def fetch(name: str, allow_patterns: list[str]) -> str:
        asked.append(allow_patterns)
        return mapping["model"]["pretrained_llm"] if name == "a/llm" else mapping["model"]["pretrained_asr"]

    monkeypatch.setattr(hub, "snapshot_download", fetch)
    mapping = mapping_of(tmp_path)
    names = {"pretrained_llm": "a/llm", "pretrained_asr": "an/asr", "trust_remote_code": trusted}
    config = load_config({**mapping, "model": {**mapping["model"], **names}}, world_size=1)
    assert isinstance(config, SpeechConfig)
    prompts_of(config.model)
    salm_plan(config.model, 1, seed=0, sample_rate=16000)
    assert len(asked) == 3 and all(("*.py" in patterns) is trusted for patterns in asked)
