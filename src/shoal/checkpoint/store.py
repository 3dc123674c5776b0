"""Atomic checkpoint directories: a checkpoint is complete or invisible.

A checkpoint called NAME is written into `NAME.incomplete`; every file in it is flushed to the disk, the
directory is renamed to NAME and the parent directory is flushed. Whoever looks for checkpoints skips the
`.incomplete` ones, so a process that dies at any point leaves either the old set of checkpoints or the old
set plus one whole new checkpoint. Leftovers are removed at the next save.

Names are free (one path component): the recipes use what `filename` of the checkpoint callback gives, for
example `step=120`. The step is not read from the name but from the manifest `shoal.json` inside.

This module knows nothing of torch or of ranks; `shoal.checkpoint.state` adds the agreement between ranks.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

INCOMPLETE_SUFFIX = ".incomplete"
MANIFEST_NAME = "shoal.json"
REPAIR = (
    "repair: copy the checkpoint again, or name an earlier one (to resume: checkpoint.restore_from of an LLM run, "
    "exp_manager.resume_from_checkpoint of a speech run)"
)
"""What helps when a checkpoint is damaged; nothing can bring back what is not in it."""
CHECKPOINTS = "checkpoints"
"""Where a run's directory keeps its checkpoints."""


class CheckpointError(OSError):
    """A checkpoint could not be written, published, removed or found; the message names its path."""


@dataclass(frozen=True)
class StoredCheckpoint:
    """One complete checkpoint: its directory, its optimizer step, when it was published (ns since 1970)."""

    path: Path
    step: int
    published_ns: int

    @property
    def name(self) -> str:
        """The directory's name."""
        return self.path.name


