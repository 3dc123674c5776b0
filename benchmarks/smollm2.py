"""Fine-tunes SmolLM2-135M as examples/llm/smollm2_135m.yaml says, and lets plain transformers check the outcome.

What a user would do, command by command: fetch weights and texts, `shoal evaluate`, `shoal train` on two FSDP2 ranks
with packing, `shoal export`, `shoal evaluate`. A process that knows transformers and not Shoal reads the export and the
texts and has to find the perplexity that `shoal evaluate` finds. All of it is about the same held-out texts: all of
them, or the shortest ones.

    perplexity = exp( sum of token losses / number of supervised tokens ), texts cut into pieces of 256 tokens,
                 the first token of a piece is not supervised

    python benchmarks/smollm2.py [--results FOLDER] [--folder FOLDER] [--texts N]

Takes about twenty minutes on two cores that do nothing else. `--folder` keeps what has been done, and a second call
goes on from there; every part names the commit it was measured at.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.provenance import provenance  # noqa: E402 (needs the path above)
from benchmarks.report import smollm2  # noqa: E402

RESULTS = Path(__file__).parent / "results"
CONFIG = "examples/llm/smollm2_135m.yaml"
MODEL, HELD_OUT = "data/smollm2/model", "data/smollm2/valid"
LENGTH = 256
NUM_RANKS = 2
DIGITS = 4
PATIENCE = (
    "dist_env.timeout_minutes=120"  # ranks that share their cores with other work wait for each other longer
)


def shoal(*words: str) -> None:
    """Runs a command of Shoal in the repository."""
    print(f"\n$ shoal {' '.join(words)}", flush=True)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-m", "shoal.cli", *words], cwd=ROOT, env=environment, check=True)


def stage(file: Path, measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What `measure` finds, kept in a file: a second call with the same folder goes on where the first one stopped."""
    if not file.is_file():
        found = measure()
        file.write_text(json.dumps({"commit": provenance("")["commit"], **found}) + "\n")
    return dict(json.loads(file.read_text()))


def evaluated(folder: Path, model: str, texts: Path) -> dict[str, Any]:
    """What `shoal evaluate` says of a model or run on a folder of texts, in rows."""
    answers = folder / "evaluation.jsonl"
    words = [f"pretrained_name={model}", "dtype=float32", f"output_manifest={answers}"]
    words += [f"inputs={texts}", f"seq_length={LENGTH}", "batch_size=8"]
    shoal("evaluate", *words, "--nproc-per-node", str(NUM_RANKS))
    (line,) = answers.read_text().splitlines()
    return dict(json.loads(line))


def trained(run: Path, texts: Path) -> dict[str, Any]:
    """Trains and validates, and returns the history of the steps and what validation said at the end."""
    overrides = (f"checkpoint.checkpoint_dir={run}", f"validation_dataset.path={texts}", PATIENCE)
    shoal("train", CONFIG, *overrides, "--nproc-per-node", str(NUM_RANKS))
    steps, validations = (
        [json.loads(line) for line in (run / f"{name}.jsonl").read_text().splitlines()]
        for name in ("training", "validation")
    )
    return {"history": steps, "validation": validations[-1]}


def exported(run: Path, folder: Path) -> dict[str, Any]:
    """Exports, and compares the weights with those that the run consolidated itself."""
    from safetensors.torch import load_file

    shoal("export", str(run), str(folder))
    (consolidated,) = run.glob("*/consolidated")
    one, other = (load_file(path / "model.safetensors") for path in (folder, consolidated))
    if one.keys() != other.keys() or not all(bool((one[name] == other[name]).all()) for name in one):
        raise SystemExit(f"{folder} and {consolidated} are not the same weights")
    return {"tensors": len(one)}


