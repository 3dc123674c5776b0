"""What the chunked cross-entropy costs against full logits: peak memory and CPU seconds, one thread, same inputs.

Each way runs forward and backward in processes of its own, in turn: `full` multiplies all hidden states by the
head and calls torch's cross-entropy on float32 logits, `chunked` is `shoal.kernels.loss.token_losses`, `torch` is
torch's own `linear_cross_entropy` with chunking, which has no soft-cap, no scale, no z-loss and counts no hits.
Losses and gradients of all are compared, so that they are known to do the same work.

    memory ratio = M(chunked) / M(full),  M = median over repetitions of the growth of the peak of the process's
                   resident memory over forward and backward: gradients are included, inputs are not
    time ratio   = S(chunked) / S(full),  S = median over repetitions of the user plus system seconds of forward
                   and backward, after one on a few tokens

The peak is the kernel's high-water mark (VmHWM), reset just before. Linux only.

    python benchmarks/loss.py [--repetitions 3] [--check] [--results FOLDER] [--scale 1.0] [--only NAME]
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.provenance import provenance  # noqa: E402 (needs the path above)

RESULTS = Path(__file__).parent / "results"
KINDS = ("full", "chunked", "torch")
MEMORY_LIMIT = 0.5
TOLERANCE = {"float32": 1e-4, "bfloat16": 2e-2}
CASES: dict[str, dict[str, Any]] = {
    "SmolLM2-135M head, float32": {"tokens": 2048, "hidden": 576, "vocab": 49152, "dtype": "float32"},
    "vocabulary of Llama 3, float32": {"tokens": 512, "hidden": 512, "vocab": 128256, "dtype": "float32"},
    "vocabulary and soft-cap of Gemma 2": {
        "tokens": 512,
        "hidden": 256,
        "vocab": 256000,
        "dtype": "float32",
        "softcap": 30.0,
    },
    "one label in four, float32": {
        "tokens": 2048,
        "hidden": 576,
        "vocab": 49152,
        "dtype": "float32",
        "ignored": 0.75,
    },
    "SmolLM2-135M head, bfloat16": {"tokens": 1024, "hidden": 576, "vocab": 49152, "dtype": "bfloat16"},
}


def loss_of(kind: str, softcap: float | None) -> Callable[[Any, Any, Any], Any]:
    """Returns a function of hidden states, weight and labels that gives the summed loss."""
    import torch.nn.functional as F
    from torch.nn import LinearCrossEntropyOptions

    from shoal.kernels.loss import reference_token_losses, token_losses

    if kind == "torch":
        options = LinearCrossEntropyOptions()
        return lambda h, w, y: F.linear_cross_entropy(
            h, w, y, reduction="sum", ignore_index=-100, options=options
        )
    loss = token_losses if kind == "chunked" else reference_token_losses
    return lambda h, w, y: loss(h, w, y, softcap=softcap)[0]


def run(kind: str, case: dict[str, Any]) -> dict[str, Any]:
    """One repetition in this process."""
    import torch

    generator = torch.Generator().manual_seed(0)
    dtype = getattr(torch, case["dtype"])
    tokens, hidden, vocab = (int(case[name]) for name in ("tokens", "hidden", "vocab"))
    states = torch.randn(tokens, hidden, generator=generator).to(dtype).requires_grad_()
    weight = (torch.randn(vocab, hidden, generator=generator) / hidden**0.5).to(dtype).requires_grad_()
    labels = torch.randint(0, vocab, (tokens,), generator=generator)
    labels[: int(case.get("ignored", 0.0) * tokens)] = -100
    loss = loss_of(kind, case.get("softcap"))
    loss(states[-4:], weight[:64], labels[-4:] % 64).backward()
    states.grad = weight.grad = None

    before, started = status("VmRSS"), cpu_seconds()
    Path("/proc/self/clear_refs").write_text("5")
    total = loss(states, weight, labels)
    total.backward()
    seconds, peak = cpu_seconds() - started, status("VmHWM")
    assert states.grad is not None and weight.grad is not None
    return {
        "bytes": peak - before,
        "seconds": seconds,
        "loss": float(total.detach()),
        "gradient_norms": [float(g.double().norm()) for g in (states.grad, weight.grad)],
        "gradient_samples": [
            g.flatten()[:: g.numel() // 97].double().tolist() for g in (states.grad, weight.grad)
        ],
    }


def cpu_seconds() -> float:
    """User plus system seconds of this process so far."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def status(key: str) -> int:
    """Bytes that the kernel reports for this process under a key of /proc/self/status."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key):
            return int(line.split()[1]) * 1024
    raise SystemExit(f"/proc/self/status has no {key}: this benchmark needs Linux")


def launch(kind: str, case: dict[str, Any]) -> dict[str, Any]:
    """One repetition in a fresh process."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, "--worker", kind, "--case", json.dumps(case)]
    done = subprocess.run(command, check=True, env=environment, stdout=subprocess.PIPE, text=True)
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def difference(report: dict[str, Any], reference: dict[str, Any]) -> float:
    """Largest relative difference of loss, gradient norms and gradient entries."""
    worst = abs(report["loss"] - reference["loss"]) / abs(reference["loss"])
    for ours, expected in zip(report["gradient_norms"], reference["gradient_norms"], strict=True):
        worst = max(worst, abs(ours - expected) / expected)
    for ours, expected in zip(report["gradient_samples"], reference["gradient_samples"], strict=True):
        largest = max(abs(value) for value in expected)
        worst = max(worst, *(abs(a - b) / largest for a, b in zip(ours, expected, strict=True)))
    return float(worst)


