"""Opening the process group: from a launcher's environment, alone, and what is refused."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from shoal.mesh.init import LAUNCHER_VARIABLES, DistInfo, initialize_distributed
from tests.zygote import RankRunner


@pytest.fixture(autouse=True)
def closed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No launcher variables before, no process group after."""
    for name in LAUNCHER_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def open_and_sum(rank: int, world_size: int) -> tuple[DistInfo, DistInfo, float]:
    first, second = initialize_distributed("gloo"), initialize_distributed()
    total = torch.tensor(float(rank))
    dist.all_reduce(total)
    return first, second, float(total)


def test_a_launched_job(ranks: RankRunner) -> None:
    for rank, (first, second, total) in enumerate(ranks(open_and_sum, 3, init=False)):
        assert first == second == DistInfo("gloo", rank, 3, rank, torch.device("cpu"), rank == 0)
        assert total == 3.0


def test_a_single_process_needs_no_environment() -> None:
    assert initialize_distributed("gloo") == DistInfo("gloo", 0, 1, 0, torch.device("cpu"), True)
    assert dist.get_world_size() == 1


def test_the_backend_follows_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert initialize_distributed().backend == "gloo"


@pytest.mark.gpu
def test_nccl_where_there_is_a_gpu() -> None:
    info = initialize_distributed()
    assert (info.backend, info.device) == ("nccl", torch.device("cuda", 0))


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"RANK": "0"}, "WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT must be set too"),
        (
            {"RANK": "2", "WORLD_SIZE": "2", "LOCAL_RANK": "0"},
            "RANK = 2, LOCAL_RANK = 0, WORLD_SIZE = 2 contradict",
        ),
        (
            {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "1"},
            "RANK = 0, LOCAL_RANK = 1, WORLD_SIZE = 2 contradict",
        ),
        ({"RANK": "zero", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}, "RANK = 'zero' must be an integer"),
    ],
)
def test_a_broken_environment_is_refused(
    environment: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if len(environment) > 1:
        environment = environment | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=message):
        initialize_distributed("gloo")
    assert not dist.is_initialized()


def test_unfit_backends_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="backend = 'mpi' must be nccl or gloo"):
        initialize_distributed("mpi")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="use backend='gloo'"):
        initialize_distributed("nccl")
    with pytest.raises(ValueError, match="timeout_minutes = 0"):
        initialize_distributed("gloo", timeout_minutes=0)


def test_more_processes_than_devices_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    variables = dict(zip(LAUNCHER_VARIABLES, ("1", "2", "1", "127.0.0.1", "29500"), strict=True))
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match="LOCAL_RANK = 1 but this node has 1 CUDA devices"):
        initialize_distributed("nccl")


def test_an_open_group_with_another_backend_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    initialize_distributed("gloo")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ValueError, match="backend = nccl, but a process group with 'gloo' is already open"):
        initialize_distributed("nccl")
