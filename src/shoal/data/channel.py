"""A channel: parcels from the first rank of a group to all of it, in two collectives.

First every rank says where it stands, and the first one what comes; then the parcel travels. Ranks that have lost
step therefore hear of it together, whatever the reason, instead of taking one parcel for another.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from enum import IntEnum

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from shoal.data.packet import Packet

MAGIC = 0x5348_4F41_4C01
"""Begins every announcement; anything else is another collective that went astray."""

NAME_BYTES = 48
"""Of a loader's name that its peers can see when something is wrong; a multiple of 8."""


class BroadcastError(RuntimeError):
    """Peers did not get their batch; the same message on every rank that could be reached."""


class Kind(IntEnum):
    DATA = 1
    END = 2
    BAD_VALUE = 3
    ERROR = 4


@dataclass(frozen=True)
class Stamp:
    """Where a rank stands: which loader, which iteration and step of it, after which position in the data."""

    loader: int
    iteration: int
    step: int
    position: int

    def __str__(self) -> str:
        if self.loader == 0:
            return "while it was created"
        if self.step < 0:
            return "while its state was saved"
        return f"step {self.step} of iteration {self.iteration}"


@dataclass(frozen=True)
class Parcel:
    """What the source sends: uint8 [num_bytes] on the channel's device, or nothing."""

    kind: Kind
    payload: Tensor | None
    header_bytes: int


class Channel:
    """Hands parcels from rank 0 of a group to all of it, and notices when its ranks are not in step."""

    def __init__(self, group: ProcessGroup, name: str) -> None:
        self.name = name
        self.is_source = group.rank() == 0
        self._group = group
        self._name_words = _words(name)
        uses_nccl = "nccl" in dist.get_backend_config(group)
        self._device = torch.device("cuda", torch.cuda.current_device()) if uses_nccl else torch.device("cpu")

    def wrap(self, kind: Kind, packet: Packet) -> Parcel:
        return Parcel(kind, packet.written(self._device), len(packet.header))

    def exchange(self, stamp: Stamp, parcel: Parcel | None) -> tuple[Kind, Tensor, int]:
        """Returns kind, packet (uint8 [num_bytes]) and its header's length; `parcel` is given on the source."""
        try:
            kind, header_bytes, num_bytes = self._announce(stamp, parcel)
            if parcel is None or parcel.payload is None:
                payload = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
            else:
                payload = parcel.payload
            if num_bytes:
                dist.broadcast(payload, group=self._group, group_src=0)
        except BroadcastError:
            raise
        except RuntimeError as error:  # a peer has ended, or never came
            raise BroadcastError(
                f"{self.name}, {stamp}: this rank, {dist.get_rank()}, did not reach its peers "
                f"{dist.get_process_group_ranks(self._group)}: one of them has stopped, or is somewhere else: {error}"
            ) from error
        return Kind(kind), payload, header_bytes

    def _announce(self, stamp: Stamp, parcel: Parcel | None) -> tuple[int, int, int]:
        """Returns kind, header's length and packet's length, once it is sure that all ranks stand at `stamp`."""
        contents = (0, 0, 0)
        if parcel is not None:
            size = 0 if parcel.payload is None else parcel.payload.numel()
            contents = (int(parcel.kind), parcel.header_bytes, size)
        row = [*contents, MAGIC, *self._name_words, *astuple(stamp)]
        mine = torch.tensor(row, dtype=torch.int64, device=self._device)
        rows = mine.new_empty(self._group.size(), len(mine))
        dist.all_gather(list(rows.unbind()), mine, group=self._group)
        announced: list[list[int]] = rows.tolist()
        places = [row[len(contents) :] for row in announced]
        if any(place != places[0] for place in places):
            raise BroadcastError(self._explain(places))
        kind, header_bytes, num_bytes = announced[0][: len(contents)]
        return kind, header_bytes, num_bytes

    def _explain(self, places: Sequence[Sequence[int]]) -> str:
        """Says where everybody stands; the same on every rank."""
        lines = ["peers that share their batches are not at the same step:"]
        for rank, place in zip(dist.get_process_group_ranks(self._group), places, strict=True):
            name, stamp = _text(place[1:-4]), Stamp(*place[-4:])
            where = f"{name} (loader {stamp.loader}), {stamp}, after position {stamp.position:08x}"
            lines.append(f"  rank {rank}: {where if place[0] == MAGIC else 'in some other collective'}")
        lines.append(
            "every rank must take the same batches from the same loaders in the same order, from the same position: "
            "look for a loop, a condition or a set_position that not all of these ranks run"
        )
        return "\n".join(lines)


def _words(name: str) -> list[int]:
    """Returns the beginning of a name as numbers, so that it can stand in an announcement."""
    content = name.encode()[:NAME_BYTES].ljust(NAME_BYTES, b"\0")
    return list(struct.unpack(f"<{NAME_BYTES // 8}q", content))


def _text(words: Sequence[int]) -> str:
    return struct.pack(f"<{len(words)}q", *words).rstrip(b"\0").decode(errors="replace")


__all__ = ["BroadcastError", "Channel", "Kind", "Parcel", "Stamp"]
