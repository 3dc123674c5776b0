"""What the loss of a head spread over ranks costs each of them: peak memory and CPU seconds, same inputs.

Each way runs forward and backward in processes of its own, one thread each, over gloo on one machine:

    whole      one process, the whole head, `token_losses`: a chunk of logits at a time
    gathered   W ranks, each its rows of the head; all logits on every rank, then torch's cross-entropy
    unchunked  W ranks, logits of all tokens, each rank its own ids: `vocab_parallel_losses`
    parallel   W ranks, a chunk of tokens at a time, each rank its own ids: `token_losses(vocab=...)`

Losses and gradients of all are compared, so that they are known to do the same work.

    memory ratio  = M(parallel) / M(gathered),  M = median over repetitions of the largest growth on any rank of the
                    peak of its resident memory over forward and backward: gradients are included, inputs are not
    against whole = M(parallel) / M(whole)
    work ratio    = S(parallel) / S(whole),  S = median over repetitions of the user plus system seconds of forward
                    and backward, summed over ranks, after one on a few tokens

The peak is the kernel's high-water mark (VmHWM), reset just before. Linux only.

    python benchmarks/vocab_loss.py [--repetitions 3] [--check] [--results FOLDER] [--scale 1.0] [--only NAME]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.loss import TOLERANCE, cpu_seconds, difference, status  # noqa: E402 (needs the path above)
from benchmarks.provenance import provenance  # noqa: E402

RESULTS = Path(__file__).parent / "results"
KINDS = ("whole", "gathered", "unchunked", "parallel")
MEMORY_LIMIT = 0.25
WHOLE_LIMIT = 1.0
CASES: dict[str, dict[str, Any]] = {
    "SmolLM2-135M head, 2 ranks": {
        "tokens": 2048,
        "hidden": 576,
        "vocab": 49152,
        "dtype": "float32",
        "world": 2,
    },
    "SmolLM2-135M head, 4 ranks": {
        "tokens": 2048,
        "hidden": 576,
        "vocab": 49152,
        "dtype": "float32",
        "world": 4,
    },
    "vocabulary of Llama 3, 2 ranks": {
        "tokens": 1024,
        "hidden": 512,
        "vocab": 128256,
        "dtype": "float32",
        "world": 2,
    },
}


def loss_of(kind: str, vocab: Any) -> Any:
    """Returns a function of hidden states, this rank's rows of the weight and labels that gives the summed loss."""
    import torch.nn.functional as F

    from shoal.kernels.loss import reference_token_losses, token_losses
    from shoal.kernels.vocab import vocab_parallel_losses

    if kind == "unchunked":
        return lambda h, w, y: vocab_parallel_losses(F.linear(h, w), y, vocab)[0].sum()
    loss = reference_token_losses if kind == "gathered" else token_losses
    return lambda h, w, y: loss(h, w, y, vocab=vocab)[0]


