"""Checkpoints of a run: bit-exact round trips, other layouts, failures and kills."""

import json
import os
import pickle
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shoal.checkpoint import writing as state_module
from shoal.checkpoint.reader import TensorReader
from shoal.checkpoint.rng import RandomState
from shoal.checkpoint.state import load_state, save_state
from shoal.checkpoint.store import CheckpointError, CheckpointStore
from tests.unit.checkpoint.tiny import build, differences, everything, train

ROUND_TRIPS = [("plain", 1), ("fsdp", 2), ("fsdp", 4), ("hsdp", 4), ("ddp", 2)]


def _resume_equals_uninterrupted(rank: int, world_size: int, layout: str, directory: Path) -> dict[str, Any]:
    """Train 3 steps, save, train 2 more; build anew, load, train 2: report what differs."""
    torch.manual_seed(100 + rank)
    model, optimizer, schedule = build(layout, world_size)
    torch.manual_seed(100 + rank)
    train(model, optimizer, schedule, 3)
    path = save_state(
        directory / "step=3", model=model, optimizer=optimizer, scheduler=schedule, step=3,
        position={"epoch": 0, "consumed": 6}, extra={"rank0": (1, 2.5)},
    )  # fmt: skip
    losses = train(model, optimizer, schedule, 2)
    wanted = everything(model, optimizer)

    model, optimizer, schedule = build(layout, world_size)
    loaded = load_state(path, model=model, optimizer=optimizer, scheduler=schedule)
    assert loaded.rng is not None
    loaded.rng.restore()
    resumed = train(model, optimizer, schedule, 2)
    return {
        "different": differences(wanted, everything(model, optimizer)),
        "states": sorted(name for name in wanted if "/" in name),
        "losses": (losses, resumed),
        "rates": schedule.get_last_lr(),
        "loaded": (loaded.step, loaded.position, loaded.layout, loaded.extra),
    }


@pytest.mark.parametrize(("layout", "world_size"), ROUND_TRIPS)
def test_resumed_run_equals_the_uninterrupted_one_bit_for_bit(ranks, tmp_path, layout, world_size):
    for report in ranks(_resume_equals_uninterrupted, world_size, layout, tmp_path):
        assert report["different"] == []
        assert report["losses"][0] == report["losses"][1]
        assert report["loaded"] == (
            3,
            {"epoch": 0, "consumed": 6},
            {"world": world_size},
            {"rank0": (1, 2.5)},
        )
        assert report["rates"][0] < 1e-2
        assert "head.weight/exp_avg_sq" in report["states"] and "head.weight/step" in report["states"]
        assert not any(name.startswith(("unused/", "frozen/")) for name in report["states"])


def _save_after_validation(rank: int, world_size: int, directory: Path) -> list[str]:
    """A forward without backward leaves the root gathered when it does not reshard after forward."""
    model, optimizer, schedule = build("fsdp", world_size)
    model.set_reshard_after_forward(False, recurse=False)
    train(model, optimizer, schedule, 1)
    with torch.no_grad():
        model(torch.randn(2, 2))
    path = save_state(directory / "a", model=model, optimizer=optimizer, scheduler=schedule, step=1)
    wanted = everything(model, optimizer)
    other, other_optimizer, other_schedule = build("fsdp", world_size)
    other.set_reshard_after_forward(False, recurse=False)
    with torch.no_grad():
        other(torch.randn(2, 2))
    load_state(path, model=other, optimizer=other_optimizer, scheduler=other_schedule)
    return differences(wanted, everything(other, other_optimizer))


def test_a_model_that_is_gathered_at_the_moment(ranks, tmp_path):
    assert ranks(_save_after_validation, 2, tmp_path) == [[], []]


def test_round_trip_without_a_process_group(tmp_path):
    report = _resume_equals_uninterrupted(0, 1, "plain", tmp_path)
    assert report["different"] == [] and report["losses"][0] == report["losses"][1]


def _save_after(rank: int, world_size: int, layout: str, path: Path, source: Path | None) -> dict[str, Any]:
    """Load `source` (or train 2 steps), save to `path`; returns the full state and whether RNG came back."""
    model, optimizer, schedule = build(layout, world_size)
    restored = None
    if source is None:
        torch.manual_seed(100 + rank)
        train(model, optimizer, schedule, 2)
    else:
        loaded = load_state(source, model=model, optimizer=optimizer, scheduler=schedule)
        restored = loaded.rng is not None
    tensors = everything(model, optimizer)
    save_state(path, model=model, optimizer=optimizer, scheduler=schedule, step=2)
    options = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    return {"tensors": tensors, "rng": restored, "options": options, "schedule": schedule.state_dict()}


