"""Every backend computes what the reference says, in value and in every gradient; padding changes nothing."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.kernels import attention_sdpa
from shoal.kernels.attention import _log_choice as log_choice
from shoal.kernels.attention import apply_sinks, varlen_attention
from tests.unit.kernels.packs import PADDING, Pack, assert_same, pack, running_sum

KINDS: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "bidirectional": {"causal": False},
    "narrow window": {"causal": True, "window": 3},
    "wide window": {"causal": True, "window": 70},
    "only itself": {"causal": True, "window": 1},
    "bidirectional window": {"causal": False, "window": 3},
    "soft-cap": {"causal": True, "softcap": 2.0},
    "soft-cap and window": {"causal": True, "softcap": 2.0, "window": 70},
    "soft-cap, bidirectional": {"causal": False, "softcap": 2.0},
    "sinks": {"causal": True, "sinks": True},
    "sinks and window": {"causal": True, "sinks": True, "window": 3},
    "scale": {"causal": True, "scale": 0.11},
    "everything": {"causal": True, "sinks": True, "window": 70, "softcap": 2.0, "scale": 0.5},
}
# Empty documents, single tokens, and one that spans several blocks of queries.
LENS: dict[str, tuple[Sequence[int], Sequence[int]]] = {
    "same": ((5, 0, 1, 600, 3, 0), (5, 0, 1, 600, 3, 0)),
    "more keys": ((5, 0, 1, 150, 3), (9, 2, 1, 700, 3)),
    "fewer keys": ((5, 2, 1, 600, 3), (2, 0, 1, 150, 3)),
    "nothing": ((0, 0), (0, 0)),
}


@pytest.mark.parametrize("lens", LENS.values(), ids=LENS.keys())
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())
def test_sdpa_equals_the_reference(kind: dict[str, Any], lens: tuple[Sequence[int], Sequence[int]]) -> None:
    given = pack(*lens)
    assert_same(given.run(**kind, backend="sdpa"), given.run(**kind, backend="reference"), 1e-12)


@pytest.mark.parametrize(
    "shape",
    [
        {"heads": 4, "kv_heads": 4},
        {"heads": 6, "kv_heads": 1},
        {"width": 12, "value_width": 8},
        {"width": 8, "value_width": 20},
        {"width": 7, "value_width": 7},
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", ["causal", "soft-cap", "everything"])
def test_head_shapes(kind: str, shape: dict[str, int]) -> None:
    given = pack((5, 0, 40), **shape)
    assert_same(
        given.run(**KINDS[kind], backend="sdpa"), given.run(**KINDS[kind], backend="reference"), 1e-12
    )


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)], ids=str)
@pytest.mark.parametrize("kind", ["causal", "narrow window", "soft-cap", "sinks"])
def test_lower_precision_computes_the_same(kind: str, dtype: torch.dtype, tolerance: float) -> None:
    given = pack((5, 0, 1, 200, 3), dtype=dtype)
    assert_same(
        given.run(**KINDS[kind], backend="sdpa"), given.run(**KINDS[kind], backend="reference"), tolerance
    )


@pytest.mark.parametrize("kind", ["causal", "soft-cap", "sinks"])
def test_autocast_decides_the_dtype_of_the_inputs_and_nothing_else(kind: str) -> None:
    """Rotated queries and keys are float32 there and values are not; scores are float32 in backward as well."""
    mixed, half = pack((5, 0, 90), dtype=torch.float32), pack((5, 0, 90), dtype=torch.bfloat16)
    mixed.leaves.update({name: half.leaves[name] for name in ("v", "sinks")})
    with torch.autocast("cpu", torch.bfloat16):
        ours = mixed.run(**KINDS[kind])
    expected = half.run(**KINDS[kind])
    for name in ("out", "lse", "v"):
        assert torch.equal(ours[name], expected[name]), name
    for name in ("q", "k"):
        assert ours[name].dtype == torch.float32 and torch.equal(ours[name], expected[name].float()), name


@pytest.mark.parametrize("window", [None, 4])
def test_the_reference_is_torchs_attention_of_each_document(window: int | None) -> None:
    given = pack((7, 12), width=8)
    q, k, v = (given.leaves[name] for name in "qkv")
    outs = []
    for start, stop in ((0, 7), (7, 19)):
        index = torch.arange(stop - start)
        seen = index[:, None] >= index
        if window is not None:
            seen &= index[:, None] - index < window
        heads_first = [x[start:stop].transpose(0, 1) for x in (q, k, v)]
        outs.append(
            F.scaled_dot_product_attention(*heads_first, attn_mask=seen, enable_gqa=True).transpose(0, 1)
        )
    ours = given.run(causal=True, window=window, backend="reference")
    torch.testing.assert_close(ours["out"][:19], torch.cat(outs), rtol=1e-12, atol=1e-12)


def test_sinks_are_one_more_logit_without_a_value() -> None:
    given = pack((6,), heads=2, kv_heads=2)
    q, k, v, sinks = leaves = [given.leaves[name] for name in ("q", "k", "v", "sinks")]
    scores = torch.einsum("qhd,khd->hqk", q[:6], k[:6]) * 8**-0.5
    scores = scores.masked_fill(torch.ones(6, 6, dtype=torch.bool).triu(1), -torch.inf)
    with_sink = torch.cat([scores, sinks[:, None, None].expand(2, 6, 1)], -1)
    out = torch.einsum("hqk,khd->qhd", with_sink.softmax(-1)[..., :-1], v[:6])
    lse = with_sink.logsumexp(-1).t()
    total = (out * given.grad_out[:6]).sum() + (lse * given.grad_lse[:6]).sum()
    gradients = dict(zip(("q", "k", "v", "sinks"), torch.autograd.grad(total, leaves), strict=True))
    ours = given.run(causal=True, sinks=True, backend="sdpa")
    assert_same(
        {**ours, "out": ours["out"][:6], "lse": ours["lse"][:6]}, {"out": out, "lse": lse, **gradients}, 1e-12
    )


@pytest.mark.parametrize("backend", ["sdpa", "reference"])
def test_a_query_that_sees_no_key_passes_no_gradient_on(backend: Any) -> None:
    """Not even one that is no number, as merging two such log-sum-exps gives."""
    given = pack((4,), (2,))
    q, k, v = (given.leaves[name] for name in "qkv")
    out, lse = varlen_attention(q, k, v, given.cu_q, given.cu_k, causal=True, backend=backend)
    assert lse[:2].isneginf().all() and torch.equal(out[:2], torch.zeros_like(out[:2]))
    expected = torch.autograd.grad(lse[2:4].sum(), (q, k), retain_graph=True)
    upstream = torch.ones_like(lse)
    upstream[:2] = upstream[4:] = torch.nan
    torch.testing.assert_close(torch.autograd.grad(lse, (q, k), upstream), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("backend", ["sdpa", "reference"])
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())
def test_padding_gives_nothing_and_receives_nothing(kind: dict[str, Any], backend: str) -> None:
    given = pack((5, 0, 90))
    expected = given.run(**kind, backend=backend)
    for name in ("out", "q", "k", "v"):
        assert torch.equal(expected[name][-PADDING:], torch.zeros_like(expected[name][-PADDING:])), name
    assert (expected["lse"][-PADDING:] == -99).all()
    with torch.no_grad():
        for name, value in zip("qkv", (torch.nan, torch.inf, torch.nan), strict=True):
            given.leaves[name][-PADDING:] = value
    assert_same(given.run(**kind, backend=backend), expected, 0.0)


@pytest.mark.parametrize("kind", ["causal", "narrow window", "soft-cap", "sinks"])
def test_padding_inside_the_pack(kind: str) -> None:
    """Documents rounded up to a multiple of 8, pads filled with NaN, equal the same documents side by side."""
    lens, rooms = (5, 0, 8, 1), (8, 8, 8, 16)
    compact, total = pack(lens), sum(rooms)
    places = torch.cat([torch.arange(n) + start for n, start in zip(lens, (0, 8, 16, 24), strict=True)])

    def spread(x: Tensor, fill: float) -> Tensor:
        return x.new_full((total, *x.shape[1:]), fill).index_copy(0, places, x.detach()[: sum(lens)])

    leaves = {name: spread(compact.leaves[name], torch.nan).requires_grad_() for name in "qkv"}
    leaves["sinks"] = compact.leaves["sinks"]
    wide = Pack(
        leaves, compact.cu_q, compact.cu_k, spread(compact.grad_out, 3.0), spread(compact.grad_lse, 3.0)
    )
    padded = {"cu_seqlens_q_padded": running_sum(rooms), "cu_seqlens_k_padded": running_sum(rooms)}
    ours = wide.run(**KINDS[kind], **padded, backend="sdpa")
    for name, expected in compact.run(**KINDS[kind], backend="sdpa").items():
        if name == "sinks":
            torch.testing.assert_close(ours[name], expected, rtol=1e-12, atol=1e-12)
            continue
        fill = -99.0 if name == "lse" else 0.0
        torch.testing.assert_close(ours[name], spread(expected, fill), rtol=1e-12, atol=1e-12)


def test_parts_merge_by_their_log_sum_exp() -> None:
    """Attention over all keys is that over two halves, weighted; so are the gradients, through both results."""
    given = pack((40,))
    q, k, v = (given.leaves[name] for name in "qkv")
    cu, half = given.cu_q, running_sum((20,))
    empty = torch.tensor([0, 20], dtype=torch.int32)

    def whole() -> Tensor:
        return varlen_attention(q[20:40], k, v, half, cu, causal=True)[0]

    def merged() -> Tensor:
        early, early_lse = varlen_attention(q[20:40], k[:20], v[:20], half, empty, causal=False)
        late, late_lse = varlen_attention(q[20:40], k[20:40], v[20:40], half, half, causal=True)
        share = torch.sigmoid(early_lse - late_lse)[..., None]
        return share * early + (1 - share) * late

    torch.testing.assert_close(merged(), whole(), rtol=1e-12, atol=1e-12)
    upstream = given.grad_out[:20]
    ours, expected = (torch.autograd.grad((f() * upstream).sum(), (q, k, v)) for f in (merged, whole))
    torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-12)


def test_sinks_may_come_after_a_merge() -> None:
    given = pack((30,))
    q, k, v, sinks = (given.leaves[name] for name in ("q", "k", "v", "sinks"))
    without = varlen_attention(q, k, v, given.cu_q, given.cu_k, causal=True)
    expected = varlen_attention(q, k, v, given.cu_q, given.cu_k, causal=True, sinks=sinks)
    torch.testing.assert_close(apply_sinks(*without, sinks), expected, rtol=0, atol=0)


def test_the_fused_operators_are_those_of_torch() -> None:
    """Their signatures; they are private."""
    forward, backward = attention_sdpa._fused._schema, attention_sdpa._fused_backward._schema
    assert str(forward) == (
        "aten::_scaled_dot_product_flash_attention_for_cpu(Tensor query, Tensor key, Tensor value, "
        "float dropout_p=0., bool is_causal=False, *, Tensor? attn_mask=None, float? scale=None) "
        "-> (Tensor output, Tensor logsumexp)"
    )
    assert str(backward) == (
        "aten::_scaled_dot_product_flash_attention_for_cpu_backward(Tensor grad_out, Tensor query, Tensor key, "
        "Tensor value, Tensor out, Tensor logsumexp, float dropout_p, bool is_causal, *, Tensor? attn_mask=None, "
        "float? scale=None) -> (Tensor grad_query, Tensor grad_key, Tensor grad_value)"
    )


@pytest.mark.parametrize("softcap", [None, 5.0])
def test_a_window_costs_no_square_of_scores(softcap: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """With 4,096 tokens and a window of 64 no mask exceeds 64 x 127 numbers."""
    sizes = []
    additive = attention_sdpa.Mask.additive

    def noting(mask: attention_sdpa.Mask, *arguments: Any) -> Tensor:
        sizes.append(mask.num_queries * mask.num_keys)
        return additive(mask, *arguments)

    monkeypatch.setattr(attention_sdpa.Mask, "additive", noting)
    given = pack((4096,), heads=1, kv_heads=1, dtype=torch.float32)
    given.run(causal=True, window=64, softcap=softcap, backend="sdpa")
    # Forward and backward; blocks inside the document share one mask.
    assert max(sizes) == 64 * 127 and len(sizes) == 2 * 2


def test_only_what_is_trained_gets_a_gradient() -> None:
    given = pack((5, 9))
    for name in "kv":
        given.leaves[name].requires_grad_(False)
    q, k, v = (given.leaves[name] for name in "qkv")
    out, lse = varlen_attention(q, k, v, given.cu_q, given.cu_k, causal=True)
    out.sum().backward()
    assert q.grad is not None and q.grad.abs().max() > 0 and k.grad is None
    with torch.no_grad():
        out, lse = varlen_attention(q, k, v, given.cu_q, given.cu_k, causal=True)
    assert not out.requires_grad and not lse.requires_grad


def test_borders_changed_in_place_are_seen() -> None:
    given = pack((5, 9))
    before = given.run(causal=True)["out"]
    given.cu_q[1] = given.cu_k[1] = 7
    after = given.run(causal=True)["out"]
    assert not torch.equal(before, after)
    assert torch.equal(after, pack((7, 7)).run(causal=True)["out"])


def test_auto_logs_what_it_took_and_why(caplog: pytest.LogCaptureFixture) -> None:
    log_choice.cache_clear()
    given = pack((5,))
    with caplog.at_level(logging.INFO, "shoal"):
        given.run(causal=True, backend="auto")
        given.run(causal=True, backend="auto")
    assert [record.message for record in caplog.records] == [
        "attention backend auto: sdpa; flash is out: it needs a CUDA device and the tensors are on cpu"
    ]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(19, 4, 9)}, r"q \[19, 4, 9\], k .* do not fit"),
        ({"v": torch.zeros(18, 2, 8)}, r"do not fit"),
        ({"q": torch.zeros(19, 3, 8, dtype=torch.float64)}, r"3 query heads cannot share 2 key heads"),
        ({"q": torch.zeros(19, 4, 8)}, r"dtypes torch\.float32, torch\.float64"),
        ({"cu_seqlens_q": torch.tensor([0, 5])}, r"same N documents"),
        ({"cu_seqlens_q": torch.tensor([0, 9, 5])}, r"\[0, 9, 5\] has to begin with 0 and never decrease"),
        ({"cu_seqlens_k": torch.tensor([1, 5, 9])}, r"has to begin with 0"),
        ({"cu_seqlens_q": torch.tensor([0, 5, 20])}, r"cu_seqlens_q: the documents end at 20, .* 19 tokens"),
        ({"cu_seqlens_q_padded": torch.tensor([0, 4, 18])}, r"cu_seqlens_q_padded: lengths \[4, 14\] cannot"),
        ({"window": 0}, r"window: 0 is below 1"),
        ({"softcap": -1.0}, r"softcap: -1\.0 is not positive"),
        ({"sinks": torch.zeros(2)}, r"sinks: \[2\] has to be \[4\]"),
        ({"backend": "fast"}, r"'fast' is none of auto, sdpa, flash, te, reference"),
        ({"backend": "flash"}, r"backend flash: it needs a CUDA device"),
    ],
)
def test_refuses(change: dict[str, Any], message: str) -> None:
    given = pack((5, 9))
    arguments = {name: given.leaves[name].detach() for name in "qkv"}
    arguments |= {"cu_seqlens_q": given.cu_q, "cu_seqlens_k": given.cu_k, "causal": True}  # type: ignore[dict-item]
    with pytest.raises(ValueError, match=message):
        varlen_attention(**{**arguments, **change})
