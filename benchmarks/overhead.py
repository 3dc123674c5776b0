"""What Shoal costs on top of a hand-written FSDP2 loop: CPU seconds per step and of the start-up.

Both train the same transformers Llama, from the same folder, on the same tokens, with the same AdamW and
clipping, on gloo ranks of this machine; the losses of every step are compared, so that both are known to do the
same work.

    step ratio     = S(shoal) / S(bare),  S = median over repetitions of
                     [ sum over ranks of ( median over timed steps of the step's CPU seconds ) ]
    start-up ratio = U(shoal) / U(bare),  U = median over repetitions of
                     [ sum over ranks of the process's CPU seconds until the end of its first step ]

A step's CPU seconds are user plus system time of the rank's process, from the end of one step to the end of
the next: data loading, forward, backward, communication, clipping, the optimizer, and for Shoal Lightning's loop,
callbacks and logging. Repetitions of the two alternate. One thread per rank. Processes that compete for the cores
inflate CPU seconds, and those of the loop with more system calls most: the load average of the machine while
measuring is part of the result, and is NUM_RANKS or a little less on a machine that does nothing else.

    python benchmarks/overhead.py [--repetitions 3] [--steps 30] [--check] [--results FOLDER]
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = Path(__file__).parent / "results"
NUM_RANKS = 2
MODEL = {
    "vocab_size": 2048,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 6,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "max_position_embeddings": 256,
}
MICRO_BATCH, SEQUENCE = 2, 256
LEARNING_RATE, MAX_NORM = 3e-4, 1.0
NUM_UNTIMED_STEPS = 5
TARGETS = {"step": 1.05, "start-up": 1.3}
LOSS_TOLERANCE = 1e-4


class Clock:
    """CPU seconds of this process at the end of every step."""

    def __init__(self) -> None:
        self.ends: list[float] = []
        self.losses: list[float] = []

    def step_ended(self, loss: float) -> None:
        usage = resource.getrusage(resource.RUSAGE_SELF)
        self.ends.append(usage.ru_utime + usage.ru_stime)
        self.losses.append(loss)

    def report(self) -> dict[str, Any]:
        steps = [end - start for start, end in zip(self.ends, self.ends[1:], strict=False)]
        timed = steps[NUM_UNTIMED_STEPS - 1 :]
        return {"startup": self.ends[0], "step": statistics.median(timed), "losses": self.losses}


def tokens_of(step: int, rank: int) -> Any:
    """The micro-batch [B, S] of a rank in a step."""
    import torch

    generator = torch.Generator().manual_seed(step * NUM_RANKS + rank)
    return torch.randint(0, MODEL["vocab_size"], (MICRO_BATCH, SEQUENCE), generator=generator)


# --------------------------------------------------------------------------------------------------- bare


def run_bare(folder: Path, num_steps: int) -> dict[str, Any]:
    """The loop one would write by hand: mean loss, FSDP2's averaging, foreach AdamW."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from transformers import LlamaForCausalLM

    clock = Clock()
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh, reshard_after_forward=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    model.train()
    for step in range(num_steps):
        ids = tokens_of(step, dist.get_rank())
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        clock.step_ended(loss.item())
    report = clock.report()
    dist.destroy_process_group()
    return report


# -------------------------------------------------------------------------------------------------- shoal


def run_shoal(folder: Path, num_steps: int) -> dict[str, Any]:
    """Shoal as a user runs it: Lightning's Trainer, our strategy, module and training step."""
    import lightning.pytorch as pl
    import torch
    from torch.utils.data import DataLoader, Dataset
    from transformers import LlamaConfig, LlamaForCausalLM

    from shoal.config.values import FrozenDict, TargetConfig
    from shoal.data.batch import StepBatch
    from shoal.data.position import StreamPosition
    from shoal.models.assemble import ModelPlan
    from shoal.models.load import WeightSource
    from shoal.train.modules import ShoalModule
    from shoal.train.precision import ShoalPrecision
    from shoal.train.strategy import AutomodelParallelStrategy

    class CausalLM(torch.nn.Module):
        """A language model as a trainable module: one forward from a micro-batch to sums."""

        def __init__(self) -> None:
            super().__init__()
            self.llm = LlamaForCausalLM(LlamaConfig.from_pretrained(folder))

        def forward(self, micro_batch: dict[str, Any]) -> dict[str, torch.Tensor]:
            ids, labels = micro_batch["input_ids"], micro_batch["input_ids"][:, 1:].flatten()
            logits = self.llm(input_ids=ids, use_cache=False).logits[:, :-1].flatten(0, 1)
            loss_sum = torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
            num_correct = (logits.argmax(-1) == labels).sum().float()
            num_tokens = torch.tensor(float(labels.numel()), device=ids.device)
            return {"loss_sum": loss_sum, "num_correct": num_correct, "num_tokens": num_tokens}

    class Steps(Dataset[StepBatch]):
        """Step batches of this rank."""

        def __len__(self) -> int:
            return num_steps

        def __getitem__(self, step: int) -> StepBatch:
            ids = tokens_of(step, int(os.environ["RANK"]))
            micro_batch = {
                "input_ids": ids,
                "loss_mask": torch.ones_like(ids, dtype=torch.bool),
                "text_lens": torch.full((MICRO_BATCH,), SEQUENCE),
                "audios": torch.zeros(0, 0),
                "audio_lens": torch.zeros(0, dtype=torch.int64),
                "sample_ids": [f"{step}-{row}" for row in range(MICRO_BATCH)],
                "sample_seeds": torch.arange(MICRO_BATCH),
                "is_empty": False,
            }
            return StepBatch([micro_batch], StreamPosition(0, (step + 1) * NUM_RANKS))

    class Timer(pl.Callback):
        """Reads the clock where Lightning ends a step."""

        def on_train_batch_end(self, *arguments: Any, **keywords: Any) -> None:
            outputs = arguments[2]
            clock.step_ended(float(outputs["loss"] if isinstance(outputs, dict) else outputs))

    clock = Clock()
    plan = ModelPlan(CausalLM, weights=[WeightSource("llm", folder)])
    optimizer = TargetConfig("torch.optim.AdamW", FrozenDict(lr=LEARNING_RATE))
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=NUM_RANKS,
        strategy=AutomodelParallelStrategy(process_group_backend="gloo"),
        plugins=[ShoalPrecision("32-true")],
        max_steps=num_steps,
        logger=False,
        callbacks=[Timer()],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    trainer.fit(
        ShoalModule(plan, optimizer, gradient_clip_val=MAX_NORM), DataLoader(Steps(), batch_size=None)
    )
    return clock.report()


