"""Every rule of the list can be broken, is reported under its name, and appears in the support matrix."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from shoal.config import (
    ConfigError,
    Finding,
    LoadOptions,
    load,
    load_config,
    parse_distributed_section,
    support_matrix,
)
from shoal.config.rules import RULES, effect
from shoal.config.rules.base import keys_as_written
from tests.unit.config.bad_configs import BAD_CONFIGS
from tests.unit.config.base import base, merged

_AUTOMODEL = "shoal.train.strategy.AutomodelParallelStrategy"
_MEGATRON = "nemo_automodel.components.distributed.config.MegatronFSDPConfig"


def _mesh(**keys: Any) -> dict[str, Any]:
    return {"trainer": {"strategy": {"_target_": _AUTOMODEL, **keys}}}


def _distributed(**keys: Any) -> dict[str, Any]:
    return {"distributed": keys}


def _backend(**keys: Any) -> dict[str, Any]:
    return {"model": {"automodel_backend": keys}}


def _train(**keys: Any) -> dict[str, Any]:
    return {"data": {"train_ds": keys}}


def _nested(key: str, value: Any) -> dict[str, Any]:
    *parents, last = key.split(".")
    nested: dict[str, Any] = {last: value}
    for name in reversed(parents):
        nested = {name: nested}
    return nested


def _cosine(**keys: Any) -> dict[str, Any]:
    return {"model": {"lr_scheduler": {"_target_": "nemo.core.optim.lr_scheduler.CosineAnnealing", **keys}}}


_DDP = "lightning.pytorch.strategies.DDPStrategy"
_DEV = {"cuts_path": "dev.jsonl", "batch_size": 1}
_SOURCE = {"type": "lhotse_as_conversation", "cuts_path": "a.jsonl"}

# rule, recipe, world size, what is written over the base
BROKEN: tuple[tuple[str, str, int | None, dict[str, Any]], ...] = (
    ("dp-replicate-size-needs-fsdp2", "llm", 4, _distributed(strategy="ddp", dp_replicate_size=2)),
    ("pp-size-needs-fsdp2", "llm", 4, _distributed(strategy="megatron_fsdp", pp_size=2)),
    ("ep-size-needs-fsdp2", "llm", 4, _distributed(strategy="megatron_fsdp", ep_size=2)),
    ("tp-size-needs-fsdp2-or-megatron-fsdp", "llm", 4, _distributed(strategy="ddp", tp_size=2)),
    ("cp-size-needs-fsdp2-or-megatron-fsdp", "llm", 4, _distributed(strategy="ddp", cp_size=2)),
    ("layers-fill-stages", "llm", 4, _distributed(pp_size=4, pipeline={"layers_per_stage": 2})),
    ("pipeline-schedule", "llm", 4, _distributed(pp_size=4, pipeline={"pp_schedule": "2f2b"})),
    ("pipeline-schedule", "llm", 4, _distributed(pp_size=4, pipeline={"pp_schedule_csv": "absent.csv"})),
    (
        "tp-inside-node",
        "speech",
        6,
        {"trainer": {**_mesh(tp_size=3)["trainer"], "devices": 2, "num_nodes": 3}},
    ),
    (
        "shards-inside-node",
        "speech",
        16,
        {"trainer": {**_mesh(dp_replicate_size=2)["trainer"], "devices": 4, "num_nodes": 4}},
    ),
    ("accelerator-exists", "speech", None, {"trainer": {"accelerator": "gpu"}}),
    (
        "validation-interval-fits-epoch",
        "speech",
        None,
        {"trainer": {"limit_train_batches": 4, "val_check_interval": 8}},
    ),
    ("time-format", "speech", None, {"trainer": {"max_time": "3:50"}}),
    ("dtype-agrees-with-precision", "speech", None, {"model": {"torch_dtype": "bfloat16"}}),
    (
        "exp-manager-owns-logging-and-saving",
        "speech",
        None,
        {"trainer": {"enable_checkpointing": True}, "exp_manager": {"explicit_log_dir": "x"}},
    ),
    ("llm-folder-has-config", "speech", None, {"model": {"pretrained_llm": "EMPTY"}}),
    ("asr-folder-has-config", "speech", None, {"model": {"pretrained_asr": "EMPTY"}}),
    ("cp-needs-fused-attention", "speech", 2, merged(_mesh(cp_size=2), _backend(attn="eager"))),
    ("prompt-format", "speech", None, _train(prompt_format="qwen")),
    ("data-source", "speech", None, _train(cuts_path="also.jsonl")),
    ("source-keys", "speech", None, _train(input_cfg=[{"type": "nemo", "cuts_path": "a.jsonl"}])),
    ("source-weights", "speech", None, _train(input_cfg=[{**_SOURCE, "weight": 0.5}, _SOURCE])),
    ("bucket-bounds", "speech", None, _train(bucket_duration_bins=[4.0, 2.0])),
    ("warm-up-fits-schedule", "speech", None, _cosine(warmup_steps=10)),
    ("warm-up-fits-schedule", "speech", None, _cosine(warmup_steps=5, max_steps=5)),
    ("schedule-has-end", "speech", None, {**_cosine(), "trainer": {"max_steps": -1, "max_epochs": 1}}),
    (
        "one-directory",
        "speech",
        None,
        {"trainer": {"default_root_dir": "x"}, "exp_manager": {"explicit_log_dir": "x"}},
    ),
    (
        "time-limit-saves",
        "speech",
        None,
        {"exp_manager": {"max_time_per_run": "00:01:00:00", "create_checkpoint_callback": False}},
    ),
    ("one-sample-rate", "speech", None, {"data": {"validation_ds": {**_DEV, "sample_rate": 8000}}}),
    ("whole-lengths", "speech", None, _train(measure_total_length=False)),
    (
        "static-graph-reduces-always",
        "speech",
        2,
        {"trainer": {"strategy": {"_target_": _DDP, "static_graph": True}, "accumulate_grad_batches": 2}},
    ),
    ("backend-fits-device", "speech", 2, _mesh(process_group_backend="nccl")),
    ("files-exist", "speech", None, {"exp_manager": {"files_to_copy": ["absent.txt"]}}),
    ("no-half-parameters", "speech", 2, _mesh(distributed_config={"mp_policy": {"param_dtype": "float16"}})),
    ("length-range", "speech", None, _train(min_duration=3.0, max_duration=2.0)),
    (
        "packing-needs-one-row",
        "llm",
        None,
        {"packed_sequence": {"packed_sequence_size": 8}, "step_scheduler": {"local_batch_size": 2}},
    ),
    ("global-batch-divides", "llm", 5, {}),
    ("cp-method-needs-cp", "llm", 4, _distributed(cp_method="ulysses")),
    ("te-installed", "llm", None, {"model": {"backend": {"attn": "te"}}}),
    ("te-needs-packing", "speech", None, _backend(attn="te")),
    (
        "te-has-no-allgather",
        "llm",
        4,
        {"model": {"backend": {"attn": "te"}}, **_distributed(cp_size=2, cp_method="allgather")},
    ),
    (
        "te-has-no-allgather",
        "speech",
        2,
        merged(_mesh(cp_size=2, distributed_config={"cp_method": "allgather"}), _backend(attn="te")),
    ),
    ("mamba-cp-needs-cp", "llm", 4, _distributed(mamba_cp="state")),
    ("cp-method-needs-cp", "speech", 2, _mesh(distributed_config={"cp_method": "allgather"})),
    (
        "cp-attention",
        "llm",
        4,
        {"model": {"attn_implementation": "eager"}, **_distributed(cp_size=2)},
    ),
    ("cp-attention", "llm", 4, {"model": {"backend": {"attn": "eager"}}, **_distributed(cp_size=2)}),
    (
        "family-was-compared",
        "llm",
        None,
        {"model": {"config": {"model_type": "jamba"}}, "packed_sequence": {"packed_sequence_size": 8}},
    ),
    ("family-was-compared", "llm", 4, {"model": {"config": {"model_type": "t5"}}, **_distributed(cp_size=2)}),
    (
        "cp-reaches-attention",
        "llm",
        4,
        {"model": {"config": {"model_type": "stablelm"}}, **_distributed(cp_size=2)},
    ),
    (
        "chunks-need-ulysses",
        "llm",
        4,
        {"model": {"config": {"model_type": "llama4_text"}}, **_distributed(cp_size=2)},
    ),
    (
        "fullgraph-has-no-borders",
        "llm",
        None,
        {
            "compile": {"enabled": True, "fullgraph": True},
            "packed_sequence": {"packed_sequence_size": 8},
        },
    ),
    (
        "fullgraph-has-no-borders",
        "llm",
        None,
        {"compile": {"enabled": True, "fullgraph": True}, "model": {"config": {"model_type": "bamba"}}},
    ),
    ("flash-installed", "llm", None, {"model": {"backend": {"attn": "flash"}}}),
    ("flash-installed", "llm", None, {"model": {"attn_implementation": "flash_attention_2"}}),
    ("strategy-megatron-fsdp", "speech", 2, _mesh(distributed_config={"_target_": _MEGATRON})),
    ("sequence-parallel-needs-tp", "speech", 2, _mesh(distributed_config={"sequence_parallel": True})),
    (
        "tp-plan-needs-tp",
        "speech",
        2,
        _mesh(distributed_config={"tp_plan": {"model.layers.*.mlp.up_proj": "colwise"}}),
    ),
    ("not-yet-aux-loss-coeff", "speech", None, {"model": {"aux_loss_coeff": 0.01}}),
    ("not-yet-train-gate", "speech", None, {"model": {"train_gate": True}}),
    ("not-yet-moe-metrics-enabled", "speech", None, {"model": {"moe_metrics": {"enabled": True}}}),
    ("not-yet-compile", "speech", None, {"model": {"compile": {"mode": "default"}}}),
    ("not-yet-sdpa-method", "speech", None, {"model": {"sdpa_method": ["math"]}}),
    ("not-yet-init-configure-model", "speech", None, {"model": {"init_configure_model": True}}),
    (
        "not-yet-pretrained-perception-from-s2s",
        "speech",
        None,
        {"model": {"pretrained_perception_from_s2s": "a"}},
    ),
    ("not-yet-pretrained-s2s-model", "speech", None, {"model": {"pretrained_s2s_model": "a"}}),
    ("not-yet-incremental-loading", "speech", None, {"model": {"incremental_loading": True}}),
    ("not-yet-automodel-backend-attn", "speech", None, _backend(attn="flex")),
    ("not-yet-automodel-backend-linear", "speech", None, _backend(linear="te")),
    ("not-yet-automodel-backend-rms-norm", "speech", None, _backend(rms_norm="te")),
    ("not-yet-automodel-backend-rope-fusion", "speech", None, _backend(rope_fusion=True)),
    ("not-yet-automodel-backend-experts", "speech", None, _backend(experts="gmm")),
    ("not-yet-automodel-backend-dispatcher", "speech", None, _backend(dispatcher="deepep")),
    (
        "not-yet-trainer-gradient-clip-algorithm",
        "speech",
        None,
        {"trainer": {"gradient_clip_algorithm": "value"}},
    ),
    ("not-yet-trainer-precision", "speech", None, {"trainer": {"precision": 16}}),
    ("not-yet-lora-use-dora", "speech", None, {"model": {"lora": {"use_dora": True}}}),
    (
        "not-yet-trainer-strategy-activation-checkpointing-llm",
        "speech",
        2,
        _mesh(activation_checkpointing_llm="selective"),
    ),
    (
        "not-yet-trainer-strategy-distributed-config-activation-checkpointing",
        "speech",
        2,
        _mesh(distributed_config={"activation_checkpointing": "selective"}),
    ),
    (
        "not-yet-distributed-activation-checkpointing",
        "llm",
        None,
        _distributed(activation_checkpointing="selective"),
    ),
    ("not-yet-trainer-strategy-moe-config", "speech", 2, _mesh(moe_config={})),
    *(
        ("not-yet-" + key.replace(".", "-").replace("_", "-"), "speech", None, _nested(key, value))
        for key, value in (
            ("trainer.enable_model_summary", True),
            ("trainer.limit_test_batches", 2),
            ("trainer.limit_predict_batches", 2),
            ("data.test_ds", {"cuts_path": "a", "batch_size": 1}),
            ("data.predict_ds", {"cuts_path": "a", "batch_size": 1}),
            ("exp_manager.resume_past_end", True),
            ("exp_manager.disable_validation_on_resume", True),
            ("exp_manager.seconds_to_sleep", 5),
            ("exp_manager.create_early_stopping_callback", True),
            ("exp_manager.checkpoint_callback_params.always_save_nemo", True),
            ("exp_manager.checkpoint_callback_params.save_nemo_on_train_end", True),
        )
    ),
    (
        "not-yet-trainer-strategy-save-distributed-checkpoint",
        "speech",
        None,
        _mesh(save_distributed_checkpoint=False),
    ),
    (
        "not-yet-trainer-strategy-distributed-config-mp-policy-output-dtype",
        "speech",
        None,
        _mesh(distributed_config={"mp_policy": {"output_dtype": "float32"}}),
    ),
    (
        "compile-mode-needs-inductor",
        "llm",
        None,
        {"compile": {"backend": "aot_eager", "mode": "max-autotune"}},
    ),
    (
        "not-yet-distributed-pipeline-scale-grads-in-schedule",
        "llm",
        2,
        _distributed(pp_size=2, pipeline={"scale_grads_in_schedule": True}),
    ),
    ("not-yet-backend-attn", "llm", None, {"model": {"backend": {"attn": "flex"}}}),
    ("not-yet-backend-linear", "llm", None, {"model": {"backend": {"linear": "te"}}}),
    ("not-yet-backend-rms-norm", "llm", None, {"model": {"backend": {"rms_norm": "te"}}}),
    ("not-yet-backend-rope-fusion", "llm", None, {"model": {"backend": {"rope_fusion": True}}}),
    ("not-yet-backend-experts", "llm", None, {"model": {"backend": {"experts": "torch_mm"}}}),
    ("not-yet-backend-dispatcher", "llm", None, {"model": {"backend": {"enable_deepep": True}}}),
    ("not-yet-precision", "llm", None, {"precision": "16-mixed"}),
    ("not-yet-peft-use-dora", "llm", None, {"peft": {"match_all_linear": True, "use_dora": True}}),
    ("not-yet-peft-use-triton", "llm", None, {"peft": {"match_all_linear": True, "use_triton": True}}),
    (
        "not-yet-distributed-options-mp-policy-output-dtype",
        "llm",
        None,
        _distributed(mp_policy={"output_dtype": "float32"}),
    ),
    ("llm-model", "llm", None, {"model": {"config": {"model_type": "llama"}}}),
    ("llm-model", "llm", None, {"model": {"pretrained_model_name_or_path": None, "config": {"a": 1}}}),
    ("llm-attention", "llm", None, {"model": {"attn_implementation": "sdpa", "backend": {"attn": "flash"}}}),
    (
        "packing-attention",
        "llm",
        None,
        {"packed_sequence": {"packed_sequence_size": 8}, "model": {"attn_implementation": "sdpa"}},
    ),
    ("llm-dataset", "llm", None, {}),
    ("text-columns", "llm", None, {"dataset": {"path": "a", "column_mapping": {"answer": "b"}}}),
    (
        "text-columns",
        "llm",
        None,
        {"validation_dataset_x": {"path": "a", "type": "instruction", "column_mapping": {"answer": "b"}}},
    ),
    ("tokens-folder", "llm", None, {"dataset": {"path": ["a", "b"], "type": "tokens"}}),
    ("truncation", "llm", None, {"dataset": {"path": "a", "truncation": True}}),
    (
        "truncation",
        "llm",
        None,
        {"dataset": {"path": "a", "type": "text", "truncation": True, "seq_length": 8}},
    ),
    ("llm-dtype", "llm", None, {"model": {"torch_dtype": "bfloat16"}, "precision": "32-true"}),
    ("llm-dtype", "llm", None, {"model": {"torch_dtype": "float16"}}),
    ("rng-ranked", "llm", None, {"rng": {"ranked": False}}),
    ("llm-backend", "llm", None, {"dist_env": {"backend": "nccl"}}),
    ("peft-targets", "llm", None, {"peft": {"dim": 4}}),
    ("peft-targets", "llm", None, {"peft": {"match_all_linear": True, "target_modules": ["q_proj"]}}),
    ("lr-schedule", "llm", None, {"lr_scheduler": {"lr_warmup_steps": 9, "lr_decay_steps": 9}}),
    (
        "lr-schedule",
        "llm",
        None,
        {"lr_scheduler": {"lr_warmup_steps": 9, "lr_decay_steps": None}, "step_scheduler": {"max_steps": 9}},
    ),
    ("lr-schedule", "llm", None, {"lr_scheduler": {"lr_decay_style": "WSD"}}),
    ("validation-is-whole", "llm", None, {"validation_dataloader": {"shuffle": True}}),
    ("validation-is-whole", "llm", None, {"validation_dataloader": {"drop_last": True}}),
    ("validation-is-whole", "llm", None, {"dataloader": {"batch_size": 2}}),
)

NOTICES: tuple[tuple[str, int | None, dict[str, Any]], ...] = (
    ("step-fills-ranks", 2, {"trainer": {"global_micro_batches": 3}}),
    ("no-master-weights", None, {"trainer": {"precision": "bf16-true"}}),
    ("sampler-is-ours", 2, _mesh()),
    ("sampler-is-ours", 2, {"trainer": {"use_distributed_sampler": True}}),
    ("monitor-is-logged", None, {"exp_manager": {"explicit_log_dir": "x"}}),
    (
        "monitor-needs-validation",
        None,
        {
            "exp_manager": {"explicit_log_dir": "x"},
            "data": {"validation_ds": _DEV},
            "trainer": {"limit_val_batches": 0},
        },
    ),
    ("schedule-ends-with-run", None, _cosine(max_steps=9)),
    (
        "shards-inside-node",
        16,
        {"trainer": {**_mesh(dp_replicate_size=2)["trainer"], "devices": 4, "num_nodes": 4}},
    ),
)


TO_TRAIN = ("flash-installed", "llm-dataset", "llm-backend", "backend-fits-device", "files-exist")


def _case_id(value: object) -> str | None:
    return value if isinstance(value, str) else None


@pytest.mark.parametrize(("rule", "recipe", "world", "change"), BROKEN, ids=_case_id)
def test_rule_refuses(
    rule: str, recipe: str, world: int | None, change: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "llm").mkdir()
    (tmp_path / "llm" / "config.json").write_text(json.dumps({"num_hidden_layers": 12}))
    (tmp_path / "empty").mkdir()
    data = merged(base(recipe), change)
    text = json.dumps(data).replace("EMPTY", str(tmp_path / "empty"))
    if recipe == "llm":
        inline = "config" in change.get("model", {}) and rule != "llm-model"  # which is about naming both
        model = {} if inline else {"_target_": _MODEL, "pretrained_model_name_or_path": str(tmp_path / "llm")}
        data = merged({"model": model}, json.loads(text))
    options = LoadOptions(accelerators=0, strict_topology=True, to_train=rule in TO_TRAIN)
    with pytest.raises(ConfigError) as caught:
        load_config(data if recipe == "llm" else json.loads(text), world_size=world, options=options)
    assert rule in {finding.rule for finding in caught.value.findings}, str(caught.value)


_MODEL = "transformers.AutoModelForCausalLM.from_pretrained"


@pytest.mark.parametrize(("rule", "world", "change"), NOTICES, ids=_case_id)
def test_rule_only_notes(rule: str, world: int | None, change: dict[str, Any]) -> None:
    loaded = load(merged(base("speech"), change), world_size=world)
    assert rule in {notice.rule for notice in loaded.notices}
    assert load(base("speech")).notices == ()


def test_devices_beyond_the_machine() -> None:
    data = merged(base("speech"), {"trainer": {"accelerator": "gpu", "devices": 4}})
    with pytest.raises(ConfigError, match="devices-exist"):
        load_config(data, options=LoadOptions(accelerators=2))


def test_a_logger_that_is_not_installed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    data = merged(
        base("speech"), {"exp_manager": {"create_wandb_logger": True, "create_tensorboard_logger": True}}
    )
    missing = {"wandb"}
    monkeypatch.setattr(effect, "find_spec", lambda name: None if name in missing else name)
    with pytest.raises(ConfigError) as caught:
        load_config(data, options=LoadOptions(to_train=True))
    assert [finding.key for finding in caught.value.findings] == ["exp_manager.create_wandb_logger"]
    load_config(data)  # to evaluate, say
    missing.clear()
    load_config(data, options=LoadOptions(to_train=True))


def test_every_rule_is_broken_somewhere() -> None:
    blocks = (Path(__file__).parent / "documented_blocks").glob("*.yaml")
    documented = {rule for block in blocks for rule in yaml.safe_load(block.read_text())["refused"]}
    tabled = {row[0] for row in (*BROKEN, *NOTICES)} | {bad.rule for bad in BAD_CONFIGS}
    model_shape = {"tp-divides-heads", "tp-divides-kv-heads"}
    model_shape |= {
        "ep-divides-experts",
        "ep-needs-experts",
        "cp-divides-mamba-heads",
        "ulysses-divides-heads",
        "pp-fits-layers",
    }  # case 59
    # A misspelt mode can reach the rules from Python only: the loader refuses its type.
    elsewhere = {"devices-exist", "logger-installed", "activation-checkpointing-mode"}
    elsewhere |= {"ci-section"}  # in test_llm.py
    elsewhere |= {"attention-dropout", "adapter-dropout"}  # in test_dropout_rules.py
    covered = documented | tabled | model_shape | elsewhere
    assert {rule.id for rule in RULES} - covered == set()


_LIGHTNING = "lightning.pytorch.strategies.ModelParallelStrategy"


@pytest.mark.parametrize(
    ("recipe", "change", "argument", "key"),
    [
        ("llm", _distributed(tp_size=2), "tp_size", "distributed.tp_size"),
        ("llm", _distributed(tp_size=2), "parallelism_sizes.cp_size", "distributed.cp_size"),
        ("llm", _distributed(tp_size=2), "tp_plan", "distributed.tp_plan"),
        ("speech", _mesh(tp_size=2), "tp_size", "trainer.strategy.tp_size"),
        (
            "speech",
            _mesh(tp_size=2),
            "sequence_parallel",
            "trainer.strategy.distributed_config.sequence_parallel",
        ),
        (
            "speech",
            {"trainer": {"strategy": {"_target_": _LIGHTNING, "tensor_parallel_size": 2}}},
            "tp_size",
            "trainer.strategy.tensor_parallel_size",
        ),
        ("llm", {}, "model.config", "model.config"),
    ],
)
def test_what_a_model_refuses_is_named_by_the_users_key(
    recipe: str, change: dict[str, Any], argument: str, key: str
) -> None:
    config = load_config(merged(base(recipe), change), world_size=2)
    refused = Finding("a-rule", argument, 2, "1", "1")
    with pytest.raises(ConfigError) as caught, keys_as_written(config):
        raise ConfigError([refused])
    assert caught.value.findings == (Finding("a-rule", key, 2, "1", "1"),)


def test_support_matrix_lists_every_rule_once() -> None:
    rows = [line.split("`")[1] for line in support_matrix().splitlines()[2:]]
    assert rows == list(dict.fromkeys(rule.id for rule in RULES))


def test_section_alone_is_checked_like_a_file() -> None:
    section = {
        "strategy": "fsdp2",
        "dp_size": "none",
        "dp_replicate_size": 2,
        "activation_checkpointing": True,
    }
    parsed = parse_distributed_section(section, world_size=8)
    assert (parsed.sizes.dp_size, parsed.sizes.dp_replicate_size) == (None, 2)
    assert parsed.activation_checkpointing is True
    with pytest.raises(ConfigError, match="dp-size-fills-world"):
        parse_distributed_section({"dp_size": 3}, world_size=8)
    assert section["dp_size"] == "none"


def test_an_option_of_another_strategy_is_no_misspelt_key() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_distributed_section(
            {"strategy": "ddp", "sequence_parallel": True, "bucket_cap": 1}, world_size=8
        )
    option, misspelt = sorted(caught.value.findings, key=lambda finding: finding.rule)
    assert (option.rule, option.key, option.value) == (
        "option-of-strategy",
        "distributed.sequence_parallel",
        True,
    )
    assert option.limit == "a key of strategy fsdp2, not of ddp"
    assert option.repair == "leave it out, or strategy: fsdp2"
    assert (misspelt.rule, misspelt.repair) == ("unknown-key", "did you mean distributed.bucket_cap_mb?")
