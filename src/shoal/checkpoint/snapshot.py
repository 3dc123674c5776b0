"""The state of a run at one step as one rank holds it, ready to be written now or later."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from shoal.checkpoint import optimizer as optimizer_state
from shoal.checkpoint.plain import encode
from shoal.checkpoint.rng import RandomState
from shoal.checkpoint.tensors import model_tensors, resharded

ModelFormat = Literal["safetensors", "torch_save"]
OptimizerLike = Optimizer | Sequence[Optimizer] | None
SchedulerLike = LRScheduler | Sequence[LRScheduler] | None


@dataclass(frozen=True)
class SaveOptions:
    """How a checkpoint's model is written.

    Attributes:
        model_format: `safetensors`: shards in `model/`, without any pickle; `torch_save`: torch's distributed format.
        model_part: `trainable` leaves frozen parameters out: with LoRA the checkpoint holds the adapters alone, and
            the run that resumes it takes the rest from the pretrained model again.
        consolidated: the checkpoint also holds the whole model as `consolidated/`, a Hugging Face folder.
    """

    model_format: ModelFormat = "torch_save"
    model_part: Literal["all", "trainable"] = "all"
    consolidated: bool = False


DEFAULT_SAVE = SaveOptions()


@dataclass(frozen=True)
class Snapshot:
    """One rank's part of a run's state.

    Attributes:
        module: the trainable module, of which only the configuration is read any more.
        manifest: content of `shoal.json`.
        model: parameters and persistent buffers by name.
        optimizer: optimizer tensors as `optimizer.NAME.STATE`.
        own: plain data of this rank's optimizers.
        shared: plain data that is equal on all ranks: schedulers and the caller's.
        rng: the random state of this rank.
        tokenizer: written beside an exported language model.
    """

    module: nn.Module
    manifest: dict[str, Any]
    model: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    own: list[dict[str, Any]]
    shared: dict[str, Any]
    rng: RandomState
    tokenizer: Any = None


def take_snapshot(
    model: nn.Module,
    *,
    optimizer: OptimizerLike = None,
    scheduler: SchedulerLike = None,
    rng: RandomState | None = None,
    manifest: Mapping[str, Any],
    extra: Mapping[str, Any] | None = None,
    options: SaveOptions = DEFAULT_SAVE,
    tokenizer: Any = None,
) -> Snapshot:
    """Collect this rank's state; tensors share memory with the model and the optimizers. Makes no collective.

    Raises:
        ValueError: state that a checkpoint cannot hold.
    """
    module = resharded(model)
    state = optimizer_state.collect(module, listed(optimizer))
    schedulers = [encode(one.state_dict(), "scheduler") for one in listed(scheduler)]
    tensors = model_tensors(module)
    left_out = _frozen(module) if options.model_part == "trainable" else set()
    return Snapshot(
        module,
        {**manifest, "model_format": options.model_format, "left_out": sorted(left_out)},
        {name: tensor for name, tensor in tensors.items() if name not in left_out},
        state.tensors,
        state.plain,
        {"schedulers": schedulers, "extra": encode(dict(extra or {}), "extra")},
        rng or RandomState.capture(),
        tokenizer,
    )


def _frozen(module: nn.Module) -> set[str]:
    return {name for name, parameter in module.named_parameters() if not parameter.requires_grad}


def listed(value: Any) -> list[Any]:
    """One, several or no objects as a list."""
    if value is None:
        return []
    return list(value) if isinstance(value, Sequence) else [value]
