"""Compares a kernel with its reference on this device, forward and gradients, before anything is trained with it.

Fused attention kernels have been seen whose forward is right and whose backward returns gradients many times too
large on some devices and head shapes; a loss curve shows that only much later.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.kernels.attention import BACKENDS, varlen_attention
from shoal.kernels.check_ssd import CONVOLUTIONS, SCANS, Run, convolution_problem, scan_problem
from shoal.kernels.loss import reference_token_losses, token_losses

TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 4e-2, torch.float16: 1e-2}
"""Largest accepted error, relative to the largest entry of the reference."""


class KernelError(RuntimeError):
    """A kernel does not agree with its reference on this device."""


@dataclass(frozen=True)
class AttentionCase:
    """The attention of a model, as far as it decides which kernel runs.

    Attributes:
        num_heads: Query heads.
        num_kv_heads: Key heads, a divisor of `num_heads`.
        head_dim: Width of queries and keys.
        value_dim: Width of values, `head_dim` when not given.
        causal: Whether a query sees only keys up to its position.
        window: Sliding window.
        softcap: Bound of the scores.
        sinks: Whether there is one sink per head.
        lens: Lengths of the packed documents.
    """

    num_heads: int = 8
    num_kv_heads: int = 2
    head_dim: int = 64
    value_dim: int | None = None
    causal: bool = True
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    lens: tuple[int, ...] = (70, 0, 1, 129, 33)


@dataclass(frozen=True)
class KernelReport:
    """What a comparison found.

    Attributes:
        errors: Error of every output and of every gradient ("grad q"), relative to the reference's largest entry.
        factors: By how much every gradient is too large: norm of the kernel's over norm of the reference's.
        tolerance: The largest error that is accepted.
    """

    kernel: str
    device: str
    dtype: str
    errors: Mapping[str, float]
    factors: Mapping[str, float]
    tolerance: float


def kernel_names() -> tuple[str, ...]:
    """Returns what `check_kernel` can check: "loss", and "KERNEL.BACKEND" for every backend with a reference."""
    return (
        "loss",
        *(f"attention.{name}" for name in BACKENDS if name != "reference"),
        *(f"convolution.{name}" for name in CONVOLUTIONS),
        *(f"scan.{name}" for name in SCANS),
    )


def check_kernel(
    name: str,
    device: torch.device | str,
    *,
    dtype: torch.dtype = torch.float32,
    case: AttentionCase | None = None,
) -> KernelReport:
    """Runs a kernel and its reference on the same small, ragged input and compares outputs and gradients.

    The reference computes in float64 from the same rounded inputs. Takes a fraction of a second.

    Args:
        name: One of `kernel_names()`.
        device: Where to run.
        dtype: What the kernel will be trained in.
        case: The attention to check, 8 heads of width 64 over 2 key heads when not given.

    Raises:
        KernelError: An output or a gradient is off; the message says by which factor.
        ValueError: The kernel is not known, or cannot run this case on this device.
    """
    if name not in kernel_names():
        raise ValueError(f"kernel: {name!r} is none of {', '.join(kernel_names())}")
    kind, _, backend = name.partition(".")
    device = torch.device(device)
    if kind == "loss":
        inputs, kernel, reference = _loss_problem(device, dtype)
    elif kind == "attention":
        inputs, kernel, reference = attention_problem(backend, device, dtype, case or AttentionCase())
    else:
        problem = convolution_problem if kind == "convolution" else scan_problem
        shapes, kernel, reference = problem(device, backend)
        like = torch.empty(0, device=device, dtype=dtype)
        inputs = {key: _noise(shape, index, like) for index, (key, shape) in enumerate(shapes.items())}
    return compare(name, kernel, reference, inputs, TOLERANCES[dtype])


def compare(
    name: str, kernel: Run, reference: Run, inputs: Mapping[str, Tensor], tolerance: float
) -> KernelReport:
    """Compares two computations of the same outputs; see `check_kernel`.

    Args:
        name: For the report.
        kernel: Computes outputs from `inputs`.
        reference: Computes the same outputs from `inputs` in float64.
        inputs: Floating-point leaves, all of one dtype on one device.
        tolerance: Largest accepted error, relative to the largest entry of the reference.

    Raises:
        KernelError: They do not agree.
    """
    ours = _outputs_and_gradients(kernel, inputs)
    exact = _outputs_and_gradients(reference, {key: value.double() for key, value in inputs.items()})
    errors, factors = {}, {}
    for key, expected in exact.items():
        difference = (ours[key].double() - expected).abs().max()
        errors[key] = float(difference / expected.abs().max())
        if key.startswith("grad "):
            factors[key] = float(ours[key].double().norm() / expected.norm())
    sample = next(iter(inputs.values()))
    kind = str(sample.dtype).removeprefix("torch.")
    report = KernelReport(name, str(sample.device), kind, errors, factors, tolerance)
    # NaN compares false with everything: what is not within the tolerance is off.
    if wrong := [key for key, error in errors.items() if not error <= tolerance]:
        raise KernelError(_complaint(report, wrong))
    return report


def _complaint(report: KernelReport, wrong: list[str]) -> str:
    lines = [
        f"kernel {report.kernel} is wrong on {report.device} in {report.dtype} (relative error at most "
        f"{report.tolerance:g} is accepted):"
    ]
    for key in wrong:
        factor = (
            f", {report.factors[key]:.4g} times as large as it has to be" if key in report.factors else ""
        )
        lines.append(f"  {key}: relative error {report.errors[key]:.2g}{factor}")
    lines.append(f"{_repair(report.kernel)}, and report the device, driver and torch version")
    return "\n".join(lines)


def _repair(kernel: str) -> str:
    if "sdpa" in kernel:
        return "train without packing and with attn: eager"
    if kernel.endswith((".te", "(te)")):
        return (
            "choose attn: sdpa (NVTE_FUSED_ATTN=0 turns this kernel off wherever Transformer Engine is used)"
        )
    return "choose another backend, for attention attn: sdpa"


def _outputs_and_gradients(run: Run, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    leaves = {key: value.detach().clone().requires_grad_() for key, value in inputs.items()}
    outputs = run(leaves)
    trained = [value for value in outputs.values() if value.requires_grad]
    # Upstream gradients that differ from entry to entry: a constant one hides errors that sum to nothing.
    upstream = [_noise(value.shape, 1 + index, value) for index, value in enumerate(trained)]
    gradients = torch.autograd.grad(trained, list(leaves.values()), upstream)
    named = {f"grad {key}": gradient for key, gradient in zip(leaves, gradients, strict=True)}
    return {**{key: value.detach() for key, value in outputs.items()}, **named}


def _noise(shape: torch.Size | tuple[int, ...], seed: int, like: Tensor) -> Tensor:
    """Returns the same normal numbers on every device, rounded to bfloat16 so that every dtype holds them."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).bfloat16().to(like.device, like.dtype)