CHAINS = [
    [("fsdp", 4), ("fsdp", 2), ("plain", 1)],
    [("fsdp", 2), ("fsdp", 3), ("plain", 1)],
    [("hsdp", 4), ("ddp", 2), ("fsdp", 2)],
    [("ddp", 2), ("hsdp", 4), ("fsdp", 3)],
]


@pytest.mark.parametrize("chain", CHAINS, ids=lambda c: "-".join(f"{layout}{size}" for layout, size in c))
def test_other_layouts_load_the_same_values(ranks, tmp_path, chain):
    """Every link loads what the previous one saved; uneven and empty shards on the way (case 35)."""
    source, first = None, None
    for number, (layout, size) in enumerate(chain):
        path = tmp_path / f"link={number}"
        report = ranks(_save_after, size, layout, path, source)[0]
        if first is None:
            first = report
        else:
            assert differences(first["tensors"], report["tensors"]) == []
            assert report["options"] == first["options"] and report["schedule"] == first["schedule"]
            assert report["rng"] is (size == chain[number - 1][1])
        source = path
    assert any(name.endswith("gate/exp_avg") for name in first["tensors"])


def _fail_in_phase(rank: int, world_size: int, path: Path, phase: str, failing: int) -> str:
    """Save while one phase raises on one rank; returns the error every rank saw."""
    model, optimizer, schedule = build("fsdp", world_size)
    train(model, optimizer, schedule, 1)
    save_state(path.with_name("step=1"), model=model, optimizer=optimizer, step=1)
    if rank == failing:
        patch = {
            "collect": ("optimizer_state.collect", None),
            "shards": ("FileSystemWriter.write_data", None),
            "own": ("write_json", None),
            "publish": ("CheckpointStore.publish", None),
        }[phase][0]
        holder, _, name = patch.rpartition(".")
        target = getattr(state_module, holder) if holder else state_module
        setattr(target, name, _no_space)
    try:
        save_state(path, model=model, optimizer=optimizer, scheduler=schedule, step=2)
    except CheckpointError as error:
        return str(error)
    return "no error"


def _no_space(*args: object, **kwargs: object) -> None:
    raise OSError(28, "No space left on device", "shard")


@pytest.mark.parametrize(("phase", "failing"), [("collect", 1), ("shards", 1), ("own", 1), ("publish", 0)])
def test_a_failure_on_one_rank_is_raised_on_all_and_nothing_is_published(ranks, tmp_path, phase, failing):
    messages = ranks(_fail_in_phase, 2, tmp_path / "step=2", phase, failing)
    assert len(set(messages)) == 1
    for part in (str(tmp_path / "step=2"), f"rank {failing}", "No space left", "step=1 is intact"):
        assert part in messages[0]
    assert [path.name for path in tmp_path.iterdir()] == ["step=1"]


KILL_POINTS = {
    "before the shards": ("FileSystemWriter", "write_data", False, 1),
    "after the shards": ("FileSystemWriter", "write_data", True, 1),
    "before the rename": ("CheckpointStore", "publish", False, 0),
    "after the rename": ("CheckpointStore", "publish", True, 0),
}


def _killed_while_saving(rank: int, world_size: int, directory: Path, point: str) -> None:
    """Publish step 1, then let one rank kill itself in the middle of saving step 2."""
    model, optimizer, schedule = build("fsdp", world_size)
    train(model, optimizer, schedule, 1)
    save_state(directory / "step=1", model=model, optimizer=optimizer, scheduler=schedule, step=1)
    holder, name, after, victim = KILL_POINTS[point]
    if rank == victim:
        owner = getattr(state_module, holder)
        original = getattr(owner, name)

        def dying(*args: object, **kwargs: object) -> None:
            if after:
                original(*args, **kwargs)
            os.kill(os.getpid(), signal.SIGKILL)

        setattr(owner, name, dying)
    save_state(directory / "step=2", model=model, optimizer=optimizer, scheduler=schedule, step=2)


def _load_latest_and_save(rank: int, world_size: int, directory: Path) -> tuple[str, int]:
    model, optimizer, schedule = build("fsdp", world_size)
    latest = CheckpointStore(directory).latest()
    assert latest is not None
    loaded = load_state(latest, model=model, optimizer=optimizer, scheduler=schedule)
    dist.barrier()
    save_state(directory / "step=3", model=model, optimizer=optimizer, scheduler=schedule, step=3)
    return latest.name, loaded.step


