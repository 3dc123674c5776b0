"""Peers of a data-parallel coordinate: one loads, all get the same bytes, and nobody is left waiting."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

from shoal.config import LLMConfig, load_config
from shoal.config.schema import ParallelismSizes
from shoal.data.batch import StepBatch
from shoal.data.broadcast import BroadcastError, BroadcastingDataLoader, broadcast_loader
from shoal.data.byte_tokenizer import byte_tokenizer
from shoal.data.position import START, StreamPosition
from shoal.data.stream import build_train_loader, build_validation_loaders
from shoal.data.text import open_documents
from shoal.data.text_loaders import text_train_loader, text_validation_loader
from shoal.mesh.axes import MeshAxisName
from shoal.mesh.context import MeshContext
from shoal.mesh.sizes import resolve_sizes
from tests.unit.data import corpus
from tests.unit.data.corpus import CharPrompts, clips
from tests.zygote import RankOutcome, RankRunner

TP2 = ParallelismSizes(tp_size=2)
SOURCES = (0, 2)
"""Ranks that load under (dp 2, tp 2)."""


def mesh_of(sizes: ParallelismSizes, world: int) -> MeshContext:
    return MeshContext.build(resolve_sizes(sizes, world), "cpu")


def digest(value: Any) -> str:
    """A hash of everything in a batch: types, names, shapes, dtypes and bytes."""
    found = hashlib.sha256()

    def add(one: Any) -> None:
        found.update(type(one).__name__.encode())
        if isinstance(one, Tensor):
            found.update(f"{one.dtype}{tuple(one.shape)}".encode())
            if one.numel():
                found.update(one.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        elif is_dataclass(one):
            for field in fields(one):
                add(getattr(one, field.name))
        elif isinstance(one, Mapping):
            for item in one.items():
                add(item)
        elif isinstance(one, list | tuple):
            for item in one:
                add(item)
        else:
            found.update(repr(one).encode())

    add(value)
    return found.hexdigest()


# ------------------------------------------------------------------------------------- our own loaders, dp 2 x tp 2


def text_config(root: Path, packs: bool, workers: int) -> LLMConfig:
    file = root / "train.jsonl"
    config = load_config(
        {
            "model": {"config": {"model_type": "llama"}},
            "dataset": {"type": "text", "path": str(file)},
            "validation_dataset": {"type": "text", "path": str(file)},
            "step_scheduler": {"global_batch_size": 3, "local_batch_size": 1},
            "packed_sequence": {"packed_sequence_size": 64 if packs else 0},
            "dataloader": {"num_workers": workers},
        }
    )
    assert isinstance(config, LLMConfig)
    return config


def speech_builder(root: Path, workers: int) -> Callable[[int, int, StreamPosition], Any]:
    # 7 clips of one micro-batch each and 3 micro-batches per step: some ranks run out before others.
    config = corpus.dataset(root / "manifest.json", batch_size=1, shuffle=True, num_workers=workers)

    def build(dp_rank: int, dp_size: int, position: StreamPosition) -> Any:
        sizes = {"dp_rank": dp_rank, "dp_size": dp_size, "global_micro_batches": 3}
        return build_train_loader(config, CharPrompts(), position=position, **sizes)

    return build


def builder(kind: str, root: Path) -> Callable[[int, int, StreamPosition], Any]:
    """A function of (dp_rank, dp_size, position) that builds a local loader."""
    workers = 1 if kind.endswith("workers") else 0
    if kind.startswith("speech"):
        return speech_builder(root, workers)
    if kind == "validation":
        config = corpus.dataset(root / "manifest.json", batch_size=3)
        return lambda r, n, _: build_validation_loaders(config, CharPrompts(), dp_rank=r, dp_size=n)[
            "default"
        ]
    text = text_config(root, packs="packs" in kind, workers=workers)
    assert text.dataset is not None
    documents = open_documents(text.dataset, byte_tokenizer(), "dataset")
    if kind == "text validation":
        dataset = text.validation_datasets["default"]
        return lambda r, n, _: text_validation_loader(
            text, dataset, documents, key="validation_dataset", pad_id=0, dp_rank=r, dp_size=n
        )
    return lambda r, n, position: text_train_loader(
        text, documents, pad_id=0, dp_rank=r, dp_size=n, position=position
    )


KINDS = ("speech", "speech workers", "validation", "text", "packs", "packs workers", "text validation")


def two_epochs(rank: int, world: int, root: str) -> dict[str, Any]:
    """Digests of two epochs of every kind, shared and local."""
    mesh = mesh_of(TP2, world)
    found: dict[str, Any] = {"built": []}
    for kind in KINDS:
        build = builder(kind, Path(root))

        def built(build: Any = build, kind: str = kind) -> Any:
            found["built"].append(kind)
            return build(mesh.dp_rank, mesh.dp_size, START)

        shared, local = broadcast_loader(built, mesh, name=kind), build(mesh.dp_rank, mesh.dp_size, START)
        epochs: dict[str, list[Any]] = {"shared": [], "local": [], "workers": []}
        for _ in range(2):
            for name, loader in (("shared", shared), ("local", local)):
                steps = []
                for step in loader:
                    steps.append((digest(step), sum(one["is_empty"] for one in step.micro_batches)))
                    if name == "shared":
                        epochs["workers"].append(len(multiprocessing.active_children()))
                epochs[name].append(steps)
        epochs["length"] = [length(loader) for loader in (shared, local)]
        epochs["position"] = [shared.position, local.position]
        found[kind] = epochs
    return found


def length(loader: Any) -> int | str:
    try:
        return len(loader)
    except TypeError:
        return "unknown"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("broadcast")
    corpus.write_nemo(folder, clips(7))
    corpus.write_lines(folder / "train.jsonl", ({"text": f"{n:02d}" + "x" * (n * 7 % 31)} for n in range(23)))
    return folder


@pytest.fixture(scope="module")
def epochs(ranks: RankRunner, root: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = ranks(two_epochs, 4, str(root), timeout=120)
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_peers_get_the_bytes_that_a_local_loader_gives(epochs: list[dict[str, Any]], kind: str) -> None:
    found = [rank[kind] for rank in epochs]
    for one in found:
        assert one["shared"] == one["local"] and len(one["shared"][0]) > 1
        assert one["length"][0] == one["length"][1]
        assert one["position"][0] == one["position"][1]
    assert found[0]["shared"] == found[1]["shared"] and found[2]["shared"] == found[3]["shared"]
    digests = [{step for epoch in one["shared"] for step, _ in epoch} for one in found]
    assert not digests[0] & digests[2]
    # 7 micro-batches over 2 coordinates do not come out even: some are empty, on peers too.
    assert sum(empty for one in found for epoch in one["shared"] for _, empty in epoch) > 0
    if "validation" not in kind:
        assert found[0]["shared"][0] != found[0]["shared"][1]  # a new order each epoch


def test_only_the_first_peer_has_a_source_and_workers(epochs: list[dict[str, Any]]) -> None:
    for rank, found in enumerate(epochs):
        assert found["built"] == (list(KINDS) if rank in SOURCES else [])
        for kind in KINDS:
            expected = {1} if rank in SOURCES and kind.endswith("workers") else {0}
            assert set(found[kind]["workers"]) == expected, (rank, kind)


def resumed(rank: int, world: int, root: str) -> dict[str, Any]:
    """An uninterrupted run over an epoch's end, and runs that go on from each of its positions."""
    mesh = mesh_of(TP2, world)
    build = speech_builder(Path(root), 0)

    def steps_from(position: StreamPosition, set_later: bool) -> list[tuple[str, StreamPosition]]:
        start = START if set_later else position
        loader: Any = broadcast_loader(lambda: build(mesh.dp_rank, mesh.dp_size, start), mesh)
        if set_later:
            loader.set_position(position)
        taken = []
        while len(taken) < 6 - done(position):
            for step in loader:
                assert loader.position == step.position
                taken.append((digest(step), step.position))
        return taken

    def done(position: StreamPosition) -> int:
        return 0 if position == START else 1 + [p for _, p in whole].index(position)

    whole: list[tuple[str, StreamPosition]] = []
    whole = steps_from(START, False)
    rests = [steps_from(position, later) for _, position in whole[:-1] for later in (False, True)]
    return {"whole": whole, "rests": rests}


