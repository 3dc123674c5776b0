"""One long document over context-parallel ranks: memory of a rank, memory for keys, balance of the ring.

A Llama of two layers trains two steps on a single document, in one process per rank, one thread each, over gloo on one
machine, with cp_size 1, 2 and 4. Losses and gradient norms of all are compared, so that they are known to do the same
work.

    memory ratio   = M(cp) / M(1),  M = largest growth on any rank of the peak of its resident memory over two steps:
                     gradients and optimizer state are included, the model and the document are not
    key memory     = largest number of bytes of keys and values that a rank holds for one layer at a time: its own, and
                     with several ranks as much again for those that are arriving
    pairs          = pairs of query and key that each rank computes with, from the plan that it executes
    imbalance      = max over ranks / mean over ranks - 1, of pairs and of CPU seconds of attention, forward and
                     backward, over a ragged pack of long documents

The peak is the kernel's high-water mark (VmHWM), reset just before. Linux only.

    python benchmarks/context.py [--tokens 32768] [--method ring] [--check] [--results FOLDER]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.loss import cpu_seconds, status  # noqa: E402 (needs the path above)
from benchmarks.provenance import provenance  # noqa: E402

RESULTS = Path(__file__).parent / "results"
SIZES = (1, 2, 4)
TOLERANCE = 1e-4
IMBALANCE_LIMIT = 0.05
MEMORY_SLACK = 1.6
"""A rank may need this much more than its share: not everything is cut (parameters, buffers of messages)."""
STEPS = 2
PACK = (2000, 37, 2900, 700, 1451, 4096)
"""Tokens of the documents of the ragged pack."""
MODEL: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "bos_token_id": None,
    "eos_token_id": None,
}


def document(num_tokens: int) -> dict[str, Any]:
    """A pack of one document; all tokens but the first are supervised."""
    import torch

    mask = torch.ones(1, num_tokens, dtype=torch.bool)
    mask[:, 0] = False
    return {
        "audios": torch.zeros(0, 0),
        "audio_lens": torch.zeros(0, dtype=torch.int64),
        "input_ids": torch.randint(0, 256, (1, num_tokens), generator=torch.Generator().manual_seed(1)),
        "loss_mask": mask,
        "text_lens": torch.tensor([num_tokens]),
        "position_ids": torch.arange(num_tokens)[None],
        "cu_seqlens": torch.tensor([0, num_tokens], dtype=torch.int32),
        "max_seqlen": num_tokens,
        "sample_ids": ["document"],
        "sample_seeds": torch.zeros(1, dtype=torch.int64),
        "is_empty": False,
    }


def build(num_tokens: int, world: int, method: str) -> Any:
    """The sharded model; cp_size is the number of ranks."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from shoal.config.schema import FSDP2Config, ParallelismSizes
    from shoal.kernels.attention_hf import PACKED_ATTENTION, register_attention
    from shoal.models.assemble import ModelPlan, Numerics, assemble
    from shoal.models.causal_lm import CausalLM
    from shoal.parallel.setup import DistributedSetup

    register_attention()
    config = LlamaConfig(**MODEL, max_position_embeddings=num_tokens)

    def causal_lm() -> CausalLM:
        return CausalLM(LlamaForCausalLM._from_config(config, attn_implementation=PACKED_ATTENTION))

    options = FSDP2Config(cp_method=method) if world > 1 else FSDP2Config()  # type: ignore[arg-type]
    setup = DistributedSetup.build(options, ParallelismSizes(cp_size=world), world_size=world)
    return assemble(ModelPlan(causal_lm, seed=1), setup, Numerics(), torch.device("cpu"))


