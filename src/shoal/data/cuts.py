"""Reads lhotse cut manifests and lhotse Shar directories as conversations, metadata only."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

from lhotse import CutSet
from lhotse.audio import AudioSource, Recording
from lhotse.cut import Cut, MixedCut
from lhotse.serialization import open_best
from lhotse.utils import fastcopy

from shoal.data.conversation import ASSISTANT, AudioTurn, Conversation, TextTurn
from shoal.data.paths import beside, refuse_remote
from shoal.data.tar import TarMember

_LAZY_SUFFIXES = (".jsonl", ".jsonl.gz")


def count_lines(path: str) -> int:
    """Returns the number of lines of a text file, plain or compressed, that are not blank."""
    with open_best(path) as file:
        return sum(1 for line in file if line.strip())


def count_cuts(path: str) -> int:
    """Returns the number of cuts of a manifest."""
    return count_lines(path) if path.endswith(_LAZY_SUFFIXES) else len(CutSet.from_file(path))


def read_cuts(path: str, tags: Mapping[str, Any], *, allow_commands: bool) -> Iterator[Conversation]:
    """Reads a cut manifest (jsonl and jsonl.gz lazily, other formats of lhotse at once).

    Relative paths of recordings are resolved against the folder of the manifest.

    Raises:
        ValueError: naming the cut, if a recording comes from a command or a URL and that is not allowed.
    """
    for cut in _open_cuts(path):
        if any(source.type == "shar" for source in _sources(cut)):
            raise ValueError(
                f"{path}: cut {cut.id!r} keeps its recording in a Shar archive; read its folder as shar_path"
            )
        yield cut_to_conversation(_with_checked_sources(cut, path, allow_commands), tags)


def read_shar_shard(
    cuts_path: str, recording_path: str | None, tags: Mapping[str, Any], *, allow_commands: bool
) -> Iterator[Conversation]:
    """Reads one shard of lhotse Shar: the cuts now, their recordings from the tar file when they are loaded.

    The writer of that format names the members of a cut by the cut's id, so a member is found by name and
    never by position: a shard with a missing or additional member cannot pair audio with another cut's text.
    """
    for cut in _open_cuts(cuts_path):
        member = None
        if cut.has_recording and any(source.type == "shar" for source in _sources(cut)):
            if recording_path is None:
                raise ValueError(
                    f"{cuts_path}: cut {cut.id!r} keeps its recording in a Shar archive, and there is no "
                    "recording.*.tar for this shard; add it next to the cuts or name it under "
                    "shar_path.recording"
                )
            member = TarMember(recording_path, cut.id, any_suffix=True)
        yield cut_to_conversation(_with_checked_sources(cut, cuts_path, allow_commands), tags, member)


def cut_to_conversation(cut: Cut, tags: Mapping[str, Any], member: TarMember | None = None) -> Conversation:
    """Turns a cut into a conversation: the user's audio, then the assistant's text from the supervisions.

    A ``context`` tag (or custom field of the cut) becomes a user's text before the audio, a ``system_prompt``
    becomes a system turn before everything. The tag of a source wins over the field of a cut. Texts of
    several supervisions are joined by a space in order of time.
    """
    custom: Mapping[str, Any] = getattr(cut, "custom", None) or {}
    supervisions = sorted(cut.supervisions, key=lambda s: s.start)
    text = " ".join(s.text for s in supervisions if s.text)
    turns: list[TextTurn | AudioTurn] = []
    if system_prompt := tags.get("system_prompt", custom.get("system_prompt")):
        turns.append(TextTurn("system", str(system_prompt)))
    if context := tags.get("context", custom.get("context")):
        turns.append(TextTurn("user", str(context)))
    turns.append(AudioTurn("user", cut, text or None, member))
    if text:
        turns.append(TextTurn(ASSISTANT, text))
    return Conversation(cut.id, tuple(turns), tags)


def _open_cuts(path: str) -> Iterator[Cut]:
    return iter(CutSet.from_jsonl_lazy(path) if path.endswith(_LAZY_SUFFIXES) else CutSet.from_file(path))


def _recordings(cut: Cut) -> Iterator[Recording]:
    cuts = [track.cut for track in cut.tracks] if isinstance(cut, MixedCut) else [cut]
    return (c.recording for c in cuts if c.has_recording)


def _sources(cut: Cut) -> Iterator[AudioSource]:
    return (source for recording in _recordings(cut) for source in recording.sources)


def _with_checked_sources(cut: Cut, manifest: str, allow_commands: bool) -> Cut:
    """Returns the cut with file paths resolved; refuses sources that run commands or reach the network."""
    for source in _sources(cut):
        origin = f"{manifest}: cut {cut.id!r}"
        if source.type in ("command", "url") and not allow_commands:
            raise ValueError(
                f"{origin}: its recording has a source of type {source.type!r}, which runs a command or "
                "reaches the network; only files are read. Copy the data to a file, or pass "
                "--allow-commands if you trust this manifest"
            )
        if source.type == "file":
            refuse_remote(source.source, origin, allow_commands)
    return _resolve_files(cut, manifest)


def _resolve_files(cut: Cut, manifest: str) -> Cut:
    if all(s.type != "file" or os.path.isabs(s.source) for s in _sources(cut)):
        return cut
    if isinstance(cut, MixedCut):
        return fastcopy(cut, tracks=[fastcopy(t, cut=_resolve_files(t.cut, manifest)) for t in cut.tracks])
    sources = [
        fastcopy(s, source=beside(manifest, s.source)) if s.type == "file" else s
        for s in cut.recording.sources
    ]
    return fastcopy(cut, recording=fastcopy(cut.recording, sources=sources))