def test_a_run_that_resumes_gets_what_is_left(ranks: RankRunner, root: Path) -> None:
    results = ranks(resumed, 4, str(root))
    assert results[0] == results[1] and results[2] == results[3]
    for found in results:
        whole = found["whole"]
        assert len(whole) == 6 and whole[2][1] == StreamPosition(1)
        expected = [whole[step:] for step in (1, 2, 3, 4, 5) for _ in range(2)]
        assert found["rests"] == expected


# ------------------------------------------------------------------------------------------------ any other loader


class Numbers(Dataset[dict[str, Any]]):
    """Ten examples of many dtypes, nested."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {
            "number": index,
            "half": torch.full((3,), index / 3).bfloat16(),
            "flags": torch.tensor([index % 2 == 0]),
            "nothing": torch.zeros(0, 4),
            "meta": {"name": f"clip {index}", "turns": [(index, ["user", None])]},
        }


class Stream(IterableDataset[dict[str, Any]]):
    """The same examples, in order, dealt over workers."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        info = torch.utils.data.get_worker_info()
        first, stride = (0, 1) if info is None else (info.id, info.num_workers)
        for index in range(first, 10, stride):
            yield Numbers()[index]


def as_list(examples: list[Any]) -> list[Any]:
    return examples


def any_loader(rank: int, world: int) -> dict[str, Any]:
    mesh = mesh_of(TP2, world)

    def sampler() -> Any:
        return DistributedSampler(Numbers(), mesh.dp_size, mesh.dp_rank, shuffle=True)

    options: dict[str, Any] = {"batch_size": 2, "collate_fn": as_list}
    builders: dict[str, Callable[[], Iterable[Any]]] = {
        "map": lambda: DataLoader(Numbers(), sampler=sampler(), **options),
        "map workers": lambda: DataLoader(
            Numbers(), sampler=sampler(), num_workers=2, persistent_workers=True, **options
        ),
        "iterable": lambda: DataLoader(Stream(), **options),
        "iterable workers": lambda: DataLoader(Stream(), num_workers=2, **options),
        "list": lambda: [Numbers()[index] for index in range(3)],
    }
    found = {}
    for name, build in builders.items():
        shared, local = broadcast_loader(build, mesh, name=name), build()
        runs: dict[str, list[Any]] = {"shared": [], "local": [], "length": [length(shared), length(local)]}
        for epoch in range(2):
            for kind, loader in (("shared", shared), ("local", local)):
                if getattr(loader, "sampler", None) is not None and name.startswith("map"):
                    loader.sampler.set_epoch(epoch)  # as trainers do, wherever there is a sampler
                runs[kind].append([digest(batch) for batch in loader])
        found[name] = runs
    return found


