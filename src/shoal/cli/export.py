"""``shoal export CHECKPOINT OUTPUT``: writes a checkpoint's model as a Hugging Face folder, in this process alone."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

_DTYPES = ("float32", "bfloat16", "float16", "float64")


def run(words: Sequence[str]) -> int:
    """Runs the command; returns its exit status: 1 with a message when it failed, and nothing is left behind."""
    parser = argparse.ArgumentParser(prog="shoal export", description="Write a Hugging Face folder.")
    parser.add_argument(
        "checkpoint", help="a checkpoint, or a run's directory: its newest checkpoint is taken"
    )
    parser.add_argument("output", help="the folder to create")
    parser.add_argument("--dtype", choices=_DTYPES, help="of the written weights (default: as stored)")
    parser.add_argument(
        "--merge-lora",
        action="store_true",
        help="add adapters to their layers (default: write the adapters alone, in peft's format)",
    )
    parser.add_argument("--max-shard-size", default="5GB", metavar="SIZE", help="of one file (default: 5GB)")
    given = parser.parse_args(list(words))

    import torch

    from shoal.checkpoint.consolidate import consolidate
    from shoal.checkpoint.export import ExportOptions
    from shoal.checkpoint.shards import parse_size
    from shoal.checkpoint.store import CheckpointError, newest

    dtype = None if given.dtype is None else getattr(torch, given.dtype)
    try:
        size = parse_size(given.max_shard_size)
        checkpoint = newest(Path(given.checkpoint))
        output = consolidate(checkpoint, Path(given.output), ExportOptions(dtype, given.merge_lora, size))
    except (CheckpointError, ValueError) as error:
        print(f"shoal export: {error}", file=sys.stderr)
        return 1
    print(f"exported {checkpoint} to {output}")
    return 0
