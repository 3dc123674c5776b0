"""From configuration to sources: which manifests are read, in which shares, with which tags.

A source is a tuple of shards that are read front to back. Weights decide how often a source is drawn while
the sources are interleaved; they never decide how often an example is seen, which is once an epoch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from shoal.config.speech import DatasetConfig, InputConfig
from shoal.data.conversation import Conversation
from shoal.data.cuts import count_cuts, count_lines, read_cuts, read_shar_shard
from shoal.data.manifests import AudioLocator, read_multimodal, read_nemo, read_text
from shoal.data.paths import expand_paths, refuse_remote

_CUTS_SUFFIX = re.compile(r"\.jsonl(\.gz)?$")


@dataclass(frozen=True)
class Shard:
    """A manifest that is read front to back; `read` gives a fresh iterator over metadata."""

    path: str
    read: Callable[[], Iterator[Conversation]]
    count: Callable[[], int]


@dataclass(frozen=True)
class Source:
    """Shards that are drawn from with one share; the shares of all sources of a data set add up to 1."""

    name: str
    shards: tuple[Shard, ...]
    share: float = 1.0

    def size(self) -> int:
        """Returns the number of examples listed, counted from the manifests."""
        return sum(shard.count() for shard in self.shards)


def open_sources(
    config: DatasetConfig, *, key: str = "data", allow_commands: bool = False
) -> tuple[Source, ...]:
    """Returns the leaves of a data set's sources, with shares that add up to 1.

    Args:
        config: Either `input_cfg` or exactly one of cuts_path, shar_path, manifest_filepath.
        key: Key path of the configuration, for messages.
        allow_commands: True after the user said --allow-commands.

    Raises:
        ValueError: if there is no source or more than one kind, if weights are given for some entries only,
            if files are missing, or if a path runs a command or reaches the network.
    """
    if config.input_cfg is not None:
        if _paths_given(config):
            raise ValueError(
                f"{key}: has input_cfg and {', '.join(_paths_given(config))}; move the latter into an "
                "input_cfg entry"
            )
        return _open_group(config.input_cfg, {}, f"{key}.input_cfg", allow_commands)
    shortcut = _shortcut(config, key)
    return (_open_leaf(shortcut, dict(shortcut.tags), key, allow_commands),)


_PATH_KEYS = ("cuts_path", "shar_path", "manifest_filepath")


def _paths_given(config: DatasetConfig | InputConfig) -> list[str]:
    return [name for name in _PATH_KEYS if getattr(config, name) is not None]


def _shortcut(config: DatasetConfig, key: str) -> InputConfig:
    """Returns the input_cfg entry that a bare path in the data set stands for."""
    given = _paths_given(config)
    if len(given) != 1:
        raise ValueError(
            f"{key}: give input_cfg or exactly one of {', '.join(_PATH_KEYS)}; got {given or 'none'}"
        )
    return InputConfig(
        type="nemo_tarred" if config.tarred_audio_filepaths else _SHORTCUT_TYPES[given[0]],  # type: ignore[arg-type]
        cuts_path=config.cuts_path,
        shar_path=config.shar_path,
        manifest_filepath=config.manifest_filepath,
        tarred_audio_filepaths=config.tarred_audio_filepaths,
    )


_SHORTCUT_TYPES = {"cuts_path": "lhotse", "shar_path": "lhotse_shar", "manifest_filepath": "nemo"}


def _open_group(
    entries: Sequence[InputConfig], tags: Mapping[str, Any], key: str, allow_commands: bool
) -> tuple[Source, ...]:
    if not entries:
        raise ValueError(f"{key}: is empty; list at least one source")
    branches = []
    for index, entry in enumerate(entries):
        at, inherited = f"{key}[{index}]", {**tags, **entry.tags}
        if entry.type == "group" or entry.input_cfg is not None:
            if entry.input_cfg is None:
                raise ValueError(f"{at}.input_cfg: a group needs the list of its sources")
            branches.append(_open_group(entry.input_cfg, inherited, f"{at}.input_cfg", allow_commands))
        else:
            branches.append((_open_leaf(entry, inherited, at, allow_commands),))
    shares = _shares([entry.weight for entry in entries], branches, key)
    return tuple(
        replace(source, share=source.share * share)
        for branch, share in zip(branches, shares, strict=True)
        for source in branch
    )


def _shares(weights: Sequence[float | None], branches: Sequence[tuple[Source, ...]], key: str) -> list[float]:
    """Returns weights scaled to add up to 1; without weights, each branch's share of the examples."""
    missing = [index for index, weight in enumerate(weights) if weight is None]
    if missing and len(missing) < len(weights):
        raise ValueError(
            f"{key}: entries {missing} have no weight and others have; give all a weight, or none"
        )
    if len(weights) == 1:
        return [1.0]  # nothing to count
    numbers = [float(w) for w in weights if w is not None] or [
        float(sum(source.size() for source in branch)) for branch in branches
    ]
    total = sum(numbers)
    if total <= 0:
        raise ValueError(f"{key}: its sources list no example at all")
    return [number / total for number in numbers]


