"""A full disk, a forbidden directory, a killed rank: one clear error on every rank, earlier checkpoints intact."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import shoal.checkpoint.consolidate as consolidate_module
import shoal.checkpoint.writing as writing
from shoal.checkpoint.background import BackgroundSaver
from shoal.checkpoint.consolidate import consolidate
from shoal.checkpoint.export import ExportOptions, export_model
from shoal.checkpoint.snapshot import SaveOptions
from shoal.checkpoint.state import load_state, save_state
from shoal.checkpoint.store import CheckpointError, CheckpointStore
from shoal.checkpoint.writing import FORMAT
from tests.unit.checkpoint.models import build, read_folder, save_source, unequal
from tests.zygote import RankRunner

LIMIT = 20_000
"""Bytes that a file may have on the rank whose disk is full; the tiny model has more than that in each format."""

WRITERS = ("torch_save", "safetensors", "consolidated", "background", "export")


def save(
    kind: str,
    path: Path,
    model: Any,
    optimizer: torch.optim.Optimizer,
    step: int,
    saver: BackgroundSaver | None = None,
) -> None:
    """Save, or export, in one of the ways there are; returns when it is done."""
    if kind == "export":
        export_model(model, path, options=ExportOptions(max_shard_bytes=30_000))
        return
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "step": step}
    if kind == "background":
        saver = saver or BackgroundSaver()
        saver.save(path, **state, options=SaveOptions(model_format="safetensors"))
        saver.wait()
        return
    options = {
        "torch_save": SaveOptions(),
        "safetensors": SaveOptions(model_format="safetensors"),
        "consolidated": SaveOptions(model_format="safetensors", consolidated=True),
    }
    save_state(path, **state, options=options[kind])


def trained(source: Path, world: int) -> tuple[Any, torch.optim.Optimizer]:
    model = build(source, "fsdp2", world)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model({"input_ids": torch.arange(4, 24).view(2, 10)})["loss_sum"].backward()
    optimizer.step()
    return model, optimizer


def save_with_an_obstacle(
    rank: int, world: int, source: Path, directory: Path, kind: str, obstacle: str, failing: int
) -> str:
    model, optimizer = trained(source, world)
    save("export" if kind == "export" else "torch_save", directory / "step=1", model, optimizer, 1)
    saver = BackgroundSaver()  # before the obstacle: the ranks meet through a file in the tests
    if rank == failing:
        if obstacle == "full":
            # As on a full disk, write() fails in the middle of a file. The signal is ignored by Python.
            resource.setrlimit(resource.RLIMIT_FSIZE, (LIMIT, resource.RLIM_INFINITY))
        else:
            os.chmod(directory, 0o555)
            os.seteuid(65534)  # root may write anywhere
    try:
        save(kind, directory / "step=2", model, optimizer, 2, saver)
    except CheckpointError as error:
        return str(error)
    finally:
        if rank == failing and obstacle == "forbidden":
            os.seteuid(0)
            os.chmod(directory, 0o755)
    return "no error"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_source(tmp_path_factory.mktemp("model") / "source")


@pytest.mark.parametrize("kind", WRITERS)
def test_a_full_disk(ranks: RankRunner, tmp_path: Path, source: Path, kind: str) -> None:
    directory = tmp_path / "run"
    failing = 0 if kind == "export" else 1  # only rank 0 writes an export
    messages = ranks(save_with_an_obstacle, 2, source, directory, kind, "full", failing, timeout=60)
    assert len(set(messages)) == 1, messages
    assert f"rank {failing}" in messages[0] and "File too large" in messages[0]
    if kind != "export":
        assert str(directory / "step=2") in messages[0] and "step=1 is intact" in messages[0]
    assert [path.name for path in directory.iterdir()] == ["step=1"]
    loads_again(source, directory / "step=1", kind)


def loads_again(source: Path, path: Path, kind: str) -> None:
    model = build(source, "plain", 1)
    if kind == "export":
        assert read_folder(path).keys() == read_folder(source).keys()
    else:
        assert load_state(path, model=model).step == 1


@pytest.fixture
def open_path() -> Iterator[Path]:
    """A temporary directory that other users may enter, unlike pytest's."""
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o755)
        yield Path(name)


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user to be refused")
@pytest.mark.parametrize("kind", WRITERS)
def test_a_forbidden_directory(ranks: RankRunner, open_path: Path, source: Path, kind: str) -> None:
    directory = open_path / "run"
    messages = ranks(save_with_an_obstacle, 2, source, directory, kind, "forbidden", 0, timeout=60)
    assert len(set(messages)) == 1, messages
    assert "rank 0" in messages[0] and "Permission denied" in messages[0] and "step=2" in messages[0]
    assert [path.name for path in directory.iterdir()] == ["step=1"]
    loads_again(source, directory / "step=1", kind)


