"""How long `shoal verify` takes, and what it finds, on a Llama, a Qwen3 and the quickstart's speech model.

Each case is the command as a user would type it, in a process of its own; the run fails when a verdict is not PASS. The
quickstart's models have to be in third_party/models (`make quickstart` puts them there), or that case is left out and
said to be.

    seconds = wall-clock time of the command, from its start to its exit
    ratio   = CPU seconds of the command and its ranks over those of importing torch and transformers once

    python benchmarks/verify.py [--results FOLDER]
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.provenance import provenance  # noqa: E402 (needs the path above)

RESULTS = Path(__file__).parent / "results"
LIMIT_SECONDS = 60
LLAMA = {
    "model_type": "llama",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "tie_word_embeddings": True,
}
QWEN3 = {
    "model_type": "qwen3",
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}
TP = ["distributed.tp_size=2", "distributed.sequence_parallel=true"]
QUICKSTART = ROOT / "examples" / "speechlm2" / "conf" / "quickstart.yaml"
AUTOMODEL = "trainer.strategy={_target_: shoal.AutomodelParallelStrategy}"
CASES: dict[str, tuple[Any, list[str], int]] = {
    "Llama 3.2 1B, tp 2 with sp x dp 2": (LLAMA, TP, 4),
    "Llama 3.2 1B, tp 2 with sp x dp 4": (LLAMA, TP, 8),
    "Qwen3 4B, packed, tp 2 with sp x dp 2": (QWEN3, [*TP, "packed_sequence.packed_sequence_size=4096"], 4),
    "Qwen3 4B, packed, tp 2 with sp x dp 4": (QWEN3, [*TP, "packed_sequence.packed_sequence_size=4096"], 8),
    "quickstart, SALM, fsdp2 x 4": (QUICKSTART, ["trainer.devices=4"], 4),
    "quickstart, SALM, fsdp2 x 8": (QUICKSTART, ["trainer.devices=8"], 8),
}
"""By name: the fields of a model or a file, overrides, and ranks."""


def configuration(model: dict[str, Any], folder: Path) -> Path:
    """A YAML file that trains `model`."""
    file = folder / f"{model['model_type']}.yaml"
    text = {
        "model": {"config": model},
        "dataset": {"type": "text", "path": "data.jsonl"},
        "step_scheduler": {"global_batch_size": 8, "local_batch_size": 1, "max_steps": 10},
        "distributed": {"strategy": "fsdp2"},
        "optimizer": {"_target_": "torch.optim.AdamW", "lr": 1e-4},
    }
    file.write_text(yaml.safe_dump(text))
    return file


def timed(command: list[str]) -> tuple[subprocess.CompletedProcess[str], float, float]:
    """Runs a command; returns it with its wall-clock and CPU seconds, children included."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return done, time.perf_counter() - start, cpu


def measure() -> dict[str, Any]:
    imports = timed([sys.executable, "-c", "import torch, transformers.models.llama.modeling_llama"])[2]
    cases: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, (what, overrides, world) in CASES.items():
            if what == QUICKSTART and not (ROOT / "third_party" / "models").is_dir():
                cases[name] = {"verdict": "not run: third_party/models is missing"}
                continue
            file = what if isinstance(what, Path) else configuration(what, Path(folder))
            command = [sys.executable, "-m", "shoal.cli", "verify", str(file), *overrides]
            done, seconds, cpu = timed([*command, "--world-size", str(world), "--json"])
            if done.returncode:
                raise SystemExit(f"{name}: exit status {done.returncode}\n{done.stdout}\n{done.stderr}")
            found = json.loads(done.stdout)
            cases[name] = {
                "ranks": world,
                "verdict": found["verdict"],
                "seconds": round(seconds, 1),
                "cpu_seconds": round(cpu, 1),
                "ratio": round(cpu / imports, 2),
            }
            print(name, cases[name], flush=True)
    return {"limit_seconds": LIMIT_SECONDS, "import_cpu_seconds": round(imports, 2), "cases": cases}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of verify.json")
    options = parser.parse_args()
    result = {**provenance(__doc__ or ""), **measure()}
    options.results.mkdir(exist_ok=True)
    (options.results / "verify.json").write_text(json.dumps(result, indent=2) + "\n")
    late = [
        name
        for name, case in result["cases"].items()
        if case.get("ranks") == 4 and case["seconds"] > LIMIT_SECONDS
    ]
    print(f"slower than {LIMIT_SECONDS} s on 4 ranks: {', '.join(late) or 'none'}")
    return int(bool(late))


if __name__ == "__main__":
    sys.exit(main())
