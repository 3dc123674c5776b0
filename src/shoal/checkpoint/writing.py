"""Writing a snapshot as an atomic checkpoint: all ranks write, and after every phase they agree on its outcome.

Touches nothing of the run but the snapshot, so that it works in a thread beside the training as well, on a process
group of its own.
"""

from __future__ import annotations

import json
import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_saver import save as save_tensors
from torch.distributed.checkpoint.storage import StorageWriter

from shoal.checkpoint import optimizer as optimizer_state
from shoal.checkpoint.agree import (
    agreed,
    describe,
    from_origin,
    gather_objects,
    gather_text,
    is_distributed,
    rank_of,
)
from shoal.checkpoint.consolidate import CONSOLIDATED, consolidate, write_script
from shoal.checkpoint.parts import DESCRIPTION, has_export, parts_of, write_description
from shoal.checkpoint.reader import MODEL_FOLDER, MODEL_PREFIX, without_group_warning
from shoal.checkpoint.rng import RandomState
from shoal.checkpoint.snapshot import SaveOptions, Snapshot
from shoal.checkpoint.store import MANIFEST_NAME, CheckpointError, CheckpointStore, write_json

FORMAT = 2  # 1 counted micro-batches where the position now counts examples
STATE_NAME = "state.json"
_MODEL_FILE_BYTES = 10**9


def write_snapshot(
    path: str | os.PathLike[str],
    snapshot: Snapshot,
    options: SaveOptions,
    group: dist.ProcessGroup | None,
) -> Path:
    """Write and publish one checkpoint. Collective over `group`.

    Args:
        path: the final directory.
        snapshot: this rank's part of the state.
        options: as the snapshot was taken with.
        group: all ranks of the run, for collectives of plain data on the CPU.

    Raises:
        CheckpointError: on every rank, when any of them failed; nothing is published.
    """
    path = Path(path)
    store = CheckpointStore(path.parent)
    target = path.with_name(f"{path.name}.incomplete")
    from_origin(lambda: store.prepare(path.name), group)
    try:
        plain = _shared_plain(snapshot, group)
        _write_model(target, snapshot.model, options, group)
        _write_tensors(FileSystemWriter(target), _distributed_tensors(snapshot, options), group)
        agreed(lambda: _write_own(target, snapshot.rng, group), group)
        from_origin(lambda: _write_shared(target, plain, snapshot, options), group)
        from_origin(lambda: store.publish(path.name), group)
    except CheckpointError as error:
        if rank_of(group) == 0:
            store.discard(path.name)
        raise store.failure(path.name, error) from error
    return path


def _shared_plain(snapshot: Snapshot, group: dist.ProcessGroup | None) -> dict[str, Any]:
    # Every rank describes its own parameters; equal texts (all layouts but pipelines) need no merging.
    parts = list(dict.fromkeys(gather_text(json.dumps(snapshot.own), group)))
    merged = agreed(lambda: optimizer_state.merge_plain(json.loads(part) for part in parts), group)
    return {"optimizers": merged, **snapshot.shared}


def _distributed_tensors(snapshot: Snapshot, options: SaveOptions) -> dict[str, Tensor]:
    if options.model_format == "safetensors":
        return snapshot.optimizer
    return {f"{MODEL_PREFIX}{name}": tensor for name, tensor in snapshot.model.items()} | snapshot.optimizer


def _write_model(
    target: Path, tensors: dict[str, Tensor], options: SaveOptions, group: dist.ProcessGroup | None
) -> None:
    if options.model_format != "safetensors":
        return
    # torch serialises a whole file in memory before it writes it: bounded files bound the memory. It takes rank 0's
    # numbers for all ranks, so they have to know every rank's tensors.
    sizes: dict[str, int] = {}
    for own in gather_objects({name: t.numel() * t.element_size() for name, t in tensors.items()}, group):
        sizes |= own
    numbers, total = {}, 0
    for name, size in sizes.items():
        total += size
        numbers[name] = 1 + total // _MODEL_FILE_BYTES
    writer = HuggingFaceStorageWriter(
        str(target / MODEL_FOLDER), fqn_to_index_mapping=numbers or None, save_distributed=True
    )
    _write_tensors(writer, tensors, group)


def _write_tensors(
    writer: StorageWriter, tensors: dict[str, Tensor], group: dist.ProcessGroup | None
) -> None:
    try:
        # torch agrees on failures by itself: it raises on every rank. Filters of warnings belong to the whole process
        # and stay untouched when this may be a thread of a distributed run.
        with nullcontext() if is_distributed() else without_group_warning():
            save_tensors(tensors, storage_writer=writer, process_group=group, no_dist=not is_distributed())
    except CheckpointException as error:
        raise CheckpointError(first_failure(error)) from error


def _write_own(target: Path, rng: RandomState, group: dist.ProcessGroup | None) -> None:
    write_json(target / _rng_name(group), rng.to_json())


def _write_shared(target: Path, plain: dict[str, Any], snapshot: Snapshot, options: SaveOptions) -> None:
    write_json(target / STATE_NAME, plain)
    write_json(target / MANIFEST_NAME, snapshot.manifest)
    if not has_export(snapshot.module):
        return
    parts = parts_of(snapshot.module)
    write_description(target / DESCRIPTION, snapshot.module, parts, snapshot.tokenizer)
    if options.consolidated:
        consolidate(target, target / CONSOLIDATED)
    else:
        write_script(target)


def read_own(path: Path, group: dist.ProcessGroup | None) -> RandomState:
    """The random state that this rank saved."""
    return RandomState.from_json(json.loads((path / _rng_name(group)).read_text(encoding="utf-8")))


def _rng_name(group: dist.ProcessGroup | None) -> str:
    return f"rng-{rank_of(group):05d}.json"


def first_failure(error: CheckpointException) -> str:
    """What failed on the lowest rank, as one line that names the rank."""
    rank, (cause, _) = min(error.failures.items())
    return f"rank {rank}: {describe(cause)}"
