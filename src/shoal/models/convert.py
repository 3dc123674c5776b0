"""From the tensors of a checkpoint to the parameters of a model: renamed, stacked, split, transposed.

Hugging Face describes the difference between both as a list of transforms per architecture. Its own loader takes
a rank's slice of every checkpoint tensor *before* it applies them, which is right for stacking experts and
silently wrong for whatever moves data along the sharded dimension (`Chunk`, `Concatenate`, a permutation). Here the
transforms run first, on tensors of the meta device: that tells every target and its shape before a byte is read.
Then each rank reads what it needs, one target at a time: its own experts where stacking is all that happens, and
otherwise the whole tensors, which are converted and cut afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from transformers import PreTrainedModel
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)
from transformers.distributed.sharding_utils import DtensorShardOperation

Source = Any
"""A lazy slice of a safetensors file, or a tensor."""

_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass
class Conversion:
    """Checkpoint tensors that become model tensors together.

    Attributes:
        first: Name of the first target; what Hugging Face calls the layer's name.
        converter: The transform; None for a tensor that at most changes its name.
        sources: (name in the checkpoint, pattern of the converter that it matched), in the checkpoint's order.
        shapes: Shape of every target, by name; filled by `measure`.
    """

    first: str
    converter: WeightConverter | None
    sources: list[tuple[str, str]] = field(default_factory=list)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)


def plan_conversions(
    tensors: Mapping[str, Source],
    targets: Mapping[str, Tensor],
    transforms: Sequence[Any],
    model: PreTrainedModel,
) -> tuple[list[Conversion], set[str]]:
    """Sorts checkpoint tensors by the model tensors they become.

    Args:
        tensors: The checkpoint, by name.
        targets: The model's parameters and saved buffers, by Hugging Face's names.
        transforms: Renamings and converters of the architecture.
        model: The model, for its base-model prefix and the settings that converters read.

    Returns:
        The conversions, with the shapes of their targets, and the names of checkpoint tensors that become nothing.

    Raises:
        ValueError: A converter cannot take the tensors that the checkpoint has for it.
    """
    renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
    converters = [t for t in transforms if isinstance(t, WeightConverter)]
    by_pattern = {pattern: c for c in converters for pattern in c.source_patterns}
    conversions: dict[str, Conversion] = {}
    unexpected: set[str] = set()
    prefix, known = model.base_model_prefix, dict(targets)
    for name in sorted(tensors, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, prefix, known)
        if target not in targets and name in targets:
            target, pattern = rename_source_key(name, [], [], prefix, known)
        converter = None if pattern is None else by_pattern[pattern]
        if target not in targets or (converter is None and target in conversions):
            unexpected.add(name)
            continue
        conversion = conversions.setdefault(target, Conversion(target, converter))
        conversion.sources.append((name, pattern or name))
    for conversion in conversions.values():
        conversion.shapes = _measure(conversion, tensors, model)
    return list(conversions.values()), unexpected


def read(
    conversion: Conversion,
    tensors: Mapping[str, Source],
    targets: Mapping[str, Tensor],
    model: PreTrainedModel,
) -> Iterator[tuple[str, Tensor]]:
    """Reads one conversion; yields each target with the part of it that belongs to this rank, on the CPU."""
    target = targets[conversion.first]
    if conversion.converter is None:
        yield conversion.first, local_part(tensors[conversion.sources[0][0]], target)
    elif isinstance(target, DTensor) and _stacks_whole_slices(conversion.converter, target):
        yield from _read_own_slices(conversion, tensors, target, model)
    else:
        whole = [(pattern, _whole(tensors[name])) for name, pattern in conversion.sources]
        for name, tensor in _convert(conversion, whole, model).items():
            yield name, local_part(tensor, targets[name])


def local_part(source: Source, target: Tensor) -> Tensor:
    """This rank's part of a whole tensor; only that part is read from a file.

    Args:
        source: The whole tensor.
        target: A DTensor whose layout decides, or a plain tensor, which takes everything.
    """
    cut: Any = DtensorShardOperation(target).shard_tensor if isinstance(target, DTensor) else _whole
    part: Tensor = cut(source)
    return part


def _whole(source: Source) -> Any:
    return source[...]


def own_slice(source: Source, target: DTensor, index: int) -> Tensor | None:
    """This rank's part of slice number `index` of dimension 0 of the target; None when it has no part in it.

    Args:
        source: That slice, without dimension 0.
        target: The DTensor whose layout decides.
        index: Position along dimension 0.
    """
    part: Tensor | None = DtensorShardOperation(target).shard_tensor(source, tensor_idx=index)
    return part


def _stacks_whole_slices(converter: WeightConverter, target: DTensor) -> bool:
    """Whether a rank's part of the result is made of the sources of its own slices of dimension 0, and no others.

    True of experts that are stacked, and joined on another dimension, when nothing but dimension 0 is sharded.
    """
    merge, *joins = converter.operations
    placed = all(type(p) is Replicate or p == Shard(0) for p in target.placements)
    stacked = isinstance(merge, MergeModulelist) and merge.dim == 0
    return placed and stacked and all(isinstance(op, Concatenate) and op.dim > 0 for op in joins)


def _read_own_slices(
    conversion: Conversion, tensors: Mapping[str, Source], target: DTensor, model: PreTrainedModel
) -> Iterator[tuple[str, Tensor]]:
    counts: dict[str, int] = {}
    own: list[tuple[str, Tensor]] = []
    for name, pattern in conversion.sources:
        index = counts.get(pattern, 0)
        counts[pattern] = index + 1
        part = own_slice(tensors[name], target, index)
        if part is not None:
            own.append((pattern, part))
    if own:  # with more ranks than experts, a rank may own none
        yield from _convert(conversion, own, model).items()


def _measure(
    conversion: Conversion, tensors: Mapping[str, Source], model: PreTrainedModel
) -> dict[str, tuple[int, ...]]:
    if conversion.converter is None:
        return {conversion.first: shape_of(tensors[conversion.sources[0][0]])}
    twins = [(pattern, _twin(tensors[name])) for name, pattern in conversion.sources]
    return {name: tuple(tensor.shape) for name, tensor in _convert(conversion, twins, model).items()}


def _convert(
    conversion: Conversion, parts: list[tuple[str, Tensor]], model: PreTrainedModel
) -> dict[str, Tensor]:
    """Applies the converter; takes the tensors out of `parts`, so that each is freed when it is used up."""
    converter = deepcopy(conversion.converter)
    assert converter is not None
    while parts:
        pattern, tensor = parts.pop(0)
        converter.add_tensor(conversion.first, pattern, pattern, tensor)  # type: ignore[arg-type]
    try:
        made = converter.convert(conversion.first, model=model, config=model.config)
    except Exception as error:  # whatever an operation raises on tensors that it was not written for
        sources = ", ".join(name for name, _ in conversion.sources[:6])
        raise ValueError(
            f"{conversion.first}: {', '.join(type(op).__name__ for op in converter.operations)} cannot convert "
            f"{sources}{' ...' if len(conversion.sources) > 6 else ''}: {error}; "
            "repair: name a checkpoint of the same architecture and sizes"
        ) from error
    return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}


def shape_of(source: Source) -> tuple[int, ...]:
    """Shape of a tensor or of a lazy slice, which is not read."""
    return tuple(source.shape if isinstance(source, Tensor) else source.get_shape())


def _twin(source: Source) -> Tensor:
    """A tensor of the same shape and dtype without memory."""
    if isinstance(source, Tensor):
        return source.to("meta")
    return torch.empty(source.get_shape(), dtype=_DTYPES.get(source.get_dtype()), device="meta")
