"""Members of archives are found by name and read by one seek."""

from __future__ import annotations

import gzip
import tarfile

import pytest

from shoal.data.tar import TarMember, read_member, tar_index
from tests.unit.data import corpus

MEMBERS = {"a.wav": b"aaa", "deep/b.flac": b"bbbb", "deep/b.json": b"{}", "c.tar.wav": b"", "d": b"x" * 2000}


def test_every_member_is_read_whole(tmp_path):
    archive = str(corpus.write_tar(tmp_path / "a.tar", MEMBERS))
    assert {name: read_member(TarMember(archive, name)) for name in MEMBERS} == MEMBERS


def test_members_are_found_without_their_suffix(tmp_path):
    archive = str(corpus.write_tar(tmp_path / "a.tar", MEMBERS))
    assert read_member(TarMember(archive, "deep/b", any_suffix=True)) == b"bbbb"
    with pytest.raises(KeyError, match=r"a\.tar has no member deep"):
        read_member(TarMember(archive, "deep", any_suffix=True))


def test_long_names_and_leading_dots(tmp_path):
    long = "x" * 150 + ".wav"
    archive = str(corpus.write_tar(tmp_path / "a.tar", {f"./{long}": b"long", "./s.wav": b"short"}))
    assert read_member(TarMember(archive, long)) == b"long"
    assert read_member(TarMember(archive, "s.wav")) == b"short"


def test_a_repeated_entry_falls_back_to_its_member_only_when_it_is_absent(tmp_path):
    archive = str(
        corpus.write_tar(tmp_path / "a.tar", {"a.wav": b"whole", "b-sub1.wav": b"own", "b.wav": b"no"})
    )
    assert read_member(TarMember(archive, "a-sub7.wav")) == b"whole"
    assert read_member(TarMember(archive, "b-sub1.wav")) == b"own"
    with pytest.raises(KeyError):
        read_member(TarMember(archive, "c-sub1.wav"))


def test_an_archive_is_indexed_once(tmp_path, monkeypatch):
    opened = []
    real = tarfile.open
    monkeypatch.setattr(tarfile, "open", lambda *args, **keys: opened.append(args) or real(*args, **keys))
    archive = str(corpus.write_tar(tmp_path / "a.tar", MEMBERS))
    opened.clear()
    for name in MEMBERS:
        read_member(TarMember(archive, name))
    assert len(opened) == 1


def test_a_compressed_archive_is_refused(tmp_path):
    packed = tmp_path / "a.tar"
    packed.write_bytes(gzip.compress(corpus.write_tar(tmp_path / "b.tar", MEMBERS).read_bytes()))
    with pytest.raises(ValueError, match="must be uncompressed"):
        tar_index(str(packed))
