"""What saving and exporting a checkpoint costs: the time a step waits, and the memory of an offline export.

A Llama of a few hundred MB with AdamW, sharded by FSDP2 over two gloo ranks of this machine, takes training steps.
After each there is a save: synchronous in either format, or in the background, in turns; all write with fsync. A
background save is waited for before the next save, outside the timing, but not before the next step. The first one,
which allocates its copy of the state, is reported by itself.

    blocking ratio      = B / S,  B = median over repetitions of the largest over ranks of (seconds in the call of a
                          background save + seconds that the next optimizer step waits for its copy),
                          S = median over repetitions of the largest over ranks of the seconds of a synchronous save
    step ratio          = (seconds of a step's forward and backward during a background save) / (of one without a save)
    safetensors ratio   = S(model as safetensors) / S(model in torch's format)
    export memory ratio = (peak anonymous resident bytes of an export - bytes before)
                          / (bytes of one output file + bytes of the largest tensor), one process, no process group
    export time ratio   = T(shoal export) / T(transformers' from_pretrained + save_pretrained of the same model)

    python benchmarks/checkpoint.py [--check] [--repetitions 5] [--results FOLDER]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.provenance import provenance  # noqa: E402 (needs the path above)

RESULTS = Path(__file__).parent / "results"
NUM_RANKS = 2
SHARD_BYTES = 50 * 10**6
KINDS = ("torch_save", "background", "safetensors")
KEPT = ("torch_save", 0)
"""The save that is exported afterwards."""
TARGETS = {"blocking": 0.05, "export memory": 1.5}
MODEL = {
    "vocab_size": 8000,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 8,
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
}


def build_model(**changes: int) -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM._from_config(LlamaConfig(**{**MODEL, **changes}), dtype=torch.float32)


# --------------------------------------------------------------------------------------------------- saving


def save_worker(folder: Path, repetitions: int) -> dict[str, Any]:
    """Seconds of this rank in every save, and the bytes of its state."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from shoal.checkpoint.background import BackgroundSaver
    from shoal.checkpoint.snapshot import SaveOptions
    from shoal.checkpoint.staging import Staging
    from shoal.checkpoint.state import save_state

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = build_model()
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    saver = BackgroundSaver()
    seconds: dict[str, list[float]] = {kind: [] for kind in (*KINDS, "waiting", "step", "step while saving")}
    Staging._wait = _timed(Staging._wait, seconds["waiting"])  # type: ignore[method-assign]
    ids = torch.randint(
        0, MODEL["vocab_size"], (1, 32), generator=torch.Generator().manual_seed(dist.get_rank())
    )

    def step(kind: str) -> None:
        dist.barrier()
        start = time.perf_counter()
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        seconds["step while saving" if kind == "background" else "step"].append(time.perf_counter() - start)
        optimizer.step()
        optimizer.zero_grad()

    def save(kind: str, number: int) -> None:
        path = folder / f"{kind}-{number}"
        options = SaveOptions(model_format="safetensors" if kind == "safetensors" else "torch_save")
        state: dict[str, Any] = {"model": model, "optimizer": optimizer, "step": number, "options": options}
        dist.barrier()
        start = time.perf_counter()
        if kind == "background":
            saver.save(path, **state)
        else:
            save_state(path, **state)
        seconds[kind].append(time.perf_counter() - start)

    step("warm-up")
    for name in ("step", "waiting"):
        seconds[name].clear()
    for number in range(repetitions + 1):
        for kind in KINDS:
            save(kind, number)
            step(kind)
            saver.wait()
            dist.barrier()
            if dist.get_rank() == 0 and (kind, number) != KEPT:
                shutil.rmtree(folder / f"{kind}-{number}")
    # The optimizer is asked to wait from the first background save on, at every step.
    seconds["waiting"] = seconds["waiting"][:: len(KINDS)]
    dist.destroy_process_group()
    local = [p.to_local() for p in model.parameters()]
    return {"seconds": seconds, "state_bytes": 3 * sum(t.numel() * t.element_size() for t in local)}


def _timed(function: Any, seconds: list[float]) -> Any:
    def wrapped(*arguments: Any) -> None:
        start = time.perf_counter()
        function(*arguments)
        seconds.append(time.perf_counter() - start)

    return wrapped


# ------------------------------------------------------------------------------------------------- exporting


