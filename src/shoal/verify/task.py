"""What is trained twice: a model, the micro-batches of each step, and how the steps are taken."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from shoal.config.schema import (
    CheckpointingMode,
    FSDP2Config,
    MoEParallelizerConfig,
    ParallelismSizes,
    PipelineConfig,
    StrategyOptions,
)
from shoal.data.batch import MicroBatch
from shoal.models.assemble import ModelPlan

LEARNING_RATE = 1e-2
"""Large enough that a wrong gradient shows in the weights after one step."""

PlainLoss = Callable[[nn.Module, MicroBatch], Tensor]
"""Sum of token losses of a micro-batch, computed without the trainable module's own forward."""


def adamw(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer of a proof."""
    return torch.optim.AdamW(parameters, lr=LEARNING_RATE, weight_decay=0.1)


@dataclass(frozen=True)
class Task:
    """The same for every layout it is compared under.

    Attributes:
        plan: What to build; activation checkpointing and compilation belong to the layout.
        plain: The same model for the plain process, with nothing of ours that it can do without: no packing, and the
            attention and state-space layers of transformers; None for `plan` itself.
        draw: The global micro-batches of a step.
        empty: The micro-batch of a rank that has none left.
        plain_loss: The loss without the trainable module's forward; None where there is no second way to it.
        dtype: Of parameters and arithmetic.
        max_norm: Bound of the gradient norm, or None.
        num_steps: Optimizer steps.
        seed: Of what is random in a step.
        optimizer: Over the parameters that train.
    """

    plan: ModelPlan
    plain: ModelPlan | None = field(default=None, kw_only=True)
    draw: Callable[[int], list[MicroBatch]]
    empty: Callable[[], MicroBatch]
    plain_loss: PlainLoss | None = None
    dtype: torch.dtype = torch.float64
    max_norm: float | None = 0.5
    num_steps: int = 2
    seed: int = 3
    optimizer: Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer] = adamw


@dataclass(frozen=True)
class MeshLayout:
    """A layout on local ranks.

    Attributes:
        world: Number of ranks.
        sizes: Degrees of the axes.
        strategy: Options of the strategy, whose class says which strategy it is.
        pipeline: Pipeline block; None with pp_size 1.
        moe: Block for expert layers; None with ep_size 1.
        checkpoint_llm: Recompute the LLM's layers in backward.
        checkpoint_perception: Recompute the speech encoder's layers in backward.
    """

    world: int
    sizes: ParallelismSizes = ParallelismSizes()
    strategy: StrategyOptions = FSDP2Config()
    pipeline: PipelineConfig | None = None
    moe: MoEParallelizerConfig | None = None
    checkpoint_llm: CheckpointingMode = False
    checkpoint_perception: bool = False

    @property
    def axes(self) -> dict[str, int]:
        """Size of each axis by its name, the data-parallel one resolved."""
        sizes = self.sizes
        dp = self.world // (sizes.tp_size * sizes.cp_size * sizes.pp_size)
        degrees = {"dp": dp, "dp_replicate": sizes.dp_replicate_size or 1, "tp": sizes.tp_size}
        return degrees | {"cp": sizes.cp_size, "pp": sizes.pp_size, "ep": sizes.ep_size}

    def describe(self) -> str:
        """The layout in a few words, such as ``fsdp2, dp 2 x tp 2``."""
        name = type(self.strategy).__name__.removesuffix("Config").lower()
        shown = " x ".join(f"{axis} {size}" for axis, size in self.axes.items() if size > 1) or "one rank"
        extra = ", sequence parallel" if getattr(self.strategy, "sequence_parallel", False) else ""
        recomputed = self.checkpoint_llm or self.checkpoint_perception
        return f"{name}, {shown}{extra}{', activation checkpointing' if recomputed else ''}"


def supervised_tokens(micro_batches: Sequence[MicroBatch]) -> int:
    """Supervised tokens of a step, counted here and not by the training step."""
    return sum(int(batch["loss_mask"][:, 1:].sum()) for batch in micro_batches)


def digest(micro_batch: MicroBatch) -> str:
    """A hash of everything in a micro-batch."""
    state = hashlib.blake2b(digest_size=8)
    for name in sorted(micro_batch):
        value: Any = micro_batch[name]
        state.update(name.encode())
        state.update(value.numpy().tobytes() if isinstance(value, Tensor) else repr(value).encode())
    return state.hexdigest()
