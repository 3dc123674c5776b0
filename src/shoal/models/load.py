"""Loads a Hugging Face folder into a model that is already sharded: each rank reads only its own slices.

Everything is decided before a byte is read, from names and shapes alone, so that all ranks refuse a checkpoint that
does not fit, together and with the same message. Then one target after the other is read, converted and copied
into its place: beyond the rank's shard, memory holds one of them at a time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.utils.loading_report import LoadStateDictInfo

from shoal.models.convert import Conversion, Source, plan_conversions, read
from shoal.models.files import RANDOM_WEIGHTS, open_tensors
from shoal.models.lora import adapted_modules

_BLOCK_ELEMENTS = 2**22


@dataclass(frozen=True)
class WeightSource:
    """Where the weights of one submodule come from.

    Attributes:
        module: Full name of a `PreTrainedModel` inside the trainable module (``llm``, ``perception.encoder``).
        folder: A Hugging Face folder with safetensors files.
        prefix: What stands before the module's own names in the checkpoint; tensors without it belong to
            something else (a decoder, say) and are left alone.
    """

    module: str
    folder: Path
    prefix: str = ""


def conversions_of(model: PreTrainedModel) -> list[Any]:
    """The checkpoint-to-model conversions of a model; must be taken before `fully_shard` renames its classes."""
    conversions: list[Any] = get_model_conversion_mapping(model) or []
    return conversions


def load_pretrained(model: PreTrainedModel, source: WeightSource, conversions: Sequence[Any]) -> None:
    """Fills a materialised `model` in place; parameters keep their layout, dtype, device and `requires_grad`.

    LoRA adapters and the buffers that no checkpoint holds are left alone.

    Raises:
        ValueError: The folder has no safetensors files, keys are missing, unexpected or of another shape, or two
            tensors for one tied parameter differ; the message lists them. On every rank, before anything is read
            (tied tensors excepted).
    """
    length = len(source.prefix)
    tensors = {
        name[length:]: tensor
        for name, tensor in open_tensors(source.folder).items()
        if name.startswith(source.prefix)
    }
    targets = target_tensors(model)
    transforms = deepcopy(
        list(conversions)
    )  # matching marks them as used, and marks must not outlive the load
    plan, unexpected = plan_conversions(tensors, targets, transforms, model)
    _refuse_misfits(model, source, plan, unexpected, targets)
    _refuse_untied(source, plan, tensors, targets)
    with torch.no_grad():
        for conversion in plan:
            for name, part in read(conversion, tensors, targets, model):
                target = targets[name]
                (target.to_local() if isinstance(target, DTensor) else target).copy_(part)
    # Hugging Face's save_pretrained undoes these, to write the names that the checkpoint had.
    used = [transform for transform in transforms if transform.was_used()]
    model._weight_conversions = used  # type: ignore[assignment]


def target_tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """Parameters and saved buffers by the names they have without adapters; adapters themselves left out.

    Tied parameters appear under each of their names.
    """
    named: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
    buffers = dict(model.named_buffers(remove_duplicate=False))
    saved = model.state_dict().keys()
    named.update({name: buffer for name, buffer in buffers.items() if name in saved})
    adapted = frozenset(f"{name}.base_layer." if name else "base_layer." for name in adapted_modules(model))

    def plain(name: str) -> str:
        head, found, leaf = name.rpartition("base_layer.")
        return head + leaf if found and head + found in adapted else name

    return {plain(name): tensor for name, tensor in named.items() if ".lora_" not in name}


def check_ties(model: PreTrainedModel) -> None:
    """Asserts that parameters which the architecture ties are one parameter still.

    Raises:
        RuntimeError: Something between building and loading has replaced one of them.
    """
    targets = target_tensors(model)
    for name, other in (getattr(model, "all_tied_weights_keys", None) or {}).items():
        if targets[name] is not targets[other]:
            raise RuntimeError(
                f"{name} and {other} are tied in {type(model).__name__}, but no longer one tensor"
            )


def _refuse_misfits(
    model: PreTrainedModel,
    source: WeightSource,
    plan: Sequence[Conversion],
    unexpected: set[str],
    targets: Mapping[str, Tensor],
) -> None:
    shapes = {name: shape for conversion in plan for name, shape in conversion.shapes.items()}
    filled = {id(targets[name]) for name in shapes if name in targets}
    missing = {name for name, tensor in targets.items() if id(tensor) not in filled}
    surplus = {name for name in shapes if name not in targets}
    info = LoadStateDictInfo(
        missing_keys=missing,
        unexpected_keys=unexpected | surplus,
        mismatched_keys=set(),
        skipped_pp_keys=set(),
        error_msgs=[],
        conversion_errors={},
    )
    model._adjust_missing_and_unexpected_keys(info)  # what the architecture declares to be harmless
    mismatched = [
        f"{name} {list(shape)} instead of {list(targets[name].shape)}"
        for name, shape in shapes.items()
        if name in targets and shape != tuple(targets[name].shape)
    ]
    _refuse(source, sorted(info.missing_keys), sorted(info.unexpected_keys), sorted(mismatched))


def _refuse_untied(
    source: WeightSource,
    plan: Sequence[Conversion],
    tensors: Mapping[str, Source],
    targets: Mapping[str, Tensor],
) -> None:
    """A checkpoint may hold a tied parameter under several names, but not with several values."""
    first: dict[int, tuple[str, Source]] = {}
    for conversion in plan:
        if conversion.converter is not None:
            continue
        name, tensor = conversion.first, tensors[conversion.sources[0][0]]
        other, reference = first.setdefault(id(targets[name]), (name, tensor))
        if other != name and not _equal(reference, tensor):
            raise ValueError(
                f"{source.folder}: {other} and {name} are one tied parameter of the model, but the checkpoint "
                "has different values for them; repair: set tie_word_embeddings=false in its config.json"
            )


def _equal(a: Source, b: Source) -> bool:
    """Whether two tensors of one shape are equal; whole on every rank, so that all decide alike, but by blocks."""
    shape = a.get_shape()
    rows = max(1, _BLOCK_ELEMENTS // max(1, shape[-1]))
    blocks = (slice(start, min(start + rows, shape[0])) for start in range(0, shape[0], rows))
    return all(torch.equal(a[block], b[block]) for block in blocks)


def _refuse(source: WeightSource, missing: list[str], unexpected: list[str], mismatched: list[str]) -> None:
    kinds = {"missing": missing, "unexpected": unexpected, "of another shape": mismatched}
    lines = [
        f"  {kind}: {', '.join(keys[:12])}{f' and {len(keys) - 12} more' if len(keys) > 12 else ''}"
        for kind, keys in kinds.items()
        if keys
    ]
    if lines:
        raise ValueError(
            f"{source.folder} does not fit {source.module or 'the model'}:\n"
            + "\n".join(lines)
            + "\n  repair: name a checkpoint "
            f"of the same architecture; random weights are {RANDOM_WEIGHTS}"
        )