KILL_POINTS = {
    "safetensors": (writing.HuggingFaceStorageWriter, "write_data", 1),
    "consolidated": (consolidate_module.PartWriter, "finish", 0),
    "background": (writing.FileSystemWriter, "write_data", 1),
    "export": (consolidate_module.PartWriter, "finish", 0),
}


def killed_in_a_save(rank: int, world: int, source: Path, directory: Path, kind: str) -> None:
    model, optimizer = trained(source, world)
    save("torch_save", directory / "step=1", model, optimizer, 1)
    holder, name, victim = KILL_POINTS[kind]
    if rank == victim:
        setattr(holder, name, lambda *arguments: os.kill(os.getpid(), signal.SIGKILL))
    save(kind, directory / "step=2", model, optimizer, 2)


def resume_and_save(rank: int, world: int, source: Path, directory: Path, kind: str) -> int:
    model = build(source, "fsdp2", world)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    latest = CheckpointStore(directory).latest()
    assert latest is not None
    loaded = load_state(latest, model=model, optimizer=optimizer)
    save(kind, directory / "step=2", model, optimizer, 2)
    return loaded.step


@pytest.mark.parametrize("kind", list(KILL_POINTS))
def test_a_killed_rank(ranks: RankRunner, tmp_path: Path, source: Path, kind: str) -> None:
    """What is left behind is invisible and is gone after the next save of the same kind, which succeeds."""
    directory, victim = tmp_path / "run", KILL_POINTS[kind][2]
    outcomes = ranks(killed_in_a_save, 2, source, directory, kind, expect_failure=True, timeout=30, grace=1)
    assert outcomes[victim].kind == "signalled" and outcomes[victim].exit_code == -signal.SIGKILL
    assert (directory / "step=2.incomplete").exists() and not (directory / "step=2").exists()
    assert ranks(resume_and_save, 2, source, directory, kind) == [1, 1]
    assert sorted(path.name for path in directory.iterdir()) == ["step=1", "step=2"]


def test_a_directory_that_cannot_even_be_read_is_an_error_that_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = CheckpointStore(tmp_path)
    monkeypatch.setattr(
        CheckpointStore, "latest", lambda self: (_ for _ in ()).throw(PermissionError(13, "no"))
    )
    message = str(store.failure("step=2", OSError(28, "No space left on device")))
    assert "step=2 was not saved" in message and "cannot be read either" in message


def test_a_damaged_shard_is_named(ranks: RankRunner, tmp_path: Path, source: Path) -> None:
    model = build(source, "plain", 1)
    path = save_state(tmp_path / "a", model=model, step=1, options=SaveOptions(model_format="safetensors"))
    (shard,) = (path / "model").glob("*.safetensors")
    whole = shard.read_bytes()
    shard.write_bytes(whole[: len(whole) // 2])
    for action in (lambda: load_state(path, model=model), lambda: consolidate(path, tmp_path / "out")):
        with pytest.raises(CheckpointError, match="cannot read the tensors in"):
            action()
    shard.write_bytes(whole)
    consolidate(path, tmp_path / "out")
    assert unequal(read_folder(tmp_path / "out"), read_folder(source)) == []


def save_on_rank(rank: int, world: int, source: Path, path: Path) -> None:
    save("safetensors", path, *trained(source, world), 2)


def refused_on_rank(rank: int, world: int, source: Path, path: Path) -> str:
    model = build(source, "fsdp2", world)
    with pytest.raises(CheckpointError) as error:
        load_state(path, model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2))
    return str(error.value)


def halve(file: Path) -> None:
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])


