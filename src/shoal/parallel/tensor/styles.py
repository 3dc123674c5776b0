"""How one module is cut over the tensor-parallel ranks: torch `ParallelStyle`s that compute on plain local tensors.

torch's own styles run every operation of a sharded module through DTensor, cannot pad a sequence and assume that all
sizes divide. These cut the parameters into DTensors as torch's do, let the module see its local part, and put each
collective where `shoal.mesh.regions` says what becomes of the gradient. They do nothing at the entrance of a region:
one collective there serves all of the region's projections (`shoal.parallel.tensor.blocks`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

from shoal.mesh.regions import chunk_bounds
from shoal.parallel.tensor.local import local_part, show

Leave = Callable[[Tensor], Tensor]
"""What makes a partial result full: `reduce`, or under sequence parallelism `reduce_scatter_sequence`."""


@dataclass
class Cutter:
    """Cuts parameters; a tied parameter is cut once."""

    mesh: DeviceMesh
    cut_already: dict[nn.Parameter, nn.Parameter] = field(default_factory=dict)

    def cut(self, module: nn.Module, name: str, dim: int) -> None:
        """Replaces a parameter by a DTensor that is sharded on `dim`, and lets the module see its local part."""
        parameter = module._parameters[name]
        if parameter is None:
            return
        if not isinstance(parameter, DTensor):
            sharded = self.cut_already.get(parameter)
            if sharded is None:
                part = distribute_tensor(parameter.detach(), self.mesh, [Shard(dim)], src_data_rank=None)
                sharded = nn.Parameter(part, requires_grad=parameter.requires_grad)
                self.cut_already[parameter] = sharded
            module._parameters[name] = sharded
        show(module, {name: local_part})


class Column(ParallelStyle):
    """A linear layer whose output features are cut: full input, local features out.

    An adapter's A stays whole, and its B is cut as the layer is.
    """

    def __init__(self, cutter: Cutter) -> None:
        self.cutter = cutter

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for linear in (base_of(module), *adapter(module, "lora_B")):
            self.cutter.cut(linear, "weight", 0)
            self.cutter.cut(linear, "bias", 0)
        return module


class Row(ParallelStyle):
    """A linear layer whose input features are cut: local features in, full output.

    The first rank alone adds the bias, since the results are summed. An adapter's A is cut as the layer is; its B
    stays whole and works on partial activations, so that one sum serves both.
    """

    def __init__(self, cutter: Cutter, leave: Leave, is_first: bool) -> None:
        self.cutter, self.leave, self.is_first = cutter, leave, is_first

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        linear = base_of(module)
        self.cutter.cut(linear, "weight", 1)
        for down in adapter(module, "lora_A"):
            self.cutter.cut(down, "weight", 1)
        for biased in (linear, *adapter(module, "lora_B")):
            if biased.bias is not None and not self.is_first:
                show(biased, {"bias": _zero})
        module.register_forward_hook(lambda _module, _inputs, output: self.leave(output))
        return module


class Rows(ParallelStyle):
    """A linear layer that stays whole, of which each rank uses some rows: shared key-value heads, fused projections.

    Its gradient is partial: ranks that share a row have to be summed.

    Args:
        parts: Row ranges (start, end) that this rank uses, in order.
    """

    def __init__(self, parts: Sequence[tuple[int, int]]) -> None:
        self.parts = tuple(parts)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for linear in (base_of(module), *adapter(module, "lora_B")):
            names = [name for name, parameter in linear._parameters.items() if parameter is not None]
            show(linear, {name: self._pick for name in names})
        return module

    def _pick(self, parameter: Tensor) -> Tensor:
        if isinstance(parameter, DTensor):  # not gathered: FSDP2 looks at its own shard
            return parameter
        rows = [parameter[start:end] for start, end in self.parts]
        return rows[0] if len(rows) == 1 else torch.cat(rows)


class VocabEmbedding(ParallelStyle):
    """An embedding table whose rows are cut: full ids in, full embeddings out; ids of other ranks give zeros."""

    def __init__(self, cutter: Cutter, reduce: Leave, start: int, end: int) -> None:
        self.cutter, self.reduce, self.start, self.end = cutter, reduce, start, end

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        self.cutter.cut(module, "weight", 0)
        self._padding = getattr(module, "padding_idx", None)
        module.register_forward_pre_hook(self._to_own_rows)
        module.register_forward_hook(self._only_own_rows)
        return module

    def _is_own(self, ids: Tensor) -> Tensor:
        return (ids >= self.start) & (ids < self.end)

    def _to_own_rows(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        ids = inputs[0]
        self._own = self._is_own(ids)
        if self._padding is not None:  # the row without gradient, counted in the table that is looked up
            own = self.start <= self._padding < self.end
            module.padding_idx = self._padding - self.start if own else None  # type: ignore[assignment]
        return ((ids - self.start).masked_fill(~self._own, 0), *inputs[1:])

    def _only_own_rows(self, module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        if self._padding is not None:
            module.padding_idx = self._padding
        return self.reduce(output.masked_fill(~self._own[..., None], 0.0))


class Head(ParallelStyle):
    """The head, whose vocabulary is cut: full hidden states in, logits of this rank's part of the vocabulary out.

    Args:
        finish: What the module's caller gets instead of local logits; the identity for losses that take them.
    """

    def __init__(self, cutter: Cutter, finish: Leave) -> None:
        self.cutter, self.finish = cutter, finish

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        self.cutter.cut(module, "weight", 0)
        self.cutter.cut(module, "bias", 0)
        module.register_forward_hook(lambda _module, _inputs, logits: self.finish(logits))
        return module


class PerHead(ParallelStyle):
    """A module that owns parameters with one entry per attention head, such as sinks."""

    def __init__(self, cutter: Cutter, names: Sequence[str]) -> None:
        self.cutter, self.names = cutter, tuple(names)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name in self.names:
            self.cutter.cut(module, name, 0)
        return module


def base_of(module: nn.Module) -> nn.Module:
    """The linear layer itself, inside of an adapter or not."""
    base = getattr(module, "base_layer", module)
    assert isinstance(base, nn.Module)
    return base


def num_rows(module: nn.Module) -> int:
    """Output features of a linear layer, or rows of an embedding; adapted or not."""
    weight = base_of(module).weight
    assert isinstance(weight, Tensor)
    return weight.shape[0]


def adapter(module: nn.Module, part: str) -> list[nn.Module]:
    """The linear layers ``lora_A`` or ``lora_B`` of an adapted layer; none without an adapter."""
    parts: Mapping[str, nn.Module] = getattr(module, part, None) or {}
    return list(parts.values())


def head_rows(num_rows: int, num_heads: int, num_ranks: int, rank: int) -> tuple[int, int]:
    """First and last (exclusive) row of a rank in a projection of several heads; ranks share heads if there are fewer.

    >>> [head_rows(8, 2, 4, rank) for rank in range(4)]
    [(0, 4), (0, 4), (4, 8), (4, 8)]
    >>> [head_rows(8, 4, 2, rank) for rank in range(2)]
    [(0, 4), (4, 8)]
    """
    height = num_rows // num_heads
    if num_heads < num_ranks:
        head = rank * num_heads // num_ranks
        return head * height, (head + 1) * height
    start, end = chunk_bounds(num_heads, num_ranks, rank)
    return start * height, end * height


def _zero(parameter: Tensor) -> Tensor:
    """Nothing, with a gradient of zeros: all ranks have the same set of gradients."""
    return parameter if isinstance(parameter, DTensor) else parameter * 0.0


__all__ = [
    "Column",
    "Cutter",
    "Head",
    "Leave",
    "PerHead",
    "Row",
    "Rows",
    "VocabEmbedding",
    "adapter",
    "base_of",
    "head_rows",
    "num_rows",
]
