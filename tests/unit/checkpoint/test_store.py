"""Atomic directories: complete or invisible, newest by step, never overwritten, clear errors."""

import errno
import os
from pathlib import Path

import pytest

from shoal.checkpoint.store import (
    MANIFEST_NAME,
    CheckpointError,
    CheckpointStore,
    flush_tree,
    read_manifest,
    stored,
    write_json,
)


def _save(store: CheckpointStore, name: str, step: int) -> None:
    with store.writing(name) as path:
        (path / "shard").write_bytes(b"x" * 10)
        write_json(path / MANIFEST_NAME, {"step": step})


def test_latest_is_found_by_the_step_inside_not_by_name_or_age(tmp_path):
    store = CheckpointStore(tmp_path)
    assert store.latest() is None and store.complete() == []
    for name, step in [("best-0.2", 90), ("z=1", 5), ("step=100-last", 100), ("a", 99)]:
        _save(store, name, step)
    (tmp_path / "notes").mkdir()
    (tmp_path / "README").write_text("not a checkpoint")
    assert [one.step for one in store.complete()] == [5, 90, 99, 100]
    assert store.latest() == tmp_path / "step=100-last"


def test_of_equal_steps_the_later_one_is_newer(tmp_path):
    store = CheckpointStore(tmp_path)
    for name, when in [("b", 2_000_000_000), ("a", 3_000_000_000)]:
        _save(store, name, 7)
        os.utime(tmp_path / name / MANIFEST_NAME, ns=(when, when))
    assert store.latest() == tmp_path / "a"


def test_an_incomplete_checkpoint_is_invisible_and_removed_at_the_next_save(tmp_path):
    store = CheckpointStore(tmp_path)
    _save(store, "step=1", 1)
    leftover = store.prepare("step=2")
    write_json(leftover / MANIFEST_NAME, {"step": 2})
    assert store.latest() == tmp_path / "step=1"
    assert stored(leftover) is None
    _save(store, "step=3", 3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step=1", "step=3"]


def test_an_exception_inside_the_block_publishes_nothing(tmp_path):
    store = CheckpointStore(tmp_path)
    with pytest.raises(ZeroDivisionError), store.writing("step=1"):
        _ = 1 / 0
    assert list(tmp_path.iterdir()) == []


def test_a_published_checkpoint_is_never_overwritten(tmp_path):
    store = CheckpointStore(tmp_path)
    _save(store, "step=1", 1)
    with pytest.raises(CheckpointError, match="exists already"):
        _save(store, "step=1", 2)
    assert read_manifest(tmp_path / "step=1")["step"] == 1


def test_a_checkpoint_published_meanwhile_by_another_run_is_not_overwritten(tmp_path):
    store = CheckpointStore(tmp_path)
    path = store.prepare("step=1")
    write_json(path / MANIFEST_NAME, {"step": 1})
    (tmp_path / "step=1").mkdir()
    with pytest.raises(CheckpointError, match="not overwritten"):
        store.publish("step=1")


def test_without_a_manifest_nothing_is_published(tmp_path):
    store = CheckpointStore(tmp_path)
    store.prepare("step=1")
    with pytest.raises(CheckpointError, match="no shoal.json"):
        store.publish("step=1")
    assert store.latest() is None


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/a", "x.incomplete"])
def test_names_are_one_visible_path_component(tmp_path, name):
    with pytest.raises(ValueError, match="one path component"):
        CheckpointStore(tmp_path).prepare(name)


def test_delete_removes_older_ones_and_keeps_the_newest(tmp_path):
    store = CheckpointStore(tmp_path)
    for step in (1, 2):
        _save(store, f"step={step}", step)
    with pytest.raises(CheckpointError, match="newest complete checkpoint and is kept"):
        store.delete("step=2")
    store.delete("step=1")
    assert [path.name for path in tmp_path.iterdir()] == ["step=2"]
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        store.delete("step=1")


def test_a_deletion_that_stops_half_way_leaves_nothing_that_looks_complete(tmp_path, monkeypatch):
    store = CheckpointStore(tmp_path)
    for step in (1, 2):
        _save(store, f"step={step}", step)
    monkeypatch.setattr("shutil.rmtree", _refuse(errno.EIO))
    with pytest.raises(CheckpointError, match=r"could not delete checkpoint .*step=1"):
        store.delete("step=1")
    assert [one.name for one in store.complete()] == ["step=2"]


def _refuse(code: int):
    def refuse(*args: object, **kwargs: object) -> None:
        raise OSError(code, os.strerror(code), "the file")

    return refuse


@pytest.mark.parametrize(
    ("function", "code", "words"),
    [
        ("pathlib.Path.mkdir", errno.EACCES, "Permission denied"),
        ("os.fsync", errno.ENOSPC, "No space left on device"),
        ("os.rename", errno.EDQUOT, "quota"),
    ],
)
def test_disk_errors_name_the_path_and_say_that_the_previous_one_is_intact(
    tmp_path, monkeypatch, function, code, words
):
    store = CheckpointStore(tmp_path)
    _save(store, "step=1", 1)
    with monkeypatch.context() as patch:
        patch.setattr(function, _refuse(code))
        with pytest.raises(OSError, match=words) as caught:
            _save(store, "step=2", 2)
    assert str(tmp_path / "step=2") in str(caught.value)
    assert f"{tmp_path / 'step=1'} is intact" in str(caught.value)
    assert store.latest() == tmp_path / "step=1"


def test_everything_is_flushed_before_the_rename_and_the_parent_after_it(tmp_path, monkeypatch):
    events: list[str] = []
    fsync, rename = os.fsync, os.rename

    def log_fsync(descriptor: int) -> None:
        events.append(os.path.relpath(os.readlink(f"/proc/self/fd/{descriptor}"), tmp_path))
        fsync(descriptor)

    def log_rename(source: Path, target: Path) -> None:
        events.append("rename")
        rename(source, target)

    store = CheckpointStore(tmp_path)
    path = store.prepare("s")
    (path / "sub").mkdir()
    (path / "sub" / "shard").write_bytes(b"x")
    write_json(path / MANIFEST_NAME, {"step": 1})
    monkeypatch.setattr(os, "fsync", log_fsync)
    monkeypatch.setattr(os, "rename", log_rename)
    store.publish("s")
    before, after = events[: events.index("rename")], events[events.index("rename") + 1 :]
    assert sorted(before) == [
        "s.incomplete",
        "s.incomplete/shoal.json",
        "s.incomplete/sub",
        "s.incomplete/sub/shard",
    ]
    assert (
        before.index("s.incomplete/sub/shard")
        < before.index("s.incomplete/sub")
        < before.index("s.incomplete")
    )
    assert after == ["."]
    flush_tree(tmp_path)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"step": "3"}', "{}"])
def test_a_damaged_manifest_is_named(tmp_path, content):
    (tmp_path / MANIFEST_NAME).write_text(content)
    with pytest.raises(CheckpointError, match=rf"{MANIFEST_NAME}.*; repair: copy the checkpoint again"):
        read_manifest(tmp_path)
