"""Saving and restoring a run: model, optimizers, schedulers, data position, step and random state.

A checkpoint directory holds

- `.metadata` and `*.distcp`: every parameter and persistent buffer as `model.NAME`, every optimizer tensor as
  `optimizer.NAME.STATE`, in torch's distributed format. Names and shapes are those of the whole plain model,
  so any layout (DDP, FSDP2, HSDP, TP, PP, another number of ranks, one process) loads what any other saved;
- `shoal.json`: format, step, data position, layout. Written last; its presence makes a directory a
  checkpoint;
- `state.json`: optimizer options, schedulers and the caller's own plain data;
- `rng-RRRRR.json`: the random generators of rank R.

All ranks write into `NAME.incomplete`; after every phase they agree on its outcome, so a failure anywhere is
raised everywhere and nothing is published. Nothing in a checkpoint is unpickled by the full unpickler.

Resuming on the same layout continues bit for bit. On another layout everything but the random generators is
restored: per-rank generators have no meaning there, and each rank keeps the state its seed gave it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load as load_tensors
from torch.distributed.checkpoint.state_dict_saver import save as save_tensors
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from shoal.checkpoint import optimizer as optimizer_state
from shoal.checkpoint.agree import agreed, describe, from_origin, gather_text, is_distributed, rank_of
from shoal.checkpoint.plain import decode, encode
from shoal.checkpoint.reader import TensorReader
from shoal.checkpoint.rng import RandomState
from shoal.checkpoint.store import MANIFEST_NAME, CheckpointError, CheckpointStore, read_manifest, write_json

FORMAT = 1
STATE_NAME = "state.json"
_MODEL = "model."
_log = logging.getLogger(__name__)

OptimizerLike = Optimizer | Sequence[Optimizer] | None
SchedulerLike = LRScheduler | Sequence[LRScheduler] | None


@dataclass(frozen=True)
class LoadedState:
    """What a checkpoint said besides tensors.

    `position` is the data position as plain fields (epoch, consumed, ...), empty when none was saved.
    `rng` is this rank's saved random state, None on another layout; it is returned and not yet set, so that
    the caller restores it last, after everything that draws numbers.
    """

    step: int
    position: dict[str, Any] = field(default_factory=dict)
    layout: dict[str, int] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)
    rng: RandomState | None = None


def save_state(
    path: str | os.PathLike[str],
    *,
    model: nn.Module,
    optimizer: OptimizerLike = None,
    scheduler: SchedulerLike = None,
    position: Mapping[str, Any] | None = None,
    step: int,
    rng: RandomState | None = None,
    layout: Mapping[str, int] | None = None,
    extra: Mapping[str, Any] | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> Path:
    """Write one checkpoint atomically. Collective over `process_group`; works without any process group too.

    Saving changes nothing: no optimizer state is created, no generator is advanced.

    Args:
        path: the final directory; its parent holds the run's checkpoints. The same on every rank.
        model: plain, DDP-wrapped (the inner module is saved), FSDP2 or HSDP; may hold this rank's stages
            only.
        optimizer: one or several, over parameters of `model`.
        scheduler: one or several.
        position: the data position after `step` as plain fields (`dataclasses.asdict(stream_position)`).
        step: optimizer steps taken.
        rng: the random state to save; None captures this process's.
        layout: sizes that decide whether per-rank random states apply at loading; None is the world size.
        extra: plain data of the caller (see `plain.encode`), for instance loops and callbacks.

    Returns:
        The published directory.

    Raises:
        CheckpointError: on every rank, when any of them failed; nothing is published.
    """
    path = Path(path)
    store = CheckpointStore(path.parent)
    group = process_group
    target = path.with_name(f"{path.name}.incomplete")
    manifest = {
        "format": FORMAT,
        "step": step,
        "position": dict(position or {}),
        "layout": _layout(layout, group),
    }
    from_origin(lambda: store.prepare(path.name), group)
    try:
        tensors, plain = _collected(model, optimizer, scheduler, extra, group)
        _write_tensors(target, tensors, group)
        agreed(lambda: _write_own(target, rng or RandomState.capture(), group), group)
        from_origin(lambda: _write_shared(target, plain, manifest), group)
        from_origin(lambda: store.publish(path.name), group)
    except CheckpointError as error:
        if rank_of(group) == 0:
            store.discard(path.name)
        raise store.failure(path.name, error) from error
    return path


def load_state(
    path: str | os.PathLike[str],
    *,
    model: nn.Module,
    optimizer: OptimizerLike = None,
    scheduler: SchedulerLike = None,
    layout: Mapping[str, int] | None = None,
    strict: bool = True,
    process_group: dist.ProcessGroup | None = None,
) -> LoadedState:
    """Fill model, optimizers and schedulers from a checkpoint, in the layout they have now. Collective.

    Afterwards each optimizer holds exactly the saved state: learning rates and other options of its groups
    come from the checkpoint (execution flags such as `fused` do not), and a parameter without saved state has
    none. A schedule whose end was changed meanwhile applies from the second resumed step on; the first one still
    uses the rate that was computed for it before.

    Args:
        path: a published checkpoint directory.
        model, optimizer, scheduler: as for `save_state`; without `optimizer` only the model is loaded.
        layout: this run's sizes, compared with the saved ones for the random state.
        strict: refuse a checkpoint with model tensors that no rank's model has. Missing ones are always
            refused.

    Raises:
        CheckpointError: on every rank: not a checkpoint, damaged, or not of this model or optimizer.
    """
    path, group = Path(path), process_group
    module, optimizers = _resharded(model), _listed(optimizer)
    manifest, plain, reader = agreed(lambda: _open(path), group)
    targets, model_targets = agreed(lambda: _targets(module, optimizers, reader), group)
    _check_model_keys(path, model_targets, reader, strict, group)
    try:
        with _without_group_warning():
            load_tensors(targets, storage_reader=reader, process_group=group, no_dist=not is_distributed())
    except CheckpointException as error:
        raise CheckpointError(f"cannot load {path}: {_first_failure(error)}") from error
    saved_layout = dict(manifest["layout"])
    same = saved_layout == _layout(layout, group)

    def finish() -> RandomState | None:
        set_model_state_dict(module, dict(model_targets), options=StateDictOptions(strict=True))
        if optimizers:
            tensors = {key: value for key, value in targets.items() if key.startswith(optimizer_state.PREFIX)}
            optimizer_state.assign(module, optimizers, tensors, plain["optimizers"])
        _load_schedulers(_listed(scheduler), plain["schedulers"])
        return _read_own(path, group) if same else None

    rng = agreed(finish, group)
    if not same:
        _log.info("%s was saved on layout %s: random generators are not restored", path, saved_layout)
    return LoadedState(manifest["step"], manifest["position"], saved_layout, decode(plain["extra"]), rng)


def _collected(
    model: nn.Module,
    optimizer: OptimizerLike,
    scheduler: SchedulerLike,
    extra: Mapping[str, Any] | None,
    group: dist.ProcessGroup | None,
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    def local() -> tuple[dict[str, Tensor], list[dict[str, Any]], dict[str, Any]]:
        module = _resharded(model)
        state = optimizer_state.collect(module, _listed(optimizer))
        schedulers = [encode(one.state_dict(), "scheduler") for one in _listed(scheduler)]
        rest = {"schedulers": schedulers, "extra": encode(dict(extra or {}), "extra")}
        return _model_tensors(module) | state.tensors, state.plain, rest

    tensors, own, rest = agreed(local, group)
    # Every rank describes its own parameters; equal texts (all layouts but pipelines) need no merging.
    parts = list(dict.fromkeys(gather_text(json.dumps(own), group)))
    merged = agreed(lambda: optimizer_state.merge_plain(json.loads(part) for part in parts), group)
    return tensors, {"optimizers": merged, **rest}


def _write_tensors(target: Path, tensors: dict[str, Tensor], group: dist.ProcessGroup | None) -> None:
    try:
        # torch agrees on failures by itself: it raises on every rank.
        with _without_group_warning():
            writer = FileSystemWriter(target)
            save_tensors(tensors, storage_writer=writer, process_group=group, no_dist=not is_distributed())
    except CheckpointException as error:
        raise CheckpointError(_first_failure(error)) from error


@contextlib.contextmanager
def _without_group_warning() -> Iterator[None]:
    # torch warns whenever there is no process group, also when a single process is what was asked for.
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        yield


def _write_own(target: Path, rng: RandomState, group: dist.ProcessGroup | None) -> None:
    write_json(target / _rng_name(group), rng.to_json())


def _write_shared(target: Path, plain: dict[str, Any], manifest: dict[str, Any]) -> None:
    write_json(target / STATE_NAME, plain)
    write_json(target / MANIFEST_NAME, manifest)


def _read_own(path: Path, group: dist.ProcessGroup | None) -> RandomState:
    return RandomState.from_json(json.loads((path / _rng_name(group)).read_text(encoding="utf-8")))


def _rng_name(group: dist.ProcessGroup | None) -> str:
    return f"rng-{rank_of(group):05d}.json"


def _open(path: Path) -> tuple[dict[str, Any], dict[str, Any], TensorReader]:
    manifest = read_manifest(path)
    if manifest.get("format") != FORMAT:
        raise CheckpointError(f"{path} has format {manifest.get('format')!r}, this version reads {FORMAT}")
    plain = json.loads((path / STATE_NAME).read_text(encoding="utf-8"))
    reader = TensorReader(path)
    reader.read_metadata()
    return manifest, plain, reader


def _targets(
    module: nn.Module, optimizers: Sequence[Optimizer], reader: TensorReader
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    model_tensors = _model_tensors(module)
    saved = reader.tensors()
    missing = sorted(set(model_tensors) - set(saved))
    if missing:
        raise ValueError(f"the checkpoint has no {_some(missing)}, which this model needs")
    for key, tensor in model_tensors.items():
        if tuple(saved[key].size) != tuple(tensor.shape):
            raise ValueError(
                f"{key}: saved shape {tuple(saved[key].size)}, this model's {tuple(tensor.shape)}"
            )
    targets = model_tensors | optimizer_state.templates(module, optimizers, saved)
    return targets, {key.removeprefix(_MODEL): tensor for key, tensor in model_tensors.items()}


def _check_model_keys(
    path: Path,
    model_targets: Mapping[str, Tensor],
    reader: TensorReader,
    strict: bool,
    group: dist.ProcessGroup | None,
) -> None:
    """Refuse saved model tensors that no rank has. Under a pipeline each rank has only its own stages."""
    if not strict:
        return
    saved = {key.removeprefix(_MODEL) for key in reader.tensors() if key.startswith(_MODEL)}
    strangers = saved.difference(model_targets)
    for text in gather_text(json.dumps(sorted(strangers)), group):
        strangers.intersection_update(json.loads(text))
    if strangers:
        raise CheckpointError(f"{path} holds {_some(sorted(strangers))}, which this model does not have")


def _model_tensors(module: nn.Module) -> dict[str, Tensor]:
    """`model.NAME` -> parameter or persistent buffer, sharing memory with the module."""
    tensors: dict[str, Tensor] = {}
    for name, value in get_model_state_dict(module).items():
        if not isinstance(value, Tensor):
            raise ValueError(
                f"state {name} of the model is a {type(value).__qualname__}; only tensors are saved"
            )
        tensors[f"{_MODEL}{name}"] = value
    return tensors


def _load_schedulers(schedulers: Sequence[LRScheduler], saved: Sequence[Any]) -> None:
    if schedulers and len(schedulers) != len(saved):
        raise ValueError(
            f"the checkpoint holds {len(saved)} learning-rate schedulers, this run has {len(schedulers)}"
        )
    for scheduler, content in zip(schedulers, saved, strict=False):
        scheduler.load_state_dict(decode(content))


def _resharded(model: nn.Module) -> nn.Module:
    """The module itself, without DDP's wrapper and with the parameters that the optimizer has."""
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    for module in inner.modules():
        if isinstance(module, FSDPModule):
            # After a forward without backward the modules still hold the gathered parameters, which are not the
            # ones the optimizer has.
            module.reshard()
    return inner


def _listed(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, Sequence) else [value]


def _layout(layout: Mapping[str, int] | None, group: dist.ProcessGroup | None) -> dict[str, int]:
    if layout is not None:
        return dict(layout)
    return {"world": dist.get_world_size(group) if is_distributed() else 1}


def _first_failure(error: CheckpointException) -> str:
    rank, (cause, _) = min(error.failures.items())
    return f"rank {rank}: {describe(cause)}"


def _some(names: Sequence[str], limit: int = 5) -> str:
    shown = ", ".join(names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"