def run(kind: str, case: dict[str, Any], rank: int, store: str) -> dict[str, Any]:
    """One repetition on this rank."""
    import torch
    import torch.distributed as dist

    from shoal.kernels.vocab import VocabShard

    world = 1 if kind == "whole" else int(case["world"])
    dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world)
    group = dist.group.WORLD
    assert group is not None
    generator = torch.Generator().manual_seed(0)
    dtype = getattr(torch, case["dtype"])
    tokens, hidden, num_total = (int(case[name]) for name in ("tokens", "hidden", "vocab"))
    states = torch.randn(tokens, hidden, generator=generator).to(dtype).requires_grad_()
    whole = (torch.randn(num_total, hidden, generator=generator) / hidden**0.5).to(dtype)
    labels = torch.randint(0, num_total, (tokens,), generator=generator)
    vocab, few = (None if kind == "whole" else VocabShard.of(size, group) for size in (num_total, 64))
    own = slice(None) if vocab is None else slice(vocab.start, vocab.start + vocab.num_local)
    weight = whole[own].clone().requires_grad_()
    del whole
    loss_of(kind, few)(states[-4:], weight[: 64 // world], labels[-4:] % 64).backward()
    states.grad = weight.grad = None
    dist.barrier()

    before, started = status("VmRSS"), cpu_seconds()
    Path("/proc/self/clear_refs").write_text("5")
    total = loss_of(kind, vocab)(states, weight, labels)
    total.backward()
    seconds, peak = cpu_seconds() - started, status("VmHWM")

    assert states.grad is not None and weight.grad is not None
    dist.all_reduce(states.grad)
    gradient = torch.zeros(num_total, hidden, dtype=dtype)
    gradient[own] = weight.grad
    dist.all_reduce(gradient)
    gradients = (states.grad, gradient)
    return {
        "bytes": peak - before,
        "seconds": seconds,
        "loss": float(total.detach()),
        "gradient_norms": [float(g.double().norm()) for g in gradients],
        "gradient_samples": [g.flatten()[:: g.numel() // 97].double().tolist() for g in gradients],
    }


def launch(kind: str, case: dict[str, Any]) -> list[dict[str, Any]]:
    """One repetition in fresh processes; the reports of all ranks."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--worker", kind, "--case", json.dumps(case)]
        command += ["--store", str(Path(folder) / "store"), "--rank"]
        workers = [
            subprocess.Popen([*command, str(rank)], env=environment, stdout=subprocess.PIPE, text=True)
            for rank in range(1 if kind == "whole" else case["world"])
        ]
        outputs = [worker.communicate(timeout=600)[0] for worker in workers]
    if any(worker.returncode for worker in workers):
        raise SystemExit(f"{kind}: a rank failed")
    return [json.loads(output) for output in outputs]


def measure(case: dict[str, Any], repetitions: int) -> dict[str, Any]:
    reports: dict[str, list[list[dict[str, Any]]]] = {kind: [] for kind in KINDS}
    for repetition in range(repetitions):
        for kind in KINDS if repetition % 2 == 0 else reversed(KINDS):
            reports[kind].append(launch(kind, case))
    reference = reports["whole"][0][0]
    differences = {
        kind: max(difference(report, reference) for report in reports[kind][0]) for kind in KINDS[1:]
    }
    if max(differences.values()) > TOLERANCE[case["dtype"]]:
        raise SystemExit(f"{differences}: these do not compute the same")
    peaks = {k: statistics.median(max(r["bytes"] for r in ranks) for ranks in reports[k]) for k in KINDS}
    seconds = {k: statistics.median(sum(r["seconds"] for r in ranks) for ranks in reports[k]) for k in KINDS}
    return {
        "memory_ratio": peaks["parallel"] / peaks["gathered"],
        "against_whole": peaks["parallel"] / peaks["whole"],
        "work_ratio": seconds["parallel"] / seconds["whole"],
        "peak_megabytes_per_rank": {kind: round(value / 1e6, 1) for kind, value in peaks.items()},
        "cpu_seconds_of_all_ranks": seconds,
        "largest_difference": differences,
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--check", action="store_true", help="exit with 1 when a memory limit is exceeded")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of vocab_loss.json")
    parser.add_argument("--scale", type=float, default=1.0, help="share of the tokens and of the vocabulary")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    for hidden in ("--worker", "--case", "--rank", "--store"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker is not None:
        print(json.dumps(run(options.worker, json.loads(options.case), int(options.rank), options.store)))
        return 0

    measured = {}
    for name, case in CASES.items():
        if options.only not in name:
            continue
        scaled = {**case, **{key: int(case[key] * options.scale) for key in ("tokens", "vocab")}}
        measured[name] = {"case": scaled, **measure(scaled, options.repetitions)}
        result, peaks = measured[name], measured[name]["peak_megabytes_per_rank"]
        print(
            f"{name:<31} {peaks['parallel']:5.0f} MB a rank against {peaks['gathered']:5.0f} MB of gathered logits: "
            f"{result['memory_ratio']:.3f} (limit {MEMORY_LIMIT}); against {peaks['whole']:.0f} MB of one process: "
            f"{result['against_whole']:.3f} (limit {WHOLE_LIMIT}); {result['work_ratio']:.3f} of its CPU seconds"
        )
    document = {
        **provenance(__doc__ or ""),
        "repetitions": options.repetitions,
        "memory_limit": MEMORY_LIMIT,
        "whole_limit": WHOLE_LIMIT,
        "cases": measured,
    }
    options.results.mkdir(exist_ok=True)
    (options.results / "vocab_loss.json").write_text(json.dumps(document, indent=2) + "\n")
    missed = any(
        case["memory_ratio"] > MEMORY_LIMIT or case["against_whole"] > WHOLE_LIMIT
        for case in measured.values()
    )
    return int(missed and options.check)


if __name__ == "__main__":
    sys.exit(main())