class CheckpointStore:
    """The checkpoints in one directory.

    Args:
        directory: holds one sub-directory per checkpoint; created at the first save.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = Path(directory)

    @contextlib.contextmanager
    def writing(self, name: str) -> Iterator[Path]:
        """Give a fresh `.incomplete` directory and publish it when the block ends without an exception.

        Raises:
            CheckpointError: the disk refused; the directory is removed and older checkpoints are untouched.
        """
        path = self.prepare(name)
        try:
            yield path
        except OSError as error:
            self.discard(name)
            raise self.failure(name, error) from error
        except BaseException:
            self.discard(name)
            raise
        self.publish(name)

    def prepare(self, name: str) -> Path:
        """Remove leftovers of earlier saves and create `NAME.incomplete`; returns its path.

        Raises:
            ValueError: `name` is not one plain path component, or ends in the suffix of incomplete ones.
            CheckpointError: a checkpoint of this name exists, or the directory cannot be created.
        """
        _check_name(name)
        final = self.directory / name
        if os.path.lexists(final):
            raise CheckpointError(
                f"checkpoint {final} exists already; choose another name or delete it first"
            )
        try:
            self.clean()
            path = self._incomplete(name)
            path.mkdir(parents=True)
        except OSError as error:
            raise self.failure(name, error) from error
        return path

    def publish(self, name: str) -> Path:
        """Flush `NAME.incomplete` to the disk and rename it to NAME; returns the final path.

        Raises:
            CheckpointError: NAME exists, the manifest is missing, or the disk refused.
        """
        source, final = self._incomplete(name), self.directory / name
        if not (source / MANIFEST_NAME).is_file():
            raise CheckpointError(f"checkpoint {source} has no {MANIFEST_NAME} and is not published")
        if os.path.lexists(final):
            raise CheckpointError(f"checkpoint {final} exists already and is not overwritten")
        try:
            flush_tree(source)
            os.rename(source, final)
            flush_directory(self.directory)
        except OSError as error:
            raise self.failure(name, error) from error
        return final

    def discard(self, name: str) -> None:
        """Remove `NAME.incomplete`. What cannot be removed stays invisible and is tried again later."""
        shutil.rmtree(self._incomplete(name), ignore_errors=True)

    def clean(self) -> None:
        """Remove every incomplete checkpoint. Call it only when no save is running in this directory."""
        if self.directory.is_dir():
            for path in self.directory.glob(f"*{INCOMPLETE_SUFFIX}"):
                shutil.rmtree(path, ignore_errors=True)

    def complete(self) -> list[StoredCheckpoint]:
        """Every complete checkpoint, oldest step first; equal steps in the order they were published."""
        if not self.directory.is_dir():
            return []
        found = (stored(path) for path in self.directory.iterdir())
        return sorted((one for one in found if one is not None), key=lambda one: (one.step, one.published_ns))

    def latest(self) -> Path | None:
        """The complete checkpoint with the highest step, None when there is none."""
        checkpoints = self.complete()
        return checkpoints[-1].path if checkpoints else None

    def delete(self, name: str) -> None:
        """Remove a complete checkpoint; it disappears at once, then its files are removed.

        Raises:
            CheckpointError: there is no such checkpoint, it is the newest one, or the disk refused.
        """
        checkpoints = self.complete()
        if name not in {one.name for one in checkpoints}:
            raise CheckpointError(f"there is no complete checkpoint {self.directory / name} to delete")
        if checkpoints[-1].name == name:
            raise CheckpointError(f"{self.directory / name} is the newest complete checkpoint and is kept")
        hidden = self._incomplete(name)
        try:
            os.rename(self.directory / name, hidden)
            flush_directory(self.directory)
            shutil.rmtree(hidden)
        except OSError as error:
            raise CheckpointError(f"could not delete checkpoint {self.directory / name}: {error}") from error

    def failure(self, name: str, error: BaseException) -> CheckpointError:
        """The error a user sees when a save fails: what, where, and that older checkpoints are intact."""
        try:
            latest = self.latest()
            intact = (
                f"the previous checkpoint {latest} is intact" if latest else "there was no earlier checkpoint"
            )
        except OSError:
            intact = "the directory cannot be read either"
        return CheckpointError(f"checkpoint {self.directory / name} was not saved: {error}; {intact}")

    def _incomplete(self, name: str) -> Path:
        return self.directory / f"{name}{INCOMPLETE_SUFFIX}"


def stored(path: str | os.PathLike[str]) -> StoredCheckpoint | None:
    """Describe the checkpoint in directory `path`; None when it is incomplete or not a checkpoint."""
    path = Path(path)
    manifest = path / MANIFEST_NAME
    if path.name.endswith(INCOMPLETE_SUFFIX) or not manifest.is_file():
        return None
    return StoredCheckpoint(path, int(read_manifest(path)["step"]), manifest.stat().st_mtime_ns)


def newest(path: str | os.PathLike[str]) -> Path:
    """The checkpoint that `path` means: itself, or the newest complete one in it or in its `checkpoints/`.

    Raises:
        CheckpointError: there is none.
    """
    path = Path(path)
    if stored(path) is not None:
        return path
    found = CheckpointStore(path).latest() or CheckpointStore(path / CHECKPOINTS).latest()
    if found is None:
        raise CheckpointError(
            f"{path} is not a complete checkpoint and holds none; name one, or the directory of a run that saved one"
        )
    return found


def read_manifest(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read `shoal.json` of a checkpoint directory.

    Raises:
        CheckpointError: the file is missing or is not the manifest of a checkpoint.
    """
    file = Path(path) / MANIFEST_NAME
    try:
        manifest = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{path} is not a complete checkpoint: cannot read {file}: {error}; {REPAIR}"
        ) from error
    if not isinstance(manifest, dict) or not isinstance(manifest.get("step"), int):
        raise CheckpointError(
            f"{file} is not the manifest of a checkpoint: it has no integer `step`; {REPAIR}"
        )
    return manifest


def write_json(file: Path, content: Mapping[str, Any]) -> None:
    """Write JSON and flush it to the disk; on network disks only the writer can flush a file."""
    with open(file, "w", encoding="utf-8") as stream:
        json.dump(content, stream)
        stream.flush()
        os.fsync(stream.fileno())


def flush_tree(directory: Path) -> None:
    """Flush every file and directory below and including `directory` to the disk, leaves first."""
    for parent, _, files in os.walk(directory, topdown=False):
        for file in files:
            _flush(Path(parent) / file)
        flush_directory(Path(parent))


def flush_directory(directory: Path) -> None:
    """Flush one directory's list of names to the disk."""
    _flush(directory)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _check_name(name: str) -> None:
    if not name or name != Path(name).name or name in (".", "..") or name.endswith(INCOMPLETE_SUFFIX):
        raise ValueError(
            f"checkpoint name {name!r} must be one path component that does not end in {INCOMPLETE_SUFFIX!r}"
        )
