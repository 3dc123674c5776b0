"""Runs a function on N ranks by forking this process, which has imported everything already.

A process may be forked while it has one thread and has never run autograd or opened a process group. Whatever a
rank does (raise, abort, hang) costs that one run: ranks report through files and are killed afterwards.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist

from shoal.config.errors import ConfigError, Finding

T = TypeVar("T")

_POLL_SECONDS = 0.005
_GRACE_SECONDS = 5.0


@dataclass(frozen=True)
class Failure:
    """A rank that did not return.

    Attributes:
        rank: Which one.
        reason: ``raised``, ``ended`` (the process died), ``hung`` or ``stopped`` (killed after a peer failed).
        error: Last line of the traceback, or what is known instead.
        output: Traceback, and the end of what the rank wrote; for one that hung, the stacks of its threads.
        findings: What the rank refused, when it raised a `ConfigError`.
    """

    rank: int
    reason: str
    error: str
    output: str
    findings: tuple[Finding, ...] = ()


class RanksFailed(RuntimeError):
    """At least one rank did not return."""

    def __init__(self, failures: tuple[Failure, ...]) -> None:
        self.failures = failures
        # A rank that was merely stopped says nothing about the cause.
        self.first = next((f for f in failures if f.reason != "stopped"), failures[0])
        super().__init__(f"rank {self.first.rank} {self.first.reason}: {self.first.error}")

    @property
    def refused(self) -> tuple[Finding, ...]:
        """What all ranks refused alike, before they trained; empty when anything else happened."""
        told = [failure.findings for failure in self.failures if failure.reason != "stopped"]
        return told[0] if told and all(findings == told[0] for findings in told) else ()


@dataclass(frozen=True)
class _Job(Generic[T]):
    function: Callable[[int], T]
    world: int
    timeout: float
    scratch: Path
    group: bool


def run_ranks(
    function: Callable[[int], T], world: int, *, timeout: float = 120.0, group: bool = True
) -> list[T]:
    """Runs ``function(rank)`` in `world` forked processes and returns their results by rank.

    Args:
        function: Any callable; the ranks inherit it with the memory of this process. Results are pickled.
        world: Number of processes.
        timeout: Seconds until ranks that have not reported are killed; also that of the process group.
        group: Open a gloo process group of all ranks first.

    Raises:
        RanksFailed: With the reason of every rank that did not return.
        ValueError: This process cannot be forked safely.
    """
    refuse_unsafe_fork()
    scratch = Path(tempfile.mkdtemp(prefix="shoal-verify-"))
    job = _Job(function, world, timeout, scratch, group)
    pids: list[int] = []
    try:
        for rank in range(world):
            sys.stdout.flush()
            sys.stderr.flush()
            pid = os.fork()
            if pid == 0:
                _be_rank(job, rank)
            pids.append(pid)
        return _collect(job, pids)
    finally:
        for pid in pids:
            _end(pid)
        shutil.rmtree(scratch, ignore_errors=True)


def refuse_unsafe_fork() -> None:
    """Refuses to fork a process with threads or a process group, whose children would wait for them forever.

    Raises:
        ValueError: With the reason.
    """
    tasks = Path("/proc/self/task")
    threads = len(list(tasks.iterdir())) if tasks.is_dir() else 1
    if threads > 1 or dist.is_initialized():
        reason = f"{threads} threads" if threads > 1 else "an open process group"
        raise ValueError(
            f"this process has {reason} and cannot be forked; repair: OMP_NUM_THREADS=1, "
            "and call it before anything that starts threads"
        )


def _collect(job: _Job[T], pids: list[int]) -> list[T]:
    results: dict[int, T] = {}
    failures: dict[int, Failure] = {}
    deadline, late = time.monotonic() + job.timeout, "hung"
    while len(results) + len(failures) < job.world and time.monotonic() < deadline:
        for rank, pid in enumerate(pids):
            if rank in results or rank in failures:
                continue
            ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            report = job.scratch / f"report.{rank}"
            if report.exists():
                outcome = pickle.loads(report.read_bytes())
                if isinstance(outcome, Failure):
                    failures[rank] = outcome
                else:
                    results[rank] = outcome[0]
            elif ended is not None:
                what = "exit status" if ended.si_code == os.CLD_EXITED else "signal"
                failures[rank] = Failure(rank, "ended", f"{what} {ended.si_status}", _output(job, rank))
        if failures and late == "hung":
            deadline, late = min(deadline, time.monotonic() + _GRACE_SECONDS), "stopped"
        time.sleep(_POLL_SECONDS)
    missing = [rank for rank in range(job.world) if rank not in results and rank not in failures]
    for rank in missing:
        os.kill(pids[rank], signal.SIGUSR1)  # faulthandler writes the stacks of all threads
    if missing:
        time.sleep(0.3)
    for rank in missing:
        failures[rank] = Failure(rank, late, f"no answer in {job.timeout:.0f} s", _output(job, rank))
    if failures:
        raise RanksFailed(tuple(failures[rank] for rank in sorted(failures)))
    return [results[rank] for rank in range(job.world)]


def _output(job: _Job[Any], rank: int) -> str:
    path = job.scratch / f"output.{rank}"
    return path.read_bytes()[-6000:].decode(errors="replace") if path.exists() else ""


def _end(pid: int) -> None:
    """Kills a rank with everything it started, then reaps it."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def _be_rank(job: _Job[Any], rank: int) -> None:
    """The whole life of a forked rank; never returns."""
    try:
        os.setpgid(0, 0)
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: end with the parent
        output = os.open(job.scratch / f"output.{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        faulthandler.enable(all_threads=True)
        faulthandler.register(signal.SIGUSR1, all_threads=True)
        try:
            _open_group(job, rank)
            outcome: Any = (job.function(rank),)
            data = pickle.dumps(outcome)
        except BaseException as error:
            last = f"{type(error).__name__}: {error}"
            text = traceback.format_exc() + _output(job, rank)
            findings = tuple(error.findings) if isinstance(error, ConfigError) else ()
            data = pickle.dumps(Failure(rank, "raised", last, text, findings))
        partial = job.scratch / f"partial.{rank}"
        partial.write_bytes(data)
        partial.rename(job.scratch / f"report.{rank}")
        while True:  # an exit would reset connections that a slower peer still reads from
            signal.pause()
    finally:  # only an error in the lines above comes here
        os._exit(70)


def _open_group(job: _Job[Any], rank: int) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(job.world)}
    if not job.group:
        return
    if sys.platform == "linux":
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = dist.FileStore(str(job.scratch / "store"), job.world)  # type: ignore[attr-defined]
    limit = timedelta(seconds=job.timeout)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=job.world, timeout=limit)
