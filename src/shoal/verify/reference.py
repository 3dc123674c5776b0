"""The plain process: no process group, no mesh, none of the parallel code; torch's own clipping and AdamW.

It sums the losses of all micro-batches of a step, divides once by all their supervised tokens, and calls backward
once per micro-batch. Only the model is shared with the layout, without packing and with the attention and state-space
layers of transformers; for text even its loss is computed another way, see `shoal.verify.documents`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from shoal.config.seeds import derive_seed
from shoal.data.batch import MicroBatch
from shoal.models.assemble import Numerics, assemble
from shoal.models.dropout import dropout_step
from shoal.speech.batch_norm import update_running_statistics
from shoal.verify.capture import Capture, Captured
from shoal.verify.record import Record, full_tensors, saved_buffers
from shoal.verify.task import Task, supervised_tokens

CPU = torch.device("cpu")


def train_plain(task: Task, *, independent: bool = True) -> Record:
    """Trains in this process.

    Args:
        task: What to train.
        independent: Build `task.plain` and take `task.plain_loss`, where there are such; else what ranks build, and the
            trainable module's forward.
    """
    module = build_plain(task, independent=independent)
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    optimizer = task.optimizer(parameters)
    record = Record(initial=full_tensors(module))
    for step in range(task.num_steps):
        batches = task.draw(step)
        tokens = supervised_tokens(batches)
        total = 0.0
        with dropout_step(module, task.seed, step):
            for loss in losses_of(task, module, batches, step, independent=independent):
                (loss / max(tokens, 1)).backward()  # type: ignore[no-untyped-call]
                total += float(loss.detach()) / max(tokens, 1)
        record.gradients.append(full_tensors(module, lambda parameter: parameter.grad))
        limit = float("inf") if task.max_norm is None else task.max_norm
        norm = nn.utils.clip_grad_norm_(parameters, limit)
        optimizer.step()
        optimizer.zero_grad()
        update_running_statistics(module, None)
        record.losses.append(total)
        record.norms.append(float(norm))
        record.tokens.append(tokens)
    record.weights = {**full_tensors(module), **saved_buffers(module)}
    return record


def build_plain(task: Task, *, independent: bool = False) -> nn.Module:
    """The model on one process, in training mode, with the same initial values as on any mesh; see `train_plain`."""
    plan = task.plain if independent and task.plain is not None else task.plan
    return assemble(plan, None, Numerics(stored=task.dtype), CPU).module.train()


def losses_of(
    task: Task, module: nn.Module, batches: list[MicroBatch], step: int, *, independent: bool = True
) -> Iterator[Tensor]:
    """The sum of token losses of each micro-batch of a step, one after the other."""
    for index, batch in enumerate(batches):
        # The random numbers of a micro-batch are named by its place in the step.
        torch.manual_seed(derive_seed(task.seed, step, index))
        if independent and task.plain_loss is not None:
            yield task.plain_loss(module, batch)
        else:
            yield module(batch)["loss_sum"]


@dataclass(frozen=True)
class Contributions:
    """What each micro-batch of the first step contributes.

    Attributes:
        gradients: For each global micro-batch, the gradient of its loss sum over all tokens of the step, by name.
        tokens: Supervised tokens of each micro-batch.
        captured: Outputs of every module and their gradients, for each micro-batch.
    """

    gradients: list[Mapping[str, Tensor]]
    tokens: list[int]
    captured: list[Captured]


def contributions(task: Task) -> Contributions:
    """Runs the first step one micro-batch at a time, through the trainable module's forward."""
    module = build_plain(task)
    batches = task.draw(0)
    tokens = supervised_tokens(batches)
    gradients: list[Mapping[str, Tensor]] = []
    capture = Capture(module)
    with dropout_step(module, task.seed, 0):
        for loss in losses_of(task, module, batches, 0, independent=False):
            (loss / max(tokens, 1)).backward()  # type: ignore[no-untyped-call]
            gradients.append(full_tensors(module, lambda parameter: parameter.grad))
            module.zero_grad()
            capture.next()
    return Contributions(gradients, [supervised_tokens([batch]) for batch in batches], capture.taken)
