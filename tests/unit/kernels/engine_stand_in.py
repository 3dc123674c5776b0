"""A stand-in for Transformer Engine: its functions with their signatures, computed in plain torch, and as strict.

Signatures and defaults are those of the named versions. What cuDNN would read or do wrongly without a word is refused
here: strides, borders that are not given or not int32, layouts left at defaults that mean something else, documents
without queries or keys, statistics of another shape, a state of random numbers that no forward made.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, make_dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from shoal.kernels import attention_te, te_calls, te_engine

FORWARD = (
    "is_training max_seqlen_q max_seqlen_kv cu_seqlens_q cu_seqlens_kv q k v fake_dtype fused_attention_backend "
    "attn_bias=None cu_seqlens_q_padded=None cu_seqlens_kv_padded=None page_table_k=None page_table_v=None "
    "s_quantizer=None o_quantizer=None attn_scale=None dropout=0.0 fast_zero_fill=True qkv_layout='sbh3d' "
    "{2.15:o_format='sbhd'} {2.15:qkv_scale_inv_format=None} attn_bias_type='no_bias' attn_mask_type='padding' "
    "softmax_type='vanilla' window_size=(-1,-1) {2.12:bottom_right_diagonal=None} rng_gen=None softmax_offset=None "
    "{2.9:return_max_logit=False} {2.10:cuda_graph=False}"
)
BACKWARD = (
    "max_seqlen_q max_seqlen_kv cu_seqlens_q cu_seqlens_kv q k v o d_o fake_dtype {-2.15:dqkv_dtype} aux_ctx_tensors "
    "fused_attention_backend cu_seqlens_q_padded=None cu_seqlens_kv_padded=None s_quantizer=None dp_quantizer=None "
    "dqkv_quantizer=None attn_scale=None dropout=0.0 fast_zero_fill=True qkv_layout='sbh3d' {2.15:o_format='sbhd'} "
    "{2.15:do_format='sbhd'} {2.15:dqkv_layout='sbh3d'} {2.15:qkv_scale_inv_format=None} "
    "{2.15:do_scale_inv_format=None} attn_bias_type='no_bias' attn_mask_type='padding' softmax_type='vanilla' "
    "window_size=(-1,-1) {2.12:bottom_right_diagonal=None} deterministic=False {2.10:cuda_graph=False}"
)
QUESTION = (
    "qkv_type qkv_dtype qkv_layout batch_size num_heads num_gqa_groups max_seqlen_q max_seqlen_kv head_dim_qk "
    "head_dim_v attn_mask_type window_size alibi_slopes_shape core_attention_bias_type core_attention_bias_shape "
    "core_attention_bias_requires_grad pad_between_seqs attention_dropout context_parallel cp_comm_type "
    "deterministic is_training fp8 fp8_meta inference_params softmax_type {2.9:return_max_logit} {2.10:cuda_graph} "
    "{2.10:num_splits} {2.12:bottom_right_diagonal} {2.15:cp_size} {2.17:fp8_output} {2.17:checkpoint_core_attention} "
    "{2.17:has_score_mod} {2.17:has_score_mod_bprop} {2.20:nominal_dtype} {2.20:num_tokens_q} {2.20:num_tokens_kv} "
    "{2.20:softcap} {2.20:cp_size_a2a} {2.20:softmax_scale}"
)
VERSIONS = ("2.8.0", "2.12.0", "2.20.2")
KERNEL = object()
DTYPES = {
    torch.float16: "kFloat16",
    torch.bfloat16: "kBFloat16",
    torch.float32: "kFloat32",
    torch.float64: "",
}
THD = "thd_thd_thd"


def arguments(text: str, version: str) -> list[str]:
    """The words of a version: {2.9:word} is there since 2.9, {-2.15:word} before 2.15."""
    release = tuple(int(number) for number in version.split(".")[:2])
    words = []
    for word in text.split():
        if word.startswith("{"):
            since, word = word[1:-1].split(":", 1)
            bound = tuple(int(number) for number in since.removeprefix("-").split("."))
            if (release >= bound) == since.startswith("-"):
                continue
        words.append(word)
    return words


def signature(text: str, version: str) -> inspect.Signature:
    parameters = []
    for word in arguments(text, version):
        name, _, default = word.partition("=")
        value = ast.literal_eval(default) if default else inspect.Parameter.empty
        parameters.append(inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=value))
    return inspect.Signature(parameters)


@dataclass
class StandIn:
    """Attributes: whether statistics are by token, what is possible, and what was asked and made."""

    version: str = "2.20.2"
    by_token: bool = True
    has_kernel: Callable[[Any], bool] = lambda asked: True
    amplify: float = 1.0  # of the gradient of the keys
    asked: list[Any] = field(default_factory=list)
    rng_states: list[Tensor] = field(default_factory=list)

    def choose(self, asked: Any) -> tuple[Any, ...]:
        assert asked.qkv_layout == THD and asked.core_attention_bias_requires_grad is False
        self.asked.append(asked)
        return (False, None, False, None, False, [True, self.has_kernel(asked), False])

    def forward(self, a: SimpleNamespace) -> tuple[Tensor, list[Tensor]]:
        self._insist(a)
        assert a.is_training and isinstance(a.rng_gen, torch.Generator)
        documents = self._documents(a)
        out = a.q.new_zeros(*a.q.shape[:2], a.v.shape[2])
        shape = (len(a.q), a.q.shape[1], 1)
        if not self.by_token:
            shape = (len(documents), a.q.shape[1], a.max_seqlen_q, 1)  # type: ignore[assignment]
        dtype = torch.float64 if a.q.dtype == torch.float64 else torch.float32
        statistics = torch.full(shape, torch.nan, dtype=dtype)
        for index, (rows, keys) in enumerate(documents):
            weights, lse = self._probabilities(a, rows, keys)
            values = a.v[keys].repeat_interleave(a.q.shape[1] // a.k.shape[1], 1).to(dtype)
            out[rows] = torch.einsum("hqk,khd->qhd", weights, values).to(out.dtype)
            if self.by_token:
                statistics[rows, :, 0] = lse.t()
            else:
                statistics[index, :, : lse.shape[1], 0] = lse
        self.rng_states.append(torch.zeros(2, dtype=torch.int64))
        return out, [statistics, self.rng_states[-1]]

    def backward(self, a: SimpleNamespace) -> list[Tensor | None]:
        self._insist(a)
        assert a.o.shape == a.d_o.shape == (*a.q.shape[:2], a.v.shape[2])
        assert a.o.is_contiguous() and a.d_o.is_contiguous() and a.o.dtype == a.d_o.dtype == a.q.dtype
        assert getattr(a, "dqkv_dtype", DTYPES[a.q.dtype]) == DTYPES[a.q.dtype]
        assert getattr(a, "do_format", "thd") == "thd" and getattr(a, "dqkv_layout", THD) == THD
        documents, groups = self._documents(a), a.q.shape[1] // a.k.shape[1]
        statistics, rng_state = a.aux_ctx_tensors
        assert any(rng_state is made for made in self.rng_states)
        shape = (len(a.q), a.q.shape[1], 1)
        if not self.by_token:
            shape = (len(documents), a.q.shape[1], a.max_seqlen_q, 1)  # type: ignore[assignment]
        assert statistics.shape == shape and statistics.is_contiguous() and not statistics.isnan().any()
        dtype = torch.float64 if a.q.dtype == torch.float64 else torch.float32
        assert statistics.dtype == dtype
        grads = [torch.zeros_like(x, dtype=dtype) for x in (a.q, a.k, a.v)]
        for index, (rows, keys) in enumerate(documents):
            places = (
                (rows, slice(None), 0)
                if self.by_token
                else (index, slice(None), slice(rows.stop - rows.start), 0)
            )
            lse = statistics[places].t() if self.by_token else statistics[places]
            scores, seen = self._scores(a, rows, keys)
            weights = (scores - lse[..., None]).exp().where(seen, 0.0)
            key, value = (x[keys].repeat_interleave(groups, 1).to(dtype) for x in (a.k, a.v))
            query, upstream, out = (x[rows].to(dtype) for x in (a.q, a.d_o, a.o))
            delta = (upstream * out).sum(-1).t()[..., None]
            grad_scores = a.attn_scale * weights * (torch.einsum("qhd,khd->hqk", upstream, value) - delta)
            grads[0][rows] = torch.einsum("hqk,khd->qhd", grad_scores, key)
            by_key = torch.einsum("hqk,qhd->khd", grad_scores, query) * self.amplify
            grads[1][keys] = by_key.unflatten(1, (-1, groups)).sum(2)
            grads[2][keys] = torch.einsum("hqk,qhd->khd", weights, upstream).unflatten(1, (-1, groups)).sum(2)
        return [*(grad.to(a.q.dtype) for grad in grads), None, None]

    @staticmethod
    def _insist(a: SimpleNamespace) -> None:
        for x in (a.q, a.k, a.v):
            assert x.is_contiguous() and x.shape[2] % 8 == 0 and x.dtype == a.fake_dtype
        assert a.q.shape[2] == a.k.shape[2] and a.k.shape[:2] == a.v.shape[:2]
        for cu, places, x, most in (
            (a.cu_seqlens_q, a.cu_seqlens_q_padded, a.q, a.max_seqlen_q),
            (a.cu_seqlens_kv, a.cu_seqlens_kv_padded, a.k, a.max_seqlen_kv),
        ):
            assert cu.dtype == places.dtype == torch.int32 and torch.equal(cu, places)
            assert cu[-1] == len(x) and cu.diff().min() > 0 and cu.diff().max() <= most
        assert a.fused_attention_backend is KERNEL and a.qkv_layout == THD
        assert getattr(a, "o_format", "thd") == "thd"
        assert a.attn_bias_type == "no_bias" and a.softmax_type == "vanilla" and a.dropout == 0.0

    @staticmethod
    def _documents(a: SimpleNamespace) -> list[tuple[slice, slice]]:
        borders = [x.tolist() for x in (a.cu_seqlens_q, a.cu_seqlens_kv)]
        pairs = zip(borders[0], borders[0][1:], borders[1], borders[1][1:], strict=False)
        return [(slice(x, y), slice(z, w)) for x, y, z, w in pairs]

    @staticmethod
    def _scores(a: SimpleNamespace, rows: slice, keys: slice) -> tuple[Tensor, Tensor]:
        """Scores [H, Q, K] of one document and which are seen, aligned at the first query and key."""
        dtype = torch.float64 if a.q.dtype == torch.float64 else torch.float32
        key = a.k[keys].repeat_interleave(a.q.shape[1] // a.k.shape[1], 1).to(dtype)
        scores = a.attn_scale * torch.einsum("qhd,khd->hqk", a.q[rows].to(dtype), key)
        ahead = torch.arange(scores.shape[2]) - torch.arange(scores.shape[1])[:, None]
        left, right = a.window_size
        assert (a.attn_mask_type, right) in (("padding", -1), ("padding_causal", 0))
        seen = torch.ones_like(ahead, dtype=torch.bool) if right else ahead <= 0
        return scores, seen & (ahead >= -left) if left >= 0 else seen

    def _probabilities(self, a: SimpleNamespace, rows: slice, keys: slice) -> tuple[Tensor, Tensor]:
        """Probabilities [H, Q, K] and log-sum-exp [H, Q] of one document."""
        scores, seen = self._scores(a, rows, keys)
        lse = scores.masked_fill(~seen, -torch.inf).logsumexp(-1)
        return (scores - lse[..., None]).exp().where(seen, 0.0), lse

    def function(self, name: str, text: str, compute: Callable[[SimpleNamespace], Any]) -> Callable[..., Any]:
        form = signature(text, self.version)

        def call(*given: Any, **named: Any) -> Any:
            bound = form.bind(*given, **named)
            bound.apply_defaults()
            return compute(SimpleNamespace(**bound.arguments))

        call.__name__, call.__signature__ = name, form  # type: ignore[attr-defined]
        return call

    def modules(self) -> Mapping[str, ModuleType]:
        """The modules that are imported, by name."""
        contents: dict[str, dict[str, Any]] = {
            "": {"__version__": self.version},
            ".pytorch": {},
            ".pytorch.constants": {"TE_DType": DTYPES},
            ".pytorch.cpp_extensions": {},
            ".pytorch.cpp_extensions.fused_attn": {
                "fused_attn_fwd": self.function("fused_attn_fwd", FORWARD, self.forward),
                "fused_attn_bwd": self.function("fused_attn_bwd", BACKWARD, self.backward),
                "FusedAttnBackend": {"F16_arbitrary_seqlen": KERNEL},
            },
            ".pytorch.attention": {},
            ".pytorch.attention.dot_product_attention": {},
            ".pytorch.attention.dot_product_attention.utils": {
                "AttentionParams": make_dataclass(
                    "AttentionParams", [(x, Any, None) for x in arguments(QUESTION, self.version)]
                ),
                "get_attention_backend": self.choose,
            },
        }
        modules = {}
        for name, values in contents.items():
            module = modules["transformer_engine" + name] = ModuleType("transformer_engine" + name)
            module.__path__ = []
            vars(module).update(values)
            parent, _, last = module.__name__.rpartition(".")
            if parent:
                setattr(modules[parent], last, module)
        return modules


def install(monkeypatch: pytest.MonkeyPatch, engine: StandIn) -> StandIn:
    """Makes a stand-in importable and the CPU a device that it computes on, until the test ends."""
    for name, module in engine.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(attention_te, "why_not_on_cuda", lambda *_: None)
    forget()
    return engine


def forget() -> None:
    """Forgets what is remembered of an engine; to be called before and after each test."""
    te_engine.engine_or_reason.cache_clear()
    te_calls._conventions.cache_clear()
