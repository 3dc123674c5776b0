"""Random access into tar archives: one pass over the headers, then one seek and one read per member.

Only the process that decodes audio opens an archive. The sampler, and a resume that replays it, never do.
"""

from __future__ import annotations

import re
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import PurePosixPath

_REPEATED = re.compile(r"^(?P<stem>.+)-sub\d+$")


@dataclass(frozen=True)
class TarMember:
    """A member of an archive, named by its path; with `any_suffix`, by its path less the suffix."""

    archive: str
    name: str
    any_suffix: bool = False


@lru_cache(maxsize=512)
def tar_index(archive: str) -> Mapping[str, tuple[int, int]]:
    """Returns {member name: (offset, size) in bytes}, read once per process from the headers.

    Raises:
        ValueError: if the archive is compressed, which leaves no random access.
    """
    try:
        with tarfile.open(archive, mode="r:") as tar:
            return {
                info.name.removeprefix("./"): (info.offset_data, info.size) for info in tar if info.isfile()
            }
    except tarfile.ReadError as error:
        raise ValueError(
            f"{archive}: cannot be indexed ({error}); audio archives must be uncompressed and whole: "
            "unpack it with gunzip or write it again"
        ) from error


@lru_cache(maxsize=512)
def _stem_index(archive: str) -> Mapping[str, str]:
    """Returns {member path without its last suffix: member name}, leaving out lhotse's metadata members."""
    names = (PurePosixPath(name) for name in tar_index(archive))
    return {str(name.with_suffix("")): str(name) for name in names if name.suffix not in {".json", ".nometa"}}


def read_member(member: TarMember) -> bytes:
    """Returns the bytes of a member.

    A manifest may list one recording several times as ``name-sub1.wav``, ``name-sub2.wav``, while the archive
    holds ``name.wav`` once; the suffix is tried only when the exact name is absent.

    Raises:
        KeyError: if the archive has no such member.
    """
    index = tar_index(member.archive)
    name = _stem_index(member.archive).get(member.name) if member.any_suffix else member.name
    if name not in index and name is not None:
        path = PurePosixPath(name)
        repeated = _REPEATED.match(path.stem)
        name = str(path.with_name(repeated["stem"] + path.suffix)) if repeated else name
    if name is None or name not in index:
        raise KeyError(f"{member.archive} has no member {member.name}")
    offset, size = index[name]
    with open(member.archive, "rb") as file:
        file.seek(offset)
        return file.read(size)
