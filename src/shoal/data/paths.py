"""Paths in manifests: brace expansion, paths relative to a manifest, and which sources are refused."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable

_RANGE = re.compile(r"(?:\{|_OP_)(\d+)\.\.(\d+)(?:\}|_CL_)")
_URL = re.compile(r"^[A-Za-z][A-Za-z0-9+.-]*://")


def expand_braces(pattern: str) -> list[str]:
    """Returns the paths that ``a_{0..3}.tar`` or ``a__OP_0..3_CL_.tar`` stands for, both ends included.

    ``_OP_`` and ``_CL_`` stand for the braces where a shell would eat them. Leading zeros of the first number
    set the width. Several ranges expand like nested loops, the first slowest.

    Raises:
        ValueError: if a range runs backwards.
    """
    match = _RANGE.search(pattern)
    if match is None:
        return [pattern]
    first, last = match[1], match[2]
    if int(last) < int(first):
        raise ValueError(f"{pattern}: the range {first}..{last} runs backwards; write {{{last}..{first}}}")
    width = len(first) if first.startswith("0") else 0
    head, tail = pattern[: match.start()], pattern[match.end() :]
    numbers = (str(number).zfill(width) for number in range(int(first), int(last) + 1))
    return [head + number + rest for number in numbers for rest in expand_braces(tail)]


def expand_paths(paths: str | Iterable[str]) -> list[str]:
    """Returns every path named by one pattern or a list of patterns, in order."""
    patterns = [paths] if isinstance(paths, str) else list(paths)
    return [path for pattern in patterns for path in expand_braces(pattern)]


def is_url(path: str) -> bool:
    """Returns whether a path has the form ``scheme://...``."""
    return _URL.match(path) is not None


def refuse_remote(path: str, origin: str, allow_commands: bool) -> None:
    """Refuses a path that would run a program or reach the network.

    Args:
        path: A path as written in a configuration or a manifest.
        origin: The file and the sample that name it, for the message.
        allow_commands: True after the user said --allow-commands.

    Raises:
        ValueError: for ``pipe:...`` and ``scheme://...`` unless allowed.
    """
    if allow_commands:
        return
    if path.startswith("pipe:") or is_url(path):
        raise ValueError(
            f"{origin}: {path!r} runs a command or reaches the network; only files are read. Copy the data "
            "to a file, or pass --allow-commands if you trust this manifest"
        )


def beside(manifest: str, path: str) -> str:
    """Returns `path`, resolved against the folder of `manifest` when it is relative."""
    return path if is_url(path) else os.path.join(os.path.dirname(manifest), path)
