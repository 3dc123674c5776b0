"""Freezing by name: which parameters train."""

from __future__ import annotations

import re
from collections.abc import Sequence

from torch import nn


def freeze_parameters(model: nn.Module, freeze: Sequence[str], keep: Sequence[str]) -> tuple[str, ...]:
    """Sets `requires_grad` from regular expressions matched at the start of the parameter's full name.

    A name matched by `keep` trains, also when `freeze` matches it or an adapter froze its layer; a name matched by
    `freeze` alone does not.

    Returns:
        Patterns that matched nothing, for the caller to report.

    Raises:
        ValueError: A pattern is no regular expression, or nothing is left to train.
    """
    for pattern in (*freeze, *keep):
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(
                f"{pattern!r} (freeze_params, prevent_freeze_params) is no regular expression: {error}; "
                "repair: escape what is meant literally, as in '^llm[.]model[.]'"
            ) from None
    used: set[str] = set()

    def matches(name: str, patterns: Sequence[str]) -> bool:
        hits = [pattern for pattern in patterns if re.match(pattern, name)]
        used.update(hits)
        return bool(hits)

    for name, parameter in model.named_parameters(remove_duplicate=False):
        frozen, kept = matches(name, freeze), matches(name, keep)
        if kept:
            parameter.requires_grad_(True)
        elif frozen:
            parameter.requires_grad_(False)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError(
            f"{list(freeze)} freezes every parameter; "
            "repair: narrow a pattern (freeze_params), or name what must train (prevent_freeze_params)"
        )
    return tuple(pattern for pattern in (*freeze, *keep) if pattern not in used)