@pytest.mark.parametrize("point", list(KILL_POINTS))
def test_a_rank_killed_while_saving_leaves_a_loadable_checkpoint(ranks, tmp_path, point):
    victim = KILL_POINTS[point][3]
    outcomes = ranks(_killed_while_saving, 2, tmp_path, point, expect_failure=True, timeout=20, grace=1)
    assert outcomes[victim].kind == "signalled" and outcomes[victim].exit_code == -signal.SIGKILL
    found = ("step=2", 2) if point == "after the rename" else ("step=1", 1)
    assert ranks(_load_latest_and_save, 2, tmp_path) == [found, found]
    assert not [path for path in tmp_path.iterdir() if path.name.endswith(".incomplete")]


def test_the_model_alone_can_be_loaded_and_strange_tensors_are_refused(tmp_path):
    model, optimizer, schedule = build("plain", 1)
    train(model, optimizer, schedule, 1)
    path = save_state(tmp_path / "a", model=model, optimizer=optimizer, step=1)
    fresh, _, _ = build("plain", 1)
    load_state(path, model=fresh)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), fresh.parameters(), strict=True))

    del fresh.unused
    with pytest.raises(CheckpointError, match="unused, which this model does not have"):
        load_state(path, model=fresh)
    assert load_state(path, model=fresh, strict=False).step == 1
    fresh.extra = torch.nn.Linear(2, 2)
    with pytest.raises(CheckpointError, match=r"no model\.extra\.bias, model\.extra\.weight"):
        load_state(path, model=fresh, strict=False)
    wrong, _, _ = build("plain", 1)
    wrong.head = torch.nn.Linear(2, 4)
    with pytest.raises(
        CheckpointError, match=r"model\.head\.weight: saved shape \(3, 2\), this model's \(4, 2\)"
    ):
        load_state(path, model=wrong)


def test_optimizers_of_another_kind_or_grouping_are_refused(tmp_path):
    model, optimizer, schedule = build("plain", 1)
    train(model, optimizer, schedule, 1)
    path = save_state(tmp_path / "a", model=model, optimizer=optimizer, step=1)
    trainable = [p for p in model.parameters() if p.requires_grad]
    with pytest.raises(CheckpointError, match=r"state of optimizers \['AdamW'\], this run has \['SGD'\]"):
        load_state(path, model=model, optimizer=torch.optim.SGD(trainable, lr=1.0))
    with pytest.raises(CheckpointError, match="optimizer groups differ"):
        load_state(path, model=model, optimizer=torch.optim.AdamW(trainable, lr=1.0))
    with pytest.raises(CheckpointError, match="not in the model being saved"):
        other = torch.optim.SGD([torch.nn.Parameter(torch.zeros(7))], lr=1.0)
        save_state(tmp_path / "b", model=model, optimizer=other, step=2)


class _Malicious:
    def __init__(self, flag: Path) -> None:
        self.flag = flag

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.flag),)


def test_metadata_that_would_run_code_is_refused(tmp_path):
    model, optimizer, _ = build("plain", 1)
    path = save_state(tmp_path / "a", model=model, step=1)
    (path / ".metadata").write_bytes(pickle.dumps(_Malicious(tmp_path / "ran")))
    with pytest.raises(CheckpointError, match="refused"):
        load_state(path, model=model)
    assert not (tmp_path / "ran").exists()


def test_an_entry_of_raw_bytes_is_refused(tmp_path):
    model, _, _ = build("plain", 1)
    torch.distributed.checkpoint.save({"model.head.bias": "text"}, checkpoint_id=tmp_path / "a", no_dist=True)
    with pytest.raises(CheckpointError, match=r"model\.head\.bias.*not a tensor"):
        TensorReader(tmp_path / "a").tensors()


def test_nothing_in_a_checkpoint_is_a_pickle_except_torchs_metadata_and_shards(tmp_path):
    model, optimizer, schedule = build("plain", 1)
    path = save_state(tmp_path / "a", model=model, optimizer=optimizer, scheduler=schedule, step=1)
    names = sorted(file.name for file in path.iterdir())
    assert names == [".metadata", "__0_0.distcp", "rng-00000.json", "shoal.json", "state.json"]
    for name in names[2:]:
        json.loads((path / name).read_text())


def test_random_state_round_trip_covers_python_numpy_and_torch():
    import random

    import numpy as np

    torch.manual_seed(5), np.random.seed(5), random.seed(5)
    random.gauss(0, 1), np.random.randn()
    saved = json.loads(json.dumps(RandomState.capture().to_json()))

    def draw() -> tuple[Any, ...]:
        return (
            random.gauss(0, 1),
            random.random(),
            np.random.randn(),
            np.random.rand(),
            torch.rand(3).tolist(),
        )

    wanted = draw()
    assert draw() != wanted
    RandomState.from_json(saved).restore()
    assert draw() == wanted
