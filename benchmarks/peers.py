"""The same training in Shoal, in accelerate (FSDP2) and in Lightning (FSDP2 by hand under ModelParallelStrategy).

All three train one transformers Llama from one folder on the same tokens, two micro-batches per rank and step, with
AdamW and clipping, on gloo ranks of this machine. Every micro-batch has the same number of tokens, so that the means
that accelerate and Lightning take are the sums that Shoal divides once; the losses of every step have to agree to
four decimals, or the run is void.

    ratio = S(shoal) / S(peer),  S = median over repetitions of
            [ sum over ranks of ( median over timed steps of the step's CPU seconds ) ]

A step's CPU seconds are user plus system time of the rank's process, from the end of one step to the end of the next.
Repetitions alternate. One thread per rank. Needs the package accelerate.

    python benchmarks/peers.py [--repetitions 3] [--steps 20] [--results FOLDER]
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

from benchmarks.overhead import (  # noqa: E402 (needs the path above)
    LEARNING_RATE,
    MAX_NORM,
    MICRO_BATCH,
    MODEL,
    NUM_RANKS,
    SEQUENCE,
    Clock,
    write_model,
)
from benchmarks.provenance import provenance  # noqa: E402

RESULTS = Path(__file__).parent / "results"
ACCUMULATION = 2
DECIMALS = 4


def tokens_of(step: int, micro_batch: int, rank: int) -> Any:
    """Micro-batch [B, S] of a rank in a step."""
    import torch

    generator = torch.Generator().manual_seed((step * ACCUMULATION + micro_batch) * NUM_RANKS + rank)
    return torch.randint(0, MODEL["vocab_size"], (MICRO_BATCH, SEQUENCE), generator=generator)


def mean_loss(model: Any, ids: Any) -> Any:
    """Mean cross-entropy of the next token."""
    import torch

    logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def run_accelerate(folder: Path, num_steps: int) -> dict[str, Any]:
    """accelerate's loop with its FSDP2 plugin and its own gradient accumulation."""
    import torch
    from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin
    from transformers import LlamaForCausalLM

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        reshard_after_forward=True,
        cpu_ram_efficient_loading=False,
    )
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin, gradient_accumulation_steps=ACCUMULATION)
    # On CPU accelerate drops the plugin without a word and runs DDP; its FSDP2 path itself works there.
    accelerator.state.distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = plugin
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    model, optimizer = accelerator.prepare(model, optimizer)
    clock = Clock()
    model.train()
    for step in range(num_steps):
        total = 0.0
        for micro_batch in range(ACCUMULATION):
            with accelerator.accumulate(model):
                loss = mean_loss(model, tokens_of(step, micro_batch, accelerator.process_index))
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), MAX_NORM)
                optimizer.step()
                optimizer.zero_grad()
            total += loss.item() / ACCUMULATION
        clock.step_ended(total)
    return {**clock.report(), "sharding": _sharding(model)}


def run_lightning(folder: Path, num_steps: int) -> dict[str, Any]:
    """Lightning's Trainer with its own accumulation; the module shards itself, as its documentation shows.

    Lightning clips no DTensors, so the module does, with torch's function.
    """
    import lightning.pytorch as pl
    import torch
    from lightning.pytorch.strategies import ModelParallelStrategy
    from torch.distributed.fsdp import fully_shard
    from torch.utils.data import DataLoader, Dataset
    from transformers import LlamaForCausalLM

    class Micro(Dataset[Any]):
        def __len__(self) -> int:
            return num_steps * ACCUMULATION

        def __getitem__(self, index: int) -> Any:
            return tokens_of(index // ACCUMULATION, index % ACCUMULATION, int(os.environ["RANK"]))

    class Module(pl.LightningModule):
        def configure_model(self) -> None:
            if hasattr(self, "model"):
                return
            self.model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
            mesh = self.device_mesh["data_parallel"]
            for layer in self.model.model.layers:
                fully_shard(layer, mesh=mesh)
            fully_shard(self.model, mesh=mesh, reshard_after_forward=False)
            self.model.train()
            self.total = 0.0

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE)

        def training_step(self, ids: Any, index: int) -> Any:
            self.model.set_requires_gradient_sync((index + 1) % ACCUMULATION == 0)
            loss = mean_loss(self.model, ids)
            self.total += loss.item() / ACCUMULATION
            return loss

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), MAX_NORM)

        def on_train_batch_end(self, outputs: Any, batch: Any, index: int) -> None:
            if (index + 1) % ACCUMULATION == 0:
                clock.step_ended(self.total)
                self.total = 0.0

    clock = Clock()
    strategy = ModelParallelStrategy(
        data_parallel_size=NUM_RANKS, tensor_parallel_size=1, process_group_backend="gloo"
    )
    module = Module()
    trainer = pl.Trainer(
        strategy=strategy, max_steps=num_steps, accumulate_grad_batches=ACCUMULATION, **quiet_trainer()
    )
    trainer.fit(module, DataLoader(Micro(), batch_size=None))
    return {**clock.report(), "sharding": _sharding(module.model)}


