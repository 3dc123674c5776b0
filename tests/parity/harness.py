"""Runs the same global micro-batches under a layout and in one plain process, and compares every number.

The plain process shares no parallel code with the layout: it sums the losses of all micro-batches over all their
supervised tokens, calls backward once per micro-batch, and uses torch's own gradient norm, clipping and AdamW.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shoal.config.llm import CompileConfig
from shoal.config.schema import DDPConfig, FSDP2Config, ParallelismSizes
from shoal.data.batch import StepBatch
from shoal.data.position import StreamPosition
from shoal.models.assemble import ModelPlan, Numerics, assemble
from shoal.models.dropout import dropout_step
from shoal.parallel.model import ParallelModel
from shoal.parallel.setup import DistributedSetup
from shoal.speech.batch_norm import update_running_statistics
from shoal.train.step import agree_on_step, train_step
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


@dataclass
class Record:
    """Numbers of a run: per step, and the gradients of every step by parameter name."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    initial: dict[str, Tensor] = field(default_factory=dict)
    weights: dict[str, Tensor] = field(default_factory=dict)


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
    model = assemble(plan_of(case), None, Numerics(stored=case.dtype), CPU).module.train()
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = make_optimizer(case, parameters)
    record = Record(initial=_full(model))
    for step in range(case.num_steps):
        batches = micro_batches_of(case, step)
        tokens = sum(int(batch["loss_mask"][:, 1:].sum()) for batch in batches)
        losses = []
        for index, batch in enumerate(batches):
            _seed(step, index)
            with dropout_step(model, 3, step):
                loss = model(batch)["loss_sum"] / max(tokens, 1)
                loss.backward()
            losses.append(float(loss.detach()))
        record.gradients.append(
            {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        )
        norm = nn.utils.clip_grad_norm_(
            parameters, case.max_norm if case.max_norm is not None else float("inf")
        )
        optimizer.step()
        optimizer.zero_grad()
        update_running_statistics(model, None)
        record.losses.append(sum(losses))
        record.norms.append(float(norm))
    record.weights = {**_full(model), **_buffers(model)}
    return record


def run_layout(rank: int, world: int, case: Case, layout: Layout) -> Record | None:
    """Trains under a layout; rank 0 returns the record, with gradients and weights gathered in full."""
    options = layout.ddp if layout.strategy == "ddp" else layout.fsdp2
    setup = DistributedSetup.build(strategy=options, parallelism_sizes=layout.sizes, world_size=world)
    model = assemble(plan_of(case, layout), setup, Numerics(stored=case.dtype), CPU)
    model.module.train()
    parameters = [p for p in model.module.parameters() if p.requires_grad]
    record = Record(initial=_full(model.module))
    optimizer = Recording(make_optimizer(case, parameters), model.module, record)
    for step in range(case.num_steps):
        batch = deal(micro_batches_of(case, step), model)
        header = agree_on_step(batch, model.group, CPU)
        result = train_step(model, batch, optimizer, step=step, seed=3, max_norm=case.max_norm, header=header)
        record.losses.append(result.loss)
        record.norms.append(result.gradient_norm)
    record.weights = {**_full(model.module), **_buffers(model.module)}
    return record if rank == 0 else None


def deal(batches: list[dict[str, Any]], model: ParallelModel) -> StepBatch:
    """Round-robin over the data-parallel ranks, filled up with empty micro-batches."""
    rounds = -(-len(batches) // model.dp_size)
    filled = batches + [empty_micro_batch()] * (rounds * model.dp_size - len(batches))
    return StepBatch(filled[model.dp_rank :: model.dp_size], StreamPosition(0, len(batches)), None, {})


class Recording:
    """An optimizer that keeps a copy of the gradients before it clips nothing and steps."""

    def __init__(self, optimizer: torch.optim.Optimizer, module: nn.Module, record: Record) -> None:
        self.optimizer, self.module, self.record = optimizer, module, record

    def step(self) -> None:
        self.record.gradients.append(_full(self.module, lambda p: p.grad))
        self.optimizer.step()

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()


def _full(
    module: nn.Module, of: Callable[[nn.Parameter], Tensor | None] = lambda p: p.detach()
) -> dict[str, Tensor]:
    tensors = {name: of(parameter) for name, parameter in module.named_parameters()}
    return {
        name: (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()
        for name, tensor in tensors.items()
        if tensor is not None
    }


def _buffers(module: nn.Module) -> dict[str, Tensor]:
    """Buffers that are saved, batch-norm statistics above all."""
    kept = module.state_dict().keys()
    return {n: b.clone() for n, b in module.named_buffers() if n in kept and b.is_floating_point()}


def _seed(step: int, index: int) -> None:
    from shoal.config.seeds import derive_seed

    torch.manual_seed(derive_seed(3, step, index))


def relative_errors(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    """max|a-b| / max(max|b| of the tensor, 1e-3 x the largest entry of all), by name; names must agree."""
    assert actual.keys() == expected.keys(), sorted(actual.keys() ^ expected.keys())
    largest = max(float(tensor.abs().max()) for tensor in expected.values())
    errors = {}
    for name, b in expected.items():
        a = actual[name]
        assert a.shape == b.shape, (name, a.shape, b.shape)
        scale = max(float(b.abs().max()), 1e-3 * largest)
        errors[name] = float((a - b).abs().max()) / scale if scale else float((a - b).abs().max())
    return errors


def unclipped(record: Record, case: Case) -> list[dict[str, Tensor]]:
    """Gradients as they were before clipping: the layout records them after it."""
    if case.max_norm is None:
        return record.gradients
    factors = [min(1.0, case.max_norm / (norm + 1e-6)) for norm in record.norms]
    return [
        {name: gradient / factor for name, gradient in step.items()}
        for step, factor in zip(record.gradients, factors, strict=True)
    ]


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
    "assert_parity",
    "deal",
    "plan_of",
    "reference",
    "replace",
    "run_layout",
]
