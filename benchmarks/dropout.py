"""What dropout by hashing costs beside torch's, on activations of one layer: CPU seconds and bytes kept for backward.

Both run forward and backward in one process of one thread, in turns; shares kept and expectations are compared, so
that both are known to do the same work.

    time ratio = S(counter) / S(torch),  S = median over rounds of the user plus system seconds of forward and
                 backward; the forward ratio is that of the forward alone
    bytes      = size of the tensors that autograd keeps between forward and backward, per element

    python benchmarks/dropout.py [--rounds 30] [--check] [--results FOLDER]
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.loss import cpu_seconds  # noqa: E402 (needs the path above)
from benchmarks.provenance import provenance  # noqa: E402
from shoal.kernels.dropout import counter_dropout, token_keys  # noqa: E402

RESULTS = Path(__file__).parent / "results"
SHAPE = (4, 512, 1024)
P = 0.1
TIME_LIMIT = 3.0
DTYPES = ("float32", "bfloat16", "float64")
Way = Callable[[Tensor], Tensor]


def ways() -> dict[str, Way]:
    """The two computations of the same thing."""
    tokens = token_keys(torch.arange(SHAPE[0])[:, None], torch.arange(SHAPE[1]))
    key = torch.tensor(0x0123_4567_89AB_CDEF)
    return {
        "torch": lambda x: F.dropout(x, P, training=True),
        "counter": lambda x: counter_dropout(x, P, key, tokens),
    }


def seconds(way: Way, x: Tensor, gradient: Tensor) -> tuple[float, float]:
    """CPU seconds of one forward, and of it and its backward."""
    start = cpu_seconds()
    out = way(x)
    middle = cpu_seconds()
    out.backward(gradient)
    x.grad = None
    return middle - start, cpu_seconds() - start


def bytes_kept(way: Way, x: Tensor) -> float:
    """Bytes per element that autograd keeps."""
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = way(x)
    del out
    return sum(kept.values()) / x.numel()


def same_work(way: Way, name: str) -> None:
    """Stops when a way does not keep 1 - P of the elements or does not keep the expectation."""
    out = way(torch.ones(SHAPE, dtype=torch.float64))
    deviation = 5 * math.sqrt(P / (1 - P) / out.numel())
    if abs(float(out.mean()) - 1.0) > deviation:
        raise SystemExit(f"{name}: a mean of {float(out.mean())} is not 1 within {deviation}")


def measure(dtype: str, rounds: int) -> dict[str, Any]:
    """One row of the table."""
    x = torch.randn(SHAPE).to(getattr(torch, dtype)).requires_grad_()
    gradient = torch.ones_like(x)
    both = ways()
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in both}
    for _ in range(rounds + 2):
        for name, way in both.items():
            taken[name].append(seconds(way, x, gradient))
    medians = {
        name: [statistics.median(column) for column in zip(*rows[2:], strict=True)]
        for name, rows in taken.items()
    }
    forward, whole = (medians["counter"][part] / medians["torch"][part] for part in (0, 1))
    return {
        "seconds": {name: values[1] for name, values in medians.items()},
        "forward_ratio": forward,
        "time_ratio": whole,
        "bytes_per_element": {name: bytes_kept(way, x) for name, way in both.items()},
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--check", action="store_true", help="exit with 1 above the limit")
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for name, way in ways().items():
        same_work(way, name)
    cases = {dtype: measure(dtype, arguments.rounds) for dtype in DTYPES}
    for dtype, case in cases.items():
        print(
            f"{dtype:<9} forward {case['forward_ratio']:.2f}, with backward {case['time_ratio']:.2f}, ",
            end="",
        )
        print(", ".join(f"{name} keeps {size:g} B" for name, size in case["bytes_per_element"].items()))
    result = {**provenance(__doc__ or ""), "shape": SHAPE, "p": P, "time_limit": TIME_LIMIT, "cases": cases}
    arguments.results.mkdir(parents=True, exist_ok=True)
    (arguments.results / "dropout.json").write_text(json.dumps(result, indent=2) + "\n")
    exceeded = any(case["time_ratio"] > TIME_LIMIT for case in cases.values())
    return int(arguments.check and exceeded)


if __name__ == "__main__":
    sys.exit(main())
