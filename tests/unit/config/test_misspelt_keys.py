"""A misspelt key is answered with the one that was meant, in every section, also where blocks are read apart."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

import pytest

import shoal.config.shapes  # noqa: F401  (registers the readers)
from shoal.config import ConfigError, LoadOptions, evaluate, llm, load, schema, speech, text
from shoal.config.build import Report, convert
from shoal.config.values import TargetConfig

NEMO = "nemo.collections.speechlm2.parts.parallel.AutomodelParallelStrategy"
LIGHTNING = "lightning.pytorch.strategies.ModelParallelStrategy"
CONFORMER = "nemo.collections.asr.modules.ConformerEncoder"


def names(*classes: Any) -> set[str]:
    return {item.name for cls in classes for item in fields(cls) if not item.metadata.get("internal")}


@dataclass(frozen=True)
class Section:
    """The keys of a block, and what has to stand in it for them to be its keys."""

    cls: type
    keys: set[str]
    given: dict[str, Any] = field(default_factory=dict)


def plain(cls: type, *more: str) -> Section:
    return Section(cls, names(cls) | set(more))


FSDP2_KEYS = names(schema.ParallelismSizes, schema.FSDP2Config) | {"strategy", "pipeline", "moe"}
DDP_KEYS = names(schema.ParallelismSizes, schema.DDPConfig) | {"strategy", "pipeline", "moe"}
MFSDP_KEYS = names(schema.ParallelismSizes, schema.MegatronFSDPConfig) | {"strategy", "pipeline", "moe"}
_COMMON = {"_target_", "process_group_backend", "timeout", "timeout_minutes"}

SECTIONS = {
    "llm": plain(llm.LLMConfig, "recipe", "validation_dataset"),
    "llm.model": plain(llm.CausalLMConfig, "_target_"),
    "llm.model.backend": plain(speech.BackendConfig, "_target_", "enable_deepep"),
    "llm.step_scheduler": plain(llm.StepSchedulerConfig),
    "llm.dist_env": plain(schema.DistEnvConfig),
    "llm.rng": plain(llm.RngConfig, "_target_"),
    "llm.compile": plain(llm.CompileConfig),
    "llm.checkpoint": plain(llm.CheckpointConfig, "max_recent_checkpoints"),
    "llm.distributed": Section(schema.DistributedConfig, FSDP2_KEYS),
    "llm.distributed ddp": Section(schema.DistributedConfig, DDP_KEYS - {"strategy"}, {"strategy": "ddp"}),
    "llm.distributed megatron": Section(
        schema.DistributedConfig, MFSDP_KEYS - {"strategy"}, {"strategy": "megatron_fsdp"}
    ),
    "pipeline": plain(schema.PipelineConfig, "_target_"),
    "moe": plain(schema.MoEParallelizerConfig, "_target_"),
    "mp_policy": plain(schema.MixedPrecisionConfig, "_target_"),
    "offload_policy": plain(schema.OffloadConfig, "_target_"),
    "llm.loss_fn": plain(llm.LossConfig, "_target_"),
    "llm.dataset": plain(text.TextDatasetConfig, "_target_", "path_or_dataset_id", "num_samples_limit"),
    "llm.packed_sequence": plain(text.PackedSequenceConfig, "drop_long_samples"),
    "llm.dataloader": plain(text.DataloaderConfig, "_target_", "collate_fn"),
    "llm.lr_scheduler": plain(llm.LRSchedulerConfig),
    "llm.clip_grad_norm": plain(llm.ClipGradNormConfig),
    "llm.peft": plain(llm.PeftConfig, "_target_"),
    "optimizer": Section(TargetConfig, {"_target_"}),
    "optimizer AdamW": Section(
        TargetConfig, {"betas", "weight_decay", "fused", "foreach"}, {"_target_": "torch.optim.AdamW"}
    ),
    "speech": plain(speech.SpeechConfig),
    "speech.model": plain(speech.SalmConfig),
    "speech.model.lora": plain(speech.LoraConfig, "_target_", "alpha", "match_all_linear"),
    "speech.model.perception": plain(speech.PerceptionConfig, "_target_", "target"),
    "speech.model.perception.modality_adapter": plain(speech.ModalityAdapterConfig, "_target_"),
    "speech.model.perception.modality_adapter NeMo": Section(
        speech.ModalityAdapterConfig,
        {"dropout_att", "subsampling_factor", "n_layers"},
        {"_target_": CONFORMER},
    ),
    "speech.model.perception.spec_augment": plain(speech.SpecAugmentConfig, "_target_"),
    "speech.model.moe_metrics": plain(speech.MoEMetricsConfig),
    "speech.trainer": plain(speech.TrainerConfig),
    "speech.trainer.strategy": Section(
        speech.StrategyConfig, (names(schema.DDPConfig) - {"activation_checkpointing"}) | _COMMON
    ),
    "speech.trainer.strategy automodel": Section(
        speech.StrategyConfig,
        names(schema.ParallelismSizes)
        | (_COMMON - {"_target_"})
        | {"distributed_config", "moe_config", "activation_checkpointing_llm"},
        {"_target_": NEMO},
    ),
    "speech.trainer.strategy model_parallel": Section(
        speech.StrategyConfig, {"data_parallel_size", "tensor_parallel_size"}, {"_target_": LIGHTNING}
    ),
    "distributed_config": plain(schema.FSDP2Config, "_target_"),
    "distributed_config megatron": plain(schema.MegatronFSDPConfig, "_target_"),
    "speech.data": plain(speech.DataConfig),
    "speech.data.train_ds": plain(speech.DatasetConfig),
    "speech.data.train_ds.input_cfg": plain(speech.InputConfig),
    "speech.exp_manager": plain(speech.ExpManagerConfig),
    "speech.exp_manager.checkpoint_callback_params": plain(speech.CheckpointCallbackConfig),
    "evaluate": plain(evaluate.EvaluateConfig),
    "generate": plain(evaluate.GenerateConfig),
}


def without_a_letter(name: str) -> set[str]:
    return {name[:place] + name[place + 1 :] for place in range(len(name))}


@pytest.mark.parametrize("name", list(SECTIONS))
def test_a_key_without_one_of_its_letters_is_answered_with_the_key(name: str) -> None:
    section = SECTIONS[name]
    wrong = {}
    for key in section.keys:
        for misspelt in without_a_letter(key) - section.keys if len(key) > 2 else ():
            report = Report()
            convert(section.cls, {**section.given, misspelt: 1}, "block", report)
            said = [item for item in report.findings if item.key == f"block.{misspelt}"]
            meant = said[0].repair.removeprefix("did you mean block.").removesuffix("?") if said else ""
            # tp_size and dp_size are equally near to p_size.
            if misspelt not in without_a_letter(meant) or (said and key not in said[0].limit):
                wrong[misspelt] = (key, [str(item) for item in report.findings])
    assert not wrong


@pytest.mark.parametrize(
    ("override", "repair"),
    [
        ("distributed.stratgy=ddp", "did you mean distributed.strategy?"),
        ("distributed.dpsize=1", "did you mean distributed.dp_size?"),
        ("distributed.strategy=dpp", "strategy: ddp"),
        ("distributed.strategy=fsdp", "strategy: fsdp2"),
        ("optimizer={_targt_: torch.optim.SGD}", "did you mean optimizer._target_?"),
        ("checkpoint.max_recent_checkpoint=1", "did you mean checkpoint.max_recent_checkpoints?"),
    ],
)
def test_what_the_command_line_says(override: str, repair: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load({"model": {"config": {"model_type": "llama"}}}, [override], options=LoadOptions(accelerators=0))
    assert repair in [finding.repair for finding in caught.value.findings], str(caught.value)