def blank_the_middle(file: Path) -> None:
    whole = file.read_bytes()
    third = len(whole) // 3
    file.write_bytes(whole[:third] + bytes(third) + whole[2 * third :])


def break_text(file: Path) -> None:
    file.write_text("{broken")


DAMAGES = {
    "shard of rank 0 missing": ("model/shard-00001-model-00001-of-00001.safetensors", Path.unlink),
    "shard of rank 1 missing": ("model/shard-00002-model-00001-of-00001.safetensors", Path.unlink),
    "shard cut off": ("model/shard-00002-model-00001-of-00001.safetensors", halve),
    "shard empty": ("model/shard-00001-model-00001-of-00001.safetensors", lambda file: file.write_bytes(b"")),
    "optimizer file missing": ("__1_0.distcp", Path.unlink),
    "optimizer file cut off": ("__0_0.distcp", halve),
    "optimizer file blanked": ("__0_0.distcp", blank_the_middle),
    "state broken": ("state.json", break_text),
    "state of nothing": ("state.json", lambda file: file.write_text("{}")),
    "state missing": ("state.json", Path.unlink),
    "manifest broken": ("shoal.json", break_text),
    "manifest of nothing": ("shoal.json", lambda file: file.write_text(f'{{"format": {FORMAT}, "step": 2}}')),
    "metadata broken": (".metadata", halve),
    "metadata missing": (".metadata", Path.unlink),
    "random state broken": ("rng-00001.json", break_text),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, ranks: RankRunner, source: Path) -> Path:
    path = tmp_path_factory.mktemp("run") / "step=2"
    ranks(save_on_rank, 2, source, path)
    return path


@pytest.mark.parametrize("case", list(DAMAGES))
def test_damage_is_refused_by_checkpoint_file_and_repair(
    ranks: RankRunner, tmp_path: Path, source: Path, saved: Path, case: str
) -> None:
    name, damage = DAMAGES[case]
    path = tmp_path / "step=2"
    shutil.copytree(saved, path)
    damage(path / name)
    first, second = ranks(refused_on_rank, 2, source, path)
    assert first == second
    assert str(path) in first and "repair: copy the checkpoint again, or name an earlier one" in first
    # Of a shard that is not there its rank is known, and no more.
    assert (
        f"has no {name[6:17]}-*" if "missing" in case and "shard" in case else str(path / name)
    ) in first, first
    assert "checkpoint.restore_from" in first and "exp_manager.resume_from_checkpoint" in first


@pytest.mark.parametrize("damage", [Path.unlink, halve, blank_the_middle])
def test_damage_among_a_models_tensors_in_torchs_format(
    ranks: RankRunner, tmp_path: Path, source: Path, damage: Any
) -> None:
    path = save_state(tmp_path / "step=1", model=build(source, "plain", 1), step=1)
    file = path / "__0_0.distcp"
    damage(file)
    for action in (
        lambda: load_state(path, model=build(source, "plain", 1)),
        lambda: consolidate(path, tmp_path / "out"),
    ):
        with pytest.raises(CheckpointError, match="; repair: copy the checkpoint again") as error:
            action()
        assert str(file) in str(error.value)


def test_a_model_is_read_without_the_optimizers_files(saved: Path, tmp_path: Path, source: Path) -> None:
    shutil.copytree(saved, tmp_path / "step=2")
    (tmp_path / "step=2" / "__1_0.distcp").unlink()
    assert load_state(tmp_path / "step=2", model=build(source, "plain", 1)).step == 2


def test_a_full_disk_stops_an_offline_export(ranks: RankRunner, tmp_path: Path, source: Path) -> None:
    save_state(tmp_path / "step=1", model=build(source, "plain", 1), step=1)
    (message,) = ranks(export_on_a_full_disk, 1, tmp_path / "step=1", tmp_path / "out", init=False)
    assert "cannot write" in message and "File too large" in message
    assert [path.name for path in tmp_path.iterdir()] == ["step=1"]


def export_on_a_full_disk(rank: int, world: int, path: Path, output: Path) -> str:
    resource.setrlimit(resource.RLIMIT_FSIZE, (LIMIT, resource.RLIM_INFINITY))
    try:
        consolidate(path, output)
    except CheckpointError as error:
        return str(error)
    return "no error"
