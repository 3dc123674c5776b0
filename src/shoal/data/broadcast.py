"""BroadcastingDataLoader: the peers of one data-parallel coordinate train on the batch that one of them built.

Peers in tensor, context and pipeline groups need the same batch, byte for byte. The first of them loads it; the
others have no source, no workers and no open files. A step takes two collectives: every peer says where it stands (and
the first one what comes), then the packet travels. So an end and an error reach everybody, and peers that have lost
step hear of it together instead of mixing their batches.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, Generic, TypeVar

import torch.distributed as dist
from torch.distributed import ProcessGroup

from shoal.data.channel import BroadcastError, Channel, Kind, Parcel, Stamp
from shoal.data.packet import pack, unpack
from shoal.data.position import StreamPosition
from shoal.data.worker_deaths import workers_awaited
from shoal.mesh.axes import MeshAxisName
from shoal.mesh.context import MeshContext

T = TypeVar("T")

PEER_AXES = (MeshAxisName.PP, MeshAxisName.CP, MeshAxisName.TP)
"""Axes along which ranks work on the same batch."""

_SERIALS = count(1)


def broadcast_loader(
    build: Callable[[], Iterable[T]],
    context: MeshContext | None,
    *,
    axes: Collection[MeshAxisName] = PEER_AXES,
    name: str = "data",
    classes: Sequence[type[Any]] = (),
) -> Iterable[T]:
    """Returns what `build` returns when this rank has no peers along `axes`, else a `BroadcastingDataLoader` of it.

    Collective over the ranks of `context` when there are peers. Arguments and errors are those of that class.
    """
    group = None if context is None else context.group_over(axes)
    if group is None:
        return build()
    return BroadcastingDataLoader(build, group, name=name, classes=classes)


class BroadcastingDataLoader(Generic[T]):
    """Iterates over the same batches on every rank of a group; only rank 0 of the group loads them.

    Creating it, each `next` on it and `source_state` are collective. Tensors of a batch lie on the device the group
    communicates from (the current CUDA device under NCCL, the host under gloo), share one buffer per batch, are
    contiguous, and have the same bytes on every rank. Rank 0 gets the batch through the same packet.

    Args:
        build: Builds the source: a DataLoader, map-style or iterable, with or without workers, or any iterable that
            can be iterated anew each epoch. Called on rank 0 of the group alone. It must load for the
            data-parallel coordinate that the peers share.
        group: The peers, as `MeshContext.group_over` gives them, or any other group.
        name: Of the data, for messages.
        classes: Dataclasses that batches contain, besides those of `shoal.data`; the same on every rank.

    Raises:
        ValueError: `build` raised one; on every rank, with the same message.
        BroadcastError: `build` raised something else; on every rank.
    """

    def __init__(
        self,
        build: Callable[[], Iterable[T]],
        group: ProcessGroup,
        *,
        name: str = "data",
        classes: Sequence[type[Any]] = (),
    ) -> None:
        self._channel = Channel(group, name)
        self._classes = tuple(classes)
        self._source: Any = None
        self._position: StreamPosition | None = None
        self._iteration = 0
        self._serial = 0  # until the source has told

        def facts() -> _Facts:
            self._source = build()
            return _Facts.of(self._source)

        self._facts: _Facts = self._hand_round(Stamp(0, 0, 0, 0), facts)
        self._serial, self._position = self._facts.serial, self._facts.position

    @property
    def source(self) -> Any:
        """The loader that was built, on rank 0 of the group; None on its peers."""
        return self._source

    @property
    def sampler(self) -> Any:
        """The source's sampler, on which a trainer sets the epoch; None without one and on the peers."""
        return getattr(self._source, "sampler", None)

    @property
    def batch_sampler(self) -> Any:
        """The source's batch sampler; None without one and on the peers."""
        return getattr(self._source, "batch_sampler", None)

    @property
    def position(self) -> StreamPosition | None:
        """The position after the last step batch that was handed out, on every rank; None if batches have none."""
        return self._position

    def set_position(self, position: StreamPosition) -> None:
        """Makes the next iteration start at `position`. Every rank calls it, with the same one.

        Raises:
            ValueError: The source has no position.
        """
        if self._facts.position is None:
            raise ValueError(f"{self._channel.name}: its loader has no position; pass one with set_position")
        self._position = position
        if self._source is not None:
            self._source.set_position(position)

    def source_state(self) -> Any:
        """Returns what `state_dict` of the source returns, on every rank. Collective.

        Raises:
            ValueError: The source has no `state_dict`.
        """
        self._require_state()
        return self._hand_round(self._stamp(self._iteration, -1), lambda: self._source.state_dict())

    def load_source_state(self, state: Any) -> None:
        """Restores the source with what `source_state` returned. Every rank calls it.

        Raises:
            ValueError: The source has no `load_state_dict`.
        """
        self._require_state()
        if self._source is not None:
            self._source.load_state_dict(state)

    def __len__(self) -> int:
        """Returns the length of the source when this loader was created.

        Raises:
            TypeError: The source has none; on every rank alike.
        """
        if self._facts.length is None:
            raise TypeError(f"{self._channel.name}: the loader of these batches has no length")
        return self._facts.length

    def __iter__(self) -> Iterator[T]:
        """Yields the batches of one pass over the source.

        Raises:
            ValueError: The source, or a worker of it, raised one; on every rank, with the same message.
            BroadcastError: It raised something else, a batch cannot travel, or the peers are not at the same step.
        """
        self._iteration += 1
        iteration, batches = self._iteration, _Started(self._source)
        for step in count():
            batch = self._hand_round(self._stamp(iteration, step), batches.next)
            if batch is END:
                return
            position = getattr(batch, "position", None)
            if isinstance(position, StreamPosition):
                self._position = position
            yield batch

    def _stamp(self, iteration: int, step: int) -> Stamp:
        digest = 0 if self._position is None else zlib.crc32(repr(self._position).encode())
        return Stamp(self._serial, iteration, step, digest)

    def _require_state(self) -> None:
        if not self._facts.has_state:
            raise ValueError(f"{self._channel.name}: its loader has no state_dict and load_state_dict")

    def _hand_round(self, stamp: Stamp, produce: Callable[[], Any]) -> Any:
        """Returns what `produce` returns on the source, or raises on every rank what it raises there."""
        parcel, failure = None, None
        if self._channel.is_source:
            parcel, failure = self._parcel(stamp, produce)
        kind, payload, header_bytes = self._channel.exchange(stamp, parcel)
        if failure is not None and not isinstance(failure, Exception):
            raise failure  # an interrupt: the peers know, and this rank stops as it was told to
        if kind is Kind.END:
            return END
        content = unpack(payload, header_bytes, (*self._classes, _Facts))
        if kind is Kind.DATA:
            return content
        raise (ValueError if kind is Kind.BAD_VALUE else BroadcastError)(content) from failure

    def _parcel(self, stamp: Stamp, produce: Callable[[], Any]) -> tuple[Parcel, BaseException | None]:
        try:
            content = produce()
            if content is END:
                return Parcel(Kind.END, None, 0), None
            return self._channel.wrap(Kind.DATA, pack(content, (*self._classes, _Facts))), None
        except BaseException as error:  # whatever it was, the peers are waiting to hear of it
            kind = Kind.BAD_VALUE if isinstance(error, ValueError) else Kind.ERROR
            text = (
                f"{self._channel.name}, {stamp}, on rank {dist.get_rank()}: {type(error).__name__}: {error}"
            )
            return self._channel.wrap(kind, pack(text)), error


END = object()
"""Stands for the end of the data."""


class _Started(Generic[T]):
    """An iterator that begins when it is first asked, so that a failure to begin is one of a step."""

    def __init__(self, source: Iterable[T] | None) -> None:
        self._source = source
        self._iterator: Iterator[T] | None = None

    def next(self) -> T | object:
        with workers_awaited():
            if self._iterator is None:
                assert self._source is not None
                self._iterator = iter(self._source)
            return next(self._iterator, END)


@dataclass(frozen=True)
class _Facts:
    """What peers know of a source they do not have."""

    serial: int
    length: int | None
    position: StreamPosition | None
    has_state: bool

    @staticmethod
    def of(source: Any) -> _Facts:
        try:
            length = len(source)
        except (TypeError, NotImplementedError):  # how torch and Lightning say that there is none
            length = None
        position = getattr(source, "position", None)
        settable = isinstance(position, StreamPosition) and hasattr(source, "set_position")
        has_state = hasattr(source, "state_dict") and hasattr(source, "load_state_dict")
        return _Facts(next(_SERIALS), length, position if settable else None, has_state)


__all__ = ["PEER_AXES", "BroadcastError", "BroadcastingDataLoader", "broadcast_loader"]
