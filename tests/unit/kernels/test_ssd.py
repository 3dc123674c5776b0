"""Mamba-2's convolution and scan compute what their twins say, token by token: value and every gradient, by name."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.kernels import ssd, ssd_chunked, ssd_convolution, ssd_fused
from shoal.kernels.ssd import causal_convolution, document_ids, state_space_scan
from shoal.kernels.ssd_reference import reference_scan
from tests.unit.kernels.packs import assert_same, running_sum

TAPS, HEADS, WIDTH, STATES = 4, 4, 3, 5
LENS: dict[str, Sequence[int] | None] = {
    "one document a row": None,
    "ragged": (5, 0, 1, 19, 3, 0, 2, 8, 1),
    "borders of chunks": (8, 8, 7, 1, 16),
    "longer than a block": (3, 70, 7),
    "single tokens": (1,) * 9,
    "nothing": (0, 0),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "skip": {"d": True},
    "softplus": {"dt_bias": True, "dt_softplus": True},
    "limits": {"dt_bias": True, "dt_softplus": True, "dt_limit": (0.5, 1.0)},
    "everything": {"d": True, "dt_bias": True, "dt_softplus": True, "dt_limit": (0.2, float("inf"))},
}


def inputs(
    num_tokens: int, *, rows: int = 1, groups: int = 2, dtype: torch.dtype = torch.float64, seed: int = 0
) -> dict[str, Tensor]:
    """Arguments of the scan and of the convolution (w, bias) by name."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    leaves = {
        "x": random(rows, num_tokens, HEADS, WIDTH),
        "dt": random(rows, num_tokens, HEADS).exp() / 4,
        "a": -random(HEADS).exp(),
        "b": random(rows, num_tokens, groups, STATES),
        "c": random(rows, num_tokens, groups, STATES),
        "d": random(HEADS),
        "dt_bias": random(HEADS),
        "weight": random(HEADS * WIDTH, TAPS),
        "bias": random(HEADS * WIDTH),
    }
    return {name: leaf.to(dtype).requires_grad_() for name, leaf in leaves.items()}


def scan(leaves: dict[str, Tensor], documents: Tensor | None, backend: str, **options: Any) -> Tensor:
    given = [leaves[name] for name in ("x", "dt", "a", "b", "c")]
    chosen = {
        name: leaves[name] if value is True and name != "dt_softplus" else value
        for name, value in options.items()
    }
    return state_space_scan(*given, documents=documents, backend=backend, **chosen)  # type: ignore[arg-type]


def convolve(
    leaves: dict[str, Tensor], documents: Tensor | None, backend: str, *, bias: bool = True
) -> Tensor:
    return causal_convolution(
        leaves["x"].flatten(2),
        leaves["weight"],
        leaves["bias"] if bias else None,
        documents=documents,
        backend=backend,  # type: ignore[arg-type]
    )


def with_gradients(leaves: dict[str, Tensor], y: Tensor) -> dict[str, Tensor]:
    """The result, and the gradient of every argument that it depends on, from an uneven upstream gradient."""
    upstream = torch.randn(y.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    found = torch.autograd.grad((y * upstream).sum(), list(leaves.values()), allow_unused=True)
    gradients = {name: g for name, g in zip(leaves, found, strict=True) if g is not None}
    assert len(gradients) >= 2
    return {"y": y.detach(), **gradients}


def tokens_of(lens: Sequence[int] | None) -> tuple[int, int, Tensor | None]:
    """Rows, tokens and numbers of documents."""
    if lens is None:
        return 2, 43, None
    return 1, sum(lens), document_ids(running_sum(lens), sum(lens))


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ssd_chunked, "CHUNK_TOKENS", 8)
    monkeypatch.setattr(ssd_chunked, "BLOCK_TOKENS", 32)


@pytest.mark.parametrize("lens", LENS.values(), ids=LENS.keys())
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_the_scan_equals_its_twin(options: dict[str, Any], lens: Sequence[int] | None) -> None:
    rows, total, documents = tokens_of(lens)
    leaves = inputs(total, rows=rows)
    if not total:
        assert scan(leaves, documents, "torch", **options).shape == (1, 0, HEADS, WIDTH)
        return
    ours = with_gradients(leaves, scan(leaves, documents, "torch", **options))
    assert_same(ours, with_gradients(leaves, scan(leaves, documents, "reference", **options)), 1e-10)


