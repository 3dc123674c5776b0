"""What the command line decides about a load, apart from the keys themselves."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LoadOptions:
    """Options of `load_config`.

    Attributes:
        allow_targets: Modules, or full names, whose classes a ``_target_`` may name in addition.
        allow_commands: Accept ``pipe:`` paths, ``command`` sources and URLs.
        strict_topology: Refuse layouts that leave the fast links of a node instead of warning.
        to_train: Refuse what loads but cannot be trained: no model, no data, a backend without its devices.
        accelerators: Accelerators per node; None counts those of this machine.
    """

    allow_targets: tuple[str, ...] = ()
    allow_commands: bool = False
    strict_topology: bool = False
    to_train: bool = False
    accelerators: int | None = None
