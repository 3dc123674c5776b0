"""Packets: what goes in comes out, byte for byte, and nothing else goes in."""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor

from shoal.data.batch import StepBatch, empty_micro_batch
from shoal.data.packet import ALIGNMENT, pack, unpack
from shoal.data.position import StreamPosition

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Labelled:
    label: str
    values: Tensor


def sent(value: Any, classes: tuple[type[Any], ...] = ()) -> Any:
    packet = pack(value, classes)
    return unpack(packet.written(CPU), len(packet.header), classes)


def bits(tensor: Tensor) -> bytes:
    """The bytes of a tensor in order; NaNs and the signs of zeros count."""
    return tensor.resolve_conj().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


TENSORS = {
    "float": torch.tensor([[1.5, -0.0], [math.nan, math.inf]]),
    "double": torch.tensor([1 / 3], dtype=torch.float64),
    "half": torch.tensor([65504.0, 6e-8], dtype=torch.float16),
    "bfloat16": torch.randn(5, 3, generator=torch.Generator().manual_seed(0)).bfloat16(),
    "float8": torch.tensor([0.5, 448.0]).to(torch.float8_e4m3fn),
    "complex": torch.tensor([1 + 2j, -3j]).conj(),
    "bool": torch.tensor([True, False, True]),
    "int8": torch.tensor([-128, 127], dtype=torch.int8),
    "int32": torch.tensor([-(2**31), 2**31 - 1], dtype=torch.int32),
    "int64": torch.tensor([-(2**63), 2**63 - 1]),
    "uint16": torch.tensor([0, 65535], dtype=torch.uint16),
    "scalar": torch.tensor(7),
    "no elements": torch.zeros(0, 0),
    "no columns": torch.zeros(3, 0, dtype=torch.bool),
    "transposed": torch.arange(6).view(2, 3).t(),
    "expanded": torch.tensor([1.0]).expand(4),
    "inner part": torch.arange(100)[7:61:9],
}


def test_tensors_arrive_bit_for_bit() -> None:
    arrived = sent(TENSORS)
    assert list(arrived) == list(TENSORS)
    for name, tensor in TENSORS.items():
        assert (arrived[name].dtype, arrived[name].shape) == (tensor.dtype, tensor.shape), name
        assert bits(arrived[name]) == bits(tensor) if tensor.numel() else True, name
        assert arrived[name].is_contiguous()


def test_tensors_lie_in_the_memory_of_the_packet() -> None:
    packet = pack(list(TENSORS.values()))
    written = packet.written(CPU)
    start, end = written.data_ptr(), written.data_ptr() + packet.num_bytes
    last = start
    for tensor in unpack(written, len(packet.header)):
        if tensor.numel():
            assert last < tensor.data_ptr() < end and (tensor.data_ptr() - start) % ALIGNMENT == 0
            last = tensor.data_ptr() + bytes_of(tensor) - 1
    assert last < end


def bytes_of(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def test_a_change_of_one_tensor_does_not_disturb_the_gradient_of_another() -> None:
    # Views of one tensor share a version counter: with them, autograd refuses this.
    inputs, labels = sent([torch.ones(3), torch.zeros(3)])
    weight = torch.ones(3, requires_grad=True)
    loss = (weight * inputs).sum()
    labels.fill_(-100.0)
    loss.backward()  # type: ignore[no-untyped-call]
    assert weight.grad is not None and torch.equal(weight.grad, torch.ones(3))


METADATA = [
    None,
    True,
    -(10**30),
    0.1,
    -math.inf,
    "naïve \ud800 \0 人",
    b"\x00\xff",
    b"",
    (),
    [],
    {},
    [1, (2.0, [None, {"deep": ("er",)}])],
    {1: "one", (2, "b"): {None: False}},
    StreamPosition(3, 14, None, 2**62),
]


@pytest.mark.parametrize("value", METADATA, ids=repr)
def test_metadata_arrives_with_its_types(value: Any) -> None:
    arrived = sent(value)
    assert arrived == value and repr(arrived) == repr(value)


def test_step_batches_arrive_whole() -> None:
    batch = StepBatch(
        [
            empty_micro_batch(7),
            {"sample_ids": ["a", "b"], "max_seqlen": 5, "cu_seqlens": torch.arange(3).int()},
        ],
        StreamPosition(1, 2, 3, 4),
        "sample 'x': ValueError",
        MappingProxyType({"longer_than_seq_length": 2}),
    )
    arrived = sent(batch)
    assert isinstance(arrived, StepBatch)
    assert (arrived.position, arrived.error, arrived.skipped) == (
        batch.position,
        batch.error,
        dict(batch.skipped),
    )
    assert len(arrived.micro_batches) == 2
    for mine, theirs in zip(arrived.micro_batches, batch.micro_batches, strict=True):
        assert list(mine) == list(theirs)
        for key, value in theirs.items():
            assert torch.equal(mine[key], value) if isinstance(value, Tensor) else mine[key] == value


def test_dataclasses_travel_only_when_they_are_named() -> None:
    value = {"one": Labelled("x", torch.ones(2))}
    arrived = sent(value, (Labelled,))["one"]
    assert (
        isinstance(arrived, Labelled) and arrived.label == "x" and torch.equal(arrived.values, torch.ones(2))
    )
    with pytest.raises(TypeError, match=r"batch\['one'\]: a \S*Labelled cannot travel"):
        pack(value)
    packet = pack(value, (Labelled,))
    with pytest.raises(ValueError, match="Labelled, a class that this rank was not given"):
        unpack(packet.written(CPU), len(packet.header))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([0, {"cut": object()}], r"batch\[1\]\['cut'\]: a builtins.object cannot travel.*collate function"),
        ({"weight": torch.nn.Parameter(torch.ones(1))}, r"batch\['weight'\]: a \S*Parameter cannot"),
        ((torch.ones(1, requires_grad=True),), r"batch\[0\]: .*requires_grad True.*repair"),
        ([torch.eye(2).to_sparse()], r"batch\[0\]: a tensor of layout torch.sparse_coo"),
        ({1, 2}, "batch: a builtins.set cannot"),
    ],
)  # fmt: skip
def test_what_cannot_travel_is_refused_with_its_place(value: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        pack(value)


def test_a_dtype_that_torch_lacks_is_named() -> None:
    packet = pack(torch.ones(1))
    written = packet.written(CPU)
    forged = bytearray(packet.header.replace(b"float32", b"nothing"))
    written[: len(forged)] = torch.frombuffer(forged, dtype=torch.uint8)
    with pytest.raises(ValueError, match="dtype 'nothing'"):
        unpack(written, len(forged))