@pytest.mark.parametrize("lens", LENS.values(), ids=LENS.keys())
@pytest.mark.parametrize("bias", [True, False])
def test_the_convolution_equals_its_twin(bias: bool, lens: Sequence[int] | None) -> None:
    rows, total, documents = tokens_of(lens)
    leaves = inputs(total, rows=rows)
    if not total:
        assert convolve(leaves, documents, "torch", bias=bias).shape == (1, 0, HEADS * WIDTH)
        return
    ours = with_gradients(leaves, convolve(leaves, documents, "torch", bias=bias))
    assert_same(ours, with_gradients(leaves, convolve(leaves, documents, "reference", bias=bias)), 1e-10)


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_groups(groups: int) -> None:
    rows, total, documents = tokens_of((70, 1, 9))
    leaves = inputs(total, rows=rows, groups=groups)
    expected = with_gradients(leaves, scan(leaves, documents, "reference"))
    assert_same(with_gradients(leaves, scan(leaves, documents, "torch")), expected, 1e-10)


def test_rows_of_different_documents() -> None:
    documents = torch.stack([document_ids(running_sum(lens), 80)[0] for lens in ((70, 10), (3, 60, 17))])
    leaves = inputs(80, rows=2)
    for operation in (scan, convolve):
        ours = with_gradients(leaves, operation(leaves, documents, "torch"))
        assert_same(ours, with_gradients(leaves, operation(leaves, documents, "reference")), 1e-10)


