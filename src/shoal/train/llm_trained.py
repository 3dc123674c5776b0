"""Opens a language model for evaluation: from a run of the LLM recipe, or from a Hugging Face folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from shoal.checkpoint.state import load_state
from shoal.checkpoint.store import CheckpointStore, stored
from shoal.config import LLMConfig, load_config
from shoal.config.reading import read_source
from shoal.models.assemble import Numerics, assemble
from shoal.models.causal_lm import CausalLM
from shoal.models.folder import hf_generation_config
from shoal.models.hub import local_folder
from shoal.train.llm_plans import causal_lm_plan, load_llm_tokenizer
from shoal.train.trained import CONFIG_FILE

_SPEECH_SECTIONS = {"trainer", "data"}


@dataclass(frozen=True)
class TrainedLM:
    """A whole language model on the CPU, in eval mode, with rows instead of packs.

    `config` is that of its run, or of a run that would start from the folder; `tokenizer` may be None.
    """

    model: CausalLM
    tokenizer: Any
    config: LLMConfig


def kind_of(path: str | Path) -> Literal["speech", "llm"]:
    """What a path holds: a run (or checkpoint) of one of the recipes, or a language model of Hugging Face.

    Raises:
        ValueError: A folder with neither a run's nor a model's configuration.
    """
    path = Path(path)
    file = _run_file(path)
    if file is not None:
        saved = read_source(file)
        return "speech" if _SPEECH_SECTIONS & set(saved) else "llm"
    if path.is_dir() and not (path / "config.json").is_file():
        raise ValueError(
            f"pretrained_name = {str(path)!r}: neither a run, a checkpoint of one nor an export, which have a "
            f"{CONFIG_FILE}, nor a model of Hugging Face, which has a config.json; repair: name one of them"
        )
    return "llm"


def load_trained_llm(path: str | Path) -> TrainedLM:
    """Opens a run's directory (its newest complete checkpoint), one of its checkpoints, or a Hugging Face model.

    Raises:
        ValueError: No complete checkpoint, or no such model.
    """
    path = Path(path)
    file = _run_file(path)
    if file is None:
        folder = local_folder(str(path))
        config = _for_one_process({"model": {"pretrained_model_name_or_path": str(folder)}})
        trained = _assembled(config, keep_weights=True)
        if (folder / "generation_config.json").is_file():
            trained.model.llm.generation_config = hf_generation_config(folder)
        return trained
    checkpoint = path if stored(path) is not None else CheckpointStore(file.parent).latest()
    if checkpoint is None:
        raise ValueError(
            f"{str(path)!r}: no complete checkpoint in it; repair: name a run that has saved one"
        )
    config = _for_one_process(read_source(file))
    # Beside adapters the checkpoint holds nothing: the rest is that of the pretrained model.
    trained = _assembled(config, keep_weights=config.peft is not None)
    load_state(checkpoint, model=trained.model)
    return trained


def _run_file(path: Path) -> Path | None:
    """The saved configuration of the run that a directory or one of its checkpoints belongs to.

    A Hugging Face folder is itself, also when it lies inside a checkpoint.
    """
    if (path / "config.json").is_file():
        return None
    folders = (path, path.parent, path.parent.parent)
    return next((folder / CONFIG_FILE for folder in folders if (folder / CONFIG_FILE).is_file()), None)


def _for_one_process(saved: Mapping[str, Any]) -> LLMConfig:
    """The configuration without what says how a run was spread, packed or compiled: only model and data count."""
    left_out = ("distributed", "dist_env", "compile", "packed_sequence", "step_scheduler")
    kept = {name: section for name, section in saved.items() if name not in left_out}
    model = {**kept["model"], "attn_implementation": "auto", "backend": {}}
    config = load_config({**kept, "model": model, "step_scheduler": {}}, world_size=1)
    assert isinstance(config, LLMConfig)
    return config


def _assembled(config: LLMConfig, *, keep_weights: bool) -> TrainedLM:
    plan = causal_lm_plan(config)
    plan = plan if keep_weights else replace(plan, weights=())
    model = assemble(plan, None, Numerics(), torch.device("cpu")).module
    assert isinstance(model, CausalLM)
    return TrainedLM(model.eval(), load_llm_tokenizer(config), config)
