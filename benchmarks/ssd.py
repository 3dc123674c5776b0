"""What a Mamba-2 layer costs with our convolution and scan, against the same layer with transformers' own in torch.

Forward and backward of one mixer, projections and gated norm included, on one row of T tokens, in float32 and one
thread; each way in processes of its own, forked in turn from one that has imported everything. Outputs and gradients
of both are compared, so that they are known to do the same work. The convolution and scan alone, which is what Shoal
replaces, are measured too, and so are the two projections alone, which both ways share: however fast a scan is, a layer
cannot be faster than they are. Small layers are far from that bound, wide ones and those of many groups close to it.

    bound        = S(layer of transformers) / S(projections of Shoal's layer), of the time ratio of a layer

    time ratio   = S(transformers) / S(shoal),  S = median over repetitions of the user plus system seconds of forward
                   and backward, after one of each on 64 tokens
    memory       = M, the growth of the peak of the process's resident memory over forward and backward: gradients are
                   included, inputs and weights are not; in a process of its own, whose allocator gives freed memory
                   back at once, so that the peak is one of use
    linear fit   = M over T, least squares; R2 is its coefficient of determination, and excess = the largest
                   |M(T) - fit(T)| / M(T)

The peak is the kernel's high-water mark (VmHWM), reset just before. Linux only.

    python benchmarks/ssd.py [--repetitions 3] [--check] [--results FOLDER] [--tokens 512,1024] [--only NAME]
"""

from __future__ import annotations

import argparse
import ctypes
import json
import multiprocessing
import resource
import statistics
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.provenance import provenance  # noqa: E402 (needs the path above)

M_MMAP_THRESHOLD = -3
"""glibc's name of the size from which memory is mapped, and unmapped when freed."""
RESULTS = Path(__file__).parent / "results"
KINDS = ("transformers", "shoal")
PARTS = ("layer", "projections", "convolution and scan")
TOKENS = (512, 1024, 2048, 4096)
SPEED_PART, SPEED_TOKENS, SPEED_LIMIT = "convolution and scan", 2048, 2.0
FIT_LIMIT = 0.1
TOLERANCE = 1e-4
CASES: dict[str, dict[str, Any]] = {
    "Mamba-2 130M": {"hidden_size": 768, "num_heads": 24, "head_dim": 64, "n_groups": 1, "chunk_size": 256},
    "8 groups, chunks of 128": {
        "hidden_size": 512,
        "num_heads": 16,
        "head_dim": 64,
        "n_groups": 8,
        "chunk_size": 128,
    },
}
"""The state has 128 numbers for each channel of a head, and the convolution 4 taps, as in all published models."""


def build(case: dict[str, Any], kind: str) -> Any:
    """The mixer, with repeatable weights."""
    import torch
    from transformers import Mamba2Config, Mamba2ForCausalLM

    from shoal.models.mamba import substitute_mamba

    torch.manual_seed(0)
    config = Mamba2Config(vocab_size=8, num_hidden_layers=1, state_size=128, expand=2, conv_kernel=4, **case)
    model = Mamba2ForCausalLM(config).train()
    if kind == "shoal":
        substitute_mamba(model)
    return model.backbone.layers[0].mixer


