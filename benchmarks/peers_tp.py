"""Tensor parallelism over two ranks in Shoal, in transformers and in Lightning, on the same model and tokens.

transformers cuts the model by its own plan (`DistributedConfig(tp_size=2)`) in a plain loop; under Lightning's
`ModelParallelStrategy` the module cuts it with torch's `parallelize_module` and torch's styles. All three take two
micro-batches per step and AdamW, without clipping, which torch refuses for such mixes of parameters. The losses of each
step have to agree to four decimals, or the run is void.

    ratio = S(shoal) / S(peer),  S = median over repetitions of
            [ sum over ranks of ( median over timed steps of the step's CPU seconds ) ]

A step's CPU seconds are user plus system time of the rank's process. Repetitions alternate. One thread per rank.

    python benchmarks/peers_tp.py [--repetitions 3] [--steps 12] [--results FOLDER]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.overhead import LEARNING_RATE, MICRO_BATCH, MODEL, NUM_RANKS, SEQUENCE, Clock, write_model  # noqa: E402
from benchmarks.peers import (  # noqa: E402
    ACCUMULATION,
    largest_difference,
    launch,
    mean_loss,
    quiet_trainer,
    tokens_of,
    train_shoal,
)
from benchmarks.provenance import provenance  # noqa: E402

RESULTS = Path(__file__).parent / "results"
LIMIT = 1.05


def run_transformers(folder: Path, num_steps: int) -> dict[str, Any]:
    """A plain loop around the model as transformers cuts it."""
    import torch
    import torch.distributed as dist
    from transformers import LlamaForCausalLM
    from transformers.distributed import DistributedConfig

    dist.init_process_group("gloo")
    config = DistributedConfig(tp_size=NUM_RANKS)
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32, distributed_config=config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    clock = Clock()
    for step in range(num_steps):
        total = 0.0
        for micro_batch in range(ACCUMULATION):
            loss = mean_loss(model, tokens_of(step, micro_batch, 0)) / ACCUMULATION
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        clock.step_ended(total)
    return clock.report()


def run_lightning(folder: Path, num_steps: int) -> dict[str, Any]:
    """Lightning's Trainer; the module cuts itself with torch's styles, as its documentation shows."""
    import lightning.pytorch as pl
    import torch
    from lightning.pytorch.strategies import ModelParallelStrategy
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
    from torch.utils.data import DataLoader, Dataset
    from transformers import LlamaForCausalLM

    column, row = ("q_proj", "k_proj", "v_proj"), ("o_proj",)
    plan: dict[str, Any] = {f"model.layers.*.self_attn.{name}": ColwiseParallel() for name in column}
    plan |= {f"model.layers.*.self_attn.{name}": RowwiseParallel() for name in row}
    plan |= {f"model.layers.*.mlp.{name}": ColwiseParallel() for name in ("gate_proj", "up_proj")}
    plan |= {"model.layers.*.mlp.down_proj": RowwiseParallel()}
    plan |= {"model.embed_tokens": RowwiseParallel(input_layouts=Replicate())}
    plan |= {"lm_head": ColwiseParallel(output_layouts=Replicate())}

    class Micro(Dataset[Any]):
        def __len__(self) -> int:
            return num_steps * ACCUMULATION

        def __getitem__(self, index: int) -> Any:
            return tokens_of(index // ACCUMULATION, index % ACCUMULATION, 0)

    class Module(pl.LightningModule):
        def configure_model(self) -> None:
            if not hasattr(self, "model"):
                model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
                self.model = parallelize_module(model, self.device_mesh["tensor_parallel"], plan).train()
                self.total = 0.0

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE)

        def training_step(self, ids: Any, index: int) -> Any:
            loss = mean_loss(self.model, ids)
            self.total += loss.item() / ACCUMULATION
            return loss

        def on_train_batch_end(self, outputs: Any, batch: Any, index: int) -> None:
            if (index + 1) % ACCUMULATION == 0:
                clock.step_ended(self.total)
                self.total = 0.0

    clock = Clock()
    strategy = ModelParallelStrategy(
        data_parallel_size=1, tensor_parallel_size=NUM_RANKS, process_group_backend="gloo"
    )
    trainer = pl.Trainer(
        strategy=strategy, max_steps=num_steps, accumulate_grad_batches=ACCUMULATION, **quiet_trainer()
    )
    trainer.fit(Module(), DataLoader(Micro(), batch_size=None))
    return clock.report()


def run_shoal(folder: Path, num_steps: int, sequence_parallel: bool = False) -> dict[str, Any]:
    """Shoal as its LLM recipe runs."""
    from shoal.config.schema import FSDP2Config
    from shoal.train.strategy import AutomodelParallelStrategy

    options = FSDP2Config(sequence_parallel=sequence_parallel)
    strategy = AutomodelParallelStrategy(
        tp_size=NUM_RANKS, process_group_backend="gloo", distributed_config=options
    )
    return train_shoal(folder, num_steps, strategy, rank=0, dp_size=1, max_norm=None)[0]


def run_shoal_sp(folder: Path, num_steps: int) -> dict[str, Any]:
    """The same with sequence parallelism."""
    return run_shoal(folder, num_steps, sequence_parallel=True)


RUNS = {
    "shoal": run_shoal,
    "shoal-sp": run_shoal_sp,
    "transformers": run_transformers,
    "lightning": run_lightning,
}


def measure(repetitions: int, num_steps: int) -> dict[str, Any]:
    """Alternates the runs, checks that they agree, and takes medians."""
    runs: dict[str, list[list[dict[str, Any]]]] = {kind: [] for kind in RUNS}
    differences: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder))
        for repetition in range(repetitions):
            for kind in list(RUNS)[:: 1 if repetition % 2 == 0 else -1]:
                runs[kind].append(launch(kind, Path(folder), num_steps, __file__))
            ours = runs["shoal"][-1][0]["losses"]
            for kind in RUNS:
                theirs = runs[kind][-1][0]["losses"]
                difference = largest_difference(ours, theirs)
                differences[kind] = max(differences.get(kind, 0.0), difference)
    seconds = {
        kind: [sum(rank["step"] for rank in ranks) for ranks in repeated] for kind, repeated in runs.items()
    }
    medians = {kind: statistics.median(values) for kind, values in seconds.items()}
    return {
        "ratios": {kind: medians["shoal"] / medians[kind] for kind in RUNS if kind != "shoal"},
        "largest_loss_difference": differences,
        "cpu_seconds_per_step_over_ranks": seconds,
        "losses": runs["shoal"][0][0]["losses"],
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of peers_tp.json")
    for hidden in ("--worker", "--folder", "--reports"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker is not None:
        report = RUNS[options.worker](Path(options.folder), options.steps)
        (Path(options.reports) / f"{os.environ['RANK']}.json").write_text(json.dumps(report))
        return 0

    facts = provenance(__doc__ or "", ("lightning",))
    setting = {
        "ranks": NUM_RANKS,
        "model": MODEL,
        "micro_batch": [MICRO_BATCH, SEQUENCE],
        "accumulation": ACCUMULATION,
        "steps": options.steps,
        "limit": LIMIT,
    }
    result = {**facts, **setting, **measure(options.repetitions, options.steps)}
    options.results.mkdir(exist_ok=True)
    (options.results / "peers_tp.json").write_text(json.dumps(result, indent=2) + "\n")
    for kind, ratio in result["ratios"].items():
        difference = result["largest_loss_difference"][kind]
        print(f"{ratio:.3f} of the CPU seconds of {kind}; losses differ by at most {difference:.1e}")
    late = [kind for kind in ("transformers", "lightning") if result["ratios"][kind] > LIMIT]
    return 1 if late else 0


if __name__ == "__main__":
    sys.exit(main())
