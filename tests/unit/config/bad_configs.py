"""Configurations that are refused: how they are wrong, and what the message must say."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Bad:
    """One refused configuration.

    Attributes:
        name: What is wrong.
        changes: Keys written into the minimal speech configuration, as dotted path and value.
        rule: The rule that must refuse it.
        key: The key the message must name.
        limit: A part of the limit the message must state.
        repair: A part of the repair the message must state.
        world: Ranks to start, as ``--nproc-per-node``.
    """

    name: str
    changes: dict[str, Any]
    rule: str
    key: str
    limit: str
    repair: str
    world: int | None = None


_STRATEGY = "trainer.strategy"
_TARGET = f"{_STRATEGY}._target_"
_AUTOMODEL = "nemo.collections.speechlm2.parts.parallel.AutomodelParallelStrategy"
_LIGHTNING = "lightning.pytorch.strategies.ModelParallelStrategy"
_OPTIMIZER = "model.optimizer._target_"


def _mesh(**sizes: Any) -> dict[str, Any]:
    return {_TARGET: _AUTOMODEL, **{f"{_STRATEGY}.{name}": value for name, value in sizes.items()}}


BAD_CONFIGS: tuple[Bad, ...] = (
    # typos
    Bad(
        "typo in trainer",
        {"trainer.max_stps": 5},
        "unknown-key",
        "trainer.max_stps",
        "max_steps",
        "trainer.max_steps",
    ),
    Bad("typo in section", {"trainr": {}}, "unknown-key", "trainr", "trainer", "did you mean trainer"),
    Bad(
        "typo in data",
        {"data.train_ds.batchsize": 4},
        "unknown-key",
        "data.train_ds.batchsize",
        "batch_size",
        "batch_size",
    ),
    Bad(
        "typo in a nested source",
        {"data.train_ds.input_cfg.0.cut_path": "x"},
        "unknown-key",
        "data.train_ds.input_cfg.0.cut_path",
        "cuts_path",
        "cuts_path",
    ),
    Bad(
        "typo in a size",
        _mesh(tensor_paralel=2),
        "unknown-key",
        f"{_STRATEGY}.tensor_paralel",
        "tp_size",
        "did you mean trainer.strategy.tp_size",
    ),
    Bad(
        "other spelling of a size",
        _mesh(tensor_parallel_size=2),
        "unknown-key",
        f"{_STRATEGY}.tensor_parallel_size",
        "tp_size",
        "did you mean trainer.strategy.tp_size",
    ),
    Bad(
        "typo in an optimizer keyword",
        {"model.optimizer.weigth_decay": 0.1},
        "unknown-key",
        "model.optimizer.weigth_decay",
        "weight_decay",
        "model.optimizer.weight_decay",
    ),
    Bad(
        "typo in lora",
        {"model.lora.lora_aplha": 4},
        "unknown-key",
        "model.lora.lora_aplha",
        "lora_alpha",
        "lora_alpha",
    ),
    Bad(
        "typo in perception",
        {"model.perception.modality_adaptor": {}},
        "unknown-key",
        "model.perception.modality_adaptor",
        "modality_adapter",
        "modality_adapter",
    ),
    Bad(
        "typo in exp_manager",
        {"exp_manager.explicit_logdir": "x"},
        "unknown-key",
        "exp_manager.explicit_logdir",
        "explicit_log_dir",
        "explicit_log_dir",
    ),
    # wrong types
    Bad("text as devices", {"trainer.devices": "2"}, "wrong-type", "trainer.devices", "an integer", "2"),
    Bad(
        "fraction as size", _mesh(tp_size=2.0), "wrong-type", f"{_STRATEGY}.tp_size", "an integer", "integer"
    ),
    Bad("negative size", _mesh(dp_size=-1), "wrong-type", f"{_STRATEGY}.dp_size", "at least 1", "null"),
    Bad("zero size", _mesh(cp_size=0), "wrong-type", f"{_STRATEGY}.cp_size", "at least 1", "integer"),
    Bad(
        "truth value as size",
        _mesh(pp_size=True),
        "wrong-type",
        f"{_STRATEGY}.pp_size",
        "an integer",
        "integer",
    ),
    Bad(
        "quoted size",
        _mesh(ep_size="2"),
        "wrong-type",
        f"{_STRATEGY}.ep_size",
        "an integer",
        "without quotes: 2",
    ),
    Bad(
        "unknown precision",
        {"trainer.precision": "bf16-mixd"},
        "wrong-type",
        "trainer.precision",
        "bf16-mixed",
        "did you mean bf16-mixed",
    ),
    Bad("list instead of a block", {"trainer": []}, "wrong-type", "trainer", "a block of keys", "indent"),
    Bad(
        "seed of 32 bits",
        {"data.train_ds.seed": 2**32 - 1},
        "wrong-type",
        "data.train_ds.seed",
        "at most 2147483647",
        "integer",
    ),
    Bad(
        "missing model name",
        {"model.pretrained_llm": None},
        "wrong-type",
        "model.pretrained_llm",
        "a text",
        "a text",
    ),
    Bad(
        "unfilled value",
        {"model.pretrained_asr": "???"},
        "missing-key",
        "model.pretrained_asr",
        "a value",
        "set model.pretrained_asr",
    ),
    # impossible sizes
    Bad(
        "world does not divide",
        _mesh(tp_size=3),
        "axes-divide-world",
        f"{_STRATEGY}.tp_size",
        "world size 4",
        "ranks",
        4,
    ),
    Bad(
        "product is not the world",
        _mesh(dp_size=2),
        "dp-size-fills-world",
        f"{_STRATEGY}.dp_size",
        "world size 4",
        "dp_size: 4",
        4,
    ),
    Bad(
        "replicas do not divide",
        _mesh(dp_replicate_size=3),
        "dp-replicate-size-divides-dp-size",
        f"{_STRATEGY}.dp_replicate_size",
        "dp_size = 4",
        "dp_replicate_size",
        4,
    ),
    Bad(
        "replicas without shards",
        _mesh(dp_replicate_size=4),
        "dp-replicate-size-divides-dp-size",
        f"{_STRATEGY}.dp_replicate_size",
        "dp_size = 4",
        "ddp",
        4,
    ),
    Bad(
        "experts do not divide",
        _mesh(ep_size=3),
        "ep-size-divides-dp-times-cp",
        f"{_STRATEGY}.ep_size",
        "dp_size * cp_size = 4",
        "ep_size: 2",
        4,
    ),
    Bad(
        "product of Lightning's sizes",
        {_TARGET: _LIGHTNING, f"{_STRATEGY}.data_parallel_size": 2, f"{_STRATEGY}.tensor_parallel_size": 1},
        "dp-size-fills-world",
        f"{_STRATEGY}.data_parallel_size",
        "world size 4",
        "4",
        4,
    ),
    Bad(
        "devices against ranks",
        {"trainer.devices": 2},
        "world-is-devices-times-nodes",
        "trainer.devices",
        "4 ranks",
        "trainer.devices",
        4,
    ),
    Bad(
        "context without packing",
        _mesh(cp_size=2),
        "cp-needs-packing",
        f"{_STRATEGY}.cp_size",
        "1 for padded batches",
        "packed_sequences: true",
        2,
    ),
    Bad(
        "accumulation does not divide",
        {"trainer.accumulate_grad_batches": 4, "trainer.limit_train_batches": 10},
        "counts-divide-by-accumulation",
        "trainer.limit_train_batches",
        "a multiple of 4",
        "8",
    ),
    Bad(
        "two sizes of a step",
        {"trainer.accumulate_grad_batches": 4, "trainer.global_micro_batches": 6},
        "accumulation-agrees",
        "trainer.global_micro_batches",
        "= 4",
        "global_micro_batches",
    ),
    # unknown targets
    Bad(
        "optimizer that does not exist",
        {_OPTIMIZER: "torch.optim.adamw2"},
        "target",
        _OPTIMIZER,
        "a class",
        "--allow-target",
    ),
    Bad(
        "strategy of another library",
        {_STRATEGY: {"_target_": "lightning.pytorch.strategies.FSDPStrategy"}},
        "strategy",
        _TARGET,
        "DDPStrategy",
        "use one of",
    ),
    Bad(
        "library that is not allowed",
        {_OPTIMIZER: "bitsandbytes.optim.AdamW8bit"},
        "target",
        _OPTIMIZER,
        "torch.optim",
        "--allow-target",
    ),
    Bad(
        "adapter we do not have",
        {"model.perception.modality_adapter._target_": "nemo.collections.speechlm2.modules.QformerConnector"},
        "target",
        "model.perception.modality_adapter._target_",
        "ConformerEncoder",
        "IdentityConnector",
    ),
    # forbidden targets
    Bad(
        "os.system through lhotse",
        {_OPTIMIZER: "lhotse.utils.os.system"},
        "target",
        _OPTIMIZER,
        "a class",
        "--allow-target",
    ),
    Bad(
        "warnings.warn through torch",
        {_OPTIMIZER: "torch.optim.lr_scheduler.warnings.warn"},
        "target",
        _OPTIMIZER,
        "a class",
        "--allow-target",
    ),
    Bad(
        "shutil.rmtree through lightning",
        {_OPTIMIZER: "lightning.pytorch.callbacks.model_checkpoint.shutil.rmtree"},
        "target",
        _OPTIMIZER,
        "a class",
        "--allow-target",
    ),
    Bad(
        "a class that torch only imports",
        {_OPTIMIZER: "torch.optim.lr_scheduler.Counter"},
        "target",
        _OPTIMIZER,
        "comes from collections",
        "--allow-target",
    ),
    Bad(
        "factory inside a target",
        {"model.optimizer.betas": {"_target_": "os.system"}},
        "nested-target",
        "model.optimizer.betas._target_",
        "plain values",
        "plain values",
    ),
    # sources that run code
    Bad(
        "pipe as a manifest",
        {"data.train_ds.input_cfg.0.cuts_path": "pipe:cat cuts.jsonl"},
        "source-runs-code",
        "data.train_ds.input_cfg.0.cuts_path",
        "a path of a file",
        "--allow-commands",
    ),
    Bad(
        "address as a manifest",
        {"data.train_ds.input_cfg.0.cuts_path": "s3://bucket/cuts.jsonl"},
        "source-runs-code",
        "data.train_ds.input_cfg.0.cuts_path",
        "a path of a file",
        "--allow-commands",
    ),
    Bad(
        "command source",
        {"data.train_ds.input_cfg.0.type": "command"},
        "source-runs-code",
        "data.train_ds.input_cfg.0.type",
        "a path of a file",
        "--allow-commands",
    ),
    # contradictions and what is not there yet
    Bad(
        "no limit of a batch",
        {"data.train_ds.batch_size": None},
        "batch-limit",
        "data.train_ds.batch_size",
        "batch_duration",
        "batch_size",
    ),
    Bad(
        "no end of the run",
        {"trainer.max_steps": -1},
        "run-ends",
        "trainer.max_steps",
        "max_epochs",
        "trainer.max_steps",
    ),
    Bad(
        "broken pattern",
        {"model.freeze_params": ["^llm\\.(+$"]},
        "freeze-pattern",
        "model.freeze_params.0",
        "a regular expression",
        "fix",
    ),
    Bad(
        "attention that is not installed",
        {"model.automodel_backend.attn": "te"},
        "attention-installed",
        "model.automodel_backend.attn",
        "transformer_engine",
        "attn: auto",
    ),
    Bad(
        "checkpointing set twice",
        {
            **_mesh(activation_checkpointing_llm=True),
            f"{_STRATEGY}.distributed_config": {"activation_checkpointing": "selective"},
        },
        "activation-checkpointing-agrees",
        f"{_STRATEGY}.distributed_config.activation_checkpointing",
        "True",
        "activation_checkpointing_llm",
    ),
    Bad(
        "packed sequences with eager attention",
        {"model.packed_sequences": True, "model.automodel_backend.attn": "eager"},
        "packed-attention",
        "model.automodel_backend.attn",
        "auto, sdpa, flash or te",
        "attn: auto",
    ),
    Bad(
        "tag that differs",
        {"data.train_ds.audio_locator_tag": "<other>"},
        "audio-locator-tag",
        "data.train_ds.audio_locator_tag",
        "<|audio|>",
        "model.audio_locator_tag",
    ),
)


def write_bad_config(bad: Bad, base: dict[str, Any], folder: Path) -> Path:
    """Writes the configuration file of a case; JSON is YAML. Returns its path."""
    for path, value in bad.changes.items():
        *parents, last = path.split(".")
        node: Any = base
        for name in parents:
            node = node[int(name)] if isinstance(node, list) else node.setdefault(name, {})
        node[last] = value
    file = folder / "bad.yaml"
    file.write_text(json.dumps(base))
    return file
