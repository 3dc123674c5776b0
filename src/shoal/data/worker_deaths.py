"""A data worker that dies is an error where its batch is awaited, not in the midst of a training step.

A torch DataLoader with workers handles SIGCHLD, and its handler raises in whatever the main thread is doing just then.
In the midst of a step that ends one rank between two collectives, and its peers wait for it.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TypeVar

T = TypeVar("T")

_RAISES = "torch.utils.data._utils.signal_handling"
"""The module of torch's handler."""


@contextmanager
def workers_awaited() -> Iterator[None]:
    """Within it the death of a data worker raises, at once; one that came since the last time, on entry.

    After the first use in which a DataLoader started workers, deaths outside of it raise nothing. Handlers of signals
    run in the main thread, and in others this does nothing: there torch looks after its workers every few seconds.

    Raises:
        RuntimeError: torch's, with the worker's process id and how it ended.
    """
    deferred = _deferred()
    before = deferred is not None and deferred.awaited
    try:
        if deferred is not None:
            deferred.raise_from_now_on()
        yield
    finally:
        deferred = _deferred()
        if deferred is not None:
            deferred.awaited = before


def awaited(begin: Callable[[], Iterator[T]]) -> Iterator[T]:
    """Yields what `begin()` yields; deaths of its workers raise while it is asked for the next item only."""
    items: Iterator[T] | None = None
    while True:
        with workers_awaited():
            items = begin() if items is None else items
            item = next(items, _END)
        if item is _END:
            return
        yield item  # type: ignore[misc]


_END = object()


class _Deferred:
    """A handler of SIGCHLD that asks torch's only while workers are awaited, and remembers otherwise."""

    def __init__(self, raises: Callable[[int, FrameType | None], object]) -> None:
        self.awaited = False
        self._raises = raises
        self._missed = False

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        if self.awaited:
            self._raises(signum, frame)
        else:
            self._missed = True

    def raise_from_now_on(self) -> None:
        self.awaited = True
        if self._missed:
            self._missed = False
            self._raises(signal.SIGCHLD, None)


def _deferred() -> _Deferred | None:
    """Returns ours, put around torch's handler if that is there; None without one, and outside the main thread."""
    if threading.current_thread() is not threading.main_thread():
        return None
    current = signal.getsignal(signal.SIGCHLD)
    if isinstance(current, _Deferred):
        return current
    if not callable(current) or getattr(current, "__module__", "") != _RAISES:
        return None
    deferred = _Deferred(current)
    signal.signal(signal.SIGCHLD, deferred)
    return deferred


__all__ = ["awaited", "workers_awaited"]
