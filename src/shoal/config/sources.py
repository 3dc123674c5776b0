"""Refuses paths that would run a program or reach the network, in the configuration and in manifests."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from shoal.config.errors import Finding

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_LIMIT = "a path of a file: pipes run commands and URLs reach the network"
_REPAIR = "copy the data to a file, or pass --allow-commands if you trust this source"


def check_manifest_source(path: str, key: str = "path") -> Finding | None:
    """Returns a finding for a path that would run a command or reach the network, or None.

    Args:
        path: A path as a configuration or a manifest spells it.
        key: Where it stands, for the message.
    """
    if path.lstrip().startswith("pipe:") or _URL.match(path.lstrip()):
        return Finding("source-runs-code", key, path, _LIMIT, _REPAIR)
    return None


def check_sources(data: Any, path: str) -> Iterator[Finding]:
    """Yields a finding for every value below `path` that names a command or an address instead of a file."""
    if isinstance(data, str):
        finding = check_manifest_source(data, path)
        if finding is not None:
            yield finding
    elif isinstance(data, Mapping):
        if data.get("type") == "command":
            yield Finding("source-runs-code", f"{path}.type", "command", _LIMIT, _REPAIR)
        for name, item in data.items():
            yield from check_sources(item, f"{path}.{name}" if path else str(name))
    elif isinstance(data, list | tuple):
        for index, item in enumerate(data):
            yield from check_sources(item, f"{path}.{index}")
