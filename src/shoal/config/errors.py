"""What is wrong with a configuration: findings, and the one exception that carries all of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

_LONGEST_VALUE = 120


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong (or, as a notice, worth knowing) about a configuration.

    Attributes:
        rule: Identifier of the rule, stable across releases (``unknown-key``, ``tp-divides-heads``, ...).
        key: Dotted path of the user's key, as the user spelled its place.
        value: The offending value; ``None`` when the key is absent or null.
        limit: What is allowed, with numbers where there are numbers.
        repair: What to write instead.
    """

    rule: str
    key: str
    value: object
    limit: str
    repair: str

    def __str__(self) -> str:
        shown = repr(self.value)
        if len(shown) > _LONGEST_VALUE:
            shown = shown[: _LONGEST_VALUE - 3] + "..."
        return f"{self.key} = {shown}  [{self.rule}]\n    limit:  {self.limit}\n    repair: {self.repair}"


class ConfigError(ValueError):
    """A configuration that is refused, with every finding.

    ``str(error)`` shows one block of lines per finding, so that one attempt reveals all of them.
    """

    def __init__(self, findings: Iterable[Finding]) -> None:
        self.findings: tuple[Finding, ...] = tuple(findings)
        if not self.findings:
            raise RuntimeError("a ConfigError needs at least one finding")
        super().__init__(self.findings)

    def __str__(self) -> str:
        count = len(self.findings)
        head = f"the configuration has {count} error{'s' if count > 1 else ''}:"
        return "\n".join([head, *(f"  {finding}" for finding in self.findings)])
