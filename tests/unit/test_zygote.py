"""The rank runner itself: a rank may return, raise, abort, exit or hang, and the next test is unaffected."""

import os
import signal
import time
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.zygote import RankRunner, RanksFailed


@dataclass(frozen=True)
class Pair:
    """A class of this module, to be pickled both ways."""

    left: int
    right: torch.Tensor


class Unpicklable(Exception):
    """An exception that pickle cannot handle."""

    def __init__(self) -> None:
        super().__init__("holds a function")
        self.function = lambda: None


def add_ranks(rank: int, world_size: int, offset: float) -> torch.Tensor:
    total = torch.tensor([rank + offset], requires_grad=True) * 1
    dist.all_reduce(total.detach())
    return total


def echo(rank: int, world_size: int, pair: Pair) -> tuple[int, Pair]:
    return rank, Pair(pair.left + rank, pair.right[:1])


def report_environment(rank: int, world_size: int) -> dict[str, Any]:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "OMP_NUM_THREADS", "SHOAL_TEST_VARIABLE")
    return {name: os.environ.get(name) for name in names} | {
        "threads": torch.get_num_threads(),
        "initialised": dist.is_initialized(),
        "directory": os.getcwd(),
        "port": int(os.environ["MASTER_PORT"]),
    }


def open_group_from_environment(rank: int, world_size: int) -> int:
    dist.init_process_group("gloo")
    total = torch.ones(())
    dist.all_reduce(total)
    return int(total)


def misbehave(rank: int, world_size: int, how: str) -> int:
    print(f"rank {rank} is about to {how}", flush=True)
    if rank == 1:
        if how == "raise":
            raise KeyError("the reason")
        if how == "raise something unpicklable":
            raise Unpicklable
        if how == "abort":
            os.abort()
        if how == "exit":
            os._exit(3)
        if how == "hang":
            time.sleep(600)
        if how == "return something unpicklable":
            return lambda: None  # type: ignore[return-value]
    return rank


def wait_for_peer(rank: int, world_size: int) -> None:
    if rank == 0:
        dist.barrier()
    else:
        os.abort()


def leave_a_child_behind(rank: int, world_size: int) -> int:
    pid = os.fork()
    if pid == 0:
        time.sleep(600)
        os._exit(0)
    return pid


def return_dtensor(rank: int, world_size: int) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(torch.ones(4), init_device_mesh("cpu", (world_size,)))


def draw(rank: int, world_size: int) -> float:
    return float(torch.rand(()))


def test_values_come_back_in_rank_order(ranks: RankRunner) -> None:
    results = ranks(add_ranks, 3, 0.5)
    assert [float(result) for result in results] == [4.5, 4.5, 4.5]
    assert not results[0].requires_grad


def test_classes_of_the_test_module_travel_both_ways(ranks: RankRunner) -> None:
    results = ranks(echo, 2, Pair(5, torch.arange(1000.0)))
    assert [(rank, pair.left, float(pair.right)) for rank, pair in results] == [(0, 5, 0.0), (1, 6, 0.0)]
    assert results[0][1].right.untyped_storage().nbytes() == 4


def test_environment_of_a_rank(ranks: RankRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_TEST_VARIABLE", "set by the test")
    results = ranks(report_environment, 2, init=False)
    ports = {result.pop("port") for result in results}
    assert len(ports) == 1
    # A port of the kernel's choice would be given to outgoing connections as well.
    assert ports < set(range(20000, 32768))
    for rank, result in enumerate(results):
        assert result == {
            "RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_RANK": str(rank),
            "MASTER_ADDR": "127.0.0.1",
            "OMP_NUM_THREADS": "1",
            "SHOAL_TEST_VARIABLE": "set by the test",
            "threads": 1,
            "initialised": False,
            "directory": os.getcwd(),
        }


def test_code_under_test_can_open_the_group_itself(ranks: RankRunner) -> None:
    assert ranks(open_group_from_environment, 2, init=False) == [2, 2]


def test_an_exception_carries_traceback_and_output(ranks: RankRunner) -> None:
    with pytest.raises(RanksFailed) as failure:
        ranks(misbehave, 2, "raise")
    text = str(failure.value)
    assert "1 of 2 ranks failed" in text
    assert "KeyError: 'the reason'" in text and 'raise KeyError("the reason")' in text
    assert "rank 1 is about to raise" in text
    assert [outcome.kind for outcome in failure.value.outcomes] == ["returned", "raised"]


@pytest.mark.parametrize(
    ("how", "kind", "exit_code"),
    [
        ("raise something unpicklable", "raised", None),
        ("return something unpicklable", "raised", None),
        ("abort", "signalled", -signal.SIGABRT),
        ("exit", "exited", 3),
    ],
)
def test_failures_are_reported_by_kind(ranks: RankRunner, how: str, kind: str, exit_code: int | None) -> None:
    outcomes = ranks(misbehave, 2, how, expect_failure=True)
    assert [outcome.kind for outcome in outcomes] == ["returned", kind]
    assert outcomes[1].exit_code == exit_code
    assert f"rank 1 is about to {how}" in outcomes[1].output
    assert ranks(add_ranks, 2, 0.0) == [torch.tensor([1.0])] * 2


def test_a_hang_costs_its_timeout_and_shows_where(ranks: RankRunner) -> None:
    ranks(draw, 1)  # the imports do not count
    start = time.monotonic()
    outcomes = ranks(misbehave, 2, "hang", timeout=2.0, expect_failure=True)
    assert time.monotonic() - start < 20
    assert [outcome.kind for outcome in outcomes] == ["returned", "timed out"]
    assert "in misbehave" in outcomes[1].output


def test_a_peer_of_an_aborted_rank_reports_or_is_stopped(ranks: RankRunner) -> None:
    outcomes = ranks(wait_for_peer, 2, expect_failure=True, grace=3.0)
    assert outcomes[1].kind == "signalled"
    assert outcomes[0].kind in ("raised", "stopped")


def test_processes_started_by_a_rank_die_with_it(ranks: RankRunner) -> None:
    (pid,) = ranks(leave_a_child_behind, 1, init=False)
    deadline = time.monotonic() + 10
    while _alive(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not _alive(pid)


def _alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_expecting_a_failure_that_does_not_come_is_an_error(ranks: RankRunner) -> None:
    with pytest.raises(AssertionError, match="a failure was expected"):
        ranks(draw, 2, expect_failure=True)


def test_a_dtensor_is_refused_as_a_result(ranks: RankRunner) -> None:
    with pytest.raises(RanksFailed, match="return its full_tensor"):
        ranks(return_dtensor, 2)


def test_a_local_function_is_refused(ranks: RankRunner) -> None:
    with pytest.raises(ValueError, match="not a module-level function"):
        ranks(lambda rank, world_size: rank, 1)


def test_random_numbers_of_a_test_do_not_depend_on_earlier_tests(ranks: RankRunner) -> None:
    assert ranks(draw, 2) == ranks(draw, 2)


def test_a_dead_zygote_is_replaced(ranks: RankRunner) -> None:
    assert ranks(draw, 1, init=False)
    assert ranks._process is not None
    ranks._process.kill()
    ranks._process.wait()
    with pytest.raises(RuntimeError, match="zygote process died"):
        ranks(draw, 1, init=False)
    assert ranks(draw, 1, init=False)
