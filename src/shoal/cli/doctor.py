"""``shoal doctor --kernels``: compares every kernel with its reference on this machine's device."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

_DTYPES = ("float32", "float64", "bfloat16", "float16")
_OPTIONAL = ("flash-attn", "transformer-engine", "causal-conv1d", "mamba-ssm")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="shoal doctor",
        description="Look for faults of this machine that training would suffer from silently. Exit status: 0 when "
        "every kernel that runs here agrees with its reference, 1 when one does not.",
    )
    parser.add_argument(
        "--kernels",
        action="store_true",
        required=True,
        help="compare outputs and gradients of every kernel with a plain computation in float64",
    )
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N (default: auto)")
    parser.add_argument("--dtype", choices=_DTYPES, action="append", help="only this dtype (may be repeated)")
    return parser


def run(words: Sequence[str]) -> int:
    """Runs the command; returns its exit status."""
    given = _parser().parse_args(list(words))

    import torch

    from shoal.kernels.survey import survey, table

    name = given.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"--device {name!r}: {error}; repair: --device cpu") from None
    print(_machine(torch, device), flush=True)
    dtypes = None if given.dtype is None else [getattr(torch, dtype) for dtype in given.dtype]
    findings = list(survey(device, dtypes))
    print(table(findings))
    wrong = [finding for finding in findings if finding.verdict == "WRONG"]
    if wrong:
        names = ", ".join(dict.fromkeys(finding.kernel for finding in wrong))
        print(f"shoal doctor: {names} must not be trained with on this device", file=sys.stderr)
    return 1 if wrong else 0


def _machine(torch: Any, device: Any) -> str:
    model = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{device.type}"
    rows = {"device": model, "torch": torch.__version__, "transformers": version("transformers")}
    rows |= {package: _version(package) for package in _OPTIONAL}
    width = max(map(len, rows))
    return "\n".join([*(f"{key:<{width}}  {value}" for key, value in rows.items()), ""])


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
