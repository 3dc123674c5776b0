"""Trains under a layout, with the real assembly and the real training step, and keeps every number."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist

from shoal.config.errors import ConfigError, Finding
from shoal.data.batch import MicroBatch, StepBatch
from shoal.data.position import StreamPosition
from shoal.mesh.sizes import MeshCoordinate
from shoal.models.assemble import ModelPlan, Numerics, assemble
from shoal.parallel.model import ParallelModel, Sums
from shoal.parallel.setup import DistributedSetup
from shoal.train.step import agree_on_step, train_step
from shoal.verify.capture import Capture, Captured, TokenShare
from shoal.verify.record import Record, Recording, full_tensors, saved_buffers
from shoal.verify.task import MeshLayout, Task, digest

CPU = torch.device("cpu")


@dataclass
class RankRecord:
    """What one rank saw and computed.

    Attributes:
        coordinate: Where the rank sits on the mesh.
        record: Its numbers, whole: of every parameter it holds a part of.
        digests: Hashes of its micro-batches, for each step.
        captured: Outputs of its modules in the first step, when asked for.
    """

    coordinate: MeshCoordinate
    record: Record
    digests: list[list[str]] = field(default_factory=list)
    captured: list[Captured] = field(default_factory=list)


def train_on_mesh(task: Task, layout: MeshLayout, *, capture: bool = False) -> RankRecord:
    """Trains as one rank of a layout; collective over an open process group of `layout.world` ranks."""
    setup, model = _assembled(task, layout)
    model.module.train()
    record = Record(initial=full_tensors(model.module))
    seen = RankRecord(setup.mesh_context.sizes.coordinate(dist.get_rank()), record)
    taken = Capture(model.module) if capture else None
    parameters = [parameter for parameter in model.module.parameters() if parameter.requires_grad]
    optimizer = Recording(task.optimizer(parameters), model.module, record)
    for step in range(task.num_steps):
        batch = deal(task.draw(step), model, task.empty)
        seen.digests.append([digest(micro_batch) for micro_batch in batch.micro_batches])
        header = agree_on_step(batch, model.group, CPU)
        watched = model if taken is None or step else _watched(model, taken)
        result = train_step(
            watched, batch, optimizer, step=step, seed=task.seed, max_norm=task.max_norm, header=header
        )
        record.losses.append(result.loss)
        record.norms.append(result.gradient_norm)
        record.tokens.append(header.num_tokens)
        if taken is not None and step == 0:
            seen.captured = taken.close()
    record.weights = {**full_tensors(model.module), **saved_buffers(model.module)}
    return seen


def deal_on_mesh(task: Task, layout: MeshLayout) -> RankRecord:
    """What one rank of a layout would train on; collective, nothing is trained."""
    setup, model = _assembled(task, layout)
    seen = RankRecord(setup.mesh_context.sizes.coordinate(dist.get_rank()), Record())
    for step in range(task.num_steps):
        batch = deal(task.draw(step), model, task.empty)
        seen.digests.append([digest(micro_batch) for micro_batch in batch.micro_batches])
    return seen


def _assembled(task: Task, layout: MeshLayout) -> tuple[DistributedSetup, ParallelModel]:
    """Mesh and model of a layout. Collective.

    Raises:
        ConfigError: The layout, or the model on it, is refused; nothing has been trained.
    """
    setup = build_setup(layout)
    try:
        return setup, assemble(plan_for(task, layout), setup, Numerics(stored=task.dtype), CPU)
    except ConfigError:
        raise
    except ValueError as error:
        finding = Finding(
            "verify-layout", "layout", layout.describe(), str(error), "change the layout or the model"
        )
        raise ConfigError([finding]) from error


def build_setup(layout: MeshLayout) -> DistributedSetup:
    """The mesh of a layout. Collective."""
    return DistributedSetup.build(
        strategy=layout.strategy,
        parallelism_sizes=layout.sizes,
        pipeline_config=layout.pipeline,
        moe_parallel_config=layout.moe,
        world_size=layout.world,
    )


def plan_for(task: Task, layout: MeshLayout) -> ModelPlan:
    """The plan of a task with what belongs to the layout."""
    return replace(
        task.plan,
        checkpoint_llm=bool(layout.checkpoint_llm),
        checkpoint_perception=layout.checkpoint_perception,
    )


def deal(batches: Sequence[MicroBatch], model: ParallelModel, empty: Callable[[], MicroBatch]) -> StepBatch:
    """Round-robin over the data-parallel ranks, filled up with empty micro-batches."""
    rounds = -(-len(batches) // model.dp_size)
    filled = [*batches, *(empty() for _ in range(rounds * model.dp_size - len(batches)))]
    return StepBatch(filled[model.dp_rank :: model.dp_size], StreamPosition(0, len(batches)), None, {})


def _watched(model: ParallelModel, capture: Capture) -> ParallelModel:
    """The same model, telling `capture` where a micro-batch begins, and which of its tokens are here."""
    started, module = False, model.module
    context = getattr(module, "context_parallel", None)
    if context is not None:
        module.context_parallel = _NotedShares(context, capture)  # type: ignore[assignment]

    def forward(micro_batch: Mapping[str, Any]) -> Sums:
        nonlocal started
        if started:
            capture.next()
        started = True
        return model.forward(micro_batch)

    return replace(model, forward=forward)


@dataclass(frozen=True)
class _NotedShares:
    """Context parallelism that tells `capture` what this rank's share of a micro-batch is."""

    context: Any
    capture: Capture

    def share(self, micro_batch: Mapping[str, Any]) -> Any:
        share = self.context.share(micro_batch)
        self.capture.shares(TokenShare(share.index, share.is_real))
        return share

    def __getattr__(self, name: str) -> Any:
        return getattr(self.context, name)
