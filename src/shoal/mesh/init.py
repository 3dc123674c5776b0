"""Opens the process group: the one place that reads a launcher's environment."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist

BackendName = Literal["nccl", "gloo"]
LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class DistInfo:
    """What a process knows about its place in the job.

    Attributes:
        backend: Communication library of the process group.
        rank: Index of this process in the job.
        world_size: Number of processes of the job.
        local_rank: Index of this process on its node.
        device: Where this process computes: ``cuda:<local_rank>`` with nccl, else ``cpu``.
        is_main: Whether this is rank 0, which writes logs and checkpoints' metadata.
    """

    backend: BackendName
    rank: int
    world_size: int
    local_rank: int
    device: torch.device
    is_main: bool


def initialize_distributed(backend: BackendName | None = None, timeout_minutes: float = 10.0) -> DistInfo:
    """Open the default process group, or describe the one that is open.

    backend: nccl computes on CUDA and gloo on the CPU; None picks nccl where there is a CUDA device.
    timeout_minutes: after this long without an answer a collective fails instead of waiting on.

    The place in the job comes from the variables that torchrun sets (RANK, WORLD_SIZE, LOCAL_RANK,
    MASTER_ADDR, MASTER_PORT); without any of them this is a job of one process, which needs no network.

    Raises ValueError when only some of the variables are set, when they contradict each other, when the
    backend does not fit the machine, or when an open process group has another backend.
    """
    chosen = backend or ("nccl" if torch.cuda.is_available() else "gloo")
    _check_backend(chosen)
    if not timeout_minutes > 0:
        raise ValueError(f"timeout_minutes = {timeout_minutes} must be more than 0; the default is 10")
    if dist.is_initialized():
        return _describe_open_group(backend)
    rank, world_size, local_rank = _place()
    device = _device(chosen, local_rank)
    timeout = timedelta(minutes=timeout_minutes)
    if any(name in os.environ for name in LAUNCHER_VARIABLES):
        dist.init_process_group(chosen, rank=rank, world_size=world_size, timeout=timeout)
    else:
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(chosen, store=store, rank=0, world_size=1, timeout=timeout)
    return DistInfo(chosen, rank, world_size, local_rank, device, rank == 0)


def _check_backend(backend: str) -> None:
    if backend not in ("nccl", "gloo"):
        raise ValueError(f"backend = {backend!r} must be nccl or gloo; leave it out to choose by the device")
    if backend == "nccl" and not torch.cuda.is_available():
        raise ValueError("backend = 'nccl' needs a CUDA device and torch sees none; use backend='gloo'")


def _place() -> tuple[int, int, int]:
    """Returns (rank, world size, local rank) from the environment."""
    missing = [name for name in LAUNCHER_VARIABLES if name not in os.environ]
    if len(missing) == len(LAUNCHER_VARIABLES):
        return 0, 1, 0
    if missing:
        raise ValueError(
            f"{', '.join(missing)} must be set too, because other variables of a launcher are; "
            "start through `shoal train`, torchrun or srun, or unset them all for a single process"
        )
    rank, world_size, local_rank = (_number(name) for name in LAUNCHER_VARIABLES[:3])
    if not 0 <= local_rank <= rank < world_size:
        raise ValueError(
            f"RANK = {rank}, LOCAL_RANK = {local_rank}, WORLD_SIZE = {world_size} contradict each other: "
            "0 <= LOCAL_RANK <= RANK < WORLD_SIZE must hold; unset them for a single process"
        )
    return rank, world_size, local_rank


def _number(name: str) -> int:
    try:
        return int(os.environ[name])
    except ValueError:
        raise ValueError(f"{name} = {os.environ[name]!r} must be an integer; torchrun sets it") from None


def _device(backend: str, local_rank: int) -> torch.device:
    if backend == "gloo":
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if local_rank >= count:
        raise ValueError(
            f"LOCAL_RANK = {local_rank} but this node has {count} CUDA devices; "
            f"start at most {count} processes per node"
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def _describe_open_group(backend: BackendName | None) -> DistInfo:
    actual = dist.get_backend()
    if actual not in ("nccl", "gloo") or (backend is not None and backend != actual):
        raise ValueError(
            f"backend = {backend or 'nccl or gloo'}, but a process group with {actual!r} is already open; "
            "open it once, with the backend you want"
        )
    rank = dist.get_rank()
    local_rank = _number("LOCAL_RANK") if "LOCAL_RANK" in os.environ else 0
    used: BackendName = "nccl" if actual == "nccl" else "gloo"
    return DistInfo(used, rank, dist.get_world_size(), local_rank, _device(used, local_rank), rank == 0)


__all__ = ["BackendName", "DistInfo", "initialize_distributed"]
