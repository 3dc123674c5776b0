"""The lock of a directory: one holder, gone with its process, not shared with what that process forked."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shoal.checkpoint.lock import DirectoryLock, HeldElsewhereError

HOLD = """
import os, sys, time
from shoal.checkpoint.lock import DirectoryLock
lock = DirectoryLock(sys.argv[1])
lock.acquire(0)
child = os.fork() if sys.argv[2:] == ["fork"] else None
if child == 0:
    lock.release()  # what a child may do without taking it from its parent
    lock = None
else:
    print(child, flush=True)
time.sleep(60)
"""


def holder(directory: Path, *words: str) -> tuple[subprocess.Popen[str], str]:
    """A process that has the lock, and what it printed: the pid of its child."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(directory), *words], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    return process, process.stdout.readline().strip()


def test_another_process_is_named_and_its_death_frees_the_lock(tmp_path: Path) -> None:
    process, _ = holder(tmp_path / "run")
    lock = DirectoryLock(tmp_path / "run")
    try:
        with pytest.raises(HeldElsewhereError, match=f"^process {process.pid} on {socket.gethostname()}$"):
            lock.acquire(0)
    finally:
        process.kill()
    lock.acquire(5)
    lock.release()
    process.wait()


def test_what_the_holder_forked_does_not_hold(tmp_path: Path) -> None:
    process, child = holder(tmp_path, "fork")
    lock = DirectoryLock(tmp_path)
    try:
        time.sleep(0.2)  # the child has run its hook and tried to release by now
        with pytest.raises(HeldElsewhereError):
            lock.acquire(0)
        process.kill()
        process.wait()
        os.kill(int(child), 0)  # it lives
        lock.acquire(0)
        lock.release()
    finally:
        process.kill()
        os.kill(int(child), signal.SIGKILL)


def test_a_holder_that_is_about_to_end_is_waited_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    process, _ = holder(tmp_path)
    subprocess.Popen(["sh", "-c", f"sleep 0.5; kill -9 {process.pid}"])
    lock = DirectoryLock(tmp_path)
    lock.acquire(10)
    lock.release()
    process.wait()
    shown = capsys.readouterr().out.splitlines()
    assert shown == [
        f"waiting for the end of process {process.pid} on {socket.gethostname()}, which writes {tmp_path}"
    ]


def test_one_process_takes_it_again_but_not_twice(tmp_path: Path) -> None:
    first, second = DirectoryLock(tmp_path), DirectoryLock(tmp_path)
    for _ in range(2):
        first.acquire(0)
        first.acquire(0)
        with pytest.raises(HeldElsewhereError, match=f"process {os.getpid()} on"):
            second.acquire(0)
        first.release()
        first.release()
        second.acquire(0)
        second.release()


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS])
def test_a_file_system_without_locks_is_a_warning(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", refuse)
    lock = DirectoryLock(tmp_path)
    with caplog.at_level(logging.WARNING):
        lock.acquire()
    lock.release()
    assert [f"the file system of {tmp_path} has no locks" in text for text in caplog.messages] == [True]
