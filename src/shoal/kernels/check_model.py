"""Checks the attention that a model is about to be trained with, before it is: forward and gradients, on this device.

What runs is the function that the model's layers will call, on a small input with the widths and head groups of the
model; what it is compared with is `shoal.kernels.attention_reference` in float64.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from shoal.kernels.attention import Backend, choose_backend
from shoal.kernels.attention_hf import PACKED_ATTENTION, registered_backend
from shoal.kernels.check import TOLERANCES, AttentionCase, KernelReport, attention_problem, compare
from shoal.kernels.check_ssd import Run
from shoal.kernels.packed import AttentionSpec

ONE_DOCUMENT = (129,)
PACKED = (20, 0, 1, 129)
LONGEST_WINDOW = 48
"""Windows above it are cut to it, so that the documents of the check are longer than their window."""
_MAX_HEADS = 8  # several key heads, unless so many query heads share one that they would cost too much
_PLAIN = ("eager", "flex_attention")


def check_attention(
    model: PreTrainedModel, device: torch.device, dtype: torch.dtype, backend: Backend | None = None
) -> tuple[KernelReport, ...]:
    """Compares the attention that a model has chosen with the reference; takes a fraction of a second.

    Attention that transformers computes in plain operators (eager) is no kernel and is not checked, and neither is
    what torch compiles for the model (flex).

    Args:
        model: On any device, before or after sharding; only its configuration and kinds of layers are read.
        device: Where it will run.
        dtype: What it will compute in.
        backend: Of attention that transformers calls but that is spread over ranks; the backend alone is checked.

    Returns:
        What was found for each kind of attention layer.

    Raises:
        KernelError: An output or a gradient is off.
        ValueError: The chosen kernel cannot run here at all.
    """
    name = str(model.config._attn_implementation)
    cases = attention_cases(model)
    if backend is None and (name not in ALL_ATTENTION_FUNCTIONS or name in _PLAIN):
        return ()
    if backend is None and name != PACKED_ATTENTION and "flash_attention" not in name:
        cases = cases[:1]  # windows, soft-caps and sinks would come as a mask, or this kernel is not taken
    reports = []
    for case in cases:
        inputs, kernel, reference = attention_problem(backend or "reference", device, dtype, case)
        label = f"attention {name}"
        if backend is None:
            kernel, reference = _Layer(name, case), _output_of(reference)
        if backend is not None or name == PACKED_ATTENTION:
            label += f" ({_choice(backend or registered_backend(name), inputs, case)})"
        reports.append(compare(label, kernel, reference, inputs, TOLERANCES[dtype]))
    return tuple(reports)


def _choice(backend: Backend, inputs: Mapping[str, Tensor], case: AttentionCase) -> str:
    """Names the kernel that computes a case, and why "auto" takes it."""
    spec = AttentionSpec(case.causal, case.head_dim**-0.5, case.window, case.softcap, case.sinks)
    chosen, reason = choose_backend(backend, inputs["q"], inputs["v"], spec)
    return chosen if reason is None else f"{chosen}; flash is out: {reason}"


def _output_of(run: Run) -> Run:
    return lambda leaves: {"out": run(leaves)["out"]}


def attention_cases(model: PreTrainedModel) -> tuple[AttentionCase, ...]:
    """The kinds of attention of a model: first full and plain, then with what its layers add to it.

    Without attention heads (a model of other mixers) there is none.
    """
    config: Any = model.config.get_text_config()
    heads = getattr(config, "num_attention_heads", None)
    if not heads:
        return ()
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    value_width = width
    if latent := getattr(config, "qk_nope_head_dim", None):  # multi-head latent attention: no groups
        width, value_width, kv_heads = latent + config.qk_rope_head_dim, config.v_head_dim, heads
    shared = heads // kv_heads
    groups = min(2, kv_heads) if 2 * shared <= _MAX_HEADS else 1
    lens = PACKED if config._attn_implementation == PACKED_ATTENTION else ONE_DOCUMENT
    sizes: dict[str, Any] = {
        "num_heads": groups * shared,
        "num_kv_heads": groups,
        "head_dim": width,
        "value_dim": value_width,
        "lens": lens,
    }
    plain = AttentionCase(**sizes)
    window = getattr(config, "sliding_window", None)
    whole = AttentionCase(
        **sizes,
        window=min(window, LONGEST_WINDOW) if window else None,
        softcap=getattr(config, "attn_logit_softcapping", None),
        sinks=any(hasattr(module, "sinks") for module in model.modules()),
    )
    return (plain,) if whole == plain else (plain, whole)


class _Layer(nn.Module):
    """Stands in for an attention layer of transformers: what its attention function reads of it."""

    def __init__(self, name: str, case: AttentionCase) -> None:
        super().__init__()
        self.config = SimpleNamespace(_attn_implementation=name)
        self.is_causal = case.causal
        self.num_key_value_groups = case.num_heads // case.num_kv_heads
        self._function = ALL_ATTENTION_FUNCTIONS[name]
        self._case = case

    def forward(self, leaves: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """q [T, Hq, D], k [T, Hkv, D], v [T, Hkv, Dv] and sinks [Hq] to out [T, Hq, Dv]."""
        case = self._case
        extra: dict[str, Any] = {"sliding_window": case.window, "softcap": case.softcap}
        extra["s_aux"] = leaves.get("sinks")
        if len(case.lens) > 1:
            borders = torch.tensor([0, *case.lens], device=leaves["q"].device).cumsum(0).int()
            extra |= {"cu_seq_lens_q": borders, "cu_seq_lens_k": borders}
        extra = {name: value for name, value in extra.items() if value is not None}
        q, k, v = (leaves[name].transpose(0, 1)[None] for name in "qkv")
        out, _ = self._function(
            self, q, k, v, None, dropout=0.0, scaling=case.head_dim**-0.5, is_causal=case.causal, **extra
        )
        return {"out": out[0]}