def train(num_tokens: int, world: int, method: str) -> dict[str, Any]:
    """Two steps; what they cost this rank."""
    import torch
    import torch.distributed as dist

    from shoal.data.batch import StepBatch
    from shoal.data.position import StreamPosition
    from shoal.train.step import agree_on_step, train_step

    keys = watch_keys(method)
    model = build(num_tokens, world, method)
    model.module.train()
    optimizer = torch.optim.AdamW(model.module.parameters(), lr=1e-3)
    batch = StepBatch([document(num_tokens)], StreamPosition())
    dist.barrier()
    before, started = status("VmRSS"), cpu_seconds()
    Path("/proc/self/clear_refs").write_text("5")
    losses, norms = [], []
    for step in range(STEPS):
        header = agree_on_step(batch, model.group, model.device)
        result = train_step(model, batch, optimizer, step=step, seed=0, max_norm=1.0, header=header)
        losses.append(result.loss)
        norms.append(result.gradient_norm)
    return {
        "bytes": status("VmHWM") - before,
        "seconds": cpu_seconds() - started,
        "key_bytes": max(keys),
        "losses": losses,
        "gradient_norms": norms,
    }


def watch_keys(method: str) -> list[int]:
    """Bytes of keys and values that attention holds at a time, noted as it runs."""
    import shoal.kernels.attention as attention
    import shoal.parallel.context.ring as ring

    noted: list[int] = []

    def size(tensors: Sequence[Any]) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    rotation, kernels = ring.Rotation, dict(attention.BACKENDS)

    def watched_rotation(tensors: Sequence[Any], *arguments: Any) -> Any:
        noted.append(2 * size(tensors))
        return rotation(tensors, *arguments)

    def watched(name: str) -> Any:
        def kernel(q: Any, k: Any, v: Any, *arguments: Any) -> Any:
            noted.append(size([k, v]))
            return kernels[name](q, k, v, *arguments)

        return kernel

    ring.Rotation = watched_rotation  # type: ignore[assignment,misc]
    attention.BACKENDS.update({name: watched(name) for name in kernels})
    return noted


def attend(world: int, rank: int) -> dict[str, Any]:
    """Ring attention over the ragged pack; CPU seconds of this rank."""
    import torch
    import torch.distributed as dist

    from shoal.kernels.packed import AttentionSpec
    from shoal.parallel.context.ring import ring_attention
    from shoal.parallel.context.split import DualChunks

    group = dist.group.WORLD
    assert group is not None
    layout = DualChunks(PACK, world, rank)
    q, k, v = (torch.randn(layout.num_local, 4, 64, requires_grad=True) for _ in range(3))
    seconds = []
    for _ in range(4):
        started = cpu_seconds()
        out = ring_attention(q, k, v, layout, group, AttentionSpec(True, 0.125), None, "sdpa")
        out.sum().backward()
        seconds.append(cpu_seconds() - started)
        dist.barrier()
    return {"seconds": statistics.median(seconds[1:])}


def work(task: str, num_tokens: int, world: int, rank: int, method: str, store: str) -> dict[str, Any]:
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world)
    return train(num_tokens, world, method) if task == "train" else attend(world, rank)


