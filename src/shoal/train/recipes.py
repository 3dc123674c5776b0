"""The speech recipe: from a validated configuration to a finished run, top to bottom."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from dataclasses import replace

from shoal.config.errors import Finding
from shoal.config.rules.speech import data_sets
from shoal.config.speech import SpeechConfig
from shoal.data.sources import open_sources
from shoal.speech.prompts import PromptFormatter
from shoal.train.data import SpeechData, validation_set_names
from shoal.train.experiment import setup_experiment
from shoal.train.modules import ShoalModule
from shoal.train.plans import prompts_of, salm_plan
from shoal.train.trained import load_trained
from shoal.train.trainer import StepPlanning, build_trainer, dp_size_of, launched_world, plan_steps

IRRELEVANT_WARNINGS = (
    r".*sync_dist=True.*",  # what the module logs is a global sum over a global count already
    r".*does not have many workers.*",  # data workers are the user's decision, data.*.num_workers
    r".*LeafSpec.*is deprecated.*",  # inside Lightning
    r".*overridden `transfer_batch_to_device`.*",  # in the module, on purpose
    r".*number of training batches .* is smaller than the logging interval.*",
    r"Checkpoint directory .* exists and is not empty.*",  # with the run's records; another run's is refused or resumed
)

__all__ = ["load_trained", "run_training", "speech_module"]


def speech_module(config: SpeechConfig, prompts: PromptFormatter) -> ShoalModule:
    """The LightningModule of a SALM run."""
    seed = config.data.train_ds.seed
    strategy = config.trainer.strategy
    plan = replace(
        salm_plan(
            config.model, prompts.placeholder_id, seed=seed, sample_rate=config.data.train_ds.sample_rate
        ),
        checkpoint_llm=bool(strategy.activation_checkpointing_llm or strategy.ddp.activation_checkpointing),
        checkpoint_perception=strategy.activation_checkpointing_perception,
    )
    return ShoalModule(
        plan,
        config.model.optimizer,
        config.model.lr_scheduler,
        gradient_clip_val=config.trainer.gradient_clip_val,
        seed=seed,
        sample_rate=config.data.train_ds.sample_rate,
        validation_sets=validation_set_names(config.data),
        init_from_checkpoint=config.model.init_from_checkpoint,
        tokenizer=prompts.tokenizer,
    )


def run_training(
    config: SpeechConfig, notices: Sequence[Finding] = (), *, allow_commands: bool = False
) -> int:
    """Trains SALM as `config` says, in this process, as one rank of however many the launcher started.

    Args:
        config: Validated for the world this process is part of.
        notices: What the loader found worth saying; rank 0 prints it.
        allow_commands: The user said --allow-commands.

    Returns:
        The exit status: 0 after the last step.

    Raises:
        ValueError: Weights, tokenizer or data are refused; on every rank.
        StoppedForRequeue: A signal or the time limit ended the run after a good save.
    """
    world = launched_world(os.environ, config.trainer)
    dp_size = dp_size_of(config.trainer, world)
    planning = plan_steps(config.trainer, dp_size)
    if world.rank == 0:
        print(resolved_steps(planning, dp_size, notices), flush=True)
    for key, data_set in data_sets(config):
        open_sources(
            data_set, key=key, allow_commands=allow_commands
        )  # a missing file is found before weights load
    prompts = prompts_of(config.model)
    module = speech_module(config, prompts)
    data = SpeechData(
        config.data,
        prompts,
        global_micro_batches=planning.global_micro_batches,
        steps_per_epoch=planning.steps_per_epoch,
        packed=config.model.packed_sequences,
        allow_commands=allow_commands,
    )
    experiment = setup_experiment(config, world.size)
    trainer = build_trainer(
        config.trainer, world, planning, loggers=experiment.loggers, callbacks=experiment.callbacks
    )
    with warnings.catch_warnings():
        for message in IRRELEVANT_WARNINGS:
            warnings.filterwarnings("ignore", message)
        trainer.fit(module, data)
    return 0


def resolved_steps(planning: StepPlanning, dp_size: int, notices: Sequence[Finding]) -> str:
    """What the counts of the configuration resolved to, and notices, as lines."""
    rows = {
        "global micro-batches per step": planning.global_micro_batches,
        "micro-batches per rank and step": planning.accumulation,
        "steps per epoch": planning.steps_per_epoch or "to the end of the data",
        "steps between validations": planning.val_check_interval or "at the end of an epoch",
        "data-parallel ranks": dp_size,
    }
    lines = [f"  {name:<32}{value}" for name, value in rows.items()]
    return "\n".join([*(f"notice: {notice}" for notice in notices), "steps", *lines])