def test_float32_and_the_usual_size_of_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Strong decays too, as of heads late in the usual initialisation (a = -1, -2, ..., -heads)."""
    monkeypatch.undo()
    assert ssd_chunked.CHUNK_TOKENS >= 64
    rows, total, documents = tokens_of((5, 600))
    leaves = inputs(total, rows=rows, dtype=torch.float32)
    leaves["a"].data.copy_(torch.tensor([-1.0, -16.0, -64.0, -128.0]))
    exact = {name: leaf.detach().double().requires_grad_() for name, leaf in leaves.items()}
    for operation in (scan, convolve):
        ours = with_gradients(leaves, operation(leaves, documents, "torch"))
        expected = with_gradients(exact, operation(exact, documents, "reference"))
        assert_same(ours, {name: value.float() for name, value in expected.items()}, 1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_float32(dtype: torch.dtype) -> None:
    leaves = {name: leaf.to(dtype) for name, leaf in inputs(90).items()}
    wide = {name: leaf.float() for name, leaf in leaves.items()}
    assert torch.equal(scan(leaves, None, "torch"), scan(wide, None, "torch"))
    y = convolve(leaves, None, "torch")
    assert y.dtype == dtype and torch.equal(y, convolve(wide, None, "torch").to(dtype))


def test_autocast_changes_nothing() -> None:
    leaves = inputs(90, dtype=torch.float32)
    for operation in (scan, convolve):
        expected = with_gradients(leaves, operation(leaves, None, "torch"))
        with torch.autocast("cpu", torch.bfloat16):
            ours = with_gradients(leaves, operation(leaves, None, "torch"))
        assert_same(ours, expected, 0.0)


def test_a_document_does_not_depend_on_its_neighbours_by_one_bit() -> None:
    lens, b = (70, 90, 33), slice(70, 160)
    documents = document_ids(running_sum(lens), sum(lens))
    leaves = inputs(sum(lens))
    others = inputs(sum(lens), seed=1)
    for name in ("x", "dt", "b", "c"):
        changed = others[name].detach() * (1e6 if name != "dt" else 1e3)
        changed[:, b] = leaves[name][:, b].detach()
        others[name] = changed.requires_grad_()
    for name in ("a", "d", "dt_bias", "weight", "bias"):
        others[name] = leaves[name]
    for operation in (scan, convolve):
        first, second = operation(leaves, documents, "torch"), operation(others, documents, "torch")
        assert torch.equal(first[:, b], second[:, b]) and not torch.equal(first, second)
        (mine, theirs) = (
            torch.autograd.grad(
                y[:, b].square().sum(), [given[name] for name in ("x", "dt", "b", "c")], allow_unused=True
            )
            for y, given in ((first, leaves), (second, others))
        )
        for one, other in zip(mine, theirs, strict=True):
            if one is not None:
                assert torch.equal(one, other) and not one[:, : b.start].any() and not one[:, b.stop :].any()


def test_a_document_in_a_pack_equals_it_alone() -> None:
    lens, b = (7, 130, 2), slice(7, 137)
    documents = document_ids(running_sum(lens), sum(lens))
    leaves = inputs(sum(lens))
    alone = {name: leaf[:, b] if name in ("x", "dt", "b", "c") else leaf for name, leaf in leaves.items()}
    for operation in (scan, convolve):
        packed, expected = operation(leaves, documents, "torch")[:, b], operation(alone, None, "torch")
        torch.testing.assert_close(packed, expected, rtol=1e-12, atol=1e-12)


def masks_without(*kept: int) -> Any:
    """`_masks`, but the parts that are not named know of no documents."""

    def faulty(span: slice, size: int, documents: Tensor | None, like: Tensor) -> tuple[Any, ...]:
        right = original(span, size, documents, like)
        wrong = original(span, size, None, like)
        return tuple(right[i] if i in kept else wrong[i] for i in range(3))

    original = ssd_chunked._masks
    return faulty


@pytest.mark.parametrize("kept", [(), (1, 2), (0, 2), (0, 1)], ids=["all", "same", "opens", "ends"])
def test_a_state_that_is_not_reset_is_seen(kept: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    rows, total, documents = tokens_of((40, 50, 90, 20))
    leaves = inputs(total, rows=rows)
    expected = with_gradients(leaves, scan(leaves, documents, "reference"))
    monkeypatch.setattr(ssd_chunked, "_masks", masks_without(*kept))
    with pytest.raises(AssertionError, match=r"\w+: \d"):
        assert_same(with_gradients(leaves, scan(leaves, documents, "torch")), expected, 1e-3)


def test_a_convolution_that_is_not_reset_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, total, documents = tokens_of((4, 5, 9))
    leaves = inputs(total, rows=rows)
    expected = with_gradients(leaves, convolve(leaves, documents, "reference"))
    monkeypatch.setattr(ssd_convolution, "_masked", lambda x, *_: x)
    with pytest.raises(AssertionError, match=r"\w+: \d"):
        assert_same(with_gradients(leaves, convolve(leaves, documents, "torch")), expected, 1e-3)


def test_numbers_of_documents() -> None:
    assert document_ids(torch.tensor([0, 2, 2, 3]), 5).tolist() == [[0, 0, 2, 3, 3]]
    assert document_ids(torch.tensor([0, 0, 1], dtype=torch.int32), 1).tolist() == [[1]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"b": torch.zeros(1, 8, 3, STATES), "c": torch.zeros(1, 8, 3, STATES)}, "G a divisor of H"),
        ({"a": torch.zeros(3)}, r"a \[3\]"),
        ({"documents": torch.zeros(1, 9)}, r"documents \[1, 9\] for tokens \[1, 8\]"),
        ({"backend": "cuda"}, "scan backend: 'cuda' is none of auto, torch, mamba_ssm, reference"),
        (
            {"backend": "mamba_ssm"},
            "scan backend mamba_ssm: it has no kernel for cpu; choose 'torch' or 'auto'",
        ),
    ],
)
def test_what_cannot_be_scanned_is_refused(change: dict[str, Any], message: str) -> None:
    leaves = inputs(8)
    with pytest.raises(ValueError, match=message):
        state_space_scan(**{**{name: leaves[name] for name in ("x", "dt", "a", "b", "c")}, **change})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight": torch.zeros(5, TAPS)}, r"weight \[5, 4\] have to be"),
        ({"documents": torch.zeros(2, 8)}, r"documents \[2, 8\]"),
        ({"backend": "causal_conv1d"}, "backend causal_conv1d: 12 channels are no multiple of 8; choose"),
    ],
)
def test_what_cannot_be_convolved_is_refused(change: dict[str, Any], message: str) -> None:
    leaves = inputs(8)
    with pytest.raises(ValueError, match=message):
        causal_convolution(**{"x": leaves["x"].flatten(2), "weight": leaves["weight"], **change})


def test_the_automatic_choice_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    ssd._log_choice.cache_clear()
    leaves = inputs(8)
    with caplog.at_level(logging.INFO, "shoal.kernels.ssd"):
        scan(leaves, None, "auto")
        convolve(leaves, None, "auto")
    assert "scan backend auto: torch; mamba_ssm is out: it has no kernel for cpu" in caplog.text
    assert "convolution backend auto: torch; causal_conv1d is out" in caplog.text


@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Stand-ins for the two packages: their signatures and layouts, computed by the reference."""

    def chunk_scan(  # noqa: PLR0913
        x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, chunk_size: int, D: Any = None, z: Any = None,
        dt_bias: Any = None, initial_states: Any = None, seq_idx: Any = None, cu_seqlens: Any = None,
        dt_softplus: bool = False, dt_limit: Any = (0.0, float("inf")), return_final_states: bool = False,
    ) -> Tensor:  # fmt: skip
        assert seq_idx is None or seq_idx.dtype == torch.int32
        options = {"d": D, "dt_bias": dt_bias, "dt_softplus": dt_softplus, "dt_limit": dt_limit}
        return reference_scan(x, dt, A, B, C, documents=seq_idx, **options)

    def conv(
        x: Tensor, weight: Tensor, bias: Any = None, seq_idx: Any = None, activation: Any = None
    ) -> Tensor:
        assert x.stride(1) == 1 and seq_idx.dtype == torch.int32 and activation == "silu"
        y = ssd.reference_convolution(x.transpose(1, 2), weight, bias, seq_idx)
        return F.silu(y).transpose(1, 2)

    for name, function in {
        "mamba_ssm.ops.triton.ssd_combined.mamba_chunk_scan_combined": chunk_scan,
        "causal_conv1d.causal_conv1d_fn": conv,
    }.items():
        module, _, attribute = name.rpartition(".")
        stand_in = ModuleType(module)
        setattr(stand_in, attribute, function)
        monkeypatch.setitem(sys.modules, module, stand_in)
        for parent in ("mamba_ssm", "mamba_ssm.ops", "mamba_ssm.ops.triton"):
            if module.startswith(parent):
                monkeypatch.setitem(sys.modules, parent, ModuleType(parent))
    ssd_fused._function.cache_clear()
    yield
    ssd_fused._function.cache_clear()


