"""A linear classifier as a trainable module, and its micro-batches, for faults that need no language model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.config.schema import DDPConfig, FSDP2Config, ParallelismSizes
from shoal.data.batch import StepBatch
from shoal.data.position import StreamPosition
from shoal.models.assemble import ModelPlan, Numerics, assemble
from shoal.parallel.model import ParallelModel
from shoal.parallel.setup import DistributedSetup
from shoal.train.step import agree_on_step, train_step
from tests.parity.harness import Record, Recording

CPU = torch.device("cpu")
STRATEGIES = ("ddp", "fsdp2", "hsdp")


class Toy(nn.Module):
    """Cross-entropy of a linear layer over the supervised rows of ``features`` [B, D] and ``targets`` [B]."""

    def __init__(self, num_features: int, num_classes: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(num_features, num_classes)])

    def forward(self, micro_batch: Mapping[str, Any]) -> dict[str, Tensor]:
        logits = self.layers[0](micro_batch["features"])
        supervised = micro_batch["loss_mask"][:, 1]
        losses = F.cross_entropy(logits, micro_batch["targets"], reduction="none")
        correct = (logits.argmax(-1) == micro_batch["targets"]) & supervised
        return {
            "loss_sum": (losses * supervised).sum(),
            "num_correct": correct.sum(),
            "num_tokens": supervised.sum(),
        }


def toy_batch(features: Tensor, targets: Tensor, supervised: Sequence[bool] | None = None) -> dict[str, Any]:
    rows = len(features)
    mask = torch.zeros(rows, 2, dtype=torch.bool)
    mask[:, 1] = torch.tensor([True] * rows if supervised is None else list(supervised))
    return {
        "features": features,
        "targets": targets,
        "input_ids": torch.zeros(rows, 2, dtype=torch.int64),
        "loss_mask": mask,
        "text_lens": torch.full((rows,), 2),
        "audios": torch.zeros(0, 0),
        "audio_lens": torch.zeros(0, dtype=torch.int64),
        "sample_ids": [f"row-{row}" for row in range(rows)],
        "is_empty": False,
    }


def toy_model(module: type[nn.Module], strategy: str, world: int, *args: Any) -> ParallelModel:
    """Assembles ``module(*args)`` in float64 under a strategy; `plain` needs no process group."""
    setup = None
    if strategy != "plain":
        options = DDPConfig() if strategy == "ddp" else FSDP2Config()
        sizes = ParallelismSizes(dp_replicate_size=2 if strategy == "hsdp" else None)
        setup = DistributedSetup.build(strategy=options, parallelism_sizes=sizes, world_size=world)
    plan = ModelPlan(lambda: module(*args), llm="", seed=1)
    return assemble(plan, setup, Numerics(stored=torch.float64), CPU)


def step_of(
    model: ParallelModel, mine: list[dict[str, Any]], optimizer: torch.optim.Optimizer | None = None
) -> Record:
    """One step on this rank's micro-batches; the record has the full gradients, the loss and the norm."""
    record = Record()
    optimizer = optimizer or torch.optim.SGD(model.module.parameters(), lr=0.0)
    batch = StepBatch(mine, StreamPosition(), None, {})
    header = agree_on_step(batch, model.group, CPU)
    recording = Recording(optimizer, model.module, record)
    result = train_step(model, batch, recording, step=0, seed=0, max_norm=None, header=header)
    record.losses.append(result.loss)
    record.norms.append(result.gradient_norm)
    return record
