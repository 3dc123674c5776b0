"""Causal language models of transformers, sharded, loaded and ready to train: `shoal.AutoModelForCausalLM`.

What comes back is transformers' own model: it is called with `input_ids`, returns logits, and generates. It is the
root of its own sharding, so everything has to go through its forward: reading ``model.lm_head.weight`` beside it
gives this rank's shard.

Gradients are summed over the ranks, never averaged. Divide a micro-batch's summed token losses by the number of
supervised tokens of the whole step, over all ranks, and call backward under `gradient_sync`; then the gradients are
those of one process on the whole batch, whatever the layout.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn
from transformers import AutoModelForCausalLM as TransformersModel
from transformers import PreTrainedModel
from transformers.configuration_utils import PreTrainedConfig

from shoal.config.llm import CompileConfig
from shoal.config.schema import MixedPrecisionConfig
from shoal.kernels.attention_hf import register_attention
from shoal.models.assemble import ModelPlan, Numerics, assemble_in_place
from shoal.models.fields import configuration_of
from shoal.models.folder import hf_config, hf_generation_config
from shoal.models.gguf import converted_gguf
from shoal.models.hub import local_folder
from shoal.models.load import WeightSource
from shoal.models.mamba import substitute_mamba
from shoal.parallel.managers import device_of, gradient_sync, remember
from shoal.parallel.setup import DistributedSetup

if TYPE_CHECKING:
    from peft import LoraConfig

DtypeLike = torch.dtype | str | None
_DTYPES = ("float32", "bfloat16", "float64")


class AutoModelForCausalLM:
    """Builds causal language models; not a class of models itself."""

    def __init__(self) -> NoReturn:
        raise TypeError("use AutoModelForCausalLM.from_pretrained(...) or .from_config(...)")

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | Path,
        *,
        distributed_setup: DistributedSetup | None = None,
        peft_config: Mapping[str, Any] | LoraConfig | None = None,
        dtype: DtypeLike = None,
        torch_dtype: DtypeLike = None,
        attn_implementation: str | None = None,
        compile_config: CompileConfig | None = None,
        freeze: Sequence[str] = (),
        gguf_file: str | None = None,
        trust_remote_code: bool = False,
        seed: int = 0,
        device: torch.device | str | None = None,
        **config_changes: Any,
    ) -> PreTrainedModel:
        """Loads a checkpoint; each rank reads and keeps its own shards. Collective with a setup.

        Args:
            pretrained_model_name_or_path: A folder in Hugging Face's layout, or a name on the hub.
            distributed_setup: Strategy and mesh; None keeps the model on one process.
            peft_config: LoRA adapters, which go in before sharding; the rest of the model freezes.
            dtype: What parameters are stored in, for the optimizer: float32 (the default), bfloat16, float64, or
                ``auto`` for the checkpoint's. What layers compute in is `FSDP2Config.mp_policy`; None computes in
                the stored dtype and sums the gradients of half-precision weights in float32.
            torch_dtype: An older name of `dtype`.
            attn_implementation: One of transformers', or ``shoal`` for packed sequences; None lets it choose.
            compile_config: Compile each layer.
            freeze: Regular expressions of parameter names that do not train.
            gguf_file: A GGUF file of the folder, converted to safetensors beside it the first time.
            trust_remote_code: Run model code that comes with the checkpoint.
            seed: Seed of what the checkpoint does not hold, adapters.
            device: Of a model without a setup; None is torch's default device.
            config_changes: Fields of the model's configuration to change, ``attention_dropout=0.1``.

        Returns:
            The model in training mode; see this module for what gradients mean.

        Raises:
            ValueError: Folder, weights or settings do not fit; on every rank, see `shoal.models.load`.
            TypeError: A keyword that neither this method nor the configuration knows.
        """
        folder = local_folder(pretrained_model_name_or_path, *([gguf_file] if gguf_file else []))
        if gguf_file is not None:
            folder = converted_gguf(folder, gguf_file)
        config, unknown = hf_config(
            folder, return_unused_kwargs=True, trust_remote_code=trust_remote_code, **config_changes
        )
        if unknown:
            raise TypeError(
                f"from_pretrained: unknown keywords {', '.join(sorted(unknown))}; {type(config).__name__} has no "
                "such fields either"
            )
        model = _model(
            config,
            (WeightSource("", folder),),
            distributed_setup,
            _stored(dtype, torch_dtype, config),
            peft_config=peft_config,
            attn_implementation=attn_implementation,
            compile_config=compile_config,
            freeze=freeze,
            trust_remote_code=trust_remote_code,
            seed=seed,
            device=device,
        )
        if (folder / "generation_config.json").is_file():
            model.generation_config = hf_generation_config(folder)
        return model

    @classmethod
    def from_config(
        cls,
        config: PreTrainedConfig | str | Path | Mapping[str, Any],
        *,
        distributed_setup: DistributedSetup | None = None,
        peft_config: Mapping[str, Any] | LoraConfig | None = None,
        dtype: DtypeLike = None,
        torch_dtype: DtypeLike = None,
        attn_implementation: str | None = None,
        compile_config: CompileConfig | None = None,
        freeze: Sequence[str] = (),
        trust_remote_code: bool = False,
        seed: int = 0,
        device: torch.device | str | None = None,
    ) -> PreTrainedModel:
        """Builds a model with random weights, which depend on `seed` and parameter names but never on the layout.

        Args:
            config: A configuration of transformers, its fields with their ``model_type``, or the folder or hub
                name of a model whose configuration is taken.
            distributed_setup: As for `from_pretrained`, and so are all further arguments.
        """
        built = _configuration(config, trust_remote_code)
        return _model(
            built,
            (),
            distributed_setup,
            _stored(dtype, torch_dtype, built),
            peft_config=peft_config,
            attn_implementation=attn_implementation,
            compile_config=compile_config,
            freeze=freeze,
            trust_remote_code=trust_remote_code,
            seed=seed,
            device=device,
        )


def _configuration(
    config: PreTrainedConfig | str | Path | Mapping[str, Any], trust_remote_code: bool
) -> PreTrainedConfig:
    if isinstance(config, PreTrainedConfig):
        return config
    built: PreTrainedConfig
    if isinstance(config, Mapping):
        if "model_type" not in config:
            raise ValueError(f"config = {dict(config)}: fields with a model_type; repair: model_type='llama'")
        return configuration_of(config, "config")
    built = hf_config(local_folder(config), trust_remote_code=trust_remote_code)
    return built


def _model(
    config: PreTrainedConfig,
    weights: Sequence[WeightSource],
    setup: DistributedSetup | None,
    stored: torch.dtype,
    *,
    peft_config: Mapping[str, Any] | LoraConfig | None,
    attn_implementation: str | None,
    compile_config: CompileConfig | None,
    freeze: Sequence[str],
    trust_remote_code: bool,
    seed: int,
    device: torch.device | str | None,
) -> PreTrainedModel:
    if setup is not None and not isinstance(setup, DistributedSetup):
        raise TypeError(
            f"distributed_setup = {setup!r}: a DistributedSetup; repair: DistributedSetup.build(strategy='fsdp2')"
        )
    if attn_implementation == "shoal":
        register_attention()

    def build() -> nn.Module:
        model: PreTrainedModel = TransformersModel.from_config(  # type: ignore[no-untyped-call]
            config,
            dtype=stored,
            attn_implementation=attn_implementation,
            trust_remote_code=trust_remote_code,
        )
        substitute_mamba(model)
        return model

    plan = ModelPlan(
        build,
        weights=weights,
        llm="",
        lora=peft_config,
        freeze=freeze,
        checkpoint_llm=setup is not None and bool(setup.activation_checkpointing),
        compile=compile_config if compile_config is not None and compile_config.enabled else None,
        seed=seed,
    )
    half = stored not in (torch.float32, torch.float64)
    policy = MixedPrecisionConfig(None, "float32", None) if half else None
    model = remember(assemble_in_place(plan, setup, Numerics(stored, policy), _device(setup, device))).train()
    assert isinstance(model, PreTrainedModel)
    return model


def _device(setup: DistributedSetup | None, device: torch.device | str | None) -> torch.device:
    if setup is None:
        return torch.get_default_device() if device is None else torch.device(device)
    own = device_of(setup.mesh_context)
    if device is not None and torch.device(device).type != own.type:
        raise ValueError(
            f"device = {str(device)!r}: the mesh computes on {own.type}; repair: leave device out, or choose the "
            "backend in shoal.initialize_distributed"
        )
    return own


def _stored(dtype: DtypeLike, torch_dtype: DtypeLike, config: PreTrainedConfig) -> torch.dtype:
    if dtype is not None and torch_dtype is not None:
        raise ValueError(f"dtype = {dtype} and torch_dtype = {torch_dtype}: one of them; repair: dtype")
    given = dtype if dtype is not None else torch_dtype
    if given == "auto":
        given = getattr(config, "dtype", None)
    name = str(given or "float32").removeprefix("torch.")
    if name not in _DTYPES:
        raise ValueError(
            f"dtype = {name!r}: one of {', '.join(_DTYPES)} or auto; weights in other types do not train; "
            "repair: dtype='bfloat16'"
        )
    stored: torch.dtype = getattr(torch, name)
    return stored


__all__ = ["AutoModelForCausalLM", "gradient_sync"]