class Peak(threading.Thread):
    """The largest anonymous resident memory of this process while it runs, in bytes."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.before = self.value = self.now()
        self._go = True

    @staticmethod
    def now() -> int:
        with open("/proc/self/status") as status:
            return next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon"))

    def run(self) -> None:
        while self._go:
            self.value = max(self.value, self.now())
            time.sleep(0.002)

    def stop(self) -> int:
        self._go = False
        self.join()
        return self.value - self.before


def export_worker(folder: Path, repetitions: int) -> dict[str, Any]:
    """Peak bytes and seconds of exporting the checkpoint that the first save left, and transformers' seconds."""
    from transformers import AutoModelForCausalLM

    from shoal.checkpoint.consolidate import consolidate
    from shoal.checkpoint.export import ExportOptions
    from shoal.checkpoint.state import save_state

    checkpoint, options = folder / "torch_save-0", ExportOptions(max_shard_bytes=SHARD_BYTES)
    # Imports and thread stacks, on a model so small that it leaves no memory behind that could be used again.
    small = {"vocab_size": 96, "hidden_size": 96, "intermediate_size": 96}
    save_state(folder / "small", model=build_model(**small), step=0)
    consolidate(folder / "small", folder / "warm-up", options)
    result: dict[str, Any] = {"seconds": [], "transformers_seconds": [], "peak_bytes": []}
    for number in range(repetitions):
        peak = Peak()
        peak.start()
        start = time.perf_counter()
        consolidate(checkpoint, folder / f"export-{number}", options)
        result["seconds"].append(time.perf_counter() - start)
        result["peak_bytes"].append(peak.stop())
        start = time.perf_counter()
        model = AutoModelForCausalLM.from_pretrained(folder / f"export-{number}")
        model.save_pretrained(folder / f"again-{number}", max_shard_size=f"{SHARD_BYTES // 10**6}MB")
        os.sync()
        result["transformers_seconds"].append(time.perf_counter() - start)
        largest = max(p.numel() * p.element_size() for p in model.parameters())
        result |= {"largest_tensor_bytes": largest, "files": len(list((folder / "again-0").glob("model-*")))}
        shutil.rmtree(folder / f"export-{number}")
        shutil.rmtree(folder / f"again-{number}")
    return result


# ------------------------------------------------------------------------------------------------- measuring


def launch(worker: str, folder: Path, num_ranks: int, repetitions: int) -> list[dict[str, Any]]:
    """Runs one worker on ranks of this machine; returns every rank's report."""
    # Otherwise glibc keeps tens of MB of what was freed for later, more or less by chance.
    allocator = {"MALLOC_MMAP_THRESHOLD_": str(2**20)}
    environment = {**os.environ, **allocator, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
    command = command if num_ranks > 1 else [sys.executable]
    command += [__file__, "--worker", worker, "--folder", str(folder), "--repetitions", str(repetitions)]
    subprocess.run(command, env=environment, check=True)
    return [json.loads((folder / f"report-{worker}-{rank}.json").read_text()) for rank in range(num_ranks)]


def measure(repetitions: int) -> dict[str, Any]:
    """Runs everything and computes the ratios."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        saves = launch("save", folder, NUM_RANKS, repetitions)
        export = launch("export", folder, 1, max(1, repetitions // 2))[0]

    def slowest(kind: str) -> list[float]:
        return [max(times) for times in zip(*(rank["seconds"][kind] for rank in saves), strict=True)]

    sync = slowest("torch_save")[1:]
    background = [sum(both) for both in zip(slowest("background"), slowest("waiting"), strict=True)]
    bound = SHARD_BYTES + export["largest_tensor_bytes"]
    return {
        "ratios": {
            "blocking": statistics.median(background[1:]) / statistics.median(sync),
            "step": statistics.median(slowest("step while saving")) / statistics.median(slowest("step")),
            "safetensors": statistics.median(slowest("safetensors")[1:]) / statistics.median(sync),
            "export memory": max(export["peak_bytes"]) / bound,
            "export time": statistics.median(export["seconds"])
            / statistics.median(export["transformers_seconds"]),
        },
        "first_background_ratio": background[0] / statistics.median(sync),
        "seconds": {kind: slowest(kind) for kind in saves[0]["seconds"]},
        "state_bytes_per_rank": [rank["state_bytes"] for rank in saves],
        "export": export,
        "load_average_over_5_minutes": round(os.getloadavg()[1], 2),
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--check", action="store_true", help="exit with 1 when a target is missed")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of checkpoint.json")
    for hidden in ("--worker", "--folder"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker is not None:
        folder, rank = Path(options.folder), os.environ.get("RANK", "0")
        work = {"save": save_worker, "export": export_worker}[options.worker]
        report = work(folder, options.repetitions)
        (folder / f"report-{options.worker}-{rank}.json").write_text(json.dumps(report))
        return 0

    settings = {"ranks": NUM_RANKS, "model": MODEL, "shard_bytes": SHARD_BYTES, "targets": TARGETS}
    settings["repetitions"] = options.repetitions
    result = {
        **provenance(__doc__ or "", ("safetensors",)),
        **settings,
        **measure(options.repetitions),
    }
    options.results.mkdir(exist_ok=True)
    (options.results / "checkpoint.json").write_text(json.dumps(result, indent=2) + "\n")
    missed = 0
    for name, ratio in result["ratios"].items():
        target = TARGETS.get(name)
        missed += target is not None and ratio > target
        print(f"{name:<14} {ratio:.3f}" + ("" if target is None else f"  (target {target:g})"))
    return int(options.check and missed > 0)


if __name__ == "__main__":
    sys.exit(main())