def _open_leaf(entry: InputConfig, tags: Mapping[str, Any], key: str, allow_commands: bool) -> Source:
    given = _paths_given(entry) + (["paths"] if entry.paths is not None else [])
    wanted = _PATHS_OF_TYPE[entry.type]
    if len(given) != 1 or given[0] not in wanted:
        raise ValueError(
            f"{key}: type {entry.type} takes exactly one of {', '.join(wanted)}; got {given or 'none'}"
        )
    opener = _OPENERS[given[0]]
    shards = opener(entry, tags, key, allow_commands)
    for shard in shards:
        if not Path(shard.path).exists() and not allow_commands:
            raise ValueError(f"{key}: no such file: {shard.path}")
    return Source(name=f"{key}:{shards[0].path}", shards=shards)


def _manifests(paths: str | Sequence[str], key: str, allow_commands: bool) -> list[str]:
    expanded = expand_paths(paths)
    for path in expanded:
        refuse_remote(path, key, allow_commands)
    return expanded


def _open_cuts_path(
    entry: InputConfig, tags: Mapping[str, Any], key: str, allow_commands: bool
) -> tuple[Shard, ...]:
    assert entry.cuts_path is not None
    return tuple(
        Shard(path, partial(read_cuts, path, tags, allow_commands=allow_commands), partial(count_cuts, path))
        for path in _manifests(entry.cuts_path, key, allow_commands)
    )


def _open_shar_path(
    entry: InputConfig, tags: Mapping[str, Any], key: str, allow_commands: bool
) -> tuple[Shard, ...]:
    assert entry.shar_path is not None
    shards = []
    for folder in _manifests(entry.shar_path, key, allow_commands):
        cuts = sorted(p for p in Path(folder).glob("cuts.*") if _CUTS_SUFFIX.search(p.name))
        if not cuts:
            raise ValueError(
                f"{key}.shar_path: {folder} has no cuts.*.jsonl.gz; name a folder that SharWriter wrote"
            )
        for path in cuts:
            number = path.name.split(".")[1]
            recording = path.with_name(f"recording.{number}.tar")
            read = partial(
                read_shar_shard,
                str(path),
                str(recording) if recording.exists() else None,
                tags,
                allow_commands=allow_commands,
            )
            shards.append(Shard(str(path), read, partial(count_cuts, str(path))))
    return tuple(shards)


def _open_manifest(
    entry: InputConfig, tags: Mapping[str, Any], key: str, allow_commands: bool
) -> tuple[Shard, ...]:
    assert entry.manifest_filepath is not None
    manifests = _manifests(entry.manifest_filepath, key, allow_commands)
    archives = _archives_of(entry, manifests, key, allow_commands)
    reader = read_multimodal if entry.type == "multimodal_conversation" else read_nemo
    return tuple(
        Shard(
            path,
            partial(reader, path, tags, AudioLocator(path, archive)),
            partial(count_lines, path),
        )
        for path, archive in zip(manifests, archives, strict=True)
    )


def _archives_of(
    entry: InputConfig, manifests: Sequence[str], key: str, allow_commands: bool
) -> list[dict[int, str] | None]:
    """Returns, for each manifest, {shard id: archive}: one archive each, or all archives for one manifest."""
    if entry.tarred_audio_filepaths is None:
        if entry.type == "nemo_tarred":
            raise ValueError(f"{key}.tarred_audio_filepaths: missing; type nemo_tarred needs its archives")
        return [None] * len(manifests)
    archives = _manifests(entry.tarred_audio_filepaths, f"{key}.tarred_audio_filepaths", allow_commands)
    if missing := [path for path in archives if not Path(path).exists()]:
        raise ValueError(f"{key}.tarred_audio_filepaths: no such file: {missing[0]}")
    if packed := [path for path in archives if not path.endswith(".tar")]:
        raise ValueError(f"{key}.tarred_audio_filepaths: {packed[0]} must be an uncompressed .tar; unpack it")
    if len(manifests) == len(archives):
        return [{0: archive} for archive in archives]
    if len(manifests) > 1:
        raise ValueError(
            f"{key}: {len(manifests)} manifests and {len(archives)} archives; give one manifest per "
            "archive, or one manifest whose lines have a shard_id"
        )
    by_id = {_shard_id(path, index): path for index, path in enumerate(archives)}
    if len(by_id) < len(archives):
        raise ValueError(
            f"{key}.tarred_audio_filepaths: the last numbers in the names are the shard ids and repeat; "
            "make them differ"
        )
    return [by_id]


def _shard_id(path: str, index: int) -> int:
    """Returns the last number in an archive's name, which is its shard id, or its place in the list."""
    numbers = re.findall(r"\d+", Path(path).stem)
    return int(numbers[-1]) if numbers else index


def _open_text(
    entry: InputConfig, tags: Mapping[str, Any], key: str, allow_commands: bool
) -> tuple[Shard, ...]:
    assert entry.paths is not None
    return tuple(
        Shard(path, partial(read_text, path, tags), partial(count_lines, path))
        for path in _manifests(entry.paths, key, allow_commands)
    )


_OPENERS = {
    "cuts_path": _open_cuts_path,
    "shar_path": _open_shar_path,
    "manifest_filepath": _open_manifest,
    "paths": _open_text,
}

_PATHS_OF_TYPE = {
    "lhotse": ("cuts_path",),
    "lhotse_shar": ("shar_path",),
    "lhotse_as_conversation": ("cuts_path", "shar_path", "manifest_filepath"),
    "nemo": ("manifest_filepath",),
    "nemo_tarred": ("manifest_filepath",),
    "multimodal_conversation": ("manifest_filepath",),
    "txt": ("paths",),
}
