"""Deaths of data workers: raised where a batch is awaited, never in the midst of what a rank does with the last one."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

from shoal.data.broadcast import BroadcastingDataLoader
from shoal.data.worker_deaths import awaited, workers_awaited
from tests.zygote import RankRunner

ENDED = "exited unexpectedly with exit code 3"


class Dies(Dataset[int]):
    """Its worker prefetches two examples, and ends at the second one."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        if index == 1:
            time.sleep(0.3)  # until the first one has been taken
            os._exit(3)
        return index


def dying() -> DataLoader[int]:
    return DataLoader(Dies(), batch_size=None, num_workers=1)


@pytest.fixture(autouse=True)
def handler() -> Iterator[None]:
    """Leaves the handler of signals to the next test as it was found."""
    before = signal.getsignal(signal.SIGCHLD)
    yield
    signal.signal(signal.SIGCHLD, before)


def outlive(worker: Any) -> None:
    """Works until the worker has ended."""
    os.waitid(os.P_PID, worker.pid, os.WEXITED | os.WNOWAIT)


def deaths(rank: int, world: int) -> tuple[list[str], str]:
    done: list[str] = []
    begun: list[Any] = []

    def begin() -> Iterator[int]:
        begun.append(iter(dying()))
        return begun[0]

    try:
        for item in awaited(begin):
            outlive(begun[0]._workers[0])
            done.append(f"trained on {item}")
    except RuntimeError as error:
        return done, str(error)
    raise AssertionError("nobody was told")


def test_the_death_waits_for_the_next_batch(ranks: RankRunner) -> None:
    ((done, message),) = ranks(deaths, 1, init=False)
    assert done == ["trained on 0"]
    assert ENDED in message


def nested(rank: int, world: int) -> str:
    with workers_awaited():
        loader = dying()
        batches = awaited(loader.__iter__)
        next(batches)
    time.sleep(1)
    try:
        with workers_awaited():
            next(batches)
    except RuntimeError as error:
        with workers_awaited():
            pass  # a death is told once
        return str(error)
    raise AssertionError("nobody was told")


def test_a_loader_within_a_loader(ranks: RankRunner) -> None:
    (message,) = ranks(nested, 1, init=False)
    assert ENDED in message


def broadcast(rank: int, world: int) -> list[int]:
    taken = []
    loader: BroadcastingDataLoader[int] = BroadcastingDataLoader(dying, dist.group.WORLD)
    for batch in loader:
        time.sleep(1)  # the source's worker ends here
        dist.barrier()  # a step, in which the peers meet
        taken.append(batch)
    return taken


def test_peers_hear_of_it_together(ranks: RankRunner) -> None:
    outcomes = ranks(broadcast, 3, expect_failure=True, timeout=60, grace=20)
    assert [one.kind for one in outcomes] == ["raised"] * 3
    (message,) = {one.message for one in outcomes}
    assert message.startswith("data, step 1 of iteration 1, on rank 0: RuntimeError: DataLoader worker")


def test_handlers_of_others_stay() -> None:
    def mine(*_: object) -> None:
        raise AssertionError

    signal.signal(signal.SIGCHLD, mine)
    with workers_awaited():
        assert signal.getsignal(signal.SIGCHLD) is mine
    assert signal.getsignal(signal.SIGCHLD) is mine