def launch(task: str, num_tokens: int, world: int, method: str) -> list[dict[str, Any]]:
    """Runs a task in fresh processes; the reports of all ranks."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            __file__,
            "--worker",
            task,
            "--tokens",
            str(num_tokens),
            "--method",
            method,
        ]
        command += ["--store", str(Path(folder) / "store"), "--world", str(world), "--rank"]
        workers = [
            subprocess.Popen([*command, str(rank)], env=environment, stdout=subprocess.PIPE, text=True)
            for rank in range(world)
        ]
        outputs = [worker.communicate(timeout=7200)[0] for worker in workers]
    if any(worker.returncode for worker in workers):
        raise SystemExit(f"{task} on {world} ranks: a rank failed")
    return [json.loads(output.splitlines()[-1]) for output in outputs]


def imbalance(values: Sequence[float]) -> float:
    """How far the slowest is above the mean.

    >>> imbalance([1.0, 1.0, 1.6])
    0.33333333333333326
    """
    return max(values) / (sum(values) / len(values)) - 1.0


def refuse_different_work(reports: dict[int, dict[str, Any]]) -> float:
    """The largest relative difference of losses and norms from those of one rank."""
    largest = 0.0
    for report in reports.values():
        for key in ("losses", "gradient_norms"):
            pairs = zip(report[key], reports[1][key], strict=True)
            largest = max(largest, *(abs(a - b) / abs(b) for a, b in pairs))
    if largest > TOLERANCE:
        raise SystemExit(f"losses or gradient norms differ by {largest:.1e}: these do not compute the same")
    return largest


def long_document(num_tokens: int, method: str) -> dict[str, Any]:
    """Two steps on one document with every number of ranks."""
    from shoal.parallel.context.ring import score_counts
    from shoal.parallel.context.split import DualChunks

    reports = {}
    for world in SIZES:
        ranks = launch("train", num_tokens, world, method)
        pairs = score_counts(DualChunks((num_tokens,), world, 0))
        reports[world] = {
            "peak_megabytes_per_rank": round(max(rank["bytes"] for rank in ranks) / 1e6, 1),
            "key_megabytes_per_layer": max(rank["key_bytes"] for rank in ranks) / 1e6,
            "cpu_seconds_of_all_ranks": round(sum(rank["seconds"] for rank in ranks), 1),
            "imbalance_of_pairs": imbalance(pairs),
            "losses": ranks[0]["losses"],
            "gradient_norms": ranks[0]["gradient_norms"],
        }
        print(f"cp_size {world}: {json.dumps(reports[world])}", flush=True)
    whole = reports[1]
    for report in reports.values():
        for key, name in (
            ("peak_megabytes_per_rank", "memory_ratio"),
            ("key_megabytes_per_layer", "key_ratio"),
        ):
            report[name] = report[key] / whole[key]
    return {"difference": refuse_different_work(reports), "cp_size": reports}


def ragged_pack() -> dict[str, Any]:
    """Balance of the ring over a ragged pack of long documents."""
    from shoal.parallel.context.ring import score_counts
    from shoal.parallel.context.split import DualChunks

    found = {}
    for world in SIZES[1:]:
        seconds = [rank["seconds"] for rank in launch("attend", 0, world, "ring")]
        pairs = score_counts(DualChunks(PACK, world, 0))
        found[world] = {
            "pairs": pairs,
            "imbalance_of_pairs": imbalance(pairs),
            "cpu_seconds": seconds,
            "imbalance_of_seconds": imbalance(seconds),
        }
        print(f"ragged pack on {world} ranks: {json.dumps(found[world])}", flush=True)
    return {"documents": PACK, "ranks": found}


def missed(result: dict[str, Any]) -> list[str]:
    """Targets that were not reached."""
    wrong = [
        f"{world} ranks: imbalance {report['imbalance_of_pairs']:.3f}"
        for world, report in result["ragged_pack"]["ranks"].items()
        if report["imbalance_of_pairs"] > IMBALANCE_LIMIT
    ]
    for world, report in result["long_document"]["cp_size"].items():
        if report["memory_ratio"] > MEMORY_SLACK / int(world):
            wrong.append(f"cp_size {world}: memory ratio {report['memory_ratio']:.2f}")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--method", default="ring", choices=["ring", "allgather", "ulysses"])
    parser.add_argument("--check", action="store_true", help="exit with 1 when a target is missed")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of context.json")
    for hidden in ("--worker", "--world", "--rank", "--store"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker is not None:
        place = (int(options.world), int(options.rank))
        print(json.dumps(work(options.worker, options.tokens, *place, options.method, options.store)))
        return 0
    result = {
        **provenance(__doc__ or ""),
        "tokens": options.tokens,
        "method": options.method,
        "model": MODEL,
        "steps": STEPS,
        "imbalance_limit": IMBALANCE_LIMIT,
        "ragged_pack": ragged_pack(),
        "long_document": long_document(options.tokens, options.method),
    }
    options.results.mkdir(exist_ok=True)
    (options.results / "context.json").write_text(json.dumps(result, indent=2) + "\n")
    for line in (wrong := missed(result)):
        print(f"missed: {line}")
    return int(bool(wrong) and options.check)


if __name__ == "__main__":
    sys.exit(main())
