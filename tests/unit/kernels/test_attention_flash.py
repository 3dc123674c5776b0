"""The flash backend: its arguments and its gradient of the log-sum-exp, with a stand-in for torch's CUDA kernel.

The stand-in computes in plain torch what the kernel's documentation says, from the arguments that the kernel
takes; on a GPU the same comparisons run with the kernel itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from shoal.kernels import attention, attention_flash
from shoal.kernels.attention_flash import MAX_WIDTH, why_not_flash
from shoal.kernels.packed import AttentionSpec
from tests.unit.kernels.packs import OnCuda, assert_same, pack

KINDS: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "bidirectional": {"causal": False},
    "window": {"causal": True, "window": 3},
    "bidirectional window": {"causal": False, "window": 3},
    "sinks": {"causal": True, "sinks": True},
    "sinks and window": {"causal": True, "sinks": True, "window": 3, "scale": 0.3},
}
LENS: dict[str, tuple[Sequence[int], Sequence[int]]] = {
    "same": ((5, 0, 1, 30, 3), (5, 0, 1, 30, 3)),
    "fewer keys": ((5, 2, 1, 30, 3), (2, 0, 1, 15, 3)),
    "more keys": ((5, 2, 1, 30, 3), (7, 2, 1, 50, 3)),
    "no queries": ((0, 0), (2, 3)),
    "no keys": ((2, 3), (0, 0)),
}


class StandIn:
    """The operators behind `torch.nn.attention.varlen`, in float64, and as strict as they are."""

    @staticmethod
    def _probabilities(
        q: Tensor, k: Tensor, causal: bool, scale: float, window: list[int]
    ) -> tuple[Tensor, Tensor]:
        """Probabilities [H, Q, K] and log-sum-exp [H, Q] of one document; keys repeated to the query heads."""
        scores = scale * torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(q.shape[1] // k.shape[1], 1))
        ahead = torch.arange(len(k)) - torch.arange(len(q))[:, None] - (len(k) - len(q))
        left, right = window if not causal else [-1, 0]
        seen = torch.ones_like(ahead, dtype=torch.bool)
        if left >= 0:
            seen &= ahead >= -left
        if right >= 0:
            seen &= ahead <= right
        lse = scores.masked_fill(~seen, -torch.inf).logsumexp(-1)
        return (scores - lse[..., None]).exp().where(seen & lse.isfinite()[..., None], 0.0), lse

    def _varlen_attn(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_q: Tensor,
        cu_k: Tensor,
        max_q: int,
        max_k: int,
        causal: bool,
        scale: float,
        window: list[int],
        grouped: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        self._insist(q, k, v, cu_q, cu_k, max_q, max_k)
        assert grouped or q.shape[1] == k.shape[1]
        out, lse = torch.zeros_like(q), q.new_full((q.shape[1], len(q)), torch.nan)
        for a, b, c, d in self._documents(cu_q, cu_k):
            weights, lse[:, a:b] = self._probabilities(q[a:b], k[c:d], causal, scale, window)
            values = v[c:d].repeat_interleave(q.shape[1] // k.shape[1], 1)
            out[a:b] = torch.einsum("hqk,khd->qhd", weights, values)
        return out, lse.masked_fill(lse.isneginf(), torch.inf), torch.zeros(2)

    def _varlen_attn_backward(
        self,
        grad_out: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        cu_q: Tensor,
        cu_k: Tensor,
        max_q: int,
        max_k: int,
        causal: bool,
        rng_state: Tensor,
        scale: float,
        window: list[int],
    ) -> tuple[Tensor, Tensor, Tensor]:
        self._insist(q, k, v, cu_q, cu_k, max_q, max_k)
        assert grad_out.is_contiguous() and lse.shape == (q.shape[1], len(q))
        groups = q.shape[1] // k.shape[1]
        grad_q, grad_k, grad_v = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for a, b, c, d in self._documents(cu_q, cu_k):
            weights, _ = self._probabilities(q[a:b], k[c:d], causal, scale, window)
            keys, values = (x[c:d].repeat_interleave(groups, 1) for x in (k, v))
            delta = (grad_out[a:b] * out[a:b]).sum(-1).t()[..., None]
            products = torch.einsum("qhd,khd->hqk", grad_out[a:b], values)
            grad_scores = scale * weights * (products - delta)
            grad_q[a:b] = torch.einsum("hqk,khd->qhd", grad_scores, keys)
            per_head = torch.einsum("hqk,qhd->khd", grad_scores, q[a:b])
            grad_k[c:d] = per_head.unflatten(1, (-1, groups)).sum(2)
            per_head = torch.einsum("hqk,qhd->khd", weights, grad_out[a:b])
            grad_v[c:d] = per_head.unflatten(1, (-1, groups)).sum(2)
        return grad_q, grad_k, grad_v

    @staticmethod
    def _insist(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int) -> None:
        assert len(q) > 0 and len(k) > 0  # CUDA starts no empty grid
        assert q.shape[2] == k.shape[2] == v.shape[2] and q.shape[2] % 8 == 0
        assert cu_q.dtype == cu_k.dtype == torch.int32
        assert (max_q, max_k) == (int(cu_q.diff().max()), int(cu_k.diff().max()))

    @staticmethod
    def _documents(cu_q: Tensor, cu_k: Tensor) -> list[tuple[int, ...]]:
        borders = [x.tolist() for x in (cu_q[:-1], cu_q[1:], cu_k[:-1], cu_k[1:])]
        return list(zip(*borders, strict=True))


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_flash, "_operators", StandIn)
    monkeypatch.setattr(attention_flash, "why_not_flash", lambda *_: None)


@pytest.mark.parametrize("lens", LENS.values(), ids=LENS.keys())
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())
@pytest.mark.usefixtures("stand_in")
def test_equals_the_reference(kind: dict[str, Any], lens: tuple[Sequence[int], Sequence[int]]) -> None:
    given = pack(*lens)
    assert_same(given.run(**kind, backend="flash"), given.run(**kind, backend="reference"), 1e-12)


@pytest.mark.parametrize("widths", [(8, 8), (12, 8), (8, 20), (3, 3)], ids=str)
@pytest.mark.usefixtures("stand_in")
def test_widths_are_filled_up(widths: tuple[int, int]) -> None:
    given = pack((5, 0, 30), width=widths[0], value_width=widths[1])
    kind = KINDS["sinks"]
    assert_same(given.run(**kind, backend="flash"), given.run(**kind, backend="reference"), 1e-12)


@pytest.mark.usefixtures("stand_in")
def test_a_query_that_sees_no_key_passes_no_gradient_on() -> None:
    given = pack((4,), (2,))
    leaves = [given.leaves[name] for name in "qkv"]
    _, lse = attention.varlen_attention(*leaves, given.cu_q, given.cu_k, causal=True, backend="flash")
    expected = torch.autograd.grad(lse[2:4].sum(), leaves, retain_graph=True)
    upstream = torch.ones_like(lse)
    upstream[:2] = upstream[4:] = torch.nan
    torch.testing.assert_close(torch.autograd.grad(lse, leaves, upstream), expected, rtol=1e-12, atol=1e-12)


def test_the_operators_are_those_of_torch() -> None:
    """Their signatures, on which the arguments above rest."""
    operators = attention_flash._operators()
    forward = str(operators._varlen_attn.default._schema)
    assert forward.startswith(
        "torch_attn::_varlen_attn(Tensor query, Tensor key, Tensor value, Tensor cu_seq_q, Tensor? cu_seq_k, "
        "SymInt max_q, SymInt max_k, bool is_causal=False, float? scale=None, SymInt[]? window_size=None, "
        "bool enable_gqa=False,"
    )
    assert forward.endswith("-> (Tensor, Tensor, Tensor)")
    assert str(operators._varlen_attn_backward.default._schema) == (
        "torch_attn::_varlen_attn_backward(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor out, "
        "Tensor lse, Tensor cu_seq_q, Tensor cu_seq_k, SymInt max_q, SymInt max_k, bool is_causal, "
        "Tensor rng_state, float? scale=None, SymInt[]? window_size=None) -> (Tensor, Tensor, Tensor)"
    )


def test_why_not() -> None:
    spec = AttentionSpec(True, 1.0)

    def why(width: int, dtype: torch.dtype = torch.bfloat16, spec: AttentionSpec = spec) -> str | None:
        q = torch.empty(4, 2, width, dtype=dtype, device="meta")
        return why_not_flash(OnCuda(q), OnCuda(q), spec)

    assert why(64) is None and why(MAX_WIDTH) is None
    assert why(64, torch.float32) == "it computes in float16 or bfloat16 and the tensors are float32"
    assert why(MAX_WIDTH + 8) == "it takes heads at most 256 wide and these have 264"
    sinks = AttentionSpec(True, 1.0, sinks=True)
    assert why(MAX_WIDTH, spec=sinks) == "it takes heads at most 248 wide with sinks and these have 256"
    assert why(64, spec=AttentionSpec(True, 1.0, softcap=3.0)) == "it cannot soft-cap the scores"


@pytest.mark.parametrize("kind", [*KINDS.values(), {"causal": True, "softcap": 2.0}], ids=str)
@pytest.mark.gpu
def test_on_a_gpu(kind: dict[str, Any]) -> None:
    given = pack((5, 0, 1, 200, 3), width=64, value_width=64, dtype=torch.bfloat16, device="cuda")
    reference = given.run(**kind, backend="reference")
    assert_same(given.run(**kind, backend="sdpa"), reference, 3e-2)
    assert_same(given.run(**kind, backend="auto"), reference, 3e-2)


@pytest.mark.gpu
def test_auto_takes_flash_on_a_gpu() -> None:
    q = torch.zeros(4, 2, 64, dtype=torch.bfloat16, device="cuda")
    assert attention._kernel("auto", q, q, AttentionSpec(True, 1.0)) is attention_flash.flash_attention
