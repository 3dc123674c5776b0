"""Where a run stands in its data, and what one rank does in one step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol


class Named(Protocol):
    """An example as the sampler sees it: metadata under a name that is unique in its data set."""

    @property
    def id(self) -> str: ...


@dataclass(frozen=True)
class StreamPosition:
    """The data position of the whole job: one value, whatever the number of ranks.

    Args:
        epoch: Number of the pass over the data.
        consumed: Examples of this epoch that optimizer steps have taken. Examples and not micro-batches, so that a run
            may be resumed with another size of these.
        order_seed: The seed that ordered this epoch; None at a start, where the configuration decides. Saved,
            so that a run resumed under another seed replays the order it has already consumed.
        digest: Hash of the names of the consumed examples in order; a replay that differs is noticed.
    """

    epoch: int = 0
    consumed: int = 0
    order_seed: int | None = None
    digest: int = 0

    def to_dict(self) -> dict[str, int | None]:
        """Returns plain data for a checkpoint."""
        return asdict(self)

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> StreamPosition:
        """Reads what `to_dict` wrote."""
        return StreamPosition(**data)


START = StreamPosition()
"""Before anything was consumed."""


@dataclass(frozen=True)
class StepPlan:
    """What one rank loads for one optimizer step, metadata only.

    Args:
        micro_batches: This rank's micro-batches; an empty tuple is one that only keeps peers in lockstep.
        epoch: The epoch they belong to.
        position: Where the job stands after this step.
        skipped: Examples that the sampler left out before this step, by reason; set on data-parallel rank 0
            alone, so that a sum over ranks counts each once.
    """

    micro_batches: tuple[tuple[Named, ...], ...]
    epoch: int
    position: StreamPosition
    skipped: Mapping[str, int] = field(default_factory=dict)
