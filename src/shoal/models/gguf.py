"""GGUF files: converted once to safetensors by transformers, and loaded in shards from there on.

transformers dequantises a GGUF file as a whole, which every rank would have to repeat and hold. So one rank does it,
writes the result beside the file, and all ranks read their slices of that.
"""

from __future__ import annotations

import os
import shutil
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, PreTrainedModel

from shoal.mesh.collectives import all_gather_objects


def converted_gguf(folder: Path, gguf_file: str) -> Path:
    """The safetensors folder of a GGUF file, which rank 0 writes if it does not exist; collective.

    The folder is ``<file without .gguf>-safetensors`` beside the file, in float32. It appears when it is complete,
    and is made again when the file is newer.

    Raises:
        ValueError: There is no such file, it cannot be converted, or this rank does not see what rank 0 wrote.
            On every rank.
    """
    source = folder / gguf_file
    target = source.with_name(f"{source.stem}-safetensors")
    ranked = dist.is_initialized()
    error = None
    if not ranked or dist.get_rank() == 0:
        try:
            if not _is_current(source, target):
                _convert(folder, gguf_file, target)
        except Exception as failure:  # any rank but this one would wait for ever
            error = f"{type(failure).__name__}: {failure}"
    error = _first(all_gather_objects(error, dist.group.WORLD) if ranked else [error])
    if error is None and not (target / "config.json").is_file():
        error = f"{target} is not visible here; repair: put the file where every node sees it"
    error = _first(all_gather_objects(error, dist.group.WORLD) if ranked else [error])
    if error is not None:
        raise ValueError(f"gguf_file = {gguf_file!r} in {folder}: {error}")
    return target


def _first(errors: list[Any]) -> str | None:
    return next((error for error in errors if error is not None), None)


def _is_current(source: Path, target: Path) -> bool:
    if not source.is_file():
        raise FileNotFoundError("there is no such file; repair: name a .gguf file of the folder")
    config = target / "config.json"
    return config.is_file() and config.stat().st_mtime >= source.stat().st_mtime


def _convert(folder: Path, gguf_file: str, target: Path) -> None:
    loaded: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=gguf_file, dtype=torch.float32
    )
    # A model that came from GGUF counts as quantised and refuses to be saved; a fresh one with its values does not.
    config = deepcopy(loaded.config)
    del config.quantization_config
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)  # type: ignore[no-untyped-call]
    model.load_state_dict(loaded.state_dict(), assign=True)
    del loaded
    draft = target.with_name(f"{target.name}.incomplete-{os.getpid()}")
    model.save_pretrained(draft, max_shard_size="5GB")
    shutil.rmtree(target, ignore_errors=True)
    draft.rename(target)
