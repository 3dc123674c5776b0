"""Parameters by what they are, for the table and for naming what is wrong."""

from __future__ import annotations

import re

_GROUPS = (
    ("adapters", r"\.lora_"),
    ("encoder", r"^perception\.encoder\."),
    ("projection", r"^perception\."),
    ("router", r"\.(router|gate)\.(weight|bias|e_score_correction_bias)$|\.router\."),
    ("experts", r"\.experts?\.|\.shared_experts?\."),
    ("norms", r"norm|\.ln_|layernorm"),
    ("embedding", r"embed_tokens|\.wte\.|\.wpe\.|embeddings?\.|embed_in"),
    ("head", r"lm_head|output_projection|embed_out"),
    ("state space", r"mamba|\.mixer\.(A_log|D|dt_bias|conv1d|in_proj|out_proj)|linear_attn"),
    ("attention", r"attn|attention|\.mixer\.[qkvo]_proj|sinks"),
    ("feed-forward", r"mlp|feed_forward|\.fc[12]\.|\.c_fc\."),
)


def group_of(name: str) -> str:
    """The kind of a parameter.

    >>> [group_of(name) for name in ("llm.model.norm.weight", "llm.model.layers.0.self_attn.q_proj.weight")]
    ['norms', 'attention']
    """
    return next((group for group, pattern in _GROUPS if re.search(pattern, name)), "other")


def groups_of(names: list[str]) -> list[str]:
    """The kinds among `names`, each once, in order of appearance."""
    return list(dict.fromkeys(group_of(name) for name in names))
