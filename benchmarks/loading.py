"""What loading a checkpoint into shards costs: peak memory of a rank, and time against transformers' own loader.

Checkpoints of at least 1 GB each are made in a temporary folder: a dense Llama in many files with an index, and
a Qwen3-MoE with one tensor per expert, which are stacked on the way; a third is dense and bfloat16 on disk. The
model is float32 each time. Every rank loads the same checkpoint, in fresh processes: Shoal onto FSDP2 shards,
transformers' `from_pretrained` the whole model, as one would before sharding it.

    memory ratio = max over ranks of  (peak resident bytes while loading - resident bytes before)
                                      / (bytes of the rank's shard + bytes of the largest single tensor)
    time ratio   = T(shoal) / T(transformers),  T = max over ranks of the seconds from the call until every
                   parameter of the rank has been read once
    CPU ratio    = the same with the sum over ranks of user plus system seconds

Without that reading, transformers would have mapped files of the right dtype and read nothing yet. The peak is the
kernel's high-water mark (VmHWM), reset just before the load; it counts anonymous, file and shared
pages. Linux only. Files are in the page cache in both cases: they have just been written.

    python benchmarks/loading.py [--check] [--results FOLDER] [--scale 1.0]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.provenance import provenance  # noqa: E402 (needs the path above)

RESULTS = Path(__file__).parent / "results"
NUM_RANKS = 2
MEMORY_LIMIT = 1.15
LLAMA = {
    "vocab_size": 32000,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
}
QWEN3_MOE = {
    "vocab_size": 16000,
    "hidden_size": 1024,
    "intermediate_size": 1024,
    "moe_intermediate_size": 512,
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 10,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
}
CHECKPOINTS: dict[str, tuple[str, dict[str, int], str]] = {
    "dense, float32": ("llama", LLAMA, "float32"),
    "experts, float32": ("qwen3_moe", QWEN3_MOE, "float32"),
    "dense, bfloat16 on disk": ("llama", {**LLAMA, "num_hidden_layers": 32}, "bfloat16"),
}


def write_checkpoint(folder: Path, kind: str, scale: float) -> int:
    """Writes a checkpoint layer by layer's worth of files; returns its bytes."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    model_type, settings, dtype = CHECKPOINTS[kind]
    layers = max(1, round(settings["num_hidden_layers"] * scale))
    config = AutoConfig.for_model(model_type, **{**settings, "num_hidden_layers": layers})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    model.save_pretrained(folder, max_shard_size="300MB")
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


# ------------------------------------------------------------------------------------------------- one rank


def load_with_shoal(folder: Path) -> Any:
    """FSDP2 shards of this rank."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from shoal.models.assemble import ModelPlan, Numerics, assemble
    from shoal.models.load import WeightSource
    from shoal.parallel.setup import DistributedSetup

    def build() -> torch.nn.Module:
        model: torch.nn.Module = AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(folder), dtype=torch.float32
        )
        return model

    plan = ModelPlan(build, weights=(WeightSource("", folder),), llm="")
    return assemble(plan, DistributedSetup.build("fsdp2"), Numerics(), torch.device("cpu")).module


def load_with_transformers(folder: Path) -> Any:
    """The whole model."""
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def resident(key: str) -> int:
    """VmRSS or VmHWM of this process, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))


def run_rank(kind: str, folder: Path, report: Path) -> None:
    """Loads once and reports bytes and seconds."""
    import torch
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor
    from transformers.models.auto.modeling_auto import AutoModelForCausalLM  # noqa: F401 (import it untimed)

    import shoal.models.assemble  # noqa: F401
    from shoal.mesh import initialize_distributed
    from shoal.parallel.setup import DistributedSetup

    load = {"shoal": load_with_shoal, "transformers": load_with_transformers}[kind]
    initialize_distributed("gloo")
    DistributedSetup.build("fsdp2")  # what comes with the first mesh is not loading
    load(folder.parent / "probe")  # nor are the imports of a model's classes
    dist.barrier()
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    start, cpu = time.perf_counter(), time.process_time()
    model = load(folder)
    peak = resident("VmHWM")
    parameters = list(model.parameters())
    local = [p.to_local() if isinstance(p, DTensor) else p for p in parameters]
    checksum = float(sum(torch.sum(tensor.detach(), dtype=torch.float64) for tensor in local))
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu
    result = {
        "resident_before": before,
        "peak": peak - before,
        "after": resident("VmRSS") - before,
        "shard": sum(t.numel() * t.element_size() for t in local),
        "largest_tensor": max(p.numel() * p.element_size() for p in parameters),
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "checksum": checksum,
    }
    report.write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