# ----------------------------------------------------------------------------------------------- measuring


def write_model(folder: Path) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**MODEL)).save_pretrained(folder)


def launch(kind: str, folder: Path, num_steps: int) -> list[dict[str, Any]]:
    """One repetition in fresh processes; returns the ranks' reports."""
    with tempfile.TemporaryDirectory() as reports:
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            str(NUM_RANKS),
        ]
        command += [__file__, "--worker", kind, "--folder", str(folder), "--reports", reports]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run(
            [*command, "--steps", str(num_steps)], check=True, env=environment, stdout=subprocess.DEVNULL
        )
        return [json.loads((Path(reports) / f"{rank}.json").read_text()) for rank in range(NUM_RANKS)]


def compare_losses(bare: Sequence[dict[str, Any]], shoal: Sequence[dict[str, Any]]) -> float:
    """Largest relative difference of a step's loss; the bare ranks hold the means of equally many tokens."""
    means = [statistics.fmean(values) for values in zip(*(rank["losses"] for rank in bare), strict=True)]
    difference = max(abs(a - b) / b for a, b in zip(shoal[0]["losses"], means, strict=True))
    if difference > LOSS_TOLERANCE:
        raise SystemExit(f"the losses differ by {difference:.1e}: the two loops do not do the same work")
    return difference


def measure(repetitions: int, num_steps: int) -> dict[str, Any]:
    runs: dict[str, list[list[dict[str, Any]]]] = {"bare": [], "shoal": []}
    differences = []
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder))
        for repetition in range(repetitions):
            for kind in ("bare", "shoal") if repetition % 2 == 0 else ("shoal", "bare"):
                runs[kind].append(launch(kind, Path(folder), num_steps))
            differences.append(compare_losses(runs["bare"][-1], runs["shoal"][-1]))
    seconds = {
        kind: {key: [sum(rank[key] for rank in ranks) for ranks in done] for key in ("step", "startup")}
        for kind, done in runs.items()
    }
    medians = {
        kind: {key: statistics.median(v) for key, v in values.items()} for kind, values in seconds.items()
    }
    return {
        "ratios": {
            "step": medians["shoal"]["step"] / medians["bare"]["step"],
            "start-up": medians["shoal"]["startup"] / medians["bare"]["startup"],
        },
        "cpu_seconds_over_ranks": seconds,
        "largest_loss_difference": max(differences),
        "load_average_over_5_minutes": round(os.getloadavg()[1], 2),
    }


def context(num_steps: int) -> dict[str, Any]:
    """What the numbers belong to."""
    from importlib.metadata import version

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout.strip()

    return {
        "commit": git("rev-parse", "HEAD"),
        "modified_files": len(git("status", "--porcelain", "--untracked-files=no", "--", "src").splitlines()),
        "python": sys.version.split()[0],
        "versions": {name: version(name) for name in ("shoal", "torch", "transformers", "lightning")},
        "num_cpus": os.cpu_count(),
        "ranks": NUM_RANKS,
        "model": MODEL,
        "micro_batch": [MICRO_BATCH, SEQUENCE],
        "steps": num_steps,
        "untimed_steps": NUM_UNTIMED_STEPS,
        "formula": (__doc__ or "").split("\n\n")[2],
        "targets": TARGETS,
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--check", action="store_true", help="exit with 1 when a target is missed")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of overhead.json")
    for hidden in ("--worker", "--folder", "--reports"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker is not None:
        run = {"bare": run_bare, "shoal": run_shoal}[options.worker]
        report = run(Path(options.folder), options.steps)
        (Path(options.reports) / f"{os.environ['RANK']}.json").write_text(json.dumps(report))
        return 0

    result = {**context(options.steps), **measure(options.repetitions, options.steps)}
    options.results.mkdir(exist_ok=True)
    (options.results / "overhead.json").write_text(json.dumps(result, indent=2) + "\n")
    missed = 0
    for name, ratio in result["ratios"].items():
        missed += ratio > TARGETS[name]
        print(f"{name:<9} {ratio:.3f} of the bare loop's CPU seconds (target {TARGETS[name]:g})")
    if (load := result["load_average_over_5_minutes"]) > NUM_RANKS + 0.5:
        print(
            f"the load average was {load}: other processes competed for the cores, measure again without them"
        )
    return 1 if missed and options.check else 0


if __name__ == "__main__":
    sys.exit(main())