def refuse_different_work(differences: dict[str, float], dtype: str) -> None:
    """Stops when losses or gradients differ; torch's way is only reported in bfloat16, where it rounds sums."""
    checked = [value for kind, value in differences.items() if kind == "chunked" or dtype == "float32"]
    if max(checked) > TOLERANCE[dtype]:
        raise SystemExit(f"{differences}: these do not compute the same")


def measure(case: dict[str, Any], repetitions: int) -> dict[str, Any]:
    kinds = [kind for kind in KINDS if kind != "torch" or "softcap" not in case]
    reports: dict[str, list[dict[str, Any]]] = {kind: [] for kind in kinds}
    for repetition in range(repetitions):
        for kind in kinds if repetition % 2 == 0 else reversed(kinds):
            reports[kind].append(launch(kind, case))
    differences = {kind: difference(reports[kind][0], reports["full"][0]) for kind in kinds[1:]}
    refuse_different_work(differences, case["dtype"])
    medians = {
        key: {kind: statistics.median(r[key] for r in done) for kind, done in reports.items()}
        for key in ("bytes", "seconds")
    }
    return {
        "memory_ratio": medians["bytes"]["chunked"] / medians["bytes"]["full"],
        "time_ratio": medians["seconds"]["chunked"] / medians["seconds"]["full"],
        "peak_megabytes": {kind: round(value / 1e6, 1) for kind, value in medians["bytes"].items()},
        "cpu_seconds": medians["seconds"],
        "largest_difference": differences,
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--check", action="store_true", help="exit with 1 when the memory limit is exceeded")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of loss.json")
    parser.add_argument("--scale", type=float, default=1.0, help="share of the tokens and of the vocabulary")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    for hidden in ("--worker", "--case"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker is not None:
        print(json.dumps(run(options.worker, json.loads(options.case))))
        return 0

    measured = {}
    for name, case in CASES.items():
        if options.only not in name:
            continue
        sizes = {key: int(case[key] * options.scale) for key in ("tokens", "vocab")}
        measured[name] = {"case": {**case, **sizes}, **measure({**case, **sizes}, options.repetitions)}
        peaks = measured[name]["peak_megabytes"]
        print(
            f"{name:<35} {peaks['chunked']:6.0f} MB against {peaks['full']:6.0f} MB of full logits: "
            f"{measured[name]['memory_ratio']:.3f} of the memory (limit {MEMORY_LIMIT}), "
            f"{measured[name]['time_ratio']:.3f} of the CPU seconds"
        )
    result = {
        **provenance(__doc__ or ""),
        "repetitions": options.repetitions,
        "memory_limit": MEMORY_LIMIT,
        "cases": measured,
    }
    options.results.mkdir(exist_ok=True)
    (options.results / "loss.json").write_text(json.dumps(result, indent=2) + "\n")
    missed = any(case["memory_ratio"] > MEMORY_LIMIT for case in measured.values())
    return int(missed and options.check)


if __name__ == "__main__":
    sys.exit(main())