def run_shoal(folder: Path, num_steps: int) -> dict[str, Any]:
    """Shoal as its LLM recipe runs, sharded over the ranks."""
    from shoal.train.strategy import AutomodelParallelStrategy

    strategy = AutomodelParallelStrategy(process_group_backend="gloo")
    rank = int(os.environ["RANK"])
    report, model = train_shoal(folder, num_steps, strategy, rank=rank, dp_size=NUM_RANKS, max_norm=MAX_NORM)
    return {**report, "sharding": _sharding(model)}


def train_shoal(
    folder: Path, num_steps: int, strategy: Any, *, rank: int, dp_size: int, max_norm: float | None
) -> tuple[dict[str, Any], Any]:
    """The trainable module, the training step and Lightning's Trainer; returns the clock's report and the model."""
    import lightning.pytorch as pl
    from torch.utils.data import DataLoader, Dataset
    from transformers import LlamaConfig, LlamaForCausalLM

    from shoal.config.values import FrozenDict, TargetConfig
    from shoal.data.batch import StepBatch
    from shoal.data.position import StreamPosition
    from shoal.models.assemble import ModelPlan
    from shoal.models.causal_lm import CausalLM
    from shoal.models.load import WeightSource
    from shoal.train.modules import ShoalModule
    from shoal.train.precision import ShoalPrecision

    class Steps(Dataset[StepBatch]):
        def __len__(self) -> int:
            return num_steps

        def __getitem__(self, step: int) -> StepBatch:
            micro_batches = [text_micro_batch(tokens_of(step, index, rank)) for index in range(ACCUMULATION)]
            return StepBatch(micro_batches, StreamPosition(0, (step + 1) * dp_size * ACCUMULATION))

    class Timer(pl.Callback):
        def on_train_batch_end(self, *arguments: Any, **keywords: Any) -> None:
            outputs = arguments[2]
            clock.step_ended(float(outputs["loss"] if isinstance(outputs, dict) else outputs))

    clock = Clock()
    plan = ModelPlan(
        lambda: CausalLM(LlamaForCausalLM(LlamaConfig.from_pretrained(folder))),
        weights=[WeightSource("llm", folder)],
    )
    optimizer = TargetConfig("torch.optim.AdamW", FrozenDict(lr=LEARNING_RATE))
    module = ShoalModule(plan, optimizer, gradient_clip_val=max_norm)
    plugins: list[Any] = [ShoalPrecision("32-true")]
    trainer = pl.Trainer(
        strategy=strategy, plugins=plugins, max_steps=num_steps, callbacks=[Timer()], **quiet_trainer()
    )
    trainer.fit(module, DataLoader(Steps(), batch_size=None))
    return clock.report(), module.model


def text_micro_batch(ids: Any) -> dict[str, Any]:
    import torch

    return {
        "input_ids": ids,
        "loss_mask": torch.ones_like(ids, dtype=torch.bool),
        "text_lens": torch.full((MICRO_BATCH,), SEQUENCE),
        "sample_ids": [str(row) for row in range(MICRO_BATCH)],
        "audios": torch.zeros(0, 0),
        "audio_lens": torch.zeros(0, dtype=torch.int64),
        "is_empty": False,
    }


def quiet_trainer() -> dict[str, Any]:
    return {
        "accelerator": "cpu",
        "devices": NUM_RANKS,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "use_distributed_sampler": False,
    }