def test_any_source_in_any_form(ranks: RankRunner) -> None:
    results = ranks(any_loader, 4, timeout=120)
    assert results[0] == results[1] and results[2] == results[3]
    for name, runs in results[0].items():
        for found in results:
            assert found[name]["shared"] == found[name]["local"], name
            assert found[name]["length"][0] == found[name]["length"][1]
        assert len(runs["shared"][0]) == 3 if "map" in name or name == "list" else 5, name
        if "map" in name:
            assert runs["shared"][0] != runs["shared"][1] and runs != results[2][name]


class WithState:
    """A source that keeps its own state, as stateful data loaders do."""

    def __init__(self) -> None:
        self.seen = 0

    def __iter__(self) -> Iterator[int]:
        while self.seen < 5:
            self.seen += 1
            yield self.seen

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen, "generator": torch.tensor([self.seen], dtype=torch.uint8)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = int(state["generator"])


def with_state(rank: int, world: int) -> Any:
    first: Any = BroadcastingDataLoader(WithState, dist.group.WORLD)
    taken = []
    for number in first:
        taken.append(number)
        if number == 2:
            break
    state = first.source_state()
    second: Any = BroadcastingDataLoader(WithState, dist.group.WORLD)
    second.load_source_state(state)
    return taken, state["seen"], list(second), second.position


