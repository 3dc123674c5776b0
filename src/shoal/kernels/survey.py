"""Every kernel on this device against its reference, forward and gradients: what `shoal doctor --kernels` prints."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from shoal.kernels.check import AttentionCase, KernelError, KernelReport, check_kernel, kernel_names

Verdict = Literal["ok", "WRONG", "not here"]

ATTENTION_CASES: dict[str, AttentionCase] = {
    "grouped heads of 64": AttentionCase(),
    "heads of 128": AttentionCase(num_heads=4, num_kv_heads=1, head_dim=128),
    "heads of 256, window": AttentionCase(num_heads=4, num_kv_heads=2, head_dim=256, window=48),
    "window and sinks": AttentionCase(window=16, sinks=True),
    "soft-cap": AttentionCase(softcap=50.0),
    "latent, 192 and 128": AttentionCase(num_heads=2, num_kv_heads=2, head_dim=192, value_dim=128),
    "bidirectional": AttentionCase(causal=False),
}
"""What the models that Shoal packs ask of attention: Llama and Qwen, Gemma, GPT-OSS, DeepSeek-V3, speech encoders."""


@dataclass(frozen=True)
class Finding:
    """One kernel on one kind of input.

    Attributes:
        kernel: As in `shoal.kernels.check.kernel_names`.
        case: The kind of attention; empty for kernels that have one kind.
        dtype: What it computed in.
        verdict: "ok", "WRONG", or "not here" when the kernel cannot do this on this device.
        report: The measured errors; None when the kernel did not run or is wrong.
        reason: Why it is not here, or what is wrong.
    """

    kernel: str
    case: str
    dtype: str
    verdict: Verdict
    report: KernelReport | None = None
    reason: str = ""


def survey(device: torch.device, dtypes: Sequence[torch.dtype] | None = None) -> Iterator[Finding]:
    """Compares every kernel with its reference, one after the other.

    Args:
        device: Where to run.
        dtypes: What to compute in; float32 and bfloat16 when not given, on an accelerator float16 as well.
    """
    if dtypes is None:
        half = [torch.bfloat16] if device.type == "cpu" else [torch.bfloat16, torch.float16]
        dtypes = [torch.float32, *half]
    for name in kernel_names():
        cases = ATTENTION_CASES if name.startswith("attention.") else {"": None}
        for label, case in cases.items():
            for dtype in dtypes:
                yield _checked(name, label, case, device, dtype)


def _checked(
    name: str, label: str, case: AttentionCase | None, device: torch.device, dtype: torch.dtype
) -> Finding:
    kind = str(dtype).removeprefix("torch.")
    try:
        report = check_kernel(name, device, dtype=dtype, case=case)
    except KernelError as error:
        return Finding(name, label, kind, "WRONG", reason=str(error))
    except (ValueError, ImportError) as error:
        return Finding(name, label, kind, "not here", reason=str(error))
    except RuntimeError as error:  # of torch: the kernel is there and fails
        return Finding(name, label, kind, "WRONG", reason=f"{type(error).__name__}: {error}")
    return Finding(name, label, kind, "ok", report)


def table(findings: Sequence[Finding]) -> str:
    """Formats findings as aligned lines; what a kernel cannot do here is one line for each reason."""
    header = ("kernel", "case", "dtype", "", "forward", "gradients", "factor")
    absent = Counter((f.kernel, f.reason) for f in findings if f.verdict == "not here")
    shown: dict[tuple[str, ...], None] = {header: None}
    for finding in findings:
        if count := absent.get((finding.kernel, finding.reason)):
            shown[(finding.kernel, f"{count} of them", "", finding.verdict, "", "", "")] = None
        else:
            shown[_row(finding)] = None
    widths = [max(len(row[column]) for row in shown) for column in range(len(header))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in shown]
    reasons = dict.fromkeys((f.kernel, f.reason) for f in findings if f.reason)
    notes = [f"{kernel}: {reason}" for kernel, reason in reasons]
    return "\n".join([*(line.rstrip() for line in lines), *([""] if notes else []), *notes])


def _row(finding: Finding) -> tuple[str, ...]:
    """Largest relative errors of outputs and of gradients, and the factor that is farthest from 1."""
    cells = (finding.kernel, finding.case, finding.dtype, finding.verdict)
    if finding.report is None:
        return (*cells, "", "", "")
    errors = finding.report.errors
    forward = max(error for key, error in errors.items() if not key.startswith("grad "))
    gradients = max(error for key, error in errors.items() if key.startswith("grad "))
    factor = max(finding.report.factors.values(), key=lambda value: abs(value - 1.0))
    return (*cells, f"{forward:.1e}", f"{gradients:.1e}", f"{factor:.4f}")
