"""Saving and restoring a run: model, optimizers, schedulers, data position, step and random state.

A checkpoint directory holds

- `.metadata` and `*.distcp`: every optimizer tensor as `optimizer.NAME.STATE` and, unless the model is written as
  safetensors, every parameter and persistent buffer as `model.NAME`, in torch's distributed format;
- `model/`: the parameters and buffers as sharded safetensors files (`SaveOptions.model_format`). Names and shapes
  are those of the whole plain model either way, so any layout (DDP, FSDP2, HSDP, TP, PP, another number of ranks,
  one process) loads what any other saved;
- `shoal.json`: format, step, data position, layout. Its presence makes a directory a checkpoint;
- `state.json`: optimizer options, schedulers and the caller's own plain data;
- `rng-RRRRR.json`: the random generators of rank R;
- `hf/` and `consolidate.sh`, or `consolidated/`: what an export needs, or the export itself, for models that have one.

All ranks write into `NAME.incomplete`; after every phase they agree on its outcome, so a failure anywhere is
raised everywhere and nothing is published. Nothing in a checkpoint is unpickled by the full unpickler.

Resuming on the same layout continues bit for bit. On another layout everything but the random generators is
restored: per-rank generators have no meaning there, and each rank keeps the state its seed gave it.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as load_tensors
from torch.distributed.checkpoint.storage import StorageReader
from torch.optim.lr_scheduler import LRScheduler

from shoal.checkpoint import optimizer as optimizer_state
from shoal.checkpoint.agree import agreed, describe, gather_text, is_distributed, rank_of
from shoal.checkpoint.plain import decode
from shoal.checkpoint.reader import (
    SavedModel,
    TensorReader,
    absent_shards,
    damaged,
    read_part,
    without_group_warning,
)
from shoal.checkpoint.rng import RandomState
from shoal.checkpoint.snapshot import (
    DEFAULT_SAVE,
    OptimizerLike,
    SaveOptions,
    SchedulerLike,
    listed,
    take_snapshot,
)
from shoal.checkpoint.store import (
    MANIFEST_NAME,
    REPAIR,
    CheckpointError,
    CheckpointStore,
    read_manifest,
)
from shoal.checkpoint.tensors import aliases_of, model_tensors, resharded
from shoal.checkpoint.writing import (
    FORMAT,
    STATE_NAME,
    first_failure,
    read_own,
    write_snapshot,
)

_OTHER_MODEL = "repair: build the model that was saved, or name another checkpoint"

_log = logging.getLogger(__name__)


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
    options: SaveOptions = DEFAULT_SAVE,
    tokenizer: Any = None,
    process_group: dist.ProcessGroup | None = None,
) -> Path:
    """Write one checkpoint atomically. Collective over `process_group`; works without any process group too.

    Saving changes nothing: no optimizer state is created, no generator is advanced. `shoal.checkpoint.background`
    does the same while training goes on.

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
        options: how the model is written.
        tokenizer: written beside an exported language model; None copies the files of the model's source.

    Returns:
        The published directory.

    Raises:
        CheckpointError: on every rank, when any of them failed; nothing is published.
    """
    path, group = Path(path), process_group
    manifest = manifest_of(step, position, layout, group)
    try:
        snapshot = agreed(
            lambda: take_snapshot(
                model,
                optimizer=optimizer,
                scheduler=scheduler,
                rng=rng,
                manifest=manifest,
                extra=extra,
                options=options,
                tokenizer=tokenizer,
            ),
            group,
        )
    except CheckpointError as error:
        raise CheckpointStore(path.parent).failure(path.name, error) from error
    return write_snapshot(path, snapshot, options, group)


def manifest_of(
    step: int,
    position: Mapping[str, Any] | None,
    layout: Mapping[str, int] | None,
    group: dist.ProcessGroup | None,
) -> dict[str, Any]:
    """What `shoal.json` says about a run."""
    return {
        "format": FORMAT,
        "step": step,
        "position": dict(position or {}),
        "layout": _layout(layout, group),
    }


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
    module, optimizers = resharded(model), listed(optimizer)
    opened = agreed(lambda: _open(path, bool(optimizers)), group)
    manifest, plain, saved = opened.manifest, opened.plain, opened.model
    model_targets = agreed(lambda: _model_targets(path, module, saved, manifest), group)
    if strict:
        _check_model_keys(path, {*model_targets, *aliases_of(module)}, saved, group)
    states = agreed(lambda: optimizer_state.templates(module, optimizers, opened.reader.tensors()), group)
    _read({saved.prefix + k: v for k, v in model_targets.items()}, saved.reader, path, group)
    _read(states, opened.reader, path, group)
    saved_layout = dict(manifest["layout"])
    same = saved_layout == _layout(layout, group)

    def finish() -> RandomState | None:
        # The targets share memory with the model; what must still happen is what modules do on loading.
        set_model_state_dict(module, dict(model_targets), options=StateDictOptions(strict=False))
        if optimizers:
            optimizer_state.assign(module, optimizers, states, plain["optimizers"])
        _load_schedulers(listed(scheduler), plain["schedulers"])
        return _own_random_state(path, group) if same else None

    rng = agreed(finish, group)
    if not same:
        _log.info("%s was saved on layout %s: random generators are not restored", path, saved_layout)
    return LoadedState(manifest["step"], manifest["position"], saved_layout, decode(plain["extra"]), rng)


@dataclass(frozen=True)
class _Opened:
    manifest: dict[str, Any]
    plain: dict[str, Any]
    model: SavedModel
    reader: TensorReader


def _open(path: Path, with_optimizers: bool) -> _Opened:
    manifest = read_manifest(path)
    if manifest.get("format") != FORMAT:
        raise CheckpointError(
            f"{path} has format {manifest.get('format')!r}, this version reads {FORMAT}; repair: load it with the "
            "version of Shoal that saved it, or name another one"
        )
    if absent := [key for key in ("position", "layout") if not isinstance(manifest.get(key), dict)]:
        raise damaged(path, f"{path / MANIFEST_NAME} has no {', '.join(absent)}")
    plain = read_part(path, STATE_NAME, ("optimizers", "schedulers", "extra"))
    reader = TensorReader(path)
    reader.read_metadata()
    if with_optimizers:  # a model alone may be read without the optimizer's files
        reader.check_files()
    return _Opened(manifest, plain, SavedModel(path, manifest.get("model_format", "torch_save")), reader)


def _own_random_state(path: Path, group: dist.ProcessGroup | None) -> RandomState:
    try:
        return read_own(path, group)
    except (OSError, ValueError, KeyError, TypeError) as error:
        file = path / f"rng-{rank_of(group):05d}.json"
        raise damaged(path, f"cannot read {file}: {describe(error)}") from error


def _read(
    targets: dict[str, Tensor], reader: StorageReader, path: Path, group: dist.ProcessGroup | None
) -> None:
    try:
        with without_group_warning():
            load_tensors(targets, storage_reader=reader, process_group=group, no_dist=not is_distributed())
    except CheckpointException as error:
        said = first_failure(error)
        # What the readers found names checkpoint, file and repair already; what torch found names nothing.
        known = any(isinstance(cause, CheckpointError) for cause, _ in error.failures.values())
        raise CheckpointError(said if known else f"cannot load {path}: {said}; {REPAIR}") from error


def _model_targets(
    path: Path, module: nn.Module, saved: SavedModel, manifest: Mapping[str, Any]
) -> dict[str, Tensor]:
    """The tensors to fill: all of the module's but those that the checkpoint left out because they are frozen.

    Raises:
        ValueError: the checkpoint lacks a tensor or has one of another shape; it is of another model, or a file of it
            is missing, and which of the two cannot always be told.
    """
    tensors = model_tensors(module)
    frozen = {name for name, parameter in module.named_parameters() if not parameter.requires_grad}
    absent = frozen.intersection(manifest.get("left_out", ()))
    missing = sorted(tensors.keys() - saved.tensors.keys() - absent)
    if missing:
        listed_names = some([f"model.{name}" for name in missing])
        raise ValueError(
            f"the checkpoint {path} has no {listed_names}, which this model needs{absent_shards(path, manifest)}; "
            f"{REPAIR}, or build the model that was saved"
        )
    targets = {name: tensor for name, tensor in tensors.items() if name not in absent}
    for name, tensor in targets.items():
        if (shape := tuple(saved.tensors[name].size)) != tuple(tensor.shape):
            lack = absent_shards(path, manifest)  # without the last rank's file, sizes come out too small
            raise ValueError(
                f"the checkpoint {path}: model.{name}: saved shape {shape}, this model's {tuple(tensor.shape)}{lack}; "
                + (REPAIR if lack else _OTHER_MODEL)
            )
    return targets


def _check_model_keys(
    path: Path, known: set[str], saved: SavedModel, group: dist.ProcessGroup | None
) -> None:
    """Refuse saved model tensors that no rank has. Under a pipeline each rank has only its own stages."""
    strangers = saved.tensors.keys() - known
    for text in gather_text(json.dumps(sorted(strangers)), group):
        strangers.intersection_update(json.loads(text))
    if strangers:
        raise CheckpointError(
            f"{path} holds {some(sorted(strangers))}, which this model does not have; {_OTHER_MODEL}"
        )


def _load_schedulers(schedulers: Sequence[LRScheduler], saved: Sequence[Any]) -> None:
    if schedulers and len(schedulers) != len(saved):
        raise ValueError(
            f"the checkpoint holds {len(saved)} learning-rate schedulers, this run has {len(schedulers)}"
        )
    for scheduler, content in zip(schedulers, saved, strict=False):
        scheduler.load_state_dict(decode(content))


def _layout(layout: Mapping[str, int] | None, group: dist.ProcessGroup | None) -> dict[str, int]:
    if layout is not None:
        return dict(layout)
    return {"world": dist.get_world_size(group) if is_distributed() else 1}


def some(names: Sequence[str], limit: int = 5) -> str:
    """The first names, and how many more there are."""
    shown = ", ".join(names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"
