"""Reads JSON-lines manifests in the formats that NeMo's users have, and plain text, as conversations.

A line says how long its audio is, so nothing else is opened. The sampling rate is usually not in the line:
such cuts are marked, and the header of the audio file decides when it is read.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lhotse import MonoCut, SupervisionSegment
from lhotse.audio import AudioSource, Recording
from lhotse.serialization import open_best

from shoal.data.conversation import ASSISTANT, AudioTurn, Conversation, TextTurn
from shoal.data.cuts import cut_to_conversation
from shoal.data.paths import beside, refuse_remote
from shoal.data.tar import TarMember

RATE_IN_HEADER = "shoal_rate_in_header"
"""Custom field of a cut whose manifest does not state a sampling rate."""

_NOMINAL_RATE = 16000  # lhotse wants a number; with RATE_IN_HEADER nobody reads it


class AudioLocator:
    """Says where the audio of a manifest line lies: in a file beside the manifest, or in a tar archive.

    Args:
        manifest: Path of the manifest, against whose folder relative audio paths are resolved.
        archives: {shard id: tar archive}; a single archive serves every line. None for plain files.
    """

    def __init__(self, manifest: str, archives: Mapping[int, str] | None) -> None:
        self._manifest = manifest
        self._archives = archives

    def locate(self, path: str, shard_id: int | None, origin: str) -> tuple[AudioSource, TarMember | None]:
        """Returns a lhotse source for `path`, with the archive member that fills it if there is one.

        Raises:
            ValueError: for a path that runs a command or reaches the network (never allowed here: only lhotse
                manifests state the sampling rate that such a source needs), or an unknown shard id.
        """
        refuse_remote(path, origin, allow_commands=False)
        if self._archives is None:
            return AudioSource("file", [0], beside(self._manifest, path)), None
        return AudioSource("shar", [0], ""), TarMember(
            self._archive(shard_id, origin), path.removeprefix("./")
        )

    def _archive(self, shard_id: int | None, origin: str) -> str:
        assert self._archives is not None
        if len(self._archives) == 1:
            return next(iter(self._archives.values()))
        if shard_id is None or shard_id not in self._archives:
            raise ValueError(
                f"{origin}: shard_id is {shard_id!r}, and the archives have {sorted(self._archives)}; give "
                "each line the shard_id of its archive, or one manifest per archive"
            )
        return self._archives[shard_id]


def read_lines(path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields (``path:line number``, object) for each JSON line that is not blank.

    Raises:
        ValueError: naming file and line, if a line is not a JSON object.
    """
    with open_best(path) as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                item = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}:{number}: not JSON ({error})") from error
            if not isinstance(item, dict):
                raise ValueError(f"{path}:{number}: a line must be a JSON object, got {type(item).__name__}")
            yield f"{path}:{number}", item


def read_nemo(path: str, tags: Mapping[str, Any], locator: AudioLocator) -> Iterator[Conversation]:
    """Reads lines of audio_filepath, duration, text and optionally offset, sampling_rate, id, lang, shard_id.

    Lines with ``_skipme`` set are left out. Fields that are not named here become custom fields of the cut,
    so ``context`` and ``system_prompt`` work as they do in lhotse manifests.
    """
    for origin, item in read_lines(path):
        if item.get("_skipme"):
            continue
        name = str(_required(item, "audio_filepath", origin))
        offset = float(item.get("offset") or 0.0)
        source, member = locator.locate(name, item.get("shard_id"), origin)
        # The same file may be cut into several lines, and folders may hold files of one name.
        cut_id = str(item.get("id", f"{name}-{offset:.3f}" if offset else name))
        cut = _mono_cut(cut_id, source, offset, float(_required(item, "duration", origin)), item)
        yield cut_to_conversation(cut, tags, member)


def read_multimodal(path: str, tags: Mapping[str, Any], locator: AudioLocator) -> Iterator[Conversation]:
    """Reads lines of id and conversations, a list of {from or role, value, type: text or audio, duration,
    offset}.

    Roles are lower-cased; ``human`` and ``gpt`` are read as user and assistant. A ``system_prompt`` tag is
    added in front when the conversation has no system turn.
    """
    for origin, item in read_lines(path):
        conversation_id = str(_required(item, "id", origin))
        parts: Sequence[dict[str, Any]] = _required(item, "conversations", origin)
        turns = [
            _multimodal_turn(part, f"{conversation_id}-{index}", item.get("shard_id"), locator, origin)
            for index, part in enumerate(parts)
        ]
        if (prompt := tags.get("system_prompt")) and not any(turn.role == "system" for turn in turns):
            turns.insert(0, TextTurn("system", str(prompt)))
        yield Conversation(conversation_id, tuple(turns), tags)


def read_text(path: str, tags: Mapping[str, Any]) -> Iterator[Conversation]:
    """Reads plain text, one example a line: an assistant turn, after the tags' system_prompt and context."""
    with open_best(path) as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            turns = [
                TextTurn(role, str(tags[tag]))
                for role, tag in (("system", "system_prompt"), ("user", "context"))
                if tags.get(tag)
            ]
            turns.append(TextTurn(ASSISTANT, line.strip()))
            yield Conversation(f"{path}:{number}", tuple(turns), tags)


_ROLES = {"human": "user", "gpt": ASSISTANT}


def _multimodal_turn(
    part: Mapping[str, Any], cut_id: str, shard_id: int | None, locator: AudioLocator, origin: str
) -> TextTurn | AudioTurn:
    role = str(part.get("role") or _required(part, "from", origin)).lower()
    role = _ROLES.get(role, role)
    value = str(_required(part, "value", origin))
    kind = part.get("type", "text")
    if kind == "text":
        return TextTurn(role, value)
    if kind != "audio":
        raise ValueError(f"{origin}: type is {kind!r}; a turn is of type text or audio")
    source, member = locator.locate(value, shard_id, origin)
    cut = _mono_cut(
        cut_id, source, float(part.get("offset") or 0.0), float(_required(part, "duration", origin)), part
    )
    return AudioTurn(role, cut, part.get("text"), member)


_KNOWN_FIELDS = frozenset(
    {"audio_filepath", "duration", "offset", "text", "id", "lang", "sampling_rate", "shard_id", "_skipme"}
    | {"from", "role", "value", "type"}
)


def _mono_cut(
    cut_id: str, source: AudioSource, offset: float, duration: float, item: Mapping[str, Any]
) -> MonoCut:
    """Builds a cut of one channel; a line that states no sampling rate is marked with RATE_IN_HEADER."""
    stated = item.get("sampling_rate")
    rate = int(stated or _NOMINAL_RATE)
    custom = {key: value for key, value in item.items() if key not in _KNOWN_FIELDS}
    if stated is None:
        custom[RATE_IN_HEADER] = True
    end = offset + duration
    recording = Recording(cut_id, [source], rate, round(end * rate), end, [0])
    supervisions = []
    if item.get("text"):
        supervisions = [
            SupervisionSegment(
                cut_id, cut_id, 0.0, duration, text=str(item["text"]), language=item.get("lang")
            )
        ]
    return MonoCut(cut_id, offset, duration, 0, supervisions=supervisions, recording=recording, custom=custom)


def _required(item: Mapping[str, Any], key: str, origin: str) -> Any:
    if key not in item or item[key] is None:
        raise ValueError(f"{origin}: {key!r} is missing; a line has {sorted(item)}")
    return item[key]
