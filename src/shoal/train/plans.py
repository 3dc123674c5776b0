"""What to build for SALM: from names of models to a `ModelPlan` and a prompt encoder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from shoal.config.speech import SalmConfig
from shoal.kernels.attention import Backend
from shoal.kernels.attention_hf import PACKED_ATTENTION, register_attention
from shoal.models.assemble import ModelPlan
from shoal.models.folder import hf_config, hf_tokenizer, read_json
from shoal.models.hub import local_folder
from shoal.models.load import WeightSource
from shoal.models.mamba import substitute_mamba
from shoal.speech.encoders import encoder_spec
from shoal.speech.perception import AudioPerception
from shoal.speech.prompts import PromptFormatter
from shoal.speech.salm import SALM

_ATTENTION = {"auto": "sdpa", "sdpa": "sdpa", "flash": "flash_attention_2", "eager": "eager"}
_PACKED_BACKENDS: dict[str, Backend] = {"auto": "auto", "sdpa": "sdpa", "flash": "flash", "te": "te"}


def model_folder(config: SalmConfig, name: str) -> Path:
    """The folder of a model or tokenizer; the code of a hub model comes along when the user trusts it.

    Raises:
        ValueError: Neither a folder nor reachable on the hub.
    """
    return local_folder(name, *(["*.py"] if config.trust_remote_code else []))


def load_tokenizer(config: SalmConfig) -> Any:
    """The tokenizer of the LLM, or the one `tokenizer_path` names."""
    folder = model_folder(config, config.tokenizer_path or config.pretrained_llm)
    return hf_tokenizer(folder, trust_remote_code=config.trust_remote_code)


def salm_plan(config: SalmConfig, placeholder_id: int, *, seed: int, sample_rate: int) -> ModelPlan:
    """What to build for SALM: LLM and encoder by their folders, projection and adapters from `seed`.

    Raises:
        ValueError: A folder is missing, damaged or of an unsupported kind; when the model is built, also an encoder
            that takes audio of another rate than `sample_rate`, the data's.
    """
    llm_folder, asr_folder = (
        model_folder(config, name) for name in (config.pretrained_llm, config.pretrained_asr)
    )
    asr_config = hf_config(asr_folder, trust_remote_code=config.trust_remote_code)
    spec = encoder_spec(asr_config, config.perception.encoder)

    def build() -> nn.Module:
        llm = _build_llm(config, llm_folder)
        perception = AudioPerception(
            spec.build(torch.float32),
            _preprocessor_config(asr_folder),
            config.perception,
            _hidden_size(llm),
            chunk_seconds=config.encoder_chunk_size_seconds,
        )
        if perception.sampling_rate != sample_rate:
            raise ValueError(
                f"data.train_ds.sample_rate = {sample_rate}: the encoder {config.pretrained_asr} takes "
                f"{perception.sampling_rate}; repair: data.train_ds.sample_rate={perception.sampling_rate}"
            )
        return SALM(llm, perception, placeholder_id=placeholder_id, packed=config.packed_sequences)

    encoder = WeightSource("perception.encoder", asr_folder, spec.checkpoint_prefix)
    return ModelPlan(
        build,
        weights=(WeightSource("llm", llm_folder), encoder) if config.pretrained_weights else (),
        perception="perception",
        lora=None if config.lora is None else _lora_arguments(config),
        lora_key="model.lora.target_modules",
        freeze=config.freeze_params,
        keep=config.prevent_freeze_params,
        seed=seed,
    )


def _build_llm(config: SalmConfig, folder: Path) -> PreTrainedModel:
    attention = _ATTENTION[config.automodel_backend.attn]
    if config.packed_sequences:
        register_attention(PACKED_ATTENTION, _PACKED_BACKENDS[config.automodel_backend.attn])
        attention = PACKED_ATTENTION
    llm_config = hf_config(folder, trust_remote_code=config.trust_remote_code)
    llm: PreTrainedModel = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
        llm_config,
        dtype=torch.float32,
        attn_implementation=attention,
        trust_remote_code=config.trust_remote_code,
    )
    substitute_mamba(llm)
    return llm


def _hidden_size(llm: PreTrainedModel) -> int:
    embedding = llm.get_input_embeddings()
    assert isinstance(embedding, nn.Embedding)
    return embedding.embedding_dim


def _lora_arguments(config: SalmConfig) -> dict[str, Any]:
    assert config.lora is not None
    arguments = {name: getattr(config.lora, name) for name in config.lora.__dataclass_fields__}
    return {name: list(v) if isinstance(v, tuple) else v for name, v in arguments.items() if v is not None}


def _preprocessor_config(folder: Path) -> dict[str, Any] | None:
    file = folder / "preprocessor_config.json"
    return read_json(file) if file.is_file() else None


def prompts_of(config: SalmConfig) -> PromptFormatter:
    """The prompt encoder of a run: the LLM's tokenizer under the configured format."""
    return PromptFormatter(load_tokenizer(config), config.prompt_format, config.audio_locator_tag)
