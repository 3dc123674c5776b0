"""Opens the model of a run for evaluation."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from shoal.checkpoint.store import CHECKPOINTS, MANIFEST_NAME, CheckpointStore, read_manifest
from shoal.config import LoadOptions, SpeechConfig, load_config
from shoal.config.reading import read_source
from shoal.models.assemble import Numerics, assemble
from shoal.speech.prompts import PromptFormatter
from shoal.speech.salm import SALM
from shoal.train.plans import prompts_of, salm_plan
from shoal.train.weights import load_weights

CONFIG_FILE = "config.yaml"


def load_trained(path: str | Path) -> tuple[SALM, PromptFormatter, SpeechConfig]:
    """Opens the model of a finished or running training run, whole, on this process's CPU, in eval mode.

    Args:
        path: A run's directory (its newest complete checkpoint is taken), one of its checkpoints, or an export of
            one, which needs nothing of the run any more.

    Raises:
        ValueError: No complete checkpoint, or no configuration beside it.
    """
    checkpoint, file = _checkpoint_of(Path(path))
    saved = _without_training(file)
    if is_speech_export(checkpoint):
        saved["model"] |= _folders_of(checkpoint)
    config = load_config(saved, world_size=1, options=LoadOptions(allow_commands=True))
    assert isinstance(config, SpeechConfig)
    prompts = prompts_of(config.model)
    data = config.data.train_ds
    plan = salm_plan(config.model, prompts.placeholder_id, seed=data.seed, sample_rate=data.sample_rate)
    if not holds_part_only(checkpoint):
        plan = replace(plan, weights=())
    model = assemble(plan, None, Numerics(), torch.device("cpu")).module
    load_weights(model, checkpoint)
    assert isinstance(model, SALM)
    return model.eval(), prompts, config


def _without_training(file: Path) -> dict[str, Any]:
    """The saved configuration as far as it describes the model and its data, on one CPU.

    How the run was trained (devices, precision, packing, optimizers of the user's own modules, loggers) says nothing
    about this process; its rules must not refuse it here. Nothing of the data is opened either.
    """
    saved = read_source(file)
    if "data" not in saved:
        raise ValueError(f"{str(file)!r}: not the configuration of a speech run")
    training: dict[str, Any] = {
        "optimizer": {"_target_": "torch.optim.AdamW"},
        "lr_scheduler": None,
        "torch_dtype": None,
    }
    if saved["model"].get("packed_sequences"):  # with an attention that perhaps runs only where the run did
        training |= {"packed_sequences": False, "automodel_backend": {}}
    trainer = {"accelerator": "cpu", "devices": 1, "max_steps": 1}
    return {"model": {**saved["model"], **training}, "trainer": trainer, "data": saved["data"]}


def is_speech_export(path: Path) -> bool:
    """Whether a folder is an exported speech model with the configuration of its run."""
    return (path / "llm" / "config.json").is_file() and (path / CONFIG_FILE).is_file()


def _folders_of(export: Path) -> dict[str, Any]:
    """Where an export keeps what the run took from elsewhere."""
    folders = {"pretrained_llm": export / "llm", "pretrained_asr": export / "perception"}
    return {**{key: str(folder) for key, folder in folders.items()}, "tokenizer_path": None}


def holds_part_only(path: Path) -> bool:
    """Whether a checkpoint left out what was frozen, which comes from the pretrained models then."""
    return (path / MANIFEST_NAME).is_file() and bool(read_manifest(path).get("left_out"))


def _checkpoint_of(path: Path) -> tuple[Path, Path]:
    """The checkpoint and the saved configuration that a path means."""
    is_checkpoint = (path / ".metadata").is_file() or is_speech_export(path)
    checkpoint = path if is_checkpoint else CheckpointStore(path / CHECKPOINTS).latest()
    if checkpoint is None:
        raise ValueError(
            f"{str(path)!r}: no complete checkpoint in it; repair: name a run that has saved one"
        )
    for folder in (path, path.parent, path.parent.parent):
        if (folder / CONFIG_FILE).is_file():
            return checkpoint, folder / CONFIG_FILE
    raise ValueError(
        f"{str(path)!r}: no {CONFIG_FILE} beside the checkpoint; repair: name the run's directory"
    )
