"""The check passes sound kernels and names the factor by which a faulty backward is off."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from shoal.kernels import attention_sdpa, loss, ssd_chunked
from shoal.kernels.check import TOLERANCES, AttentionCase, KernelError, check_kernel, kernel_names

CASES = {
    "default": AttentionCase(),
    "window and sinks": AttentionCase(window=16, sinks=True),
    "soft-cap": AttentionCase(softcap=20.0),
    "latent": AttentionCase(num_kv_heads=8, head_dim=24, value_dim=16),
    "bidirectional": AttentionCase(causal=False),
}


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_sound_attention_passes(case: AttentionCase, dtype: torch.dtype) -> None:
    report = check_kernel("attention.sdpa", "cpu", dtype=dtype, case=case)
    gradients = {"grad q", "grad k", "grad v"} | ({"grad sinks"} if case.sinks else set())
    assert report.errors.keys() == {"out", "lse"} | gradients
    assert report.factors == pytest.approx(dict.fromkeys(gradients, 1.0), abs=0.01)
    assert max(report.errors.values()) <= report.tolerance == TOLERANCES[dtype]


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_sound_loss_passes(dtype: torch.dtype) -> None:
    report = check_kernel("loss", "cpu", dtype=dtype)
    assert report.errors.keys() == {"loss", "grad hidden", "grad weight"}


@pytest.mark.parametrize("factor", [8.0, 960.0, 1.05, math.nan])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_backward_that_amplifies_is_caught(
    factor: float, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    sound = attention_sdpa._fused_backward

    def faulty(*arguments: Any, **keywords: Any) -> tuple[Tensor, ...]:
        grad_q, grad_k, grad_v = sound(*arguments, **keywords)
        return grad_q, factor * grad_k, grad_v

    monkeypatch.setattr(attention_sdpa, "_fused_backward", faulty)
    with pytest.raises(KernelError) as caught:
        check_kernel("attention.sdpa", "cpu", dtype=dtype)
    message = str(caught.value)
    assert "attention.sdpa is wrong on cpu" in message
    assert "grad k" in message and "grad q" not in message and "grad v" not in message
    named = float(message.split("grad k: ")[1].split(", ")[1].split(" times")[0])
    assert named == pytest.approx(factor, rel=0.01, nan_ok=True)


def test_a_wrong_forward_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    sound = attention_sdpa._fused

    def faulty(*arguments: Any, **keywords: Any) -> tuple[Tensor, Tensor]:
        out, lse = sound(*arguments, **keywords)
        return out, lse + 0.01

    monkeypatch.setattr(attention_sdpa, "_fused", faulty)
    with pytest.raises(KernelError, match="lse: relative error"):
        check_kernel("attention.sdpa", "cpu")


def test_a_faulty_loss_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    sound = loss._losses_and_gradient

    def faulty(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
        losses, correct, gradient = sound(*arguments)
        return losses, correct, 2.0 * gradient

    monkeypatch.setattr(loss, "_losses_and_gradient", faulty)
    with pytest.raises(KernelError, match=r"grad hidden: relative error 1, 2 times as large"):
        check_kernel("loss", "cpu")


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("name", ["convolution.torch", "scan.torch"])
def test_the_sound_kernels_of_mamba_pass(name: str, dtype: torch.dtype) -> None:
    report = check_kernel(name, "cpu", dtype=dtype)
    inputs = (
        ("x", "weight", "bias") if name.startswith("conv") else ("x", "dt", "a", "b", "c", "d", "dt_bias")
    )
    assert report.errors.keys() == {"y", *(f"grad {key}" for key in inputs)}


def test_a_faulty_scan_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    sound = ssd_chunked.ChunkedScan.backward

    def faulty(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grad_x, *others = sound(ctx, grad)
        return 8.0 * grad_x, *others

    monkeypatch.setattr(ssd_chunked.ChunkedScan, "backward", staticmethod(faulty))
    with pytest.raises(KernelError, match=r"scan\.torch is wrong.*\n.*grad x: relative error"):
        check_kernel("scan.torch", "cpu")


def test_names() -> None:
    assert kernel_names() == (
        "loss",
        "attention.sdpa",
        "attention.flash",
        "attention.te",
        "convolution.torch",
        "convolution.causal_conv1d",
        "scan.torch",
        "scan.mamba_ssm",
    )
    with pytest.raises(ValueError, match=r"'attention\.reference' is none of loss, attention\.sdpa"):
        check_kernel("attention.reference", "cpu")
    with pytest.raises(ValueError, match="backend flash: it needs a CUDA device"):
        check_kernel("attention.flash", "cpu", dtype=torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["attention.flash", "attention.sdpa"])
@pytest.mark.parametrize("case", [CASES["default"], CASES["window and sinks"], CASES["latent"]])
def test_on_a_gpu(name: str, case: AttentionCase) -> None:
    check_kernel(name, "cuda", dtype=torch.bfloat16, case=case)
