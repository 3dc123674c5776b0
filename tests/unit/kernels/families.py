"""Tiny random models of many transformers families, built from the settings that each family's configuration has."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

VOCAB = 64
_SETTINGS: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "intermediate_size_mlp": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
    "n_inner": 48,
    "num_local_experts": 4,
    "num_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "first_k_dense_replace": 1,
    "rotary_dim": 4,
    "vocab_size_per_layer_input": VOCAB,
    "sliding_window": 4,
    # Nothing random, so that two runs can be compared.
    "attention_dropout": 0.0,
    "attn_pdrop": 0.0,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "residual_dropout": 0.0,
    "hidden_dropout": 0.0,
    "initializer_range": 0.2,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
_CHANGES: dict[str, dict[str, Any]] = {
    # Multi-head latent attention has as many key as query heads.
    "deepseek_v2": {"num_key_value_heads": 4},
    "deepseek_v3": {"num_key_value_heads": 4},
    "glm4_moe_lite": {"num_key_value_heads": 4},
    "minicpm3": {"num_key_value_heads": 4},
    "youtu": {"num_key_value_heads": 4},
    # One layer of either kind.
    "gemma3_text": {"layer_types": ["sliding_attention", "full_attention"]},
    # Whole documents in the layer that does not rotate, and whose queries grow with their position.
    "llama4_text": {
        "layer_types": ["chunked_attention", "full_attention"],
        "attention_chunk_size": 4,
        "no_rope_layers": [1, 0],
        "floor_scale": 4,
        "attn_scale": 0.5,
    },
    "granitemoehybrid": {
        "layer_types": ["attention", "attention"],
        "position_embedding_type": "rope",
        "mamba_n_heads": 4,
        "mamba_d_head": 16,
    },
    "cwm": {"bos_token_id": 1, "eos_token_id": [2]},  # this configuration insists
}


def tiny_model(
    model_type: str, dtype: torch.dtype = torch.float64, *, attention: str = "eager", **changes: Any
) -> PreTrainedModel:
    """Returns a two-layer model in training mode without anything random; the weights are repeatable."""
    kind = CONFIG_MAPPING[model_type]
    known = {*kind().to_dict(), *getattr(kind, "attribute_map", {})}
    settings = {name: value for name, value in _SETTINGS.items() if name in known}
    config = kind(**{**settings, **_CHANGES.get(model_type, {}), **changes})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation=attention, experts_implementation="eager"
        )
        for parameter in model.parameters():  # biases, norms and sinks too, so that none is 0 or 1 everywhere
            if parameter.dim() == 1 and not parameter.is_meta:
                torch.nn.init.normal_(parameter, mean=float(parameter.detach().mean()), std=0.1)
    assert isinstance(model, PreTrainedModel)
    return model.train()


class InDouble(TorchFunctionMode):
    """Keeps a float64 model in float64 where transformers casts to float32: norms, rotations, softmax, routers."""

    def __torch_function__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        keywords = dict(keywords or {})
        if keywords.get("dtype") is torch.float32:
            keywords["dtype"] = torch.float64
        if function is torch.Tensor.float:
            function = torch.Tensor.double
        if function in (torch.Tensor.to, torch.Tensor.type):
            arguments = [torch.float64 if value is torch.float32 else value for value in arguments]
        return function(*arguments, **keywords)
