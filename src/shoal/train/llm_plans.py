"""What to build for the LLM recipe: from the sections of its YAML to a `ModelPlan`, a tokenizer and a precision."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from shoal.config.dump import plain
from shoal.config.llm import CausalLMConfig, LLMConfig, PeftConfig
from shoal.data.byte_tokenizer import byte_tokenizer
from shoal.kernels.attention import Backend
from shoal.kernels.attention_hf import PACKED_ATTENTION, register_attention
from shoal.kernels.packable import packable
from shoal.models.assemble import ModelPlan
from shoal.models.causal_lm import CausalLM
from shoal.models.fields import configuration_of
from shoal.models.folder import hf_config, hf_tokenizer
from shoal.models.hub import local_folder
from shoal.models.load import WeightSource
from shoal.models.mamba import substitute_mamba

BYTES = "bytes"
_ATTENTION = {
    "auto": "auto",
    "sdpa": "sdpa",
    "flash": "flash_attention_2",
    "eager": "eager",
    "te": PACKED_ATTENTION,
}
_PACKED_BACKENDS: dict[str, Backend] = {"sdpa": "sdpa", "te": "te"}
"""Kernels of packed attention by `model.backend.attn`; ``flash`` is transformers' flash_attention_2 here."""
_PRECISIONS = {"bfloat16": "bf16-true", "float64": "64-true"}


def precision_name(config: LLMConfig) -> str:
    """The precision of a run: as given, else what the stored dtype of the weights implies."""
    dtype = config.model.torch_dtype if config.model is not None else None
    return config.precision or _PRECISIONS.get(str(dtype), "bf16-mixed")


def causal_lm_plan(config: LLMConfig) -> ModelPlan:
    """What to build: the model by its folder or its fields, adapters, and the loss.

    Raises:
        ValueError: A folder is missing or of an unsupported kind; when the model is built, also a family that
            cannot be packed.
    """
    assert config.model is not None
    model, loss = config.model, config.loss_fn
    folder = None
    if model.pretrained_model_name_or_path is not None:
        folder = local_folder(model.pretrained_model_name_or_path)
    hf_config = _hf_config(model, folder)
    attention = attention_name(config)
    if attention == PACKED_ATTENTION:
        register_attention(PACKED_ATTENTION, _PACKED_BACKENDS.get(model.backend.attn, "auto"))

    def build() -> nn.Module:
        llm: PreTrainedModel = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            hf_config,
            dtype=torch.float32,
            attn_implementation=attention,
            trust_remote_code=model.trust_remote_code,
        )
        substitute_mamba(llm)
        if config.packed_sequence.packed_sequence_size:
            packable(llm)
        return CausalLM(llm, loss=loss.kind, label_smoothing=loss.label_smoothing, z_loss=loss.z_loss)

    return ModelPlan(
        build,
        weights=() if folder is None else (WeightSource("llm", folder),),
        lora=None if config.peft is None else lora_arguments(config.peft),
        lora_key="peft.target_modules",
        checkpoint_llm=bool(config.distributed.activation_checkpointing),
        compile=config.compile if config.compile.enabled else None,
        seed=config.rng.seed,
    )


def attention_name(config: LLMConfig) -> str | None:
    """transformers' name of the attention: as given; automatic is ours for packs and under context parallelism.

    For rows it is None, transformers' own choice: sdpa, or eager for the families that have none.
    """
    assert config.model is not None
    model = config.model
    chosen = model.attn_implementation
    packed = config.packed_sequence.packed_sequence_size > 0
    if chosen != "auto":
        return chosen
    if model.backend.attn == "sdpa" and packed:
        return PACKED_ATTENTION
    if model.backend.attn != "auto":
        return _ATTENTION[model.backend.attn]
    return PACKED_ATTENTION if packed or config.distributed.sizes.cp_size > 1 else None


def lora_arguments(peft: PeftConfig) -> dict[str, Any]:
    """Arguments of `peft.LoraConfig` for AutoModel's keys; ``*`` in a name stands for anything.

    >>> lora_arguments(PeftConfig(target_modules=("*_proj",)))["target_modules"]
    '(?:.*_proj)'
    """
    targets: Any = "all-linear" if peft.match_all_linear else _matcher(peft.target_modules)
    arguments = {
        "r": peft.dim,
        "lora_alpha": peft.alpha,
        "lora_dropout": peft.dropout,
        "target_modules": targets,
    }
    if peft.exclude_modules:
        arguments["exclude_modules"] = _matcher(peft.exclude_modules)
    return arguments


def _matcher(names: Sequence[str] | str) -> str | list[str]:
    """Names as peft takes them: a list of name ends, or one regular expression when there is a ``*``."""
    listed = [names] if isinstance(names, str) else list(names)
    if not any("*" in name for name in listed):
        return listed
    parts = [
        fnmatch.translate(name).removeprefix("(?s:").removesuffix(r")\Z").removesuffix(r")\z")
        for name in listed
    ]
    ends = [part if "*" in name else rf"(?:.*\.)?{part}" for part, name in zip(parts, listed, strict=True)]
    return "|".join(f"(?:{part})" for part in ends)


def load_llm_tokenizer(config: LLMConfig) -> Any:
    """The tokenizer of a run, or None for data that has its tokens and a model without one.

    Raises:
        ValueError: The named one is missing or damaged.
    """
    if config.tokenizer == BYTES:
        return byte_tokenizer()
    model = config.model
    assert model is not None
    name = config.tokenizer or model.pretrained_model_name_or_path
    if name is None and isinstance(model.config, str):
        name = model.config
    if name is None:
        return None
    folder = local_folder(name)
    if config.tokenizer is None and not _has_tokenizer(folder):
        return None
    return hf_tokenizer(folder, trust_remote_code=model.trust_remote_code)


def _has_tokenizer(folder: Path) -> bool:
    return any(
        (folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")
    )


def _hf_config(model: CausalLMConfig, folder: Path | None) -> Any:
    if folder is None and isinstance(model.config, str):
        folder = local_folder(model.config)
    if folder is not None:
        return hf_config(folder, trust_remote_code=model.trust_remote_code)
    assert model.config is not None and not isinstance(model.config, str)
    fields = plain(model.config)  # transformers fills nested mappings in, which frozen ones refuse
    return configuration_of(fields, "model.config")
