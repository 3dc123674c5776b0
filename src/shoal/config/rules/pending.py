"""Keys whose features arrive later: accepted when off, refused by name as soon as they are switched on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from shoal.config.facts import Facts
from shoal.config.llm import LLMConfig
from shoal.config.rules.base import Broken, Recipe, Rule, layout_of, size_key, sizes_of
from shoal.config.speech import SpeechConfig


@dataclass(frozen=True)
class Pending:
    """A key that is not implemented yet.

    Attributes:
        key: Path of the key, as fields of the configuration and as the user writes it.
        feature: What the key would switch on.
        off: The values that are accepted.
        repair: What to write instead.
    """

    key: str
    feature: str
    off: tuple[Any, ...]
    repair: str = "leave it out"


_PRECISIONS = ("32-true", "64-true", "bf16-mixed", "bf16-true", "bf16-flash")
_CHOSEN = "recomputing a part of each layer"
_WHOLE_LAYERS = (False, True, "full")
_SPEECH = (
    Pending("model.aux_loss_coeff", "the load-balance loss of expert layers", (0,)),
    Pending("model.train_gate", "training the router of expert layers", (False,)),
    Pending("model.moe_metrics.enabled", "logging of expert load", (False,)),
    Pending("model.compile", "torch.compile", (None,)),
    Pending("model.sdpa_method", "a choice among torch's attention kernels", (None,)),
    Pending("model.init_configure_model", "building weights in the constructor", (False,)),
    Pending("model.pretrained_perception_from_s2s", "starting from a duplex model", (None,)),
    Pending("model.pretrained_s2s_model", "starting from a duplex model", (None,)),
    Pending("model.incremental_loading", "loading tensor by tensor", (False,)),
    Pending(
        "model.automodel_backend.attn",
        "this attention kernel",
        ("auto", "sdpa", "eager", "flash", "te"),
        "attn: auto",
    ),
    Pending("model.automodel_backend.linear", "this linear layer", ("torch",)),
    Pending("model.automodel_backend.rms_norm", "this norm kernel", ("torch",)),
    Pending("model.automodel_backend.rope_fusion", "fused rotary embeddings", (False,)),
    Pending("model.automodel_backend.experts", "this expert kernel", ("auto", "torch")),
    Pending("model.automodel_backend.dispatcher", "this token dispatcher", ("auto", "torch")),
    Pending("trainer.enable_model_summary", "Lightning's table of parameters", (False,)),
    Pending("trainer.strategy.save_distributed_checkpoint", "an unsharded checkpoint file", (True,)),
    Pending("trainer.limit_test_batches", "testing after training", (None,)),
    Pending("trainer.limit_predict_batches", "prediction after training", (None,)),
    Pending("data.test_ds", "testing after training (use `shoal evaluate`)", (None,)),
    Pending("data.predict_ds", "prediction after training (use `shoal generate`)", (None,)),
    Pending("exp_manager.resume_past_end", "resuming a run that has ended", (False,)),
    Pending("exp_manager.disable_validation_on_resume", "skipping validation on resume", (False,)),
    Pending("exp_manager.seconds_to_sleep", "waiting before the first rank reports", (0,)),
    Pending("exp_manager.create_early_stopping_callback", "early stopping", (False,)),
    Pending("exp_manager.checkpoint_callback_params.always_save_nemo", "writing .nemo files", (False,)),
    Pending("exp_manager.checkpoint_callback_params.save_nemo_on_train_end", "writing .nemo files", (False,)),
    Pending("trainer.strategy.distributed_config.mp_policy.output_dtype", "an output dtype", (None,)),
    Pending("trainer.gradient_clip_algorithm", "clipping by value", ("norm",)),
    Pending("trainer.precision", "the gradient scaler of fp16", _PRECISIONS),
    Pending("trainer.strategy.moe_config", "expert parallelism", (None,)),
    Pending("trainer.strategy.activation_checkpointing_llm", _CHOSEN, _WHOLE_LAYERS),
    Pending("trainer.strategy.distributed_config.activation_checkpointing", _CHOSEN, _WHOLE_LAYERS),
    Pending("model.lora.use_dora", "weight-decomposed adapters", (False,)),
)

_LLM = (
    Pending("distributed.activation_checkpointing", _CHOSEN, _WHOLE_LAYERS),
    Pending(
        "model.backend.attn", "this attention kernel", ("auto", "sdpa", "eager", "flash", "te"), "attn: auto"
    ),
    Pending("model.backend.linear", "this linear layer", ("torch",)),
    Pending("model.backend.rms_norm", "this norm kernel", ("torch", "torch_fp32")),
    Pending("model.backend.rope_fusion", "fused rotary embeddings", (False,)),
    Pending("model.backend.experts", "this expert kernel", ("auto", "torch")),
    Pending("model.backend.dispatcher", "this token dispatcher", ("auto", "torch")),
    Pending("precision", "the gradient scaler of fp16", (None, *_PRECISIONS)),
    Pending("peft.use_dora", "weight-decomposed adapters", (False,)),
    Pending("peft.use_triton", "adapter kernels in Triton", (False,)),
    Pending("distributed.options.mp_policy.output_dtype", "an output dtype", (None,)),
    Pending("distributed.pipeline.scale_grads_in_schedule", "scaling in the schedule", (False,)),
)

_AXES = (
    ("pp_size", "axis-pp", "pipeline parallelism"),
    ("ep_size", "axis-ep", "expert parallelism"),
)


def _value(config: Any, key: str) -> Any:
    node = config
    for name in key.split("."):
        node = getattr(node, name, None)
        if node is None:
            return None
    return node


def _key_rule(item: Pending, recipe: Recipe) -> Rule:
    def check(config: Any, facts: Facts) -> Iterator[Broken]:
        value = _value(config, item.key)
        if value is not None and value not in item.off:
            allowed = ", ".join("absent" if off is None else str(off).lower() for off in item.off)
            yield Broken(
                item.key.replace(".options", ""), value, f"{allowed}: {item.feature} is not implemented yet"
            )

    identifier = "not-yet-" + item.key.removeprefix("model.").replace(".", "-").replace("_", "-")
    why = f"{item.feature} arrives later"
    return Rule(identifier, recipe, (item.key,), check, why, item.repair, pending=True)


def _axis_rule(size: str, identifier: str, name: str) -> Rule:
    def check(config: SpeechConfig | LLMConfig, facts: Facts) -> Iterator[Broken]:
        degree = getattr(sizes_of(config), size)
        if degree > 1:
            yield Broken(size_key(config, size), degree, f"1: {name} is not implemented yet")

    keys = ("trainer.strategy", "distributed")
    return Rule(identifier, "both", keys, check, f"{name} arrives later", f"{size}: 1", pending=True)


def _megatron(config: SpeechConfig | LLMConfig, facts: Facts) -> Iterator[Broken]:
    if layout_of(config, facts.world_size).strategy == "megatron_fsdp":
        speech = isinstance(config, SpeechConfig)
        key = "trainer.strategy.distributed_config" if speech else "distributed.strategy"
        yield Broken(key, "megatron_fsdp", "fsdp2 or ddp: megatron_fsdp is not implemented yet")


_KEYS = ("trainer.strategy", "distributed")

PENDING_RULES: tuple[Rule, ...] = (
    *(_axis_rule(*axis) for axis in _AXES),
    Rule(
        "strategy-megatron-fsdp",
        "both",
        _KEYS,
        _megatron,
        "the strategy arrives later",
        "strategy: fsdp2",
        pending=True,
    ),
    *(_key_rule(item, "speech") for item in _SPEECH),
    *(_key_rule(item, "llm") for item in _LLM),
)