def write_probe(folder: Path) -> None:
    """A model small enough to leave no trace in memory."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2)).save_pretrained(
        folder
    )


# ------------------------------------------------------------------------------------------------ measuring


def launch(kind: str, folder: Path) -> list[dict[str, Any]]:
    """One load in fresh processes; the ranks' reports."""
    with tempfile.TemporaryDirectory() as reports:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(NUM_RANKS), __file__, "--worker", kind]
        command += ["--folder", str(folder), "--reports", reports]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)
        return [json.loads((Path(reports) / f"{rank}.json").read_text()) for rank in range(NUM_RANKS)]


def measure(kind: str, scale: float) -> dict[str, Any]:
    """Makes a checkpoint, loads it both ways, deletes it."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "checkpoint"
        num_bytes = write_checkpoint(folder, kind, scale)
        write_probe(Path(name) / "probe")
        theirs, ours = launch("transformers", folder), launch("shoal", folder)
        shutil.rmtree(folder)
    same_values(ours, theirs)

    def memory(ranks: list[dict[str, Any]]) -> float:
        return float(max(rank["peak"] / (rank["shard"] + rank["largest_tensor"]) for rank in ranks))

    def ratio(key: str, over: Any) -> float:
        return float(over(rank[key] for rank in ours) / over(rank[key] for rank in theirs))

    return {
        "bytes_on_disk": num_bytes,
        "memory_ratio": memory(ours),
        "time_ratio": ratio("seconds", max),
        "cpu_ratio": ratio("cpu_seconds", sum),
        "shoal": ours,
        "transformers": theirs,
    }


def same_values(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> None:
    """Exits unless the shards together hold the values, and the number of them, of the whole model."""
    total = sum(rank["checksum"] for rank in ours)
    whole = theirs[0]["checksum"]
    if sum(rank["shard"] for rank in ours) != theirs[0]["shard"] or abs(total - whole) > 1e-6 * max(
        abs(whole), 1
    ):
        raise SystemExit(f"the shards add up to {total}, the whole model to {whole}: not the same weights")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="exit with 1 when the memory limit is exceeded")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of loading.json")
    parser.add_argument("--scale", type=float, default=1.0, help="share of the layers, for a quick look")
    for hidden in ("--worker", "--folder", "--reports"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker is not None:
        report = Path(options.reports) / f"{os.environ['RANK']}.json"
        run_rank(options.worker, Path(options.folder), report)
        return 0

    cases = {kind: measure(kind, options.scale) for kind in CHECKPOINTS}
    result = {
        **provenance(__doc__ or "", ("safetensors",)),
        "ranks": NUM_RANKS,
        "memory_limit": MEMORY_LIMIT,
        "checkpoints": {kind: {"model_type": t, **s} for kind, (t, s, _) in CHECKPOINTS.items()},
        "scale": options.scale,
        "cases": cases,
    }
    options.results.mkdir(exist_ok=True)
    (options.results / "loading.json").write_text(json.dumps(result, indent=2) + "\n")
    for kind, case in cases.items():
        print(
            f"{kind:<24} {case['bytes_on_disk'] / 1e9:.2f} GB: peak {case['memory_ratio']:.3f} of shard + largest "
            f"tensor (limit {MEMORY_LIMIT}), {case['time_ratio']:.2f} of transformers' time, "
            f"{case['cpu_ratio']:.2f} of its CPU seconds"
        )
    missed = any(case["memory_ratio"] > MEMORY_LIMIT for case in cases.values())
    return int(missed and options.check)


if __name__ == "__main__":
    sys.exit(main())
