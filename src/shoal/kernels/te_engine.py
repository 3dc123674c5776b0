"""The fused attention functions of the installed Transformer Engine, where they are known to be what is meant.

`transformer_engine.pytorch.DotProductAttention` gives no log-sum-exp. Below it are two functions that its own context
parallelism calls: `fused_attn_fwd` returns the statistics of the softmax, `fused_attn_bwd` takes them. They are no
public interface and have changed: since 2.15 they take the layouts of outputs and gradients as well, with defaults
that are wrong for packed tokens. A version whose functions take an argument that is not among `_KNOWN` is refused.
What is said of Transformer Engine, here and in `te_calls`, comes from its source, 2.8.0 to 2.20.2.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import cache, lru_cache
from typing import Any

import torch

from shoal.kernels.packed import AttentionSpec

VERSIONS = "2.8 to 2.20"
PACKED = "thd_thd_thd"
"""q, k and v are tensors of their own, [tokens, heads, width]."""

# fmt: off
_KNOWN = {
    "is_training", "max_seqlen_q", "max_seqlen_kv", "cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded",
    "cu_seqlens_kv_padded", "q", "k", "v", "o", "d_o", "fake_dtype", "dqkv_dtype", "aux_ctx_tensors",
    "fused_attention_backend", "attn_bias", "page_table_k", "page_table_v", "s_quantizer", "o_quantizer",
    "dp_quantizer", "dqkv_quantizer", "attn_scale", "dropout", "fast_zero_fill", "qkv_layout", "o_format",
    "do_format", "dqkv_layout", "qkv_scale_inv_format", "do_scale_inv_format", "attn_bias_type",
    "attn_mask_type", "softmax_type", "window_size", "bottom_right_diagonal", "rng_gen", "softmax_offset",
    "return_max_logit", "cuda_graph", "deterministic",
}
# fmt: on
_SINCE_2_8 = "softmax_type"
_NEW_QUESTIONS = {"num_tokens_q", "num_tokens_kv", "softmax_scale", "bottom_right_diagonal"}
_ROUNDED_TO = 1024
"""Tokens of a pack, when asked whether there is a kernel: a question for each length would be slow."""


@dataclass(frozen=True)
class Heads:
    """Numbers of query and key heads, and widths of keys and values as the kernel gets them."""

    num_queries: int
    num_keys: int
    width: int
    value_width: int


@dataclass(frozen=True, eq=False)
class Engine:
    """What is called of Transformer Engine.

    Attributes:
        version: Of the package.
        forward: `fused_attn_fwd`.
        backward: `fused_attn_bwd`.
        question: `AttentionParams`, the class of what `choose` takes.
        choose: `get_attention_backend`; its last result says whether flash, fused and plain attention are possible.
        kernel: cuDNN's for half precision and any length, the only fused one for packed tokens.
        dtypes: Its own names of dtypes.
    """

    version: str
    forward: Callable[..., Any]
    backward: Callable[..., Any]
    question: Any
    choose: Callable[[Any], tuple[Any, ...]]
    kernel: Any
    dtypes: Mapping[torch.dtype, Any]

    def why_not(self, heads: Heads, tokens: int, dtype: torch.dtype, spec: AttentionSpec) -> str | None:
        """Returns why there is no kernel for packed attention of so many tokens on the current device."""
        if os.environ.get("NVTE_FUSED_ATTN") == "0":
            return "NVTE_FUSED_ATTN=0 turns off the fused attention of Transformer Engine"
        tokens = -(-tokens // _ROUNDED_TO) * _ROUNDED_TO
        if _has_kernel(self, heads, tokens, dtype, spec, torch.are_deterministic_algorithms_enabled()):
            return None
        window = "" if spec.window is None else f", with a window of {spec.window}"
        return (
            f"Transformer Engine {self.version} has no fused kernel on this device for {heads.num_queries} query "
            f"heads over {heads.num_keys}, {heads.width} and {heads.value_width} wide{window} (NVTE_DEBUG=1 "
            "NVTE_DEBUG_LEVEL=2 says why)"
        )


@cache
def engine_or_reason() -> Engine | str:
    """Returns the functions of Transformer Engine, or why they are not called."""
    try:
        engine = _imported()
    except ModuleNotFoundError as error:
        if error.name == "transformer_engine":
            return "transformer_engine is not installed: pip install transformer-engine[pytorch]"
        return _unusable(error)
    # Its libraries do not load, it does not want this torch, or it has moved what is imported.
    except (ImportError, OSError, RuntimeError, AssertionError, AttributeError, KeyError) as error:
        return _unusable(error)
    return _why_unknown(engine) or engine


def _imported() -> Engine:
    import transformer_engine  # type: ignore[import-not-found]
    from transformer_engine.pytorch.attention.dot_product_attention import (  # type: ignore[import-not-found]
        utils,
    )
    from transformer_engine.pytorch.constants import TE_DType  # type: ignore[import-not-found]
    from transformer_engine.pytorch.cpp_extensions import fused_attn  # type: ignore[import-not-found]

    return Engine(
        transformer_engine.__version__,
        fused_attn.fused_attn_fwd,
        fused_attn.fused_attn_bwd,
        utils.AttentionParams,
        utils.get_attention_backend,
        fused_attn.FusedAttnBackend["F16_arbitrary_seqlen"],
        TE_DType,
    )


def _unusable(error: Exception) -> str:
    return (
        f"transformer_engine cannot be used ({type(error).__name__}: {error}): install "
        f"transformer-engine[pytorch] {VERSIONS}"
    )


def _why_unknown(engine: Engine) -> str | None:
    """Returns why this version is none of those whose source is known."""
    strange = []
    for function in (engine.forward, engine.backward):
        taken = inspect.signature(function).parameters.keys()
        strange += [f"{function.__name__} takes {name}, which is unknown" for name in sorted(taken - _KNOWN)]
        strange += [f"{function.__name__} does not take {name}" for name in {_SINCE_2_8} - taken]
    asked = _question(Heads(1, 1, 64, 64), _ROUNDED_TO, torch.bfloat16, AttentionSpec(True, 1.0), False)
    missing = asked.keys() - _NEW_QUESTIONS - {field.name for field in fields(engine.question)}
    strange += [f"AttentionParams has no {name}" for name in sorted(missing)]
    if not strange:
        return None
    return f"Transformer Engine {engine.version}: {strange[0]}: install transformer-engine {VERSIONS}"


@lru_cache(maxsize=256)
def _has_kernel(
    engine: Engine, heads: Heads, tokens: int, dtype: torch.dtype, spec: AttentionSpec, deterministic: bool
) -> bool:
    asked = _question(heads, tokens, dtype, spec, deterministic)
    unknown = _NEW_QUESTIONS - {field.name for field in fields(engine.question)}
    *_, possible = engine.choose(
        engine.question(**{name: value for name, value in asked.items() if name not in unknown})
    )
    return bool(possible[1])


def _question(
    heads: Heads, tokens: int, dtype: torch.dtype, spec: AttentionSpec, deterministic: bool
) -> dict[str, Any]:
    return {
        "qkv_dtype": dtype,
        "qkv_layout": PACKED,
        "num_heads": heads.num_queries,
        "num_gqa_groups": heads.num_keys,
        "max_seqlen_q": tokens,
        "max_seqlen_kv": tokens,
        "num_tokens_q": tokens,
        "num_tokens_kv": tokens,
        "head_dim_qk": heads.width,
        "head_dim_v": heads.value_width,
        **mask_of(spec),
        "bottom_right_diagonal": False,
        "softmax_scale": spec.scale,
        "core_attention_bias_requires_grad": False,
        "deterministic": deterministic,
    }


def mask_of(spec: AttentionSpec) -> dict[str, Any]:
    """A window is how many earlier and later keys a query sees, -1 for all; ours counts the query."""
    if not spec.causal:
        return {"attn_mask_type": "padding", "window_size": (-1, -1)}
    reach = -1 if spec.window is None else spec.window - 1
    return {"attn_mask_type": "padding_causal", "window_size": (reach, 0)}
