"""Exporting a saved checkpoint: one process, no process group, one tensor after the other.

Also what a run itself uses for consolidated checkpoints: rank 0 reads back what all ranks have just written, so the
other ranks gather nothing and the training state is not touched.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from shoal.checkpoint.export import (
    DEFAULT_EXPORT,
    ExportOptions,
    PartWriter,
    prepare_output,
    publish_output,
)
from shoal.checkpoint.parts import DESCRIPTION, Part, read_description
from shoal.checkpoint.reader import SavedModel, without_group_warning
from shoal.checkpoint.store import CheckpointError, read_manifest

CONSOLIDATED = "consolidated"
SCRIPT_NAME = "consolidate.sh"
RUN_CONFIG = "config.yaml"
_SCRIPT = f"""#!/bin/sh
# Writes this checkpoint's model as a Hugging Face folder, on any machine where Shoal is installed:
#   sh {SCRIPT_NAME} [OUTPUT] [options of `shoal export`]
# Without OUTPUT it goes to {CONSOLIDATED}/ beside this file.
set -e
here=$(CDPATH= cd -- "$(dirname -- "$0")" && pwd)
output=$here/{CONSOLIDATED}
case "${{1:-}}" in "" | -*) ;; *) output=$1; shift ;; esac
exec "${{PYTHON:-python3}}" -m shoal.cli export "$here" "$output" "$@"
"""


def consolidate(
    checkpoint: str | os.PathLike[str],
    output: str | os.PathLike[str],
    options: ExportOptions = DEFAULT_EXPORT,
) -> Path:
    """Write the model of a checkpoint as a folder that plain transformers (or peft) opens.

    Needs memory for about one tensor and one output file. No collective is made.

    Args:
        checkpoint: a complete checkpoint directory of a language or speech model, from any layout.
        output: the folder to create; it appears when it is complete.
        options: dtype, merging of adapters, size of files.

    Returns:
        `output`.

    Raises:
        CheckpointError: the checkpoint is incomplete, damaged or not exportable, the output exists, or the disk
            refused; nothing is left behind.
    """
    path, final = Path(checkpoint), Path(output)
    manifest = read_manifest(path)
    parts = read_description(path)
    saved = SavedModel(path, str(manifest.get("model_format", "torch_save")))
    left_out = frozenset(manifest.get("left_out", ()))
    prepare_output(final)
    target = final.with_name(f"{final.name}.incomplete")
    try:
        with without_group_warning():
            for part in parts:
                _write_part(path, part, target, saved, left_out, options)
        if len(parts) > 1:
            _copy_run_config(path, target)
        publish_output(final)
    except BaseException as error:
        shutil.rmtree(target, ignore_errors=True)
        if isinstance(error, OSError | ValueError) and not isinstance(error, CheckpointError):
            raise CheckpointError(f"{path} could not be exported to {final}: {error}") from error
        raise
    return final


def _write_part(
    checkpoint: Path,
    part: Part,
    target: Path,
    saved: SavedModel,
    left_out: frozenset[str],
    options: ExportOptions,
) -> None:
    writer = PartWriter(checkpoint / DESCRIPTION, part, target, options)
    names = [name for name in (*saved.tensors, *left_out) if name.startswith(part.prefix)]
    groups = writer.naming.groups(name.removeprefix(part.prefix) for name in names)
    for group in groups:
        for name in group:
            if part.prefix + name in left_out:
                raise ValueError(
                    f"{part.prefix}{name} is not in the checkpoint, which holds trained parameters only; "
                    "export the adapters (without --merge-lora) and load them onto the pretrained model with peft"
                )
        writer.write({name: saved.fetch(part.prefix + name) for name in group})
    writer.finish()


def _copy_run_config(checkpoint: Path, target: Path) -> None:
    """The configuration of the run, when it lies where runs put it: `shoal evaluate` opens the export with it."""
    for folder in (checkpoint.absolute().parent, checkpoint.absolute().parent.parent):
        if (folder / RUN_CONFIG).is_file():
            shutil.copyfile(folder / RUN_CONFIG, target / RUN_CONFIG)
            return


def consolidate_in_place(checkpoint: str | os.PathLike[str]) -> None:
    """Add `consolidated/` to a complete checkpoint that has none; the script that would have made it goes away."""
    path = Path(checkpoint)
    if not (path / CONSOLIDATED).exists():
        consolidate(path, path / CONSOLIDATED)
        (path / SCRIPT_NAME).unlink(missing_ok=True)


def write_script(checkpoint: Path) -> None:
    """Put `consolidate.sh` into a checkpoint that is not consolidated."""
    file = checkpoint / SCRIPT_NAME
    file.write_text(_SCRIPT, encoding="utf-8")
    file.chmod(0o755)
