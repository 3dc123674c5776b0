"""Agreement on failures: either every rank goes on, or every rank raises the same error."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from shoal.checkpoint.store import CheckpointError

T = TypeVar("T")


def is_distributed() -> bool:
    """Whether a process group exists to agree in."""
    return dist.is_available() and dist.is_initialized()


def rank_of(group: dist.ProcessGroup | None) -> int:
    """This process's rank in `group` (None: the default group; 0 without one)."""
    return dist.get_rank(group) if is_distributed() else 0


def agreed(
    action: Callable[[], T], group: dist.ProcessGroup | None, error_type: type[Exception] = CheckpointError
) -> T:
    """Run `action` on every rank, then agree on how it went. Collective over `group`.

    `action` itself must not contain a collective: a rank that failed early would leave the others waiting.

    Args:
        action: local work; each rank gets its own result.
        group: the ranks that must agree; None is the default group.
        error_type: what to raise.

    Raises:
        Exception: of `error_type`, when it failed anywhere; the same message on every rank names the origin.
    """
    result: T | None = None
    error: Exception | None = None
    try:
        result = action()
    except Exception as caught:  # whatever it was, the peers must hear of it
        error = caught
    texts = gather_text(describe(error), group)
    failures = [f"rank {rank}: {text}" for rank, text in enumerate(texts) if text]
    if failures:
        raise error_type(failures[0]) from error
    return result  # type: ignore[return-value]  # set, or an error was raised


def from_origin(
    action: Callable[[], T], group: dist.ProcessGroup | None, error_type: type[Exception] = CheckpointError
) -> T:
    """Like `agreed`, but `action` runs on rank 0 of the group only and every rank gets its result."""
    own = agreed(lambda: action() if rank_of(group) == 0 else None, group, error_type)
    if not is_distributed():
        return own  # type: ignore[return-value]  # this process is the origin
    values = [own]
    dist.broadcast_object_list(values, group=group, group_src=0)
    return values[0]  # type: ignore[return-value]


def describe(error: BaseException | None) -> str:
    """The text that peers see; empty without an error."""
    if error is None:
        return ""
    return str(error) if isinstance(error, OSError | ValueError) else f"{type(error).__name__}: {error}"


def gather_text(text: str, group: dist.ProcessGroup | None) -> list[str]:
    """Every rank's `text` in rank order; just this one's without a process group. Collective."""
    return gather_objects(text, group)


def gather_objects(value: T, group: dist.ProcessGroup | None) -> list[T]:
    """Every rank's `value` (plain data) in rank order; just this one's without a process group. Collective."""
    if not is_distributed():
        return [value]
    gathered: list[T] = [value] * dist.get_world_size(group)
    dist.all_gather_object(gathered, value, group=group)
    return gathered