def test_the_state_of_a_source_is_saved_by_all_and_restored(ranks: RankRunner) -> None:
    assert ranks(with_state, 2) == [([1, 2], 2, [3, 4, 5], None)] * 2


def without_state(rank: int, world: int) -> list[str]:
    loader: Any = BroadcastingDataLoader(lambda: [1], dist.group.WORLD, name="some list")
    messages = []
    for call in (
        loader.source_state,
        lambda: loader.load_source_state({}),
        lambda: loader.set_position(START),
    ):
        with pytest.raises(ValueError) as caught:
            call()
        messages.append(str(caught.value))
    return messages


def test_a_source_without_state_says_so_on_every_rank(ranks: RankRunner) -> None:
    first, second = ranks(without_state, 2)
    assert first == second and all(message.startswith("some list: its loader has no") for message in first)


def big_batch(rank: int, world: int) -> tuple[str, int, bool]:
    def build() -> list[dict[str, Tensor]]:
        generator = torch.Generator().manual_seed(1)
        return [{"audios": torch.randn(8, 2_000_000, generator=generator), "lens": torch.arange(8)}]

    loader: Any = BroadcastingDataLoader(build, dist.group.WORLD)
    (batch,) = loader
    audios = batch["audios"]
    one_buffer = audios.untyped_storage().data_ptr() == batch["lens"].untyped_storage().data_ptr()
    return hashlib.sha256(audios.numpy().tobytes()).hexdigest(), bytes_of(audios), one_buffer


