"""Tiny causal language models of many families: random, two layers or a little more, built in milliseconds."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

VOCAB = 64
_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_EXPERTS: dict[str, Any] = {
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
    "head_dim": 8,
}
_MAMBA: dict[str, Any] = {
    "mamba_num_heads": 4,
    "mamba_head_dim": 8,
    "n_groups": 2,
    "ssm_state_size": 8,
    "conv_kernel": 4,
    "chunk_size": 8,
    "head_dim": 8,
    "moe_intermediate_size": 12,
    "moe_shared_expert_intermediate_size": 12,
    "n_routed_experts": 5,
    "num_experts_per_tok": 2,
}
_HYBRID: dict[str, Any] = {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 8,
    "mamba_chunk_size": 8,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 8}),
    "gemma3": (
        "gemma3_text",
        {"head_dim": 8, "sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "smollm3": ("smollm3", {"no_rope_layers": [1, 0]}),
    "mistral": ("mistral", {"sliding_window": 6}),
    "phi3": ("phi3", {"partial_rotary_factor": 1.0}),
    # Frequencies that follow the longest document: two sets of them, or ever lower ones.
    "phi3-long": (
        "phi3",
        {
            "partial_rotary_factor": 1.0,
            "original_max_position_embeddings": 13,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "short_factor": [1.0] * 4,
                "long_factor": [3.0] * 4,
                "original_max_position_embeddings": 13,
            },
        },
    ),
    "llama-dynamic": (
        "llama",
        {
            "max_position_embeddings": 10,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
        },
    ),
    "qwen3-moe": ("qwen3_moe", _EXPERTS),
    # Multi-head latent attention: keys are wider than values; a dense layer, and one of experts.
    "deepseek-v3": (
        "deepseek_v3",
        {
            "num_key_value_heads": 4,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 12,
            "v_head_dim": 10,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "moe_intermediate_size": 12,
        },
    ),
    "nemotron-h": ("nemotron_h", {**_MAMBA, "layers_block_type": ["mamba", "moe", "attention", "mamba"]}),
    "gpt2": ("gpt2", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_inner": 48}),
    "gpt-oss": ("gpt_oss", {"num_local_experts": 3, "num_experts_per_tok": 2, "head_dim": 8}),
    # A vocabulary that no degree divides, biases everywhere, an uneven feed-forward layer, a tied head.
    "llama-odd": (
        "llama",
        {
            "vocab_size": 67,
            "intermediate_size": 45,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    "mixtral": ("mixtral", {"num_local_experts": 3, "num_experts_per_tok": 2, "head_dim": 8}),
    "nemotron-h-mlp": ("nemotron_h", {**_MAMBA, "layers_block_type": ["mlp", "mamba", "attention", "mlp"]}),
    "bamba": ("bamba", {**_HYBRID, "attn_layer_indices": [1]}),
    "granite-hybrid": (
        "granitemoehybrid",
        {
            **_HYBRID,
            "layer_types": ["attention", "mamba"],
            "num_local_experts": 3,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 16,
            "position_embedding_type": "rope",
        },
    ),
    "mamba2": (
        "mamba2",
        {
            "num_heads": 8,
            "head_dim": 8,
            "n_groups": 2,
            "state_size": 8,
            "chunk_size": 8,
            "time_step_limit": (0.4, 2.0),
        },
    ),
    "hrm-text": ("hrm_text", {"head_dim": 8}),
    "olmo-hybrid": ("olmo_hybrid", {}),
}
"""Model type and settings of each family; sizes that divide neither by 2 nor by 3 are on purpose."""


def tiny_config(family: str, **changes: Any) -> PretrainedConfig:
    """The configuration of a tiny model of a family."""
    model_type, settings = FAMILIES[family]
    return AutoConfig.for_model(model_type, **{**_COMMON, **settings, **changes})


def tiny_lm(
    family: str, dtype: torch.dtype = torch.float32, *, seed: int = 0, **changes: Any
) -> PreTrainedModel:
    """A tiny causal language model of a family, with repeatable weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(tiny_config(family, **changes), dtype=dtype)
    return model
