"""From the user's configuration to a small task: the same recipe code, on small models and drawn data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig

from shoal.config.errors import ConfigError, Finding
from shoal.config.llm import CompileConfig, LLMConfig
from shoal.config.speech import SalmConfig, SpeechConfig
from shoal.data.batch import MicroBatch
from shoal.models.assemble import ModelPlan
from shoal.models.mamba import restore_mamba
from shoal.models.meta import parameters_on_meta
from shoal.speech.batch_norm import use_step_batch_norm
from shoal.speech.encoders import encoder_spec
from shoal.train.llm_plans import causal_lm_plan
from shoal.train.plans import salm_plan
from shoal.verify.architecture import MOST_PARAMETERS, lost_structure, num_parameters, on_meta
from shoal.verify.documents import plain_text_loss
from shoal.verify.double import compute_in_float64
from shoal.verify.shrink import Fields, shrink_text_model, similar, small_vocabulary
from shoal.verify.shrink_speech import WINDOW_SECONDS, shrink_encoder, shrink_perception
from shoal.verify.sources import read_architecture, write_folder
from shoal.verify.synthetic import Shape, empty, micro_batches
from shoal.verify.task import MeshLayout, Task
from shoal.verify.world import Scaled

_CLIP_AT = 0.5
"""Bound of the gradient norm when the configuration has one; low enough to act on a small model."""


@dataclass(frozen=True)
class Architectures:
    """Other sources of architectures than the configuration names, see `read_architecture`."""

    model: str | None = None
    encoder: str | None = None


@dataclass(frozen=True)
class Prepared:
    """A small task and what was done to get it.

    Attributes:
        task: What is trained.
        layout: On which layout.
        sizes: Sizes of the models by name of the field, as configured and as verified.
        lost: Parts of the original architecture that the small model has not.
        uncovered: Keys of the configuration that the proof leaves out, and why.
    """

    task: Task
    layout: MeshLayout
    sizes: Mapping[str, tuple[Any, Any]]
    lost: list[str]
    uncovered: list[str]


def prepare(
    config: SpeechConfig | LLMConfig, scaled: Scaled, folder: Path, sources: Architectures
) -> Prepared:
    """Makes the task of a configuration; small model folders are written below `folder`.

    Raises:
        ConfigError: An architecture cannot be had, or cannot be made small.
    """
    if isinstance(config, LLMConfig):
        return _prepare_text(config, scaled, folder, sources)
    return _prepare_speech(config, scaled, folder, sources)


# --------------------------------------------------------------------------------------------------- text


def _prepare_text(config: LLMConfig, scaled: Scaled, folder: Path, sources: Architectures) -> Prepared:
    model = config.model
    if model is None:
        limit = "a model to verify"
        raise ConfigError(
            [Finding("llm-model", "model", None, limit, "model.pretrained_model_name_or_path: NAME")]
        )
    name = model.pretrained_model_name_or_path or model.config
    assert name is not None  # the rules demand one
    key = (
        "model.config"
        if model.pretrained_model_name_or_path is None
        else "model.pretrained_model_name_or_path"
    )
    trust = model.trust_remote_code
    original = read_architecture(name, key, "--model-config", instead=sources.model, trust_remote_code=trust)
    fields = shrink_text_model(original.to_dict(), scaled.degrees)
    write_folder(original, fields, sources.model or name, folder / "llm")
    uncovered = _uncovered_text(config)
    size = config.packed_sequence.packed_sequence_size
    degrees = scaled.degrees
    step = 2 * degrees.cp[1] if size % (2 * degrees.cp[0]) == 0 else 1
    pack = similar(size, 40, degrees.cp, degrees.tp, multiple_of=step) if size else 0
    small = replace(
        config,
        model=replace(
            model,
            pretrained_model_name_or_path=None,
            config=str(folder / "llm"),
            attn_implementation="eager" if model.attn_implementation == "eager" else "auto",
            backend=replace(model.backend, attn="auto"),
        ),
        compile=CompileConfig(),
        packed_sequence=replace(config.packed_sequence, packed_sequence_size=pack),
        peft=None
        if config.peft is None
        else replace(config.peft, dim=min(config.peft.dim, 4), adapter_path=None),
    )
    plan = _in_float64(causal_lm_plan(small))
    shape = Shape(
        small_vocabulary(fields), _num_micro_batches(scaled), pack_size=pack, round_to=2 * degrees.cp[1]
    )
    noisy = _dropout_of(fields) or (config.peft is not None and config.peft.dropout > 0)
    loss = partial(
        plain_text_loss, label_smoothing=config.loss_fn.label_smoothing, z_loss=config.loss_fn.z_loss
    )
    task = replace(_task(plan, shape, clip=config.clip_grad_norm.max_norm is not None), seed=config.rng.seed)
    if not noisy:
        task = replace(task, plain=_plain(causal_lm_plan(_in_rows(small))), plain_loss=loss)
    lost = _lost(_whole_text_model(original, trust), _small_model(plan).get_submodule("llm"))
    return Prepared(task, scaled.layout, _sizes(original.to_dict(), fields), lost, uncovered)


def _in_rows(config: LLMConfig) -> LLMConfig:
    """The same model with the attention of transformers that every family has."""
    assert config.model is not None
    return replace(
        config,
        model=replace(config.model, attn_implementation="eager"),
        packed_sequence=replace(config.packed_sequence, packed_sequence_size=0),
    )


def _whole_text_model(original: PreTrainedConfig, trust: bool) -> nn.Module:
    factory: Any = AutoModelForCausalLM
    return on_meta(lambda: factory.from_config(original, trust_remote_code=trust))


def _uncovered_text(config: LLMConfig) -> list[str]:
    model = config.model
    assert model is not None
    found = []
    if config.compile.enabled:
        found.append("compile: layers run uncompiled")
    for key, value in (
        ("model.attn_implementation", model.attn_implementation),
        ("model.backend.attn", model.backend.attn),
    ):
        if value not in ("auto", "sdpa", "eager", "shoal"):
            found.append(f"{key} {value}: attention runs on CPU kernels")
    return found


# ------------------------------------------------------------------------------------------------- speech


def _prepare_speech(config: SpeechConfig, scaled: Scaled, folder: Path, sources: Architectures) -> Prepared:
    model = config.model
    trust = model.trust_remote_code
    llm = read_architecture(
        model.pretrained_llm,
        "model.pretrained_llm",
        "--model-config",
        instead=sources.model,
        trust_remote_code=trust,
    )
    asr = read_architecture(
        model.pretrained_asr,
        "model.pretrained_asr",
        "--encoder-config",
        instead=sources.encoder,
        trust_remote_code=trust,
    )
    fields = shrink_text_model(llm.to_dict(), scaled.degrees)
    overrides = dict(model.perception.encoder)
    encoder = shrink_encoder(asr.to_dict(), overrides)
    write_folder(llm, fields, sources.model or model.pretrained_llm, folder / "llm")
    write_folder(asr, encoder, sources.encoder or model.pretrained_asr, folder / "encoder")
    chunk = model.encoder_chunk_size_seconds
    small = replace(
        model,
        pretrained_llm=str(folder / "llm"),
        pretrained_asr=str(folder / "encoder"),
        pretrained_weights=False,
        perception=shrink_perception(model.perception),
        encoder_chunk_size_seconds=None if chunk is None else 0.6 * WINDOW_SECONDS,
        lora=None
        if model.lora is None
        else replace(model.lora, r=min(model.lora.r, 4), layers_to_transform=None),
        automodel_backend=replace(model.automodel_backend, attn="auto"),
    )
    rate, vocab = config.data.train_ds.sample_rate, small_vocabulary(fields)
    plan = _in_float64(salm_plan(small, vocab + 1, seed=config.data.train_ds.seed, sample_rate=rate))
    shape = Shape(
        vocab,
        _num_micro_batches(scaled),
        placeholder=vocab + 1,
        clip_samples=(int(0.3 * rate), int(1.5 * rate)),
    )
    task = replace(
        _task(plan, shape, clip=config.trainer.gradient_clip_val is not None),
        plain=_plain(salm_plan(_padded(small), vocab + 1, seed=config.data.train_ds.seed, sample_rate=rate)),
        seed=config.data.train_ds.seed,
    )
    built = _small_model(plan)
    lost = _lost(_whole_text_model(llm, trust), built.get_submodule("llm"))
    whole_encoder = on_meta(lambda: encoder_spec(asr, overrides).build(task.dtype))
    use_step_batch_norm(whole_encoder)  # as perception does
    lost += _lost(whole_encoder, built.get_submodule("perception.encoder"))
    sizes = _sizes(llm.to_dict(), fields, "llm.") | _sizes(asr.to_dict(), encoder, "encoder.")
    return Prepared(task, scaled.layout, sizes, lost, _uncovered_speech(config))


def _padded(model: SalmConfig) -> SalmConfig:
    """The same model on padded conversations, with the attention of transformers that every family has."""
    backend = replace(model.automodel_backend, attn="eager")
    return replace(model, packed_sequences=False, automodel_backend=backend)


def _uncovered_speech(config: SpeechConfig) -> list[str]:
    attention = config.model.automodel_backend.attn
    if attention in ("auto", "sdpa", "eager"):
        return []
    return [f"model.automodel_backend.attn {attention}: attention runs on CPU kernels"]


# ------------------------------------------------------------------------------------------------ helpers


def _task(plan: ModelPlan, shape: Shape, *, clip: bool) -> Task:
    def draw(step: int) -> list[MicroBatch]:
        return micro_batches(shape, step)

    return Task(plan, draw, partial(empty, shape), max_norm=_CLIP_AT if clip else None)


def _num_micro_batches(scaled: Scaled) -> int:
    """Two per data-parallel rank, but one rank gets an empty one."""
    dp = scaled.layout.axes["dp"]
    return 2 * dp - (dp > 1)


def _in_float64(plan: ModelPlan) -> ModelPlan:
    """The same plan, without casts to float32."""

    def build() -> nn.Module:
        module = plan.build()
        compute_in_float64(module)
        return module

    return replace(plan, build=build)


def _plain(plan: ModelPlan) -> ModelPlan:
    """The same plan in float64, with the state-space layers of transformers."""

    def build() -> nn.Module:
        module = plan.build()
        restore_mamba(module)
        return module

    return _in_float64(replace(plan, build=build))


def _small_model(plan: ModelPlan) -> nn.Module:
    """The small model on the meta device.

    Raises:
        ConfigError: It is not small.
    """
    with parameters_on_meta():
        module = plan.build()
    count = num_parameters(module)
    if count > MOST_PARAMETERS:
        largest = max(module.named_parameters(), key=lambda item: item[1].numel())
        limit = f"at most {MOST_PARAMETERS:,}: {largest[0]} {tuple(largest[1].shape)} has a size that is not known"
        repair = "--model-config FOLDER, with a small config.json of the same family"
        raise ConfigError([Finding("verify-size", "parameters after shrinking", count, limit, repair)])
    return module


def _lost(original: nn.Module, small: nn.Module) -> list[str]:
    return lost_structure(original, small)


def _dropout_of(fields: Fields) -> bool:
    """Whether the configuration switches a dropout on that a causal language model has."""
    inner = fields.get("text_config")
    return (isinstance(inner, dict) and _dropout_of(inner)) or any(
        isinstance(value, float) and value > 0
        for name, value in fields.items()
        if ("dropout" in name or "pdrop" in name) and not name.startswith(("summary", "classifier"))
    )


def _sizes(before: Fields, after: Fields, prefix: str = "") -> dict[str, tuple[Any, Any]]:
    """Whole numbers and lists that have changed."""
    changed: dict[str, tuple[Any, Any]] = {}
    for name, value in before.items():
        if isinstance(value, dict) and isinstance(after.get(name), dict):
            changed |= _sizes(value, after[name], f"{prefix}{name}.")
        elif type(value) in (int, list, tuple) and after.get(name) != value:
            changed[f"{prefix}{name}"] = (value, after.get(name))
    return changed
