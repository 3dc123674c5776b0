"""The training step: one optimizer step on one list of micro-batches, the same for every model and layout.

The sum rule. The loss of the step is the sum of token losses over *all* micro-batches of *all* data-parallel
ranks, divided once by their number of supervised tokens. Each micro-batch's loss is divided by that number before
backward, and gradients are summed over micro-batches and ranks; nothing is ever averaged, so the result does not
depend on how the micro-batches were dealt.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from shoal.config.seeds import derive_seed
from shoal.data.batch import StepBatch
from shoal.mesh.collectives import all_gather_objects, all_reduce_sum
from shoal.models.dropout import dropout_step
from shoal.parallel.model import MicroBatch, ParallelModel
from shoal.speech.batch_norm import update_running_statistics
from shoal.train.clip import gradient_norm, refuse_non_finite, scale_gradients


class SupportsStep(Protocol):
    """An optimizer, or Lightning's wrapper of one, which also counts the steps."""

    def step(self) -> object: ...

    def zero_grad(self) -> object: ...


@dataclass(frozen=True)
class StepHeader:
    """What all ranks know about a step before it runs: sums over the data-parallel ranks."""

    num_tokens: int
    num_samples: int
    audio_seconds: float
    num_audio_positions: int
    num_audio_real: int
    stop_requested: bool

    @property
    def audio_padding_share(self) -> float:
        """Share of the audio samples that hold no content."""
        return _padding_share(self.num_audio_real, self.num_audio_positions)


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step did: global sums over global counts, identical on every rank.

    `padding_share` is the share of the language model's positions that hold no content.
    """

    loss: float
    accuracy: float
    gradient_norm: float
    padding_share: float
    header: StepHeader


def train_step(
    model: ParallelModel,
    batch: StepBatch,
    optimizer: SupportsStep,
    *,
    step: int,
    seed: int,
    max_norm: float | None,
    header: StepHeader,
) -> StepResult:
    """Runs one optimizer step; gradients are zero afterwards.

    Args:
        model: The parallelised model.
        batch: This rank's micro-batches; their number is the same on every rank.
        optimizer: Over the trainable parameters of `model.module`.
        step: Number of optimizer steps taken so far; names the random numbers of this step.
        seed: Seed of the run.
        max_norm: Gradients are scaled down to this global norm; None never scales.
        header: From `agree_on_step`.

    Raises:
        FloatingPointError: A gradient is not finite; on every rank, before the optimizer steps.
    """
    sums = torch.zeros(4, dtype=torch.float64)
    num_micro_batches = len(batch.micro_batches)
    for index, micro_batch in enumerate(batch.micro_batches):
        # What draws from the generator depends on the micro-batch's place in the step, not on the rank that runs it;
        # dropout modules do not draw, see shoal.models.dropout.
        torch.manual_seed(derive_seed(seed, step, index * model.dp_size + model.dp_rank))
        last = index == num_micro_batches - 1
        with dropout_step(model.module, seed, step), model.gradient_sync(last):
            out = model.forward(to_device(micro_batch, model.device))
            (out["loss_sum"] / max(header.num_tokens, 1)).backward()  # type: ignore[no-untyped-call]
        positions = (0, 0) if micro_batch["is_empty"] else _positions(micro_batch, out)
        counted = (float(out["loss_sum"].detach()), float(out["num_correct"]), *positions)
        sums += torch.tensor(counted, dtype=torch.float64)

    trainable = list(trainable_parameters(model.module))
    norm = gradient_norm(trainable)
    refuse_non_finite(norm, model.module, model.group, step)
    if max_norm is not None:
        scale_gradients(trainable, norm, max_norm)
    optimizer.step()
    optimizer.zero_grad()
    update_running_statistics(model.module, model.group)

    loss_sum, num_correct, real, positions = all_reduce_sum(sums.to(model.device), model.loss_group).tolist()
    num_tokens = max(header.num_tokens, 1)
    share = _padding_share(real, positions)
    return StepResult(loss_sum / num_tokens, num_correct / num_tokens, float(norm), share, header)


def agree_on_step(
    batch: StepBatch,
    group: ProcessGroup | None,
    device: torch.device,
    *,
    sample_rate: int = 16000,
    stop_requested: bool = False,
    everyone: ProcessGroup | None = None,
) -> StepHeader:
    """The header every step starts with: one all-reduce tells all ranks what the others have.

    Args:
        batch: This rank's step.
        group: The data-parallel group, whose ranks have different micro-batches; None on one process.
        device: Where the group communicates from.
        sample_rate: Of the audio.
        stop_requested: This rank wants the run to stop after the step.
        everyone: All ranks of the job, where tensor, context or pipeline peers share a batch; None when `group`
            has them all.

    Raises:
        RuntimeError: Some rank's data failed, or peers do not have the same batch; raised on every rank, with the
            origin's message, before anything else is communicated, so that nobody waits for a rank that has stopped.
    """
    num_peers = 1 if group is None or everyone is None else everyone.size() // group.size()
    asked = everyone if num_peers > 1 else group
    local = [_count(micro_batch) for micro_batch in batch.micro_batches]
    counts = [sum(column) for column in zip(*local, strict=True)]
    flags = [float(batch.error is not None), float(stop_requested)]
    vector = torch.tensor([*counts, *flags], dtype=torch.float64, device=device)
    *totals, num_errors, num_stops = all_reduce_sum(vector, asked).tolist()
    if num_errors:
        errors = [error for error in all_gather_objects(batch.error, asked) if error is not None]
        raise RuntimeError("data of this step failed:\n" + "\n".join(dict.fromkeys(errors)))
    tokens, samples, audio, audio_real = (_once(total, num_peers) for total in totals)
    return StepHeader(tokens, samples, audio_real / sample_rate, audio, audio_real, bool(num_stops))


def _once(total: float, num_peers: int) -> int:
    """What the data-parallel ranks have, from a sum in which each of their peers counted it too."""
    once, rest = divmod(int(total), num_peers)
    if rest:
        raise RuntimeError(
            f"{num_peers} peers of a data-parallel coordinate must have the same batch, and their counts add up to "
            f"{int(total)}; repair: load through shoal.data.broadcast.broadcast_loader"
        )
    return once


def _positions(micro_batch: MicroBatch, out: Mapping[str, Tensor]) -> tuple[float, float]:
    """Positions of the language model that hold content, and all of them.

    A model that puts other things than the token ids of a micro-batch into its rows counts for itself.
    """
    if "num_positions" in out:
        return float(out["num_real_positions"]), float(out["num_positions"])
    return float(micro_batch["text_lens"].sum()), float(micro_batch["input_ids"].numel())


def _padding_share(real: float, total: float) -> float:
    return 1.0 - real / total if total else 0.0


def num_supervised(micro_batch: MicroBatch) -> int:
    """Number of supervised tokens; a row's first token has no predecessor and is never one."""
    return int(micro_batch["loss_mask"][:, 1:].sum())


def _count(micro_batch: MicroBatch) -> tuple[int, ...]:
    if micro_batch["is_empty"]:
        return (0, 0, 0, 0)
    return (
        num_supervised(micro_batch),
        len(micro_batch["sample_ids"]),
        micro_batch["audios"].numel(),
        int(micro_batch["audio_lens"].sum()),
    )


def to_device(micro_batch: MicroBatch, device: torch.device) -> MicroBatch:
    """Moves the tensors of a micro-batch; everything else is passed on."""
    return {
        name: value.to(device, non_blocking=True) if isinstance(value, Tensor) else value
        for name, value in micro_batch.items()
    }


def trainable_parameters(module: nn.Module) -> Iterable[nn.Parameter]:
    """The parameters an optimizer should hold, in the order of registration."""
    return (parameter for parameter in module.parameters() if parameter.requires_grad)
