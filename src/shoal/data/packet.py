"""Packets: any batch as one stretch of bytes, its tensors as their own bytes and everything else as JSON.

A packet is a JSON header (the tree of the batch and a table of its tensors), then the tensors one after the other,
each at a multiple of `ALIGNMENT`. Nothing is pickled, so opening a packet runs no code that it names, and the tensors
of an opened packet share its memory: none is copied.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal.data.batch import StepBatch
from shoal.data.position import StreamPosition

ALIGNMENT = 64
"""Bytes; a multiple of every element size, and what vectorised kernels like best."""

STEP_CLASSES: tuple[type[Any], ...] = (StepBatch, StreamPosition)
"""Dataclasses that travel in every packet."""

SCALARS = (type(None), bool, int, float, str)


@dataclass(frozen=True)
class Packet:
    """A batch ready to be written.

    Attributes:
        header: JSON of the tree and of the table of tensors.
        tensors: In the order of the table, not yet copied.
        offsets: Where each begins, in bytes after the header.
        num_bytes: Of the whole packet.
    """

    header: bytes
    tensors: tuple[Tensor, ...]
    offsets: tuple[int, ...]
    num_bytes: int

    def written(self, device: torch.device) -> Tensor:
        """Returns the packet as uint8 [num_bytes] on `device`; copies each tensor once, from wherever it is."""
        packet = torch.empty(self.num_bytes, dtype=torch.uint8, device=device)
        packet[: len(self.header)] = _uint8(self.header)
        start = _aligned(len(self.header))
        for tensor, offset in zip(self.tensors, self.offsets, strict=True):
            _view(packet, start + offset, tensor.dtype, tensor.shape).copy_(tensor)
        return packet


def pack(value: Any, classes: Sequence[type[Any]] = ()) -> Packet:
    """Describes a batch for its journey.

    Args:
        value: Dense tensors of any dtype, None, bool, int, float, str, bytes, and lists, tuples, mappings (which
            arrive as dicts), `StepBatch` and `StreamPosition` of those, nested as one likes.
        classes: More dataclasses that may occur; whoever opens the packet names the same ones.

    Raises:
        TypeError: Something else occurs; the message says where, and what to do.
    """
    encoder = _Encoder(classes)
    tree = encoder.encode(value, "batch")
    offsets, end = [], 0
    for tensor in encoder.tensors:
        offsets.append(end)
        end = _aligned(end + tensor.numel() * tensor.element_size())
    table = [
        (str(tensor.dtype).removeprefix("torch."), list(tensor.shape), offset)
        for tensor, offset in zip(encoder.tensors, offsets, strict=True)
    ]
    header = json.dumps({"tree": tree, "tensors": table}, separators=(",", ":")).encode()
    return Packet(header, tuple(encoder.tensors), tuple(offsets), _aligned(len(header)) + end)


def unpack(packet: Tensor, header_bytes: int, classes: Sequence[type[Any]] = ()) -> Any:
    """Opens a packet.

    Args:
        packet: uint8 [num_bytes], at the start of its own storage.
        header_bytes: Length of the JSON header.
        classes: As they were given to `pack`.

    Returns:
        The batch. Its tensors lie in the memory of `packet`, which lives as long as any of them. They are as
        independent of each other as tensors of their own: autograd does not take a change of one for one of another.
    """
    header = json.loads(packet[:header_bytes].cpu().numpy().tobytes())
    start = _aligned(header_bytes)
    tensors = [
        _view(packet, start + offset, _dtype(name), shape) for name, shape, offset in header["tensors"]
    ]
    return _Decoder(tensors, classes).decode(header["tree"])


class _Encoder:
    """Turns a batch into plain JSON data; `tensors` collects what does not belong there."""

    def __init__(self, classes: Sequence[type[Any]]) -> None:
        self.tensors: list[Tensor] = []
        self._classes = (*STEP_CLASSES, *classes)

    def encode(self, value: Any, path: str) -> Any:
        kind = type(value)
        if kind in SCALARS:
            return value
        if kind is Tensor:
            return {"tensor": self._add(value, path)}
        if kind is bytes:
            return {"bytes": self._add(_uint8(value), path)}
        if kind in (list, tuple):
            if all(type(item) in SCALARS for item in value):
                return {kind.__name__: value}
            return {kind.__name__: [self.encode(item, f"{path}[{i}]") for i, item in enumerate(value)]}
        if isinstance(value, Mapping):
            items = [
                (self.encode(key, path), self.encode(one, f"{path}[{key!r}]")) for key, one in value.items()
            ]
            return {"dict": items}
        if kind in self._classes and is_dataclass(kind):
            names = [field.name for field in fields(kind)]
            entries = {name: self.encode(getattr(value, name), f"{path}.{name}") for name in names}
            return {"class": (_name(kind), entries)}
        raise TypeError(
            f"{path}: a {_name(kind)} cannot travel in a packet; limit: dense tensors without gradient, None, bool, "
            "int, float, str, bytes, lists, tuples, mappings and the dataclasses in `classes`; repair: turn it into "
            "one of those in the collate function, or leave it out"
        )

    def _add(self, tensor: Tensor, path: str) -> int:
        if tensor.layout is not torch.strided or tensor.requires_grad:
            raise TypeError(
                f"{path}: a tensor of layout {tensor.layout}, dtype {tensor.dtype}, requires_grad "
                f"{tensor.requires_grad} cannot travel in a packet; limit: dense, without gradient; "
                "repair: .to_dense() or .detach() it in the collate function"
            )
        self.tensors.append(tensor)
        return len(self.tensors) - 1


class _Decoder:
    """Rebuilds what `_Encoder` took apart."""

    def __init__(self, tensors: Sequence[Tensor], classes: Sequence[type[Any]]) -> None:
        self._tensors = tensors
        self._classes = {_name(kind): kind for kind in (*STEP_CLASSES, *classes)}

    def decode(self, node: Any) -> Any:
        if not isinstance(node, dict):
            return node
        ((kind, content),) = node.items()
        if kind == "tensor":
            return self._tensors[content]
        if kind == "bytes":
            return self._tensors[content].cpu().numpy().tobytes()
        if kind == "list":
            return [self.decode(item) for item in content]
        if kind == "tuple":
            return tuple(self.decode(item) for item in content)
        if kind == "dict":
            return {self.decode(key): self.decode(value) for key, value in content}
        name, entries = content
        if name not in self._classes:
            raise ValueError(
                f"a packet holds a {name}, a class that this rank was not given; name it everywhere"
            )
        return self._classes[name](**{field: self.decode(value) for field, value in entries.items()})


def _view(packet: Tensor, offset: int, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    """Returns a tensor that lies in `packet`, `offset` bytes from its start."""
    tensor = torch.empty(0, dtype=dtype, device=packet.device)
    if math.prod(shape) == 0:
        return tensor.new_empty(shape)
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    # Not packet[...].view(dtype): views share one version counter, so an in-place change of one tensor of a batch
    # would make autograd refuse the backward of another.
    return tensor.set_(
        packet.untyped_storage(), offset // tensor.element_size(), tuple(shape), tuple(strides)
    )


def _uint8(content: bytes) -> Tensor:
    return torch.from_numpy(np.frombuffer(bytearray(content), dtype=np.uint8))


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(
            f"a packet holds a tensor of dtype {name!r}, which this torch {torch.__version__} lacks"
        )
    return dtype


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def _name(kind: type[Any]) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


__all__ = ["ALIGNMENT", "STEP_CLASSES", "Packet", "pack", "unpack"]