def run(kind: str, case: dict[str, Any], tokens: int, part: str, for_memory: bool) -> dict[str, Any]:
    """One repetition in this process."""
    import torch

    if for_memory:
        assert ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 16)
    mixer = build(case, kind)
    generator = torch.Generator().manual_seed(1)
    if part != "convolution and scan":
        function: Any = mixer if part == "layer" else projections_of(mixer)
        given = [torch.randn(1, tokens, case["hidden_size"], generator=generator).requires_grad_()]
    else:
        function = mixing_of(mixer, kind)
        given = [
            torch.randn(1, tokens, width, generator=generator).requires_grad_()
            for width in (mixer.conv_dim, mixer.num_heads)
        ]
    _train(function, [tensor[:, :64].detach() for tensor in given])
    mixer.zero_grad()
    before, started = _status("VmRSS"), _cpu_seconds()
    Path("/proc/self/clear_refs").write_text("5")
    y = _train(function, given)
    seconds, peak = _cpu_seconds() - started, _status("VmHWM")
    gradients = {name: p.grad for name, p in mixer.named_parameters() if p.grad is not None}
    gradients |= {f"input {index}": tensor.grad for index, tensor in enumerate(given)}
    return {
        "bytes": peak - before,
        "seconds": seconds,
        "output": y.flatten()[:: y.numel() // 97].double().tolist(),
        "gradients": {
            name: g.flatten()[:: max(1, g.numel() // 97)].double().tolist() for name, g in gradients.items()
        },
    }


def _train(function: Any, given: list[Any]) -> Any:
    y = function(*given)
    y.square().sum().backward()
    return y.detach()


def projections_of(mixer: Any) -> Any:
    """The two projections of a mixer alone: what a layer would take if all between them were free."""
    return lambda hidden: mixer.out_proj(mixer.in_proj(hidden)[..., : mixer.intermediate_size])


def mixing_of(mixer: Any, kind: str) -> Any:
    """The convolution and scan of a mixer alone, as a function of what goes into them."""
    import torch

    if kind == "shoal":
        from shoal.models.mamba import mixed_tokens

        return lambda xbc, dt: mixed_tokens(mixer, xbc, dt, None, None)
    from transformers.models.mamba2.modeling_mamba2 import causal_conv1d_fn, mamba2_chunk_scan

    def transformers_mixing(xbc: Any, dt: Any) -> Any:
        xbc = causal_conv1d_fn(
            xbc.transpose(1, 2),
            mixer.conv1d.weight.squeeze(1),
            mixer.conv1d.bias,
            activation=mixer.activation,
        ).transpose(1, 2)
        states = mixer.n_groups * mixer.ssm_state_size
        x, b, c = torch.split(xbc, [mixer.intermediate_size, states, states], dim=-1)
        return mamba2_chunk_scan(
            x.view(1, -1, mixer.num_heads, mixer.head_dim),
            dt,
            -torch.exp(mixer.A_log.float()),
            b.view(1, -1, mixer.n_groups, mixer.ssm_state_size),
            c.view(1, -1, mixer.n_groups, mixer.ssm_state_size),
            chunk_size=mixer.chunk_size,
            D=mixer.D,
            dt_bias=mixer.dt_bias,
            dt_softplus=True,
            dt_limit=mixer.time_step_limit,
        ).flatten(2)

    return transformers_mixing


def _import_everything() -> None:
    """What every process needs; computes nothing, so that this one can be forked."""
    import torch
    import transformers.models.mamba2.modeling_mamba2

    import shoal.models.mamba  # noqa: F401

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def _status(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key):
            return int(line.split()[1]) * 1024
    raise SystemExit(f"/proc/self/status has no {key}: this benchmark needs Linux")


def measure(name: str, tokens: int, part: str, repetitions: int) -> dict[str, Any]:
    """Medians over repetitions of both ways, taken in turn, and how far their numbers are apart."""
    found: dict[str, list[dict[str, Any]]] = {kind: [] for kind in KINDS}
    for _ in range(repetitions):
        for kind in KINDS:
            found[kind].append(_in_a_process(kind, name, tokens, part, False))
    row: dict[str, Any] = {"case": name, "part": part, "tokens": tokens}
    for kind, results in found.items():
        row[kind] = {
            "seconds": statistics.median(result["seconds"] for result in results),
            "bytes": _in_a_process(kind, name, tokens, part, True)["bytes"],
        }
    row["time_ratio"] = row["transformers"]["seconds"] / row["shoal"]["seconds"]
    row["memory_ratio"] = row["transformers"]["bytes"] / row["shoal"]["bytes"]
    row["largest_difference"] = difference(*(found[kind][0] for kind in KINDS))
    return row


def difference(theirs: dict[str, Any], ours: dict[str, Any]) -> float:
    """max|a - b| / max|b| of the worst of output and gradients, over the entries that were kept."""
    pairs = [(theirs["output"], ours["output"])]
    assert theirs["gradients"].keys() == ours["gradients"].keys()
    pairs += [(value, ours["gradients"][name]) for name, value in theirs["gradients"].items()]
    return max(
        max(abs(x - y) for x, y in zip(a, b, strict=True)) / max(*(abs(x) for x in a), 1e-30)
        for a, b in pairs
    )


def _in_a_process(kind: str, name: str, tokens: int, part: str, for_memory: bool) -> dict[str, Any]:
    fork = multiprocessing.get_context("fork")
    receiver, sender = fork.Pipe(duplex=False)
    process = fork.Process(target=lambda: sender.send(run(kind, CASES[name], tokens, part, for_memory)))
    process.start()
    sender.close()
    result: dict[str, Any] = receiver.recv()  # EOFError when the process has failed, beside its own traceback
    process.join()
    return result


def linear_fit(rows: list[dict[str, Any]], kind: str) -> dict[str, float]:
    """Least squares of memory over tokens."""
    xs, ys = [float(row["tokens"]) for row in rows], [float(row[kind]["bytes"]) for row in rows]
    slope, intercept = statistics.linear_regression(xs, ys)
    rest = [y - slope * x - intercept for x, y in zip(xs, ys, strict=True)]
    spread = sum((y - statistics.fmean(ys)) ** 2 for y in ys)
    return {
        "bytes_per_token": slope,
        "intercept_bytes": intercept,
        "r2": 1 - sum(e * e for e in rest) / spread,
        "excess": max(abs(e) / y for e, y in zip(rest, ys, strict=True)),
    }


def bounds(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Of each case at `SPEED_TOKENS`, what the time ratio of a layer would be if all but its projections were free."""
    seconds = {
        (row["case"], row["part"]): {kind: row[kind]["seconds"] for kind in KINDS}
        for row in rows
        if row["tokens"] == SPEED_TOKENS
    }
    return {
        case: found["transformers"] / seconds[case, "projections"]["shoal"]
        for (case, part), found in seconds.items()
        if part == "layer"
    }


def verdicts(rows: list[dict[str, Any]], fits: dict[str, Any]) -> list[str]:
    """What misses its target, in words."""
    missed = []
    for row in rows:
        where = f"{row['case']}, {row['part']}, {row['tokens']} tokens"
        if row["largest_difference"] > TOLERANCE:
            missed.append(f"{where}: numbers differ by {row['largest_difference']:.1e} > {TOLERANCE}")
        if (row["part"], row["tokens"]) == (SPEED_PART, SPEED_TOKENS) and row["time_ratio"] < SPEED_LIMIT:
            missed.append(f"{where}: {row['time_ratio']:.2f} times as fast < {SPEED_LIMIT}")
    for name, fit in fits.items():
        if fit["shoal"]["excess"] > FIT_LIMIT:
            missed.append(f"{name}: memory is {fit['shoal']['excess']:.0%} off a line > {FIT_LIMIT:.0%}")
    return missed


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--check", action="store_true", help="exit with 1 when a target is missed")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)))
    parser.add_argument("--only", choices=CASES)
    options = parser.parse_args()
    _import_everything()
    counts = [int(count) for count in options.tokens.split(",")]
    rows, fits = [], {}
    for name in [options.only] if options.only else list(CASES):
        for part in PARTS:
            series = []
            for tokens in counts:
                series.append(measure(name, tokens, part, options.repetitions))
                print(_line(series[-1]), flush=True)
            rows += series
            if len(series) > 2 and part != "projections":
                fits[f"{name}, {part}"] = {kind: linear_fit(series, kind) for kind in KINDS}
    missed = verdicts(rows, fits)
    report = {
        **provenance(__doc__),
        "repetitions": options.repetitions,
        "rows": rows,
        "bounds": bounds(rows),
        "memory_fits": fits,
        "missed": missed,
    }
    options.results.mkdir(parents=True, exist_ok=True)
    (options.results / "ssd.json").write_text(json.dumps(report, indent=2) + "\n")
    print("\n".join(missed) or "all targets met")
    return 1 if options.check and missed else 0


def _line(row: dict[str, Any]) -> str:
    theirs, ours = row["transformers"], row["shoal"]
    return (
        f"{row['case']:26} {row['part']:21} T={row['tokens']:5}  "
        f"{theirs['seconds']:6.2f} s -> {ours['seconds']:6.2f} s "
        f"({row['time_ratio']:.2f}x)  {theirs['bytes'] / 2**20:6.0f} MiB -> {ours['bytes'] / 2**20:6.0f} MiB "
        f"({row['memory_ratio']:.2f}x)  difference {row['largest_difference']:.0e}"
    )


if __name__ == "__main__":
    raise SystemExit(main())
