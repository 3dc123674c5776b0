"""Exporting an assembled model as Hugging Face folders, in any layout, one tensor after the other.

Every rank takes part in gathering each tensor; only rank 0 keeps it, converts it and writes it. No rank ever holds
more than one whole tensor, rank 0 one output file besides.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shoal.checkpoint.agree import agreed, from_origin, gather_objects, rank_of
from shoal.checkpoint.naming import AdapterNames, HuggingFaceNames, Naming, OwnNames
from shoal.checkpoint.parts import DESCRIPTION, Part, copy_files, parts_of, write_description
from shoal.checkpoint.shards import MAX_SHARD_BYTES, ShardWriter
from shoal.checkpoint.store import CheckpointError, flush_directory, flush_tree
from shoal.checkpoint.tensors import model_tensors, resharded


@dataclass(frozen=True)
class ExportOptions:
    """How to export.

    Attributes:
        dtype: of floating-point weights; None keeps what is stored.
        merge_lora: adapters are added to their layers; False writes the adapters alone, in peft's format.
        max_shard_bytes: size of one safetensors file.
    """

    dtype: torch.dtype | None = None
    merge_lora: bool = False
    max_shard_bytes: int = MAX_SHARD_BYTES


DEFAULT_EXPORT = ExportOptions()


@dataclass(frozen=True)
class TensorSpec:
    """Global shape and dtype of a tensor, and the lowest rank that takes part in it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    owner: int = 0

    @property
    def num_bytes(self) -> int:
        """Size of the whole tensor."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def naming_of(part: Part, options: ExportOptions) -> Naming:
    """How the tensors of a part are called in its files.

    Raises:
        ValueError: exporting adapters alone would lose other trained weights of the part.
    """
    if part.build is None:
        return OwnNames()
    if part.adapter is None:
        return HuggingFaceNames(part.skeleton())
    if options.merge_lora:
        return HuggingFaceNames(part.skeleton(), part.adapted_skeleton())
    if part.trained:
        raise ValueError(
            f"{part.module or 'the model'}: {part.trained[0]} and {len(part.trained) - 1} others were trained "
            "besides the adapters, which an export of adapters alone would lose; merge them (--merge-lora)"
        )
    return AdapterNames(part.adapted_skeleton())


class PartWriter:
    """Writes one part group by group. Local to the rank that writes.

    Args:
        description: the `hf/` folder of files beside the weights.
        part: what to write.
        output: the export; the part goes into its folder below.
        options: how.
    """

    def __init__(self, description: Path, part: Part, output: Path, options: ExportOptions) -> None:
        self.options = options
        self.naming = naming_of(part, options)
        alone = isinstance(self.naming, AdapterNames)
        target = output / part.folder
        copy_files(description, part, target, adapters=alone, dtype=options.dtype)
        # peft reads one file of adapters and no index.
        self._shards = ShardWriter(target, self.naming.stem, 2**62 if alone else options.max_shard_bytes)

    def write(self, tensors: Mapping[str, Tensor]) -> None:
        """Convert and write one group of `naming.groups`: whole tensors on the CPU."""
        for name, tensor in self.naming.convert(tensors).items():
            dtype = self.options.dtype
            cast = tensor if dtype is None or not tensor.is_floating_point() else tensor.to(dtype)
            self._shards.add(name, cast.detach())

    def finish(self) -> None:
        """Write the last file and the index."""
        self._shards.finish()


class LiveTensors:
    """The tensors of a model that is spread over ranks, fetched whole on rank 0.

    Creating it is collective over `group`.

    Args:
        model: this rank's part of the model.
        group: all ranks that hold a part of it.

    Raises:
        CheckpointError: on every rank, when one failed or two disagree about a tensor.
    """

    def __init__(self, model: nn.Module, group: dist.ProcessGroup | None) -> None:
        self.module = resharded(model)
        self._group = group
        self._own = agreed(lambda: model_tensors(self.module), group)
        own = {name: (tuple(t.shape), t.dtype) for name, t in self._own.items()}
        tables = gather_objects(own, group)
        self.specs = agreed(lambda: _joined(tables), group)

    def fetch(self, name: str) -> Tensor | None:
        """The whole tensor on the CPU of rank 0, None elsewhere. Collective, in the same order on every rank."""
        spec, rank = self.specs[name], rank_of(self._group)
        whole: Tensor | None = None
        if name in self._own:
            tensor = self._own[name].detach()
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if spec.owner and rank == spec.owner:
            assert whole is not None
            dist.send(whole.contiguous(), group=self._group, group_dst=0)
        if rank:
            return None
        if spec.owner:
            whole = torch.empty(spec.shape, dtype=spec.dtype, device=self._device())
            dist.recv(whole, group=self._group, group_src=spec.owner)
        assert whole is not None
        return whole.cpu()

    def _device(self) -> torch.device:
        return next(iter(self._own.values())).device if self._own else torch.device("cpu")


def _joined(tables: Iterable[Mapping[str, tuple[tuple[int, ...], torch.dtype]]]) -> dict[str, TensorSpec]:
    joined: dict[str, TensorSpec] = {}
    for rank, table in enumerate(tables):
        for name, (shape, dtype) in table.items():
            spec = joined.setdefault(name, TensorSpec(shape, dtype, rank))
            if (spec.shape, spec.dtype) != (shape, dtype):
                raise ValueError(
                    f"{name} is {spec.shape} {spec.dtype} on rank {spec.owner} and {shape} {dtype} on rank {rank}"
                )
    return joined


def export_model(
    model: nn.Module,
    output: str | os.PathLike[str],
    *,
    options: ExportOptions = DEFAULT_EXPORT,
    tokenizer: Any = None,
    process_group: dist.ProcessGroup | None = None,
) -> Path:
    """Write a model that plain transformers (or peft) opens. Collective over `process_group`.

    Args:
        model: the trainable module or a transformers model: plain, DDP-wrapped, FSDP2, HSDP, or this rank's stages
            of it.
        output: the folder to create; it appears when it is complete. The same on every rank.
        options: dtype, merging of adapters, size of files.
        tokenizer: saved with the language model; None copies the files beside the model's source.
        process_group: all ranks that hold a part of the model.

    Returns:
        `output`.

    Raises:
        CheckpointError: on every rank, when any of them failed; nothing is left behind.
    """
    final, group = Path(output), process_group
    target = final.with_name(f"{final.name}.incomplete")
    description = target / DESCRIPTION
    source = LiveTensors(model, group)
    parts = agreed(lambda: parts_of(source.module), group)
    from_origin(lambda: prepare_output(final), group)
    try:
        from_origin(lambda: write_description(description, source.module, parts, tokenizer), group)
        for part in parts:
            _export_part(source, part, description, target, options, group)
        from_origin(lambda: publish_output(final), group)
    except CheckpointError:
        if rank_of(group) == 0:
            shutil.rmtree(target, ignore_errors=True)
        raise
    return final


def _export_part(
    source: LiveTensors,
    part: Part,
    description: Path,
    target: Path,
    options: ExportOptions,
    group: dist.ProcessGroup | None,
) -> None:
    naming = agreed(lambda: naming_of(part, options), group)
    is_writer = rank_of(group) == 0
    writer = agreed(lambda: PartWriter(description, part, target, options) if is_writer else None, group)
    names = [name.removeprefix(part.prefix) for name in source.specs if name.startswith(part.prefix)]
    sizes = {name: source.specs[part.prefix + name].num_bytes for name in names}
    for batch in _batches(naming.groups(names), sizes, options.max_shard_bytes):
        error: Exception | None = None
        for members in batch:
            tensors = {name: source.fetch(part.prefix + name) for name in members}
            if writer is None or error is not None:
                continue
            try:
                writer.write({name: t for name, t in tensors.items() if t is not None})
            except (
                Exception
            ) as caught:  # the others are about to gather the next tensor: they hear of it after this batch
                error = caught
        agreed(lambda error=error: _raise(error), group)  # type: ignore[misc]
    agreed(lambda: writer.finish() if writer is not None else None, group)


def _batches(
    groups: Sequence[tuple[str, ...]], sizes: Mapping[str, int], max_bytes: int
) -> Iterator[list[tuple[str, ...]]]:
    """Groups in runs of about `max_bytes`, after each of which the ranks agree on how it went."""
    batch: list[tuple[str, ...]] = []
    total = 0
    for group in groups:
        batch.append(group)
        total += sum(sizes[name] for name in group)
        if total >= max_bytes:
            yield batch
            batch, total = [], 0
    if batch:
        yield batch


def _raise(error: Exception | None) -> None:
    if error is not None:
        raise error


def prepare_output(final: Path) -> None:
    """Make the unfinished folder of an export; leftovers of an earlier try are removed.

    Raises:
        CheckpointError: the output exists.
    """
    if os.path.lexists(final):
        raise CheckpointError(f"{final} exists already; choose another output or delete it first")
    target = final.with_name(f"{final.name}.incomplete")
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)


def publish_output(final: Path) -> None:
    """Flush a finished export to the disk and give it its name."""
    target = final.with_name(f"{final.name}.incomplete")
    shutil.rmtree(target / DESCRIPTION, ignore_errors=True)
    flush_tree(target)
    os.rename(target, final)
    flush_directory(final.parent)