def _sharding(model: Any) -> dict[str, Any]:
    """Number of FSDP units, and the share of the parameters that this rank holds, which has to be the same in all."""
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor

    parameters = list(model.parameters())
    local = sum((p.to_local() if isinstance(p, DTensor) else p).numel() for p in parameters)
    units = sum(isinstance(module, FSDPModule) for module in model.modules())
    return {"units": units, "share": round(local / sum(p.numel() for p in parameters), 3)}


# ----------------------------------------------------------------------------------------------- measuring

RUNS = {"shoal": run_shoal, "accelerate": run_accelerate, "lightning": run_lightning}


def launch(kind: str, folder: Path, num_steps: int, script: str = __file__) -> list[dict[str, Any]]:
    """One repetition in fresh processes; the ranks' reports."""
    with tempfile.TemporaryDirectory() as reports:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(NUM_RANKS), script, "--worker", kind]
        command += ["--folder", str(folder), "--reports", reports, "--steps", str(num_steps)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)
        return [json.loads((Path(reports) / f"{rank}.json").read_text()) for rank in range(NUM_RANKS)]


def step_losses(kind: str, ranks: list[dict[str, Any]]) -> list[float]:
    """The loss of every step over all ranks; the peers report the means of theirs."""
    if kind == "shoal":
        return list(ranks[0]["losses"])
    return [statistics.fmean(values) for values in zip(*(rank["losses"] for rank in ranks), strict=True)]


def largest_difference(ours: list[float], theirs: list[float]) -> float:
    """Largest difference of a step's loss; exits when it shows in the fourth decimal."""
    difference = max(abs(a - b) for a, b in zip(ours, theirs, strict=True))
    if difference >= 0.5 * 10**-DECIMALS:
        raise SystemExit(f"the losses differ by {difference:.1e}: the runs do not do the same work")
    return difference


def measure(repetitions: int, num_steps: int) -> dict[str, Any]:
    """Alternates the three, checks that they agree, and takes medians."""
    runs: dict[str, list[list[dict[str, Any]]]] = {kind: [] for kind in RUNS}
    differences: dict[str, float] = dict.fromkeys(("accelerate", "lightning"), 0.0)
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder))
        for repetition in range(repetitions):
            for kind in list(RUNS)[:: 1 if repetition % 2 == 0 else -1]:
                runs[kind].append(launch(kind, Path(folder), num_steps))
            ours = step_losses("shoal", runs["shoal"][-1])
            for peer in differences:
                difference = largest_difference(ours, step_losses(peer, runs[peer][-1]))
                differences[peer] = max(differences[peer], difference)
    seconds = {
        kind: [sum(rank["step"] for rank in ranks) for ranks in repeated] for kind, repeated in runs.items()
    }
    sharding = {kind: repeated[0][0]["sharding"] for kind, repeated in runs.items()}
    if len({value["share"] for value in sharding.values()}) > 1:
        raise SystemExit(f"the runs are not sharded alike: {sharding}")
    medians = {kind: statistics.median(values) for kind, values in seconds.items()}
    return {
        "ratios": {peer: medians["shoal"] / medians[peer] for peer in differences},
        "largest_loss_difference": differences,
        "cpu_seconds_per_step_over_ranks": seconds,
        "sharding": sharding,
        "losses": step_losses("shoal", runs["shoal"][0]),
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of peers.json")
    for hidden in ("--worker", "--folder", "--reports"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker is not None:
        report = RUNS[options.worker](Path(options.folder), options.steps)
        (Path(options.reports) / f"{os.environ['RANK']}.json").write_text(json.dumps(report))
        return 0

    facts = provenance(__doc__ or "", ("accelerate", "lightning"))
    setting = {
        "ranks": NUM_RANKS,
        "model": MODEL,
        "micro_batch": [MICRO_BATCH, SEQUENCE],
        "accumulation": ACCUMULATION,
        "steps": options.steps,
    }
    result = {**facts, **setting, **measure(options.repetitions, options.steps)}
    options.results.mkdir(exist_ok=True)
    (options.results / "peers.json").write_text(json.dumps(result, indent=2) + "\n")
    for peer, ratio in result["ratios"].items():
        difference = result["largest_loss_difference"][peer]
        print(f"{ratio:.3f} of the CPU seconds of {peer}; losses differ by at most {difference:.1e}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
