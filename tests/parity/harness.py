"""Runs the same global micro-batches under a layout and in one plain process, and compares every number.

Both are those of `shoal verify` (`shoal.verify.reference` and `shoal.verify.parity`), on cases of the tests' own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from shoal.config.llm import CompileConfig
from shoal.config.schema import DDPConfig, FSDP2Config, ParallelismSizes
from shoal.data.batch import StepBatch
from shoal.models.assemble import ModelPlan
from shoal.parallel.model import ParallelModel
from shoal.train.step import agree_on_step
from shoal.verify import parity
from shoal.verify import record as records
from shoal.verify.parity import deal as deal_round_robin
from shoal.verify.parity import train_on_mesh
from shoal.verify.record import Record, Recording
from shoal.verify.record import unclipped as before_clipping
from shoal.verify.reference import train_plain
from shoal.verify.task import MeshLayout, Task
from tests.tiny import PLACEHOLDER, empty_micro_batch, ragged_micro_batches, tiny_encoder, tiny_llama

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Layout:
    """One row of a parity table."""

    name: str
    world: int
    strategy: str = "fsdp2"
    sizes: ParallelismSizes = ParallelismSizes()
    fsdp2: FSDP2Config = FSDP2Config()
    ddp: DDPConfig = DDPConfig()
    checkpoint_llm: bool = False
    checkpoint_perception: bool = False


@dataclass(frozen=True)
class Case:
    """What is trained: the same for every layout it is compared under.

    `build` and `draw` are functions of a module, so that ranks find them: the trainable module of a case, and its
    micro-batches of a step. The defaults are a speech language model and ragged speech. `perception` says whether
    what `build` makes has one.
    """

    build: Callable[[Case], nn.Module] | None = None
    draw: Callable[[Case, int], list[dict[str, Any]]] | None = None
    family: str = "llama"
    compile: CompileConfig | None = None
    encoder: str = "whisper"
    perception: bool = False
    packed: bool = False
    dtype: torch.dtype = torch.float64
    num_micro_batches: int = 5
    without_audio: tuple[int, ...] = (3,)
    freeze: tuple[str, ...] = ()
    lora: dict[str, Any] | None = None
    tied: bool = False
    dropout: float = 0.0
    max_norm: float | None = 0.5
    num_steps: int = 2
    optimizer: str = "adamw"
    unsupervised: tuple[int, ...] = ()


def plan_of(case: Case, layout: Layout | None = None) -> ModelPlan:
    """The model of a case; initial values come from the seed and the parameter names."""

    return ModelPlan(
        lambda: (case.build or speech_model)(case),
        perception="perception" if case.build is None or case.perception else None,
        lora=case.lora,
        freeze=case.freeze,
        checkpoint_llm=layout is not None and layout.checkpoint_llm,
        checkpoint_perception=layout is not None and layout.checkpoint_perception,
        compile=case.compile if layout is not None else None,
        seed=7,
    )


def speech_model(case: Case) -> nn.Module:
    """A tiny SALM."""
    from shoal.config.speech import ModalityAdapterConfig, PerceptionConfig
    from shoal.kernels.attention_hf import PACKED_ATTENTION, register_attention
    from shoal.speech.perception import AudioPerception
    from shoal.speech.salm import SALM

    stacked = ModalityAdapterConfig(stack_frames=4 if case.encoder == "whisper" else 1)
    encoder = tiny_encoder(case.encoder)  # type: ignore[arg-type]
    register_attention()
    llm = tiny_llama(
        tie_word_embeddings=case.tied,
        attention_dropout=case.dropout,
        attn_implementation=PACKED_ATTENTION if case.packed else "sdpa",
    )
    perception = AudioPerception(
        encoder, None, PerceptionConfig(modality_adapter=stacked), llm.config.hidden_size
    )
    return SALM(llm, perception, placeholder_id=PLACEHOLDER, packed=case.packed)


def micro_batches_of(case: Case, step: int) -> list[dict[str, Any]]:
    """The global micro-batches of a step: ragged, some without audio, some without a supervised token."""
    if case.draw is not None:
        return case.draw(case, step)
    batches = ragged_micro_batches(case.num_micro_batches, seed=100 + step, without_audio=case.without_audio)
    for index in case.unsupervised:
        batches[index]["loss_mask"] = torch.zeros_like(batches[index]["loss_mask"])
    return batches


def make_optimizer(case: Case, parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    if case.optimizer == "sgd":
        return torch.optim.SGD(parameters, lr=0.1)
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1)


def reference(case: Case) -> Record:
    """Trains in this process, without any of the parallel code."""
    return train_plain(task_of(case))


def run_layout(rank: int, world: int, case: Case, layout: Layout) -> Record | None:
    """Trains under a layout; rank 0 returns the record, with gradients and weights gathered in full."""
    mesh = MeshLayout(
        world,
        layout.sizes,
        layout.ddp if layout.strategy == "ddp" else layout.fsdp2,
        checkpoint_llm=layout.checkpoint_llm,
        checkpoint_perception=layout.checkpoint_perception,
    )
    # Guards plant faults in these two, under their names here.
    parity.agree_on_step, parity.deal = agree_on_step, lambda batches, model, empty: deal(batches, model)
    ranks = train_on_mesh(task_of(case, layout), mesh)
    return ranks.record if rank == 0 else None


def task_of(case: Case, layout: Layout | None = None) -> Task:
    """A case as `shoal verify` takes it."""
    return Task(
        plan_of(case, layout),
        lambda step: micro_batches_of(case, step),
        empty_micro_batch,
        dtype=case.dtype,
        max_norm=case.max_norm,
        num_steps=case.num_steps,
        optimizer=lambda parameters: make_optimizer(case, parameters),
    )


def deal(batches: list[dict[str, Any]], model: ParallelModel) -> StepBatch:
    """Round-robin over the data-parallel ranks, filled up with empty micro-batches."""
    return deal_round_robin(batches, model, empty_micro_batch)


def unclipped(record: Record, case: Case) -> list[dict[str, Tensor]]:
    """Gradients as they were before clipping: the layout records them after it."""
    return before_clipping(record, case.max_norm)


def relative_errors(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    """Errors by name, see `shoal.verify.record.error_of`; names must agree."""
    assert actual.keys() == expected.keys(), sorted(actual.keys() ^ expected.keys())
    return records.relative_errors(actual, expected)


def assert_parity(actual: Record, expected: Record, case: Case) -> None:
    """Law 1: initial weights, losses, norms, every gradient, and weights after the steps."""
    tolerance = 1e-10 if case.dtype == torch.float64 else 1e-5
    assert max(relative_errors(actual.initial, expected.initial).values()) == 0.0
    torch.testing.assert_close(actual.losses, expected.losses, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(actual.norms, expected.norms, rtol=tolerance, atol=tolerance)
    for step, gradients in enumerate(unclipped(actual, case)):
        bad = {n: e for n, e in relative_errors(gradients, expected.gradients[step]).items() if e > tolerance}
        assert not bad, f"step {step}: gradients differ: {bad}"
    bad = {n: e for n, e in relative_errors(actual.weights, expected.weights).items() if e > tolerance}
    assert not bad, f"weights differ: {bad}"


__all__ = [
    "Case",
    "Layout",
    "Record",
    "Recording",
    "assert_parity",
    "deal",
    "plan_of",
    "reference",
    "replace",
    "run_layout",
]
