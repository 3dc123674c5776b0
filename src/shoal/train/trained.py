"""Opens the model of a run for evaluation."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
import yaml

from shoal.checkpoint.store import CHECKPOINTS, CheckpointStore
from shoal.config import SpeechConfig, load_config
from shoal.models.assemble import Numerics, assemble
from shoal.speech.prompts import PromptFormatter
from shoal.speech.salm import SALM
from shoal.train.plans import prompts_of, salm_plan
from shoal.train.weights import load_weights

CONFIG_FILE = "config.yaml"


def load_trained(path: str | Path) -> tuple[SALM, PromptFormatter, SpeechConfig]:
    """Opens the model of a finished or running training run, whole, on this process's CPU, in eval mode.

    Args:
        path: A run's directory (its newest complete checkpoint is taken) or one of its checkpoints.

    Raises:
        ValueError: No complete checkpoint, or no configuration beside it.
    """
    checkpoint, file = _checkpoint_of(Path(path))
    # How the run was spread over devices says nothing about this process; only model and data count here.
    saved = {
        **yaml.safe_load(file.read_text()),
        "trainer": {"accelerator": "cpu", "devices": 1, "max_steps": 1},
    }
    config = load_config(saved, world_size=1)
    assert isinstance(config, SpeechConfig)
    prompts = prompts_of(config.model)
    data = config.data.train_ds
    plan = salm_plan(config.model, prompts.placeholder_id, seed=data.seed, sample_rate=data.sample_rate)
    plan = replace(plan, weights=())
    model = assemble(plan, None, Numerics(), torch.device("cpu")).module
    load_weights(model, checkpoint)
    assert isinstance(model, SALM)
    return model.eval(), prompts, config


def _checkpoint_of(path: Path) -> tuple[Path, Path]:
    """The checkpoint and the saved configuration that a path means."""
    is_checkpoint = (path / ".metadata").is_file()
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