def bytes_of(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def test_a_big_batch_arrives_whole_and_is_not_copied(ranks: RankRunner) -> None:
    first, second, third = ranks(big_batch, 3)
    assert first == second == third
    assert first[1:] == (64_000_000, True)


# ---------------------------------------------------------------------------------------------------------- groups


def groups(rank: int, world: int) -> dict[str, Any]:
    axis = MeshAxisName
    found: dict[str, Any] = {}
    for name, sizes, axes in (
        ("pp, cp and tp", ParallelismSizes(pp_size=2, cp_size=2, tp_size=2), [axis.TP, axis.PP, axis.CP]),
        ("pp and tp", ParallelismSizes(pp_size=2, tp_size=2), [axis.PP, axis.CP, axis.TP]),
        ("tp", ParallelismSizes(tp_size=4), [axis.PP, axis.CP, axis.TP]),
        ("a flattened axis", ParallelismSizes(dp_replicate_size=2, cp_size=2), [axis.DP_CP]),
        ("none", ParallelismSizes(), [axis.PP, axis.CP, axis.TP]),
    ):
        mesh = mesh_of(sizes, world)
        group = mesh.group_over(axes)
        found[name] = None if group is None else tuple(dist.get_process_group_ranks(group))
        loader: Any = broadcast_loader(lambda mesh=mesh: [mesh.dp_rank], mesh, axes=axes)
        found[name, "plain"] = isinstance(loader, list)
        found[name, "batches"] = list(loader)
        found[name, "dp"] = mesh.dp_rank
    return found


def test_the_group_is_the_peers_of_any_set_of_axes(ranks: RankRunner) -> None:
    results = ranks(groups, 8)
    expected = {
        "pp, cp and tp": [tuple(range(8))] * 8,
        "pp and tp": [(0, 1, 4, 5)] * 2 + [(2, 3, 6, 7)] * 2 + [(0, 1, 4, 5)] * 2 + [(2, 3, 6, 7)] * 2,
        "tp": [(0, 1, 2, 3)] * 4 + [(4, 5, 6, 7)] * 4,
        "a flattened axis": [tuple(range(8))] * 8,
        "none": [None] * 8,
    }
    for name, ranks_of in expected.items():
        assert [found[name] for found in results] == ranks_of
        assert [found[name, "plain"] for found in results] == [name == "none"] * 8
        source = [group[0] if group else rank for rank, group in enumerate(ranks_of)]
        assert [found[name, "batches"] for found in results] == [
            [results[rank][name, "dp"]] for rank in source
        ]


def test_one_process_gets_the_plain_loader() -> None:
    source = [1, 2]
    assert broadcast_loader(lambda: source, None) is source


# ---------------------------------------------------------------------------------------------------------- errors


class Broken(Dataset[int]):
    """Fails at one example, in a way of choice."""

    def __init__(self, how: str) -> None:
        self.how = how

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Any:
        if index < 3:
            return index
        if self.how == "exits":
            os._exit(3)
        if self.how == "object":
            return {"cut": object()}
        raise (ValueError if self.how == "value" else KeyError)(f"example {index} is bad")


def refuses() -> list[int]:
    raise ValueError("data.train_ds.batch_size = 0: at least 1")


def interrupts() -> Iterator[int]:
    yield 0
    raise KeyboardInterrupt


FAULTS: dict[str, tuple[Callable[[], Iterable[Any]], type[Exception], Sequence[str]]] = {
    "refused": (refuses, ValueError, ["while it was created", "batch_size = 0: at least 1"]),
    "missing": (lambda: open("/nowhere/x"), BroadcastError, ["while it was created", "No such file"]),  # noqa: SIM115
    "value": (
        lambda: DataLoader(Broken("value"), batch_size=None),
        ValueError,
        ["step 3 of iteration 1", "ValueError: example 3 is bad"],
    ),
    "in a worker": (
        lambda: DataLoader(Broken("key"), batch_size=None, num_workers=1),
        BroadcastError,
        ["step 3 of iteration 1", "KeyError in DataLoader worker process 0", "example 3 is bad"],
    ),
    "a worker dies": (
        lambda: DataLoader(Broken("exits"), batch_size=None, num_workers=1),
        BroadcastError,
        ["DataLoader worker", "exited unexpectedly"],
    ),
    "cannot travel": (
        lambda: DataLoader(Broken("object"), batch_size=None),
        BroadcastError,
        ["step 3 of iteration 1", "batch['cut']: a builtins.object cannot travel"],
    ),
    "interrupted": (interrupts, BroadcastError, ["step 1 of iteration 1", "KeyboardInterrupt"]),
}  # fmt: skip


def failing(rank: int, world: int, name: str) -> list[Any]:
    build = FAULTS[name][0]
    loader: Any = BroadcastingDataLoader(build, dist.group.WORLD, name="training data")
    return list(loader)


@pytest.mark.parametrize("name", FAULTS)
def test_a_failure_of_the_source_reaches_everybody(ranks: RankRunner, name: str) -> None:
    _, kind, parts = FAULTS[name]
    outcomes: list[RankOutcome] = ranks(failing, 3, name, expect_failure=True, timeout=60, grace=20)
    assert [one.kind for one in outcomes] == ["raised"] * 3
    if name == "interrupted":  # the source ends as it was told to
        assert outcomes[0].error_type == "KeyboardInterrupt"
        outcomes = outcomes[1:]
    assert {one.error_type for one in outcomes} == {kind.__name__}
    (message,) = {one.message for one in outcomes}
    assert message.startswith("training data, ") and "on rank 0: " in message
    assert all(part in message for part in parts), message


def bad_sample(rank: int, world: int, root: str) -> list[Any]:
    """Our own loaders report a failure in the batch, for the training step to agree on."""
    mesh = mesh_of(TP2, world)
    config = corpus.dataset(Path(root) / "manifest.json", batch_size=1, on_bad_audio="error")
    sizes = {"dp_rank": mesh.dp_rank, "dp_size": 2, "global_micro_batches": 2}
    loader: Any = broadcast_loader(lambda: build_train_loader(config, CharPrompts(), **sizes), mesh)
    steps: list[StepBatch] = list(loader)
    return [step.error for step in steps]


def test_the_error_of_a_step_batch_arrives_as_data(ranks: RankRunner, tmp_path: Path) -> None:
    corpus.write_nemo(tmp_path, clips(6))
    (tmp_path / "clip3.wav").write_bytes(b"no audio")
    results = ranks(bad_sample, 4, str(tmp_path))
    assert results[0] == results[1] == [None] * 3
    assert results[2] == results[3] and results[2][0] is None and "clip3.wav" in results[2][1]


# ------------------------------------------------------------------------------------------- peers that lose step


def out_of_step(rank: int, world: int, fault: str) -> int:
    train: Any = BroadcastingDataLoader(lambda: list(range(5)), dist.group.WORLD, name="training data")
    valid: Any = BroadcastingDataLoader(lambda: list(range(5)), dist.group.WORLD, name="validation data")
    if fault == "leaves an epoch a step early":
        for _ in range(2):
            for number in train:
                if rank == 1 and number == 3:
                    break
    if fault == "validates alone":
        next(iter(train))
        next(iter(valid if rank == 1 else train))
    if fault == "loses a packet":
        steps = iter(train)
        next(steps)
        if rank == 1:
            train._channel.exchange(train._stamp(1, 1), None)
        for _ in steps:
            pass
    if fault == "collects state alone":
        next(iter(train))
        if rank == 0:
            next(iter(train))
        else:
            train._facts = train._facts.__class__(1, 5, None, True)
            train.source_state()
    return 0


WHERE = {
    "leaves an epoch a step early": ["rank 0: training data (loader 1), step 4 of iteration 1",
                                     "rank 1: training data (loader 1), step 0 of iteration 2"],
    "loses a packet": ["rank 0: training data (loader 1), step 2 of iteration 1",
                       "rank 1: training data (loader 1), step 1 of iteration 1"],
    "validates alone": ["rank 0: training data (loader 1), step 0 of iteration 2",
                        "rank 1: validation data (loader 2), step 0 of iteration 1"],
    "collects state alone": ["rank 0: training data (loader 1), step 0 of iteration 2",
                             "rank 1: training data (loader 1), while its state was saved"],
}  # fmt: skip


@pytest.mark.parametrize("fault", WHERE)
def test_peers_that_lose_step_hear_of_it_together(ranks: RankRunner, fault: str) -> None:
    outcomes = ranks(out_of_step, 2, fault, expect_failure=True, timeout=60, grace=20)
    assert [one.error_type for one in outcomes] == ["BroadcastError"] * 2
    (message,) = {one.message for one in outcomes}
    assert message.startswith("peers that share their batches are not at the same step:")
    assert all(part in message for part in WHERE[fault]), message


def other_position(rank: int, world: int, root: str) -> None:
    build = speech_builder(Path(root), 0)
    loader: Any = BroadcastingDataLoader(lambda: build(0, 1, START), dist.group.WORLD)
    if rank == 0:  # a peer that restored something else, or nothing
        loader.set_position(StreamPosition(1))
    next(iter(loader))


def test_peers_at_different_positions_hear_of_it_together(ranks: RankRunner, root: Path) -> None:
    outcomes = ranks(other_position, 2, str(root), expect_failure=True, timeout=60, grace=20)
    assert [one.error_type for one in outcomes] == ["BroadcastError"] * 2
    (message,) = {one.message for one in outcomes}
    assert message.count("step 0 of iteration 1, after position") == 2


def loses_a_peer(rank: int, world: int) -> None:
    loader: Any = BroadcastingDataLoader(lambda: [1, 2], dist.group.WORLD, name="training data")
    for _ in loader:
        if rank == 2:
            os._exit(9)


def test_a_peer_that_died_is_an_error_and_no_hang(ranks: RankRunner) -> None:
    outcomes = ranks(loses_a_peer, 3, expect_failure=True, timeout=20, grace=15)
    assert (outcomes[2].kind, outcomes[2].exit_code) == ("exited", 9)
    for one in outcomes[:2]:
        assert (one.kind, one.error_type) == ("raised", "BroadcastError")
        assert "did not reach its peers [0, 1, 2]" in one.message and "training data, step 1" in one.message
