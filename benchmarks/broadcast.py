"""What it costs that one rank loads for its tensor-, context- and pipeline-parallel peers, against loading on each.

Gloo ranks of this machine, all of them one data-parallel coordinate, iterate over the training loader of a speech run:
audio decoded, prompts encoded, micro-batches padded. Each way of getting the same steps takes its turn:

    local      every rank has a loader of its own
    broadcast  Shoal: rank 0 has one, its peers get one packet per step
    pickled    rank 0 has one, its peers get the step by torch's broadcast_object_list
    alone      rank 0 has one and there are no peers: what loading costs once

    ratio    = C(broadcast) / C(local), C = median over repetitions of (user + system seconds of all ranks and of their
               workers) / steps; 1 / ranks would be a broadcast for nothing
    overhead = (C(broadcast) - C(alone)) / C(alone), what the peers' copies add to loading once
    pickled  = C(broadcast) / C(pickled)

Starting and ending the workers is part of it, importing and opening the process group is not. Before it is timed, each
way shows that its steps are the same bytes on every rank. The clips are those of the quickstart when it has fetched
them (real speech, FLAC), else made-up ones in the same format.

    python benchmarks/broadcast.py [--cuts data/quickstart/cuts_train.jsonl.gz] [--check] [--results FOLDER]
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import multiprocessing
import os
import resource
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.provenance import provenance  # noqa: E402 (needs the path above)

RESULTS = Path(__file__).parent / "results"
QUICKSTART = ROOT / "data" / "quickstart" / "cuts_train.jsonl.gz"
KINDS = ("local", "broadcast", "pickled", "alone")
CASES = {"2 ranks": (2, 0), "2 ranks, 2 workers": (2, 2), "4 ranks": (4, 0)}
"""Number of ranks, and of workers of each loader."""
LIMITS = {2: 0.7, 4: 0.45}
"""Of the ratio, by the number of ranks."""
SECONDS, MICRO_BATCHES = 60.0, 2
"""Of audio in a micro-batch, and in a step."""
RATE = 16000


class Bytes:
    """One token per byte of text."""

    placeholder_id, pad_id = 1, 0

    def encode(self, conversation: Any) -> Any:
        from shoal.data.conversation import AudioTurn, EncodedPrompt

        ids: list[int] = []
        for turn in conversation.turns:
            ids += [self.placeholder_id] if isinstance(turn, AudioTurn) else turn.text.encode()
        return EncodedPrompt(tuple(ids), tuple(token != self.placeholder_id for token in ids))

    encode_prompt_only = encode


def made_up_clips(folder: Path, count: int = 300) -> Path:
    """Writes noise with the rhythm of syllables as FLAC, and returns its manifest."""
    import numpy as np
    import soundfile

    generator = np.random.default_rng(0)
    lines = []
    for index in range(count):
        time = np.arange(int(generator.gamma(2.0, 1.0) * RATE) + RATE // 2) / RATE
        noise = np.cumsum(generator.standard_normal(len(time))) * 0.01
        samples = np.sin(2 * np.pi * 4.0 * time) ** 2 * np.sin(noise) * 0.3
        soundfile.write(folder / f"{index}.flac", samples.astype(np.float32), RATE)
        line = {
            "audio_filepath": f"{index}.flac",
            "duration": len(time) / RATE,
            "text": f"clip number {index}",
        }
        lines.append(json.dumps(line))
    manifest = folder / "manifest.json"
    manifest.write_text("\n".join(lines) + "\n")
    return manifest


def local_loader(data: Path, workers: int, steps: int) -> Any:
    from shoal.config.speech import DatasetConfig
    from shoal.data.stream import build_train_loader

    source = {"cuts_path": str(data)} if "cuts" in data.name else {"manifest_filepath": str(data)}
    config = DatasetConfig(
        **source,  # type: ignore[arg-type]
        batch_duration=SECONDS,
        shuffle=True,
        use_bucketing=True,
        num_buckets=4,
        num_workers=workers,
    )
    sizes = {"dp_rank": 0, "dp_size": 1, "global_micro_batches": MICRO_BATCHES}
    return build_train_loader(config, Bytes(), steps_per_epoch=steps, **sizes)  # type: ignore[arg-type]


def pickled(build: Callable[[], Iterable[Any]], rank: int) -> Iterator[Any]:
    """One loader, and torch's own way to hand objects round."""
    import torch.distributed as dist

    steps = iter(build()) if rank == 0 else None
    while True:
        box = [None if steps is None else next(steps, None)]
        dist.broadcast_object_list(box, src=0)
        if box[0] is None:
            return
        yield box[0]


def loader_of(kind: str, rank: int, build: Callable[[], Any]) -> Iterable[Any]:
    import torch.distributed as dist

    from shoal.data.broadcast import BroadcastingDataLoader

    if kind == "broadcast":
        group = dist.group.WORLD
        assert group is not None
        return BroadcastingDataLoader(build, group)
    return pickled(build, rank) if kind == "pickled" else build()


def cpu_seconds() -> float:
    both = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in both)


