"""The te backend against the reference, with a stand-in for Transformer Engine; see `engine_stand_in`.

No test here runs Transformer Engine itself. On a GPU where it is installed the last test does.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from shoal.cli import main
from shoal.kernels import attention, attention_te, te_calls
from shoal.kernels.attention import varlen_attention
from shoal.kernels.attention_fused import why_not_on_cuda
from shoal.kernels.attention_hf import PACKED_ATTENTION, register_attention
from shoal.kernels.attention_parts import attend, gradients, merge, part_backend
from shoal.kernels.attention_te import why_not_te
from shoal.kernels.check import KernelError, check_kernel
from shoal.kernels.check_model import check_attention
from shoal.kernels.packed import AttentionSpec, Part
from shoal.kernels.survey import survey
from shoal.parallel.context.ring import ring_passes
from shoal.parallel.context.share import make_context_parallel
from shoal.parallel.context.split import DualChunks, borders_of, local_index, take
from tests.unit.kernels import engine_stand_in
from tests.unit.kernels.engine_stand_in import VERSIONS, StandIn, forget, install
from tests.unit.kernels.families import tiny_model
from tests.unit.kernels.packs import OnCuda, assert_same, pack

KINDS: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "bidirectional": {"causal": False},
    "window": {"causal": True, "window": 3},
    "sinks": {"causal": True, "sinks": True},
    "sinks and window": {"causal": True, "sinks": True, "window": 3, "scale": 0.3},
}
LENS = (5, 0, 1, 30, 3)
SPEC = AttentionSpec(True, 1.0)


@pytest.fixture(autouse=True)
def nothing_is_remembered() -> Iterator[None]:
    forget()
    yield
    forget()


@pytest.fixture(params=VERSIONS)
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> StandIn:
    return install(monkeypatch, StandIn(request.param))


@pytest.fixture
def newest(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    return install(monkeypatch, StandIn())


@pytest.mark.parametrize("by_token", [True, False], ids=["by token", "by document"])
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())
def test_equals_the_reference(engine: StandIn, kind: dict[str, Any], by_token: bool) -> None:
    engine.by_token = by_token
    given = pack(LENS)
    assert_same(given.run(**kind, backend="te"), given.run(**kind, backend="reference"), 1e-12)


@pytest.mark.parametrize("by_token", [True, False], ids=["by token", "by document"])
def test_keys_of_another_number(newest: StandIn, by_token: bool) -> None:
    """Documents without queries or keys do not reach the kernel: their tokens are none that it sees."""
    newest.by_token = by_token
    for queries, keys in (((5, 2, 0, 30, 3), (2, 0, 4, 15, 9)), ((0, 2), (3, 0))):
        given = pack(queries, keys)
        assert_same(
            given.run(causal=False, sinks=True, backend="te"),
            given.run(causal=False, sinks=True, backend="reference"),
            1e-12,
        )
    results = pack((), ()).run(causal=True, backend="te")
    assert all(results[name].count_nonzero() == 0 for name in ("out", "q", "k", "v"))


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 1)])
@pytest.mark.parametrize("widths", [(8, 8), (12, 8), (8, 20), (3, 3)], ids=str)
def test_widths_and_groups(newest: StandIn, widths: tuple[int, int], heads: int, kv_heads: int) -> None:
    given = pack((5, 0, 30), heads=heads, kv_heads=kv_heads, width=widths[0], value_width=widths[1])
    kind = KINDS["sinks"]
    assert_same(given.run(**kind, backend="te"), given.run(**kind, backend="reference"), 1e-12)


def test_documents_with_padding_between_them(newest: StandIn) -> None:
    given = pack((5, 6, 7))  # of which these are real, padded to those
    real = torch.tensor([0, 3, 3, 10]).int()
    padded = torch.tensor([0, 5, 11, 18]).int()
    given = replace(given, cu_q=real, cu_k=real)
    places = {"cu_seqlens_q_padded": padded, "cu_seqlens_k_padded": padded}
    for kind in KINDS.values():
        reference = given.run(**kind, **places, backend="reference")
        assert_same(given.run(**kind, **places, backend="te"), reference, 1e-12)


def test_tensors_that_lie_heads_first(newest: StandIn) -> None:
    given, part = pack((5, 30)), Part((0, 5, 35), (0, 5, 35))
    q, k, v = (given.leaves[name].detach()[:35] for name in "qkv")

    def run(q: Tensor, k: Tensor, v: Tensor, grad_out: Tensor, grad_lse: Tensor | None) -> tuple[Tensor, ...]:
        out, lse = attend(q, k, v, part, SPEC, "te")
        if not q.is_contiguous():
            out, lse = heads_first(out), heads_first(lse)
        return out, lse, *gradients(grad_out, grad_lse, q, k, v, out, lse, part, SPEC, "te")

    for grad_lse in (None, given.grad_lse[:35]):
        inputs = (q, k, v, given.grad_out[:35], grad_lse)
        turned = [None if x is None else heads_first(x) for x in inputs]
        torch.testing.assert_close(run(*turned), run(*inputs), rtol=1e-12, atol=1e-12)  # type: ignore[arg-type]


def heads_first(x: Tensor) -> Tensor:
    return x.transpose(0, 1).contiguous().transpose(0, 1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision(newest: StandIn, dtype: torch.dtype) -> None:
    given = pack(LENS, dtype=dtype)
    for kind in KINDS.values():
        reference = given.run(**kind, backend="reference")
        assert_same(given.run(**kind, backend="te"), reference, 3e-2)


@pytest.mark.parametrize("by_token", [True, False], ids=["by token", "by document"])
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("causal", [True, False])
def test_the_passes_of_a_ring(engine: StandIn, causal: bool, size: int, by_token: bool) -> None:
    """All passes of all ranks, one after the other here; short documents have queries or keys only on some."""
    engine.by_token = by_token
    lengths = (7, 3, 1, 0, 33)
    given, borders = pack(lengths), borders_of(lengths)
    q, k, v = (given.leaves[name].detach()[: borders[-1]] for name in "qkv")
    grad_out, grad_lse = given.grad_out[: borders[-1]], given.grad_lse[: borders[-1]]
    spec = AttentionSpec(causal, 0.4)
    passes = list(ring_of(lengths, size, causal))
    sizes = [x for _, _, part, _ in passes for x in zip(lens(part.cu_q), lens(part.cu_k), strict=True)]
    assert any((queries == 0) != (keys == 0) for queries, keys in sizes)
    out, lse = torch.zeros_like(grad_out), torch.full_like(grad_lse, -torch.inf)
    for at, keys, part, causal in passes:
        found = attend(q[at], k[keys], v[keys], part, replace(spec, causal=causal), "te")
        out[at], lse[at] = merge(out[at], lse[at], *found)
    grads = [torch.zeros_like(x) for x in (q, k, v)]
    for at, keys, part, causal in passes:
        inputs = (grad_out[at], grad_lse[at], q[at], k[keys], v[keys], out[at], lse[at])
        more = gradients(*inputs, part, replace(spec, causal=causal), "te")
        for grad, places, values in zip(grads, (at, keys, keys), more, strict=True):
            grad.index_add_(0, places, values)
    reference = given.run(causal=spec.causal, scale=spec.scale, backend="reference")
    ours = dict(zip(("out", "lse", "q", "k", "v"), (out, lse, *grads), strict=True))
    assert_same(ours, {name: x[: borders[-1]] for name, x in reference.items()}, 1e-12)


def lens(borders: tuple[int, ...]) -> list[int]:
    return [b - a for a, b in zip(borders, borders[1:], strict=False)]


def ring_of(lengths: tuple[int, ...], size: int, causal: bool) -> Iterator[tuple[Tensor, Tensor, Part, bool]]:
    """Passes of all ranks: which tokens of the documents ask and answer, where they lie, and whether it is causal."""
    cpu = torch.device("cpu")
    ranks = [DualChunks(lengths, size, rank) for rank in range(size)]
    held = [local_index(layout, borders_of(lengths)[:-1], cpu)[0] for layout in ranks]
    for rank, layout in enumerate(ranks):
        for step, (one,) in enumerate(ring_passes(layout, causal, None, cpu)):
            keys = held[(rank - step) % size]
            yield take(held[rank], one.queries), take(keys, one.keys), one.part, one.causal


def test_the_runs_own_random_numbers_are_left_alone(newest: StandIn) -> None:
    before = torch.get_rng_state()
    pack((5,)).run(causal=True, backend="te")
    assert torch.equal(before, torch.get_rng_state()) and len(newest.rng_states) == 2


def test_the_question_for_a_kernel(engine: StandIn) -> None:
    pack((1000, 1000), width=6).run(causal=True, sinks=True, window=7, backend="te")
    plain, with_sinks = engine.asked
    assert (plain.head_dim_qk, with_sinks.head_dim_qk, with_sinks.head_dim_v) == (8, 16, 16)
    assert (plain.num_heads, plain.num_gqa_groups, plain.qkv_dtype) == (4, 2, torch.float64)
    assert (plain.attn_mask_type, plain.window_size) == ("padding_causal", (6, 0))
    assert plain.max_seqlen_q == plain.max_seqlen_kv == 2048
    assert getattr(plain, "num_tokens_q", 2048) == 2048
    assert getattr(plain, "bottom_right_diagonal", False) is False


def test_a_backward_that_amplifies_fails_the_check(newest: StandIn) -> None:
    name = "attention.te"
    sound = check_kernel(name, "cpu")
    assert sound.errors["grad k"] < 1e-4
    newest.amplify = 8.0
    with pytest.raises(KernelError, match=r"grad k: relative error .*8 times as large") as caught:
        check_kernel(name, "cpu")
    assert "NVTE_FUSED_ATTN=0" in str(caught.value) and "attn: sdpa" in str(caught.value)
    assert "grad q" not in str(caught.value) and "grad v" not in str(caught.value)
    findings = [one for one in survey(torch.device("cpu"), [torch.float32]) if one.kernel == name]
    assert {one.verdict for one in findings if one.case != "soft-cap"} == {"WRONG"}


@pytest.fixture
def chosen_by_a_model() -> Iterator[PreTrainedModel]:
    register_attention(PACKED_ATTENTION, "te")
    with torch.device("meta"):
        model = tiny_model("gpt_oss", torch.float32)
    model.set_attn_implementation(PACKED_ATTENTION)
    yield model
    register_attention()


def test_the_check_at_the_start_of_training(newest: StandIn, chosen_by_a_model: PreTrainedModel) -> None:
    reports = check_attention(chosen_by_a_model, torch.device("cpu"), torch.bfloat16)
    assert [report.kernel for report in reports] == [
        "attention shoal (te)"
    ] * 2  # with windows and sinks, and without
    newest.amplify = 8.0
    with pytest.raises(
        KernelError, match=r"attention shoal \(te\) is wrong .*\n.*grad k.*\nchoose attn: sdpa"
    ):
        check_attention(chosen_by_a_model, torch.device("cpu"), torch.bfloat16)


class OneRank:
    """A group of this process alone."""

    def size(self) -> int:
        return 1


def test_context_parallelism_keeps_the_choice(chosen_by_a_model: PreTrainedModel) -> None:
    with pytest.raises(ValueError, match="cp_method = 'allgather': backend te .* repair: cp_method: ring"):
        make_context_parallel(chosen_by_a_model, OneRank(), "allgather")  # type: ignore[arg-type]
    assert make_context_parallel(chosen_by_a_model, OneRank(), "ring").backend == "te"  # type: ignore[arg-type]


def test_statistics_of_an_unknown_layout(newest: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    sound = te_calls._forward

    def changed(*arguments: Any) -> tuple[Tensor, ...]:
        out, statistics, rng_state = sound(*arguments)
        return out, statistics.transpose(0, 1), rng_state

    monkeypatch.setattr(te_calls, "_forward", changed)
    with pytest.raises(
        ValueError, match=r"statistics \[4, 8, 1\] of 8 queries in 2 documents .*sdpa or auto"
    ):
        pack((5, 3)).run(causal=True, backend="te")


def reason(monkeypatch: pytest.MonkeyPatch, engine: StandIn, **modules: Any) -> str | None:
    install(monkeypatch, engine)
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, f"transformer_engine.pytorch.{name.replace('__', '.')}", module)
    q = torch.zeros(4, 2, 64, dtype=torch.bfloat16)
    return why_not_te(q, q, SPEC)


def test_what_is_not_installed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "transformer_engine", None)
    q = torch.zeros(4, 2, 8)
    borders = torch.tensor([0, 4]).int()
    with pytest.raises(
        ValueError, match=r"te: transformer_engine is not installed: pip install .*; give backend"
    ):
        varlen_attention(q, q, q, borders, borders, causal=True, backend="te")
    with pytest.raises(ValueError, match="backend te, in parts: transformer_engine is not installed"):
        part_backend("te", q, q, SPEC, positioned=False)
    assert main(["doctor", "--kernels", "--device", "cpu", "--dtype", "bfloat16"]) == 0
    out = capsys.readouterr().out
    assert "attention.te: attention backend te: transformer_engine is not installed" in out


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ("FORWARD", "fused_attn_fwd takes tree_mask, which is unknown"),
        ("BACKWARD", "fused_attn_bwd takes tree_mask, which is unknown"),
    ],
)
def test_a_version_that_takes_something_else(monkeypatch: pytest.MonkeyPatch, table: str, words: str) -> None:
    monkeypatch.setattr(engine_stand_in, table, getattr(engine_stand_in, table) + " tree_mask=None")
    message = reason(monkeypatch, StandIn("2.31.0"))
    assert message == f"Transformer Engine 2.31.0: {words}: install transformer-engine 2.8 to 2.20"


def test_a_version_that_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    for table in ("FORWARD", "BACKWARD"):
        text = getattr(engine_stand_in, table).replace("softmax_type='vanilla' ", "")
        monkeypatch.setattr(engine_stand_in, table, text)
    message = reason(monkeypatch, StandIn("2.7.0"))
    assert message is not None and "2.7.0: fused_attn_fwd does not take softmax_type: install" in message


def test_a_question_that_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    text = engine_stand_in.QUESTION.replace("num_gqa_groups", "num_kv_heads")
    monkeypatch.setattr(engine_stand_in, "QUESTION", text)
    message = reason(monkeypatch, StandIn("2.31.0"))
    assert message is not None and "2.31.0: AttentionParams has no num_gqa_groups" in message


def test_an_installation_that_does_not_load(monkeypatch: pytest.MonkeyPatch) -> None:
    message = reason(monkeypatch, StandIn(), constants=None)
    assert message is not None and "transformer_engine cannot be used (ModuleNotFoundError" in message
    assert message.endswith("install transformer-engine[pytorch] 2.8 to 2.20")
    moved = StandIn().modules()["transformer_engine.pytorch.constants"]
    del moved.TE_DType
    message = reason(monkeypatch, StandIn(), constants=moved)
    assert message is not None and "transformer_engine cannot be used (ImportError" in message


def test_why_not(newest: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    def why(width: int, value_width: int | None = None, spec: AttentionSpec = SPEC) -> str | None:
        q, v = (torch.zeros(4, 2, x, dtype=torch.bfloat16) for x in (width, value_width or width))
        return why_not_te(q, v, spec)

    newest.has_kernel = lambda asked: asked.head_dim_qk <= 128 and asked.head_dim_v <= 128
    assert why(64) is None and why(123) is None
    wide = "Transformer Engine 2.20.2 has no fused kernel on this device for 2 query heads over 2, 136 and 64 wide"
    assert (why(129, 64) or "").startswith(wide)
    assert "136 and 136 wide, with a window of 9 (" in (
        why(128, spec=replace(SPEC, sinks=True, window=9)) or ""
    )
    assert "no window to both sides" in (why(64, spec=replace(SPEC, causal=False, window=9)) or "")
    monkeypatch.setenv("NVTE_FUSED_ATTN", "0")
    assert why(64) == "NVTE_FUSED_ATTN=0 turns off the fused attention of Transformer Engine"


def test_the_device_and_the_dtype(newest: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_te, "why_not_on_cuda", why_not_on_cuda)
    q = torch.zeros(4, 2, 64)
    assert why_not_te(q, q, SPEC) == "it needs a CUDA device and the tensors are on cpu"
    q = OnCuda(q)
    assert why_not_te(q, q, SPEC) == "it computes in float16 or bfloat16 and the tensors are float32"
    q = OnCuda(torch.zeros(4, 2, 64, dtype=torch.bfloat16))
    assert why_not_te(q, q, replace(SPEC, softcap=3.0)) == "it cannot soft-cap the scores"
    assert newest.asked == []
    assert why_not_te(q, q, SPEC) is None


@pytest.mark.parametrize(
    ("queries", "keys", "words"),
    [((5, 2), (5, 3), "causal attention of 2 queries over 3 keys"), ((4,), (3,), "4 queries over 3 keys")],
)
def test_causal_attention_over_another_number_of_keys(
    newest: StandIn, queries: tuple[int, ...], keys: tuple[int, ...], words: str
) -> None:
    with pytest.raises(ValueError, match=rf"backend te: .*{words}.*; give backend flash, sdpa or auto"):
        pack(queries, keys).run(causal=True, backend="te")


def test_windows_over_parts(newest: StandIn) -> None:
    q = torch.zeros(4, 2, 8)
    with pytest.raises(ValueError, match="backend te, in parts: it cannot place queries freely among keys"):
        part_backend("te", q, q, replace(SPEC, window=2), positioned=True)
    part = Part((0, 4), (0, 4))
    with pytest.raises(ValueError, match="a window of 3 to both sides for 4 queries over 4 keys"):
        attend(q, q, q, part, AttentionSpec(False, 1.0, window=3), "te")
    out, _ = attend(q, q, q, part, AttentionSpec(False, 1.0, window=4), "te")  # which hides nothing
    assert out.shape == q.shape


def test_auto_never_takes_it(newest: StandIn) -> None:
    q = torch.zeros(4, 2, 8)
    assert attention.choose_backend("auto", q, q, SPEC)[0] == "sdpa"
    assert part_backend("auto", q, q, SPEC, positioned=False) == "sdpa" and newest.asked == []


@pytest.mark.parametrize("kind", KINDS.values(), ids=str)
@pytest.mark.gpu
def test_on_a_gpu(kind: dict[str, Any]) -> None:
    pytest.importorskip("transformer_engine.pytorch")
    given = pack((5, 0, 1, 200, 3), width=64, value_width=64, dtype=torch.bfloat16, device="cuda")
    reference = given.run(**kind, backend="reference")
    assert_same(given.run(**kind, backend="te"), reference, 3e-2)