def reference_perplexity(model: str, texts: str) -> dict[str, Any]:
    """Perplexity from transformers alone: one text, one piece, one forward after the other."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    llm = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(model)
    total, count = 0.0, 0
    for path in sorted(Path(texts).glob("*.txt")):
        text = path.read_text(encoding="utf-8")
        ids = tokenizer(text, return_tensors="pt").input_ids
        ids = torch.cat([ids, torch.tensor([[tokenizer.eos_token_id]])], dim=1)
        for piece in ids.split(LENGTH, dim=1):
            if piece.shape[1] > 1:
                with torch.no_grad():
                    loss = llm(input_ids=piece, labels=piece).loss  # the mean over all but the first token
                total += float(loss) * (piece.shape[1] - 1)
                count += piece.shape[1] - 1
    return {"perplexity": math.exp(total / count), "num_tokens": count}


def run_reference(model: Path, texts: Path) -> dict[str, Any]:
    """`reference_perplexity` in a process of its own, which never imports Shoal."""
    print(f"\n$ plain transformers reads {model}", flush=True)
    command = [sys.executable, __file__, "--reference", str(model), str(texts)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def same_digits(ours: float, theirs: float) -> bool:
    """Whether two figures round to the same DIGITS digits, or differ by less than half a unit of the last one."""
    return f"{ours:.{DIGITS}g}" == f"{theirs:.{DIGITS}g}" or abs(ours / theirs - 1) < 0.5 * 10**-DIGITS


def measure(folder: Path, num_texts: int | None) -> dict[str, Any]:
    """Runs everything that is not in the folder yet.

    Raises:
        SystemExit: The perplexity did not fall, or transformers finds another one.
    """
    subprocess.run([sys.executable, "scripts/smollm2.py"], cwd=ROOT, check=True)
    texts = chosen_texts(folder, num_texts)
    run, export = folder / "run", folder / "export"
    result = {
        "num_texts": len(list(texts.iterdir())),
        "training": stage(folder / "training.json", lambda: trained(run, texts)),
        "export": stage(folder / "export.json", lambda: exported(run, export)),
        "transformers": stage(folder / "transformers.json", lambda: run_reference(export, texts)),
        "before": stage(folder / "before.json", lambda: evaluated(folder, MODEL, texts)),
        "after": stage(folder / "after.json", lambda: evaluated(folder, str(run), texts)),
    }
    check(result)
    return result


def chosen_texts(folder: Path, num_texts: int | None) -> Path:
    """A folder with the shortest `num_texts` of the held-out texts; None means all."""
    found = sorted((ROOT / HELD_OUT).glob("*.txt"), key=lambda path: path.stat().st_size)[:num_texts]
    chosen = folder / "texts"
    chosen.mkdir(exist_ok=True)
    for path in found:
        shutil.copy(path, chosen / path.name)
    return chosen


def check(result: dict[str, Any]) -> None:
    """Stops unless training helped and the reference agrees.

    Raises:
        SystemExit: With the figures that do not fit.
    """
    before, validation = result["before"], result["training"]["validation"]
    after, reference = result["after"], result["transformers"]
    if after["loss"] >= before["loss"] or after["num_tokens"] != before["num_tokens"]:
        raise SystemExit(f"training did not help: {before} before, {after} after")
    if not same_digits(after["perplexity"], validation["val_ppl"]):
        raise SystemExit(f"shoal evaluate finds {after} where validation in packs found {validation}")
    same = same_digits(after["perplexity"], reference["perplexity"])
    if not same or reference["num_tokens"] != after["num_tokens"]:
        raise SystemExit(f"transformers finds {reference} where shoal evaluate finds {after}")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of smollm2.json")
    parser.add_argument("--folder", type=Path, help="folder of the run and of what has been measured")
    parser.add_argument(
        "--texts", type=int, metavar="N", help="take the N shortest held-out texts (default: all)"
    )
    parser.add_argument("--reference", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.reference is not None:
        print(json.dumps(reference_perplexity(*options.reference)))
        return 0
    facts = provenance(__doc__ or "")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) if options.folder is None else options.folder.absolute()
        folder.mkdir(exist_ok=True)
        result = {**facts, "ranks": NUM_RANKS, **measure(folder, options.texts)}
    options.results.mkdir(exist_ok=True)
    (options.results / "smollm2.json").write_text(json.dumps(result, indent=2) + "\n")
    print("\n".join(smollm2(result)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
