"""The quickstart: fetch, train a speech language model on two CPU cores, evaluate: `python scripts/quickstart/run.py`.

Exit status 0 means that the model was trained and transcribes what it hears.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import fetch
from curves import plot_loss, read_curve
from evaluation import Evaluation, evaluate

CONFIG = Path("examples/speechlm2/conf/quickstart.yaml")
HELDOUT = Path("data/quickstart/cuts_heldout.jsonl.gz")


@dataclass(frozen=True)
class Training:
    """What training took and saw."""

    wall_seconds: float
    cpu_seconds: float
    num_steps: int
    num_clips: int
    audio_seconds: float


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line entry; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help=f"overrides of keys of {CONFIG}")
    parser.add_argument("--runs", type=Path, default=Path("runs/quickstart"), help="folder of all runs")
    options = parser.parse_args(arguments)
    os.chdir(fetch.REPOSITORY)  # the YAML names its files from here
    if status := fetch.main([]):
        return status
    run = options.runs / time.strftime("%Y-%m-%d_%H-%M-%S")
    try:
        training = train(run, options.overrides)
    except subprocess.CalledProcessError as error:
        print(f"quickstart: training failed with exit status {error.returncode}", file=sys.stderr)
        return 1
    print(f"\nEvaluating on {HELDOUT}", flush=True)
    evaluation = evaluate(run, HELDOUT)
    picture = run / "loss.png"
    plot_loss(read_curve(run, "loss"), read_curve(run, "val_loss"), picture)
    _write_results(run / "results.json", training, evaluation)
    print(report(training, evaluation))
    print(f"Loss curve: {picture}\nAll transcripts: {run / 'results.json'}")
    for failure in (failures := evaluation.failures()):
        print(f"quickstart: NOT a working model: {failure}", file=sys.stderr)
    return 1 if failures else 0


def train(run: Path, overrides: Sequence[str]) -> Training:
    """Run `shoal train` with one thread a rank and collect what it took.

    Raises:
        subprocess.CalledProcessError: Training did not finish.
    """
    command = [sys.executable, "-m", "shoal.cli", "train", str(CONFIG), *overrides]
    command.append(f"exp_manager.explicit_log_dir={run}")
    print("\n$ " + " ".join(["shoal", *command[3:]]), flush=True)
    cpu, wall = _children_cpu_seconds(), time.perf_counter()
    subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=True)
    wall, cpu = time.perf_counter() - wall, _children_cpu_seconds() - cpu
    num_clips = read_curve(run, "num_samples").values
    audio_seconds = sum(read_curve(run, "audio_seconds").values)
    return Training(wall, cpu, len(num_clips), round(sum(num_clips)), audio_seconds)


def report(training: Training, evaluation: Evaluation) -> str:
    """The result as text."""
    lines = [
        "",
        f"Training: {training.num_steps} steps, {training.num_clips} clips, {training.audio_seconds / 60:.0f} "
        f"minutes of audio, in {training.wall_seconds:.0f} s ({training.cpu_seconds:.0f} CPU-s), start-up included",
        f"Held out: {len(evaluation.references)} real clips, {sum(evaluation.durations):.0f} s, whose texts occur "
        "nowhere in training",
        f"Word error rate: {evaluation.own_audio}",
        f"Given another clip's audio: {evaluation.other_audio}",
        f"Loss: {evaluation.listening}",
        "",
    ]
    for reference, hypothesis in evaluation.examples:
        lines += [f"  said:  {reference}", f"  heard: {hypothesis}", ""]
    return "\n".join(lines)


def _write_results(path: Path, training: Training, evaluation: Evaluation) -> None:
    content = {"training": vars(training), "evaluation": evaluation.to_dict()}
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _children_cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


if __name__ == "__main__":
    sys.exit(main())
