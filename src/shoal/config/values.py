"""Small types the configuration dataclasses are written in: ranges, frozen mappings, targets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, NoReturn


@dataclass(frozen=True)
class Range:
    """Inclusive or exclusive bounds of a number; the loader checks them and puts them into the message."""

    low: float | None = None
    high: float | None = None
    above: float | None = None

    def problem(self, value: float) -> str | None:
        """Returns the limits in words when `value` breaks them, or None."""
        below = (self.low is not None and value < self.low) or (
            self.above is not None and value <= self.above
        )
        return self.words if below or (self.high is not None and value > self.high) else None

    @property
    def words(self) -> str:
        """The limits as a message states them."""
        bounds = [("at least", self.low), ("more than", self.above), ("at most", self.high)]
        return ", ".join(f"{text} {bound}" for text, bound in bounds if bound is not None)


PositiveInt = Annotated[int, Range(low=1)]
"""A size or a period: 1, 2, 3, ..."""

CountInt = Annotated[int, Range(low=0)]
"""A count that may be 0."""

SeedInt = Annotated[int, Range(low=0, high=2**31 - 1)]
"""A seed of 31 bits: libraries that add rank and worker offsets to a seed overflow at 32."""

PositiveFloat = Annotated[float, Range(above=0)]
NonNegativeFloat = Annotated[float, Range(low=0)]
Fraction = Annotated[float, Range(low=0, high=1)]


class FrozenDict(dict[str, Any]):
    """A dict that refuses to change, so that a configuration is immutable all the way down; it pickles."""

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise TypeError("a configuration is immutable; load it again with an override instead")

    __setitem__ = __delitem__ = clear = pop = popitem = setdefault = update = __ior__ = _refuse

    def __reduce__(self) -> tuple[type[FrozenDict], tuple[dict[str, Any]]]:
        return FrozenDict, (dict(self),)

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(frozenset(self.items()))


@dataclass(frozen=True)
class TargetConfig:
    """A class or factory by name with its keyword arguments: ``{_target_: torch.optim.AdamW, lr: 1e-4}``.

    `target` is a name of ours or of an allowed library, aliases already replaced; `allow` holds the modules
    that the user allowed in addition. `shoal.config.targets.resolve_target(target, allow)` gives the object.
    `key` is where the user wrote it, for messages; it is no part of what is made.
    """

    target: str
    kwargs: Mapping[str, Any] = field(default_factory=FrozenDict)
    allow: tuple[str, ...] = ()
    key: str = field(default="", compare=False)


@dataclass(frozen=True)
class FunctionName:
    """A function of the user's own by its dotted name, which the user has allowed with ``--allow-target NAME``.

    `shoal.config.targets.resolve_target(target, allow)` gives the function; `key` is where the user wrote it.
    """

    target: str
    allow: tuple[str, ...] = ()
    key: str = field(default="", compare=False)
