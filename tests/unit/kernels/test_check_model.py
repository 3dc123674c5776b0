"""The attention of a model is checked as its layers would call it, whoever wrote the kernel."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from shoal.kernels.attention_hf import PACKED_ATTENTION, register_attention
from shoal.kernels.check import TOLERANCES, KernelError
from shoal.kernels.check_model import attention_cases, check_attention
from tests.unit.kernels.families import tiny_model

CPU = torch.device("cpu")
FAMILIES = (
    "llama",
    "qwen3",
    "gemma2",
    "gemma3_text",
    "gpt_oss",
    "deepseek_v3",
    "phi3",
    "gpt2",
    "granitemoehybrid",
)


@pytest.fixture(autouse=True, scope="module")
def _registered() -> None:
    register_attention()


def model_of(family: str, implementation: str) -> PreTrainedModel:
    with torch.device("meta"):
        model = tiny_model(family, torch.float32)
    model.set_attn_implementation(implementation)
    return model


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_attention_of_every_kind_passes(family: str, dtype: torch.dtype) -> None:
    reports = check_attention(model_of(family, PACKED_ATTENTION), CPU, dtype)
    kinds = 2 if family in ("gemma2", "gemma3_text", "gpt_oss", "phi3") else 1
    assert len(reports) == kinds
    for report in reports:
        assert {"out", "grad q", "grad k", "grad v"} <= report.errors.keys()
        assert report.factors == pytest.approx(dict.fromkeys(report.factors, 1.0), abs=0.02)
    assert ("grad sinks" in reports[-1].errors) == (family == "gpt_oss")


def test_what_is_checked_is_what_the_model_has() -> None:
    sizes = {family: attention_cases(model_of(family, PACKED_ATTENTION))[-1] for family in FAMILIES}
    assert (sizes["gemma2"].window, sizes["gemma2"].softcap) == (4, 50.0)
    assert sizes["gpt_oss"].sinks and sizes["gpt_oss"].window == 4
    latent = sizes["deepseek_v3"]
    assert (latent.head_dim, latent.value_dim) == (24, 16) and latent.num_heads == latent.num_kv_heads
    assert sizes["llama"].num_heads == 2 * sizes["llama"].num_kv_heads
    assert attention_cases(model_of("mamba", "eager")) == ()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_it_takes_less_than_a_second_for_a_large_model(dtype: torch.dtype) -> None:
    sizes = {"hidden_size": 8192, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128}
    with torch.device("meta"):
        model = tiny_model("llama", torch.float32, **sizes)
    model.set_attn_implementation(PACKED_ATTENTION)
    seconds = [cpu_seconds(lambda: check_attention(model, CPU, dtype)) for _ in range(3)]
    x = torch.randn(1024, 1024)
    yardstick = cpu_seconds(
        lambda: [x @ x for _ in range(5)]
    )  # a fifth of a second on a core that is not shared
    assert min(seconds) < 5 * yardstick


def cpu_seconds(work: Callable[[], object]) -> float:
    started = time.process_time()
    work()
    return time.process_time() - started


class Amplified(torch.autograd.Function):
    """The identity, whose gradient is `factor` times too large: a fused backward that is wrong on this device."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.factor, None


def plant(name: str, factor: float) -> None:
    """Registers transformers' sdpa with a faulty gradient of the keys as a kernel of that name."""
    sound = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def faulty(module: Any, q: Tensor, k: Tensor, v: Tensor, *arguments: Any, **others: Any) -> Any:
        return sound(module, q, Amplified.apply(k, factor), v, *arguments, **others)

    AttentionInterface.register(name, faulty)


@pytest.mark.parametrize("factor", [1.0, 8.0, 960.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_kernel_of_transformers_that_amplifies_is_caught(factor: float, dtype: torch.dtype) -> None:
    plant("planted", factor)
    model = model_of("llama", "sdpa")
    model.config._attn_implementation = "planted"
    if factor == 1.0:
        assert len(check_attention(model, CPU, dtype)) == 1
        return
    with pytest.raises(KernelError) as caught:
        check_attention(model, CPU, dtype)
    message = str(caught.value)
    assert "kernel attention planted is wrong on cpu" in message
    assert "grad k" in message and "grad v" not in message and "out:" not in message
    assert float(message.split("grad k: ")[1].split(", ")[1].split(" times")[0]) == pytest.approx(
        factor, rel=0.01
    )


def test_plain_attention_is_not_checked() -> None:
    assert check_attention(model_of("llama", "eager"), CPU, torch.float32) == ()


def test_attention_that_is_spread_over_ranks_is_checked_by_its_backend() -> None:
    model = model_of("gpt_oss", "eager")
    model.config._attn_implementation = "known to nobody here"
    assert check_attention(model, CPU, torch.float32) == ()
    reports = check_attention(model, CPU, torch.float32, "auto")
    assert [report.kernel for report in reports] == [
        "attention known to nobody here (sdpa; flash is out: it needs a CUDA device and the tensors are on cpu)"
    ] * 2 and "lse" in reports[0].errors
