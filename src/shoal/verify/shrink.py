"""Makes a model small by its configuration alone, keeping what can go wrong in a layout.

What is kept: kinds of layers in their order, the grouping of key-value heads and its ratio to the tensor-parallel
degree, whether each size divides by the degree that cuts it, experts per token and groups of experts, ties, biases,
norms, window attention, and everything that a configuration says without a size. `shoal.verify.architecture`
compares the result with the original, module by module.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

Fields = dict[str, Any]
"""The fields of a transformers configuration."""

Degree = tuple[int, int]
"""The degree of an axis as configured, and the smaller one that is verified."""


@dataclass(frozen=True)
class Degrees:
    """The degrees that cut a model, as configured and as verified."""

    tp: Degree = (1, 1)
    cp: Degree = (1, 1)
    pp: Degree = (1, 1)
    ep: Degree = (1, 1)


_HEAD_DIM = 8
_FREE = {
    # Latent attention.
    "q_lora_rank": 12,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "qk_head_dim": 12,
    # State-space and linear-attention layers.
    "mamba_head_dim": 8,
    "ssm_state_size": 8,
    "mamba_d_state": 8,
    "state_size": 8,
    "chunk_size": 8,
    "mamba_chunk_size": 8,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "sliding_window": 6,
    "attention_chunk_size": 8,
    "num_nextn_predict_layers": 0,
}
"""Sizes that no axis cuts; a value that is smaller already stays."""

_WIDTHS = (
    "intermediate_size",
    "n_inner",
    "ffn_dim",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "moe_shared_expert_intermediate_size",
    "intermediate_size_mlp",
)
_EXPERTS = ("n_routed_experts", "num_local_experts", "num_experts", "moe_num_experts")
_TOP_K = ("num_experts_per_tok", "moe_topk", "moe_k")
_SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "decoder_start_token_id")


def similar(value: int, near: int, *degrees: Degree, multiple_of: int = 1) -> int:
    """The least number from `near` on that divides by each degree exactly when `value` does.

    >>> similar(4096, 48, (8, 2)), similar(151_937, 96, (8, 2)), similar(100, 12, (1, 1))
    (48, 97, 12)
    """
    number = -(-near // multiple_of) * multiple_of
    for _ in range(1000):
        if all((value % given == 0) == (number % used == 0) for given, used in degrees):
            return number
        number += multiple_of
    raise ValueError(f"no small size behaves like {value} under the degrees {degrees}")


def shrink_text_model(fields: Mapping[str, Any], degrees: Degrees) -> Fields:
    """The fields of a small language model that is built like the one of `fields`."""
    small: Fields = deepcopy(dict(fields))
    if isinstance(small.get("text_config"), dict):
        small["text_config"] = shrink_text_model(small["text_config"], degrees)
        return small
    _keep_layers(small, degrees)
    _shrink_attention(small, degrees)
    _shrink_mamba(small, degrees)
    _shrink_experts(small, degrees)
    for name in _WIDTHS:
        if isinstance(small.get(name), int) and small[name]:
            small[name] = similar(small[name], 24, degrees.tp, degrees.cp)
    for name, size in _FREE.items():
        if isinstance(small.get(name), int):
            small[name] = min(small[name], size)
    _shrink_vocabulary(small, degrees)
    _shrink_positions(small)
    return small


def small_vocabulary(fields: Mapping[str, Any]) -> int:
    """Number of token ids of a model."""
    inner = fields.get("text_config")
    return int(inner["vocab_size"] if isinstance(inner, dict) else fields["vocab_size"])


# ------------------------------------------------------------------------------------------------- layers


def key_of(fields: Mapping[str, Any], *names: str) -> str | None:
    """The first of `names` that holds a whole number."""
    return next((name for name in names if type(fields.get(name)) is int), None)


def _keep_layers(small: Fields, degrees: Degrees) -> None:
    key = key_of(small, "num_hidden_layers", "n_layer", "num_layers")
    blocks = small.get("layers_block_type")
    if key is None and not isinstance(blocks, list):
        return
    total = len(blocks) if key is None and isinstance(blocks, list) else small[str(key)]
    kinds = _kinds_of_layers(small, total)
    wanted = similar(total, max(2, degrees.pp[1]), degrees.pp)
    kept = choose_layers(kinds, wanted)
    per_layer = [name for name, value in small.items() if _is_per_layer(value, total)]
    for name in per_layer:
        small[name] = [small[name][index] for index in kept]
    if "first_k_dense_replace" in small:
        small["first_k_dense_replace"] = sum(index < small["first_k_dense_replace"] for index in kept)
    if "decoder_sparse_step" in small:
        small["mlp_only_layers"] = [new for new, old in enumerate(kept) if not _is_sparse(small, old)]
        small["decoder_sparse_step"] = 1
    for name in ("attn_layer_indices", "moe_layers"):
        if isinstance(small.get(name), list):
            small[name] = [new for new, old in enumerate(kept) if old in small[name]]
    if isinstance(small.get("max_window_layers"), int):
        small["max_window_layers"] = sum(index < small["max_window_layers"] for index in kept)
    if key is not None:
        small[key] = len(kept)


def _kinds_of_layers(fields: Mapping[str, Any], total: int) -> list[Any]:
    """What the configuration says about each layer, as something that can be compared."""
    lists = [value for value in fields.values() if _is_per_layer(value, total)]
    dense = fields.get("first_k_dense_replace") or 0
    marked = [
        fields[name] for name in ("attn_layer_indices", "moe_layers") if isinstance(fields.get(name), list)
    ]
    return [
        (
            *(repr(values[index]) for values in lists),
            index < dense,
            _is_sparse(fields, index),
            *(index in layers for layers in marked),
        )
        for index in range(total)
    ]


def _is_per_layer(value: Any, total: int) -> bool:
    return isinstance(value, list | tuple) and len(value) == total and total > 1


def _is_sparse(fields: Mapping[str, Any], index: int) -> bool:
    """Whether a layer has experts, in the families that say so by a period and a list of exceptions."""
    step = fields.get("decoder_sparse_step")
    if not step:
        return False
    return index not in (fields.get("mlp_only_layers") or ()) and (index + 1) % step == 0


def choose_layers(kinds: Sequence[Any], wanted: int) -> list[int]:
    """Indices of `wanted` layers or more, in order: one of each kind, then second ones.

    >>> choose_layers(["sliding"] * 5 + ["full"] + ["sliding"] * 5, 2), choose_layers(["same"] * 9, 2)
    ([0, 5], [0, 1])
    """
    kept: list[int] = []
    rounds = 0
    while len(kept) < min(wanted, len(kinds)) or rounds == 0:
        for kind in dict.fromkeys(kinds):
            if rounds and len(kept) >= wanted:
                break
            left = [index for index, other in enumerate(kinds) if other == kind and index not in kept]
            kept += left[:1]
        rounds += 1
    while len(kept) % wanted and len(kept) < len(kinds):  # a multiple of the pipeline degree stays one
        kept.append(next(index for index in range(len(kinds)) if index not in kept))
    return sorted(kept)


# ------------------------------------------------------------------------------------------------- widths


def _shrink_attention(small: Fields, degrees: Degrees) -> None:
    heads_key = key_of(small, "num_attention_heads", "n_head")
    hidden_key = key_of(small, "hidden_size", "n_embd", "d_model")
    if heads_key is None or hidden_key is None:
        return
    heads, hidden = small[heads_key], small[hidden_key]
    kv_heads = small.get("num_key_value_heads") or heads
    head_dim = small.get("head_dim") or hidden // heads
    kv = _kv_heads(kv_heads, degrees)
    group = max(1, heads // kv_heads)
    small_group = 1 if group == 1 else 3 if group % 2 else 2
    while ((heads % degrees.tp[0] == 0) != (kv * small_group % degrees.tp[1] == 0)) and small_group < 64:
        small_group += 1
    small[heads_key] = kv * small_group
    if isinstance(small.get("num_key_value_heads"), int):
        small["num_key_value_heads"] = kv
    if small.get("head_dim") is not None and "qk_rope_head_dim" not in small:
        small["head_dim"] = _HEAD_DIM
    if "qk_rope_head_dim" in small and small.get("head_dim") is not None:
        small["head_dim"] = min(small["qk_rope_head_dim"], _FREE["qk_rope_head_dim"])
    width = kv * small_group * _HEAD_DIM
    near = width if heads * head_dim == hidden else width + _HEAD_DIM
    small[hidden_key] = similar(hidden, near, degrees.tp, multiple_of=1 if small.get("head_dim") else width)


def _kv_heads(kv_heads: int, degrees: Degrees) -> int:
    """Few key-value heads in the same relation to the tensor-parallel degree: fewer, as many, or more."""
    given, used = degrees.tp
    if given == 1:
        return min(kv_heads, 2)
    if kv_heads < given:  # each head is held by several ranks
        return max(1, used * kv_heads // given)
    return used if kv_heads == given else similar(kv_heads, used + 1, degrees.tp)


def _shrink_mamba(small: Fields, degrees: Degrees) -> None:
    cut = (degrees.tp, degrees.cp)
    heads_key = key_of(small, "mamba_num_heads", "mamba_n_heads")
    if heads_key is not None:
        small[heads_key] = similar(small[heads_key], 4, *cut)
    groups_key = key_of(small, "n_groups", "mamba_n_groups")
    if groups_key is not None and heads_key is not None:
        small[groups_key] = min(small[groups_key], 2)
    if "mamba_d_head" in small and heads_key is not None:
        hidden = small[key_of(small, "hidden_size", "d_model") or "hidden_size"]
        small["mamba_d_head"] = small.get("mamba_expand", 2) * hidden // small[heads_key]
    if isinstance(small.get("linear_num_value_heads"), int):
        ratio = max(1, small["linear_num_value_heads"] // max(1, small["linear_num_key_heads"]))
        keys = similar(small["linear_num_key_heads"], 2, *cut)
        small |= {"linear_num_key_heads": keys, "linear_num_value_heads": keys * min(ratio, 2)}


def _shrink_experts(small: Fields, degrees: Degrees) -> None:
    keys = [
        name for name in _EXPERTS if isinstance(small.get(name), int) and small[name]
    ]  # 0 is a dense model
    groups = small.get("n_group")
    few = min(groups, 2) if isinstance(groups, int) else 1
    for name in keys:
        small[name] = similar(small[name], 4 + small[name] % 2, degrees.ep, multiple_of=few)
    for name in _TOP_K:
        if isinstance(small.get(name), int):
            small[name] = min(small[name], 2)
    if isinstance(groups, int):
        small |= {"n_group": few, "topk_group": min(small.get("topk_group") or few, few)}


def _shrink_vocabulary(small: Fields, degrees: Degrees) -> None:
    if not isinstance(small.get("vocab_size"), int):
        return
    size = small["vocab_size"]
    small["vocab_size"] = similar(size, 96 + size % 2, degrees.tp)
    for offset, name in enumerate(_SPECIAL):
        if small.get(name) is not None:
            small[name] = small["vocab_size"] - 1 - offset


def _shrink_positions(small: Fields) -> None:
    for name in ("max_position_embeddings", "n_positions", "n_ctx"):
        if isinstance(small.get(name), int):
            small[name] = min(small[name], 256)
    for name in ("initializer_range", "init_std"):
        if isinstance(small.get(name), float):
            small[name] = 0.2  # small weights would make small gradients, which hide errors
    for name in ("rope_parameters", "rope_scaling"):
        if isinstance(small.get(name), dict):
            small[name] = _small_rope(small[name])


def _small_rope(rope: Mapping[str, Any]) -> Fields:
    """Factors per frequency are cut to the smaller number of frequencies."""
    half = _HEAD_DIM // 2
    small: Fields = {name: _small_rope(v) if isinstance(v, Mapping) else v for name, v in rope.items()}
    for name in ("short_factor", "long_factor"):
        if isinstance(small.get(name), list):
            small[name] = small[name][: max(1, int(half * small.get("partial_rotary_factor", 1.0)))]
    if isinstance(small.get("mrope_section"), list):
        small["mrope_section"] = [half - 2, 1, 1]
    return small
