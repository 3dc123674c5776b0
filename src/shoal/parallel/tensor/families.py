"""Tensor-parallel plans of families for which transformers has none that cuts attention and feed-forward layers.

A plan maps patterns of module names below the base model, ``*`` standing for one part of a name, to styles:

    colwise         a linear layer, output features cut
    rowwise         a linear layer, input features cut; its result is summed
    fused_qkv       queries, keys and values stacked in one projection
    fused_gate_up   gate and up projection stacked in one
    per_head        a parameter with one entry per attention head
"""

from __future__ import annotations

from collections.abc import Mapping

Plan = Mapping[str, str]

_ATTENTION: Plan = {
    "layers.*.self_attn.q_proj": "colwise",
    "layers.*.self_attn.k_proj": "colwise",
    "layers.*.self_attn.v_proj": "colwise",
    "layers.*.self_attn.o_proj": "rowwise",
}
_GATED_MLP: Plan = {
    "layers.*.mlp.gate_proj": "colwise",
    "layers.*.mlp.up_proj": "colwise",
    "layers.*.mlp.down_proj": "rowwise",
}
_FUSED_MLP: Plan = {"layers.*.mlp.gate_up_proj": "fused_gate_up", "layers.*.mlp.down_proj": "rowwise"}

FAMILY_PLANS: Mapping[str, Plan] = {
    "gpt_oss": {**_ATTENTION, "layers.*.self_attn.sinks": "per_head"},
    "phi3": {
        "layers.*.self_attn.qkv_proj": "fused_qkv",
        "layers.*.self_attn.o_proj": "rowwise",
        "layers.*.mlp.gate_up_proj": "fused_gate_up",
        "layers.*.mlp.down_proj": "rowwise",
    },
    "nemotron_h": {
        "layers.*.mixer.q_proj": "colwise",
        "layers.*.mixer.k_proj": "colwise",
        "layers.*.mixer.v_proj": "colwise",
        "layers.*.mixer.o_proj": "rowwise",
        "layers.*.mixer.up_proj": "colwise",
        "layers.*.mixer.down_proj": "rowwise",
    },
    "bamba": {
        **_ATTENTION,
        "layers.*.feed_forward.gate_proj": "colwise",
        "layers.*.feed_forward.up_proj": "colwise",
        "layers.*.feed_forward.down_proj": "rowwise",
    },
    "glm": {**_ATTENTION, **_FUSED_MLP},
    "glm4": {**_ATTENTION, **_FUSED_MLP},
    **dict.fromkeys(("hunyuan_v1_dense", "stablelm"), {**_ATTENTION, **_GATED_MLP}),
    # Mamba layers, experts and what is shared between experts stay whole.
    **dict.fromkeys(("granitemoehybrid", "granitemoe", "granitemoeshared", "hunyuan_v1_moe"), _ATTENTION),
}
"""By `config.model_type`; they win over the plans of transformers."""

__all__ = ["FAMILY_PLANS", "Plan"]