def test_the_packages_are_given_what_they_take(packages: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ssd, "why_not_fused_scan", lambda x: None)
    monkeypatch.setattr(ssd, "why_not_fused_convolution", lambda x, weight: None)
    rows, total, documents = tokens_of((4, 0, 9))
    leaves = inputs(total, rows=rows, dtype=torch.float32)
    for operation, package in ((scan, "mamba_ssm"), (convolve, "causal_conv1d")):
        expected = with_gradients(leaves, operation(leaves, documents, "torch"))
        for backend in (package, "auto"):
            assert_same(with_gradients(leaves, operation(leaves, documents, backend)), expected, 1e-5)


def test_a_missing_package_is_named() -> None:
    ssd_fused._function.cache_clear()
    on_gpu = torch.empty(1, device="meta").to(torch.float32)
    reason = ssd_fused._function("shoal_has_no_such_package", "function")
    assert "shoal_has_no_such_package cannot be imported (ModuleNotFoundError" in reason
    assert ssd_fused.why_not_fused_scan(on_gpu) == "it has no kernel for meta"
    assert (
        ssd_fused.why_not_fused_convolution(on_gpu, torch.empty(8, 5))
        == "it has no kernel of width 5, only 2 to 4"
    )


def test_without_tokens_no_fused_kernel_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank of context parallelism may hold no token, and CUDA starts no empty grid."""

    def absent(*_: Any, **__: Any) -> Tensor:
        raise AssertionError("a fused kernel got nothing to do")

    for name in ("why_not_fused_convolution", "why_not_fused_scan"):
        monkeypatch.setattr(ssd, name, lambda *_: None)
    for name in ("fused_convolution", "fused_scan"):
        monkeypatch.setattr(ssd, name, absent)
    x = torch.zeros(1, 0, HEADS, WIDTH)
    kept = torch.zeros(1, 0, 2, STATES)
    y = state_space_scan(x, x[..., 0], -torch.ones(HEADS), kept, kept)
    assert y.shape == x.shape
    assert causal_convolution(x.flatten(2), torch.ones(HEADS * WIDTH, TAPS)).shape == (1, 0, HEADS * WIDTH)
    with pytest.raises(AssertionError, match="nothing to do"):
        causal_convolution(torch.zeros(1, 1, HEADS * WIDTH), torch.ones(HEADS * WIDTH, TAPS))