def digest(step: Any) -> str:
    found = hashlib.sha256(repr(step.position).encode())
    for one in step.micro_batches:
        found.update(repr(one["sample_ids"]).encode())
        for key in ("audios", "audio_lens", "input_ids", "loss_mask", "sample_seeds"):
            found.update(one[key].contiguous().view(-1).numpy().tobytes())
    return found.hexdigest()


def rank_main(rank: int, world: int, kind: str, data: Path, workers: int, steps: int, folder: Path) -> None:
    """Writes the digests of two steps, the CPU seconds of `steps` more and what they weigh."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(minutes=5))
    digests = [digest(step) for step in loader_of(kind, rank, lambda: local_loader(data, 0, 2))]
    start, size, seconds = cpu_seconds(), 0, 0.0
    loader = loader_of(kind, rank, lambda: local_loader(data, workers, steps))
    for step in loader:
        for one in step.micro_batches:
            size += sum(value.nbytes for value in one.values() if isinstance(value, torch.Tensor))
            seconds += int(one["audio_lens"].sum()) / RATE
    del loader, step, one
    report = {
        "cpu": cpu_seconds() - start,
        "bytes": size / steps,
        "audio": seconds / steps,
        "digests": digests,
    }
    (folder / f"{rank}.json").write_text(json.dumps(report))
    dist.barrier()
    dist.destroy_process_group()


def launch(kind: str, world: int, data: Path, workers: int, steps: int) -> list[dict[str, Any]]:
    """One repetition in fresh processes, forked from this one, which has imported everything; the ranks' reports."""
    with tempfile.TemporaryDirectory() as folder:
        fork = multiprocessing.get_context("fork")
        arguments = (world, kind, data, workers, steps, Path(folder))
        ranks = [fork.Process(target=rank_main, args=(rank, *arguments)) for rank in range(world)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        if failed := [process.exitcode for process in ranks if process.exitcode]:
            raise SystemExit(f"{kind} on {world} ranks: exit codes {failed}")
        return [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(world)]


def same_steps(digests: Iterable[list[str]]) -> None:
    """Refuses to compare ways that do not give the same steps."""
    if len({tuple(one) for one in digests}) != 1:
        raise SystemExit("the steps differ: these ways do not do the same work")


def measure(world: int, data: Path, workers: int, steps: int, repetitions: int) -> dict[str, Any]:
    runs: dict[str, list[list[dict[str, Any]]]] = {kind: [] for kind in KINDS}
    for repetition in range(repetitions):
        for kind in KINDS if repetition % 2 == 0 else reversed(KINDS):
            runs[kind].append(launch(kind, 1 if kind == "alone" else world, data, workers, steps))
    same_steps(rank["digests"] for some in runs.values() for ranks in some for rank in ranks)
    seconds = {
        kind: [sum(rank["cpu"] for rank in ranks) / steps for ranks in some] for kind, some in runs.items()
    }
    medians = {kind: statistics.median(values) for kind, values in seconds.items()}
    one = runs["alone"][0][0]
    copies = (medians["broadcast"] - medians["alone"]) / (world - 1)
    return {
        "ranks": world,
        "workers": workers,
        "ratio": medians["broadcast"] / medians["local"],
        "limit": LIMITS[world],
        "overhead": (medians["broadcast"] - medians["alone"]) / medians["alone"],
        "over_pickled": medians["broadcast"] / medians["pickled"],
        "megabytes_per_step": one["bytes"] / 1e6,
        "audio_seconds_per_step": one["audio"],
        "milliseconds_per_megabyte_and_peer": 1e3 * copies / (one["bytes"] / 1e6),
        "cpu_seconds_per_step": seconds,
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cuts", type=Path, default=QUICKSTART if QUICKSTART.is_file() else None)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--check", action="store_true", help="exit with 1 when a limit is missed")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of broadcast.json")
    options = parser.parse_args()
    import shoal.data.broadcast
    import shoal.data.stream  # noqa: F401 (imported once, here)

    gc.freeze()  # otherwise ranks pay for collecting what has been imported
    with tempfile.TemporaryDirectory() as folder:
        data = options.cuts or made_up_clips(Path(folder))
        cases = {
            name: measure(world, data, workers, options.steps, options.repetitions)
            for name, (world, workers) in CASES.items()
        }
    result = {
        **provenance(__doc__ or "", ("lhotse",)),
        "clips": "real speech, FLAC" if options.cuts else "made-up clips, FLAC",
        "steps": options.steps,
        "cases": cases,
        "load_average_over_5_minutes": round(os.getloadavg()[1], 2),
    }
    options.results.mkdir(exist_ok=True)
    (options.results / "broadcast.json").write_text(json.dumps(result, indent=2) + "\n")
    for name, case in cases.items():
        print(
            f"{name:<20} {case['ratio']:.3f} of local loading's CPU seconds (limit {case['limit']:g}); "
            f"{case['overhead']:+.1%} over loading once; {case['over_pickled']:.3f} of pickled objects"
        )
    missed = any(case["ratio"] > case["limit"] for case in cases.values())
    return 1 if missed and options.check else 0


if __name__ == "__main__":
    sys.exit(main())
