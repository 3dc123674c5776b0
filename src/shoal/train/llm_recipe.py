"""The LLM recipe: from a validated configuration to a finished run, top to bottom.

Its sections say in AutoModel's words what the speech recipe says in NeMo's; both end in one module, one training
step and one trainer.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from shoal.config.errors import Finding
from shoal.config.llm import LLMConfig
from shoal.config.schema import DDPConfig
from shoal.config.speech import StrategyConfig, TrainerConfig
from shoal.data.text_loaders import global_micro_batches
from shoal.train.llm_data import TextData
from shoal.train.llm_experiment import llm_experiment
from shoal.train.llm_plans import causal_lm_plan, load_llm_tokenizer, precision_name
from shoal.train.modules import ShoalModule
from shoal.train.recipes import IRRELEVANT_WARNINGS, resolved_steps
from shoal.train.schedule import WarmupDecay, schedule_of
from shoal.train.trainer import StepPlanning, build_trainer, dp_size_of, launched_world


def run_llm_training(config: LLMConfig, notices: Sequence[Finding] = ()) -> int:
    """Trains a causal language model as `config` says, as one rank of however many the launcher started.

    Args:
        config: Validated for the world this process is part of.
        notices: What the loader found worth saying; rank 0 prints it.

    Returns:
        The exit status: 0 after the last step.

    Raises:
        ValueError: Weights, tokenizer or data are refused; on every rank.
        StoppedForRequeue: A signal ended the run after a good save.
    """
    trainer_config = trainer_section(config)
    world = launched_world(os.environ, trainer_config)
    dp_size = dp_size_of(trainer_config, world)
    planning = llm_steps(config, dp_size)
    if world.rank == 0:
        print(resolved_steps(planning, dp_size, notices), flush=True)
    tokenizer = load_llm_tokenizer(config)
    data = TextData(config, tokenizer)
    module = llm_module(config, data, tokenizer)
    experiment = llm_experiment(config, world.size)
    trainer = build_trainer(
        trainer_config, world, planning, loggers=experiment.loggers, callbacks=experiment.callbacks
    )
    with warnings.catch_warnings():
        for message in IRRELEVANT_WARNINGS:
            warnings.filterwarnings("ignore", message)
        trainer.fit(module, data)
    return 0


def llm_module(config: LLMConfig, data: TextData, tokenizer: Any = None) -> ShoalModule:
    """The LightningModule of an LLM run; the tokenizer is saved beside the model."""
    return ShoalModule(
        causal_lm_plan(config),
        config.optimizer,
        _scheduler_factory(config, data),
        gradient_clip_val=config.clip_grad_norm.max_norm,
        seed=config.rng.seed,
        sample_rate=None,
        validation_sets=tuple(data.validation),
        init_from_checkpoint=None if config.peft is None else config.peft.adapter_path,
        tokenizer=tokenizer,
    )


def llm_steps(config: LLMConfig, dp_size: int) -> StepPlanning:
    """What the batch sizes and periods mean in micro-batches and optimizer steps."""
    total = global_micro_batches(config)
    return StepPlanning(total, -(-total // dp_size), None, config.step_scheduler.val_every_steps)


def num_steps(config: LLMConfig, data: TextData) -> int:
    """Optimizer steps of the run: max_steps, or num_epochs times the steps of the first epoch if those are fewer.

    With packs the epochs can differ by a few steps; without max_steps the schedule then ends that much early or late.
    """
    steps = config.step_scheduler
    if steps.max_steps is not None and config.lr_scheduler is not None and config.lr_scheduler.lr_decay_steps:
        return steps.max_steps
    whole = steps.num_epochs * data.steps_per_epoch
    return whole if steps.max_steps is None else min(steps.max_steps, whole)


def _scheduler_factory(config: LLMConfig, data: TextData) -> Callable[[Optimizer], LRScheduler] | None:
    if config.lr_scheduler is None:
        return None
    schedule = schedule_of(config.lr_scheduler, num_steps(config, data))
    return lambda optimizer: WarmupDecay(optimizer, schedule)


def trainer_section(config: LLMConfig) -> TrainerConfig:
    """The sections on layout and length of the run, as the trainer takes them."""
    steps = config.step_scheduler
    return TrainerConfig(
        devices=1,  # read only when no launcher said how many ranks there are
        strategy=strategy_section(config),
        precision=precision_name(config),  # type: ignore[arg-type]
        max_steps=-1 if steps.max_steps is None else steps.max_steps,
        max_epochs=steps.num_epochs,
        check_val_every_n_epoch=1 if steps.val_every_steps is None else None,
        num_sanity_val_steps=0,
        log_every_n_steps=steps.log_remote_every_steps,
    )


def strategy_section(config: LLMConfig) -> StrategyConfig:
    """The ``distributed`` and ``dist_env`` sections, as the trainer takes them."""
    section, env = config.distributed, config.dist_env
    is_ddp = isinstance(section.options, DDPConfig)
    return StrategyConfig(
        kind="ddp" if is_ddp else "automodel",
        sizes=section.sizes,
        distributed_config=None if isinstance(section.options, DDPConfig) else section.options,
        moe_config=section.moe,
        activation_checkpointing_llm=section.activation_checkpointing,
        process_group_backend=env.backend,
        timeout_seconds=env.timeout_minutes * 60.0,
        ddp=section.options if isinstance(section.options, DDPConfig) else DDPConfig(),
    )