def attention_problem(
    backend: str, device: torch.device, dtype: torch.dtype, case: AttentionCase
) -> tuple[dict[str, Tensor], Run, Run]:
    """Returns the inputs of a comparison, the attention of a backend over them, and the reference's.

    Inputs are q [T, Hq, D], k [T, Hkv, D], v [T, Hkv, Dv] and, if any, sinks [Hq]; outputs are out [T, Hq, Dv] and
    lse [T, Hq].
    """
    like = torch.empty(0, device=device, dtype=dtype)
    total, value_dim = sum(case.lens), case.value_dim or case.head_dim
    shapes = {
        "q": (total, case.num_heads, case.head_dim),
        "k": (total, case.num_kv_heads, case.head_dim),
        "v": (total, case.num_kv_heads, value_dim),
    }
    if case.sinks:
        shapes["sinks"] = (case.num_heads,)  # type: ignore[assignment]
    inputs = {key: _noise(shape, index, like) for index, (key, shape) in enumerate(shapes.items())}
    cu_seqlens = torch.tensor([0, *case.lens], device=device).cumsum(0).int()

    def run(backend: str) -> Run:
        def attend(leaves: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
            out, lse = varlen_attention(
                leaves["q"],
                leaves["k"],
                leaves["v"],
                cu_seqlens,
                cu_seqlens,
                causal=case.causal,
                window=case.window,
                softcap=case.softcap,
                sinks=leaves.get("sinks"),
                backend=backend,  # type: ignore[arg-type]
            )
            # Without sinks no model differentiates the log-sum-exp, and kernels have another path for it.
            return {"out": out, "lse": lse.detach()}

        return attend

    return inputs, run(backend), run("reference")


def _loss_problem(device: torch.device, dtype: torch.dtype) -> tuple[dict[str, Tensor], Run, Run]:
    like = torch.empty(0, device=device, dtype=dtype)
    inputs = {"hidden": _noise((37, 32), 0, like), "weight": _noise((101, 32), 1, like) / 8}
    labels = torch.arange(37, device=device) * 7 % 101
    labels[::3] = -100

    def chunked(leaves: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return {"loss": token_losses(leaves["hidden"], leaves["weight"], labels, chunk_size=8)[0]}

    def plain(leaves: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return {"loss": reference_token_losses(leaves["hidden"], leaves["weight"], labels)[0]}

    return inputs, chunked, plain
