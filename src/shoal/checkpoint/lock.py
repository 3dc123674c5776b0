"""One writer for a directory of checkpoints: an advisory lock that the kernel drops when its holder dies.

Nothing is left to clean up after a crash, and nothing to be mistaken for a run that lives: the file stays, the lock on
it does not. It keeps out other runs of Shoal, on this machine and, where the file system passes locks on, on others.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import socket
import time
from pathlib import Path

LOCK_NAME = ".lock"
WAIT_SECONDS = 10.0
"""A run that has been killed a moment ago may take that long to be gone."""

_POLL_SECONDS = 0.1
# What file systems without locks say: NFS without a lock server, Lustre mounted without `flock`, some of FUSE.
_NO_LOCKS = frozenset({errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS})
_log = logging.getLogger(__name__)


class HeldElsewhereError(OSError):
    """Another process holds the lock; the message says which."""


class DirectoryLock:
    """The right to write into one directory, held from `acquire` to `release` or to the end of the process.

    Args:
        directory: is made when the lock is taken.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = Path(directory)
        self._descriptor: int | None = None

    def acquire(self, wait_seconds: float = WAIT_SECONDS) -> None:
        """Take the lock; does nothing when it is held by this object. Without locks in the file system it warns.

        Raises:
            HeldElsewhereError: another process, or another object in this one, still holds it after `wait_seconds`.
            OSError: the directory or the file in it cannot be made.
        """
        if self._descriptor is not None:
            return
        self.directory.mkdir(parents=True, exist_ok=True)
        # Writable, because NFS gives an exclusive lock on nothing else.
        descriptor = os.open(self.directory / LOCK_NAME, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            self._wait(descriptor, wait_seconds)
            os.ftruncate(descriptor, 0)
            holder = {"pid": os.getpid(), "host": socket.gethostname()}
            os.pwrite(descriptor, f"{json.dumps(holder)}\n".encode(), 0)
        except OSError as error:
            os.close(descriptor)
            if error.errno not in _NO_LOCKS:
                raise
            _log.warning(
                "the file system of %s has no locks (%s): two runs in this directory would not be noticed",
                self.directory,
                error,
            )
            return
        self._descriptor = descriptor
        _HELD.add(self)

    def release(self) -> None:
        """Give the lock back; does nothing when it is not held."""
        descriptor, self._descriptor = self._descriptor, None
        _HELD.discard(self)
        if descriptor is not None:
            # A copy of the descriptor in a process forked by something other than Python would keep it otherwise.
            fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)

    def _wait(self, descriptor: int, seconds: float) -> None:
        end, said = time.monotonic() + seconds, False
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError as error:
                if time.monotonic() >= end:
                    raise HeldElsewhereError(_holder(descriptor)) from error
            if not said:
                print(
                    f"waiting for the end of {_holder(descriptor)}, which writes {self.directory}", flush=True
                )
                said = True
            time.sleep(_POLL_SECONDS)

    def _forget(self) -> None:
        """In a forked child: close the copy, and nothing more, so that the parent keeps the lock."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


_HELD: set[DirectoryLock] = set()


def _forget_all() -> None:
    for lock in _HELD:
        lock._forget()
    _HELD.clear()


# A lock belongs to the open file, which a fork shares: a data worker that outlives its rank would hold it.
os.register_at_fork(after_in_child=_forget_all)


def _holder(descriptor: int) -> str:
    """The process that has the lock, as it wrote it down."""
    try:
        holder = json.loads(os.pread(descriptor, 4096, 0))
        return f"process {holder['pid']} on {holder['host']}"
    except (OSError, ValueError, KeyError, TypeError):  # it has not written it yet
        return "another process"
