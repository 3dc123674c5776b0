"""Rules on keys of the speech recipe that would do nothing, or not what they say, beside the rest of the file."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from shoal.config.facts import Facts
from shoal.config.rules.base import Broken, Rule, layout_of
from shoal.config.rules.speech import data_sets
from shoal.config.schema import FSDP2Config
from shoal.config.speech import SpeechConfig
from shoal.config.steps import accumulation

_COSINE = "shoal.train.optim.CosineAnnealing"


def _warm_up_fits(config: SpeechConfig, facts: Facts) -> Iterator[Broken]:
    scheduler = config.model.lr_scheduler
    if scheduler is None or scheduler.target != _COSINE:
        return
    warm_up, steps = scheduler.kwargs.get("warmup_steps"), scheduler.kwargs.get("max_steps")
    steps = config.trainer.max_steps if steps is None else steps
    if type(warm_up) is int and type(steps) is int and steps > 0 and warm_up >= steps:
        limit = f"less than the {steps} steps of the schedule"
        yield Broken("model.lr_scheduler.warmup_steps", warm_up, limit, f"warmup_steps: {steps // 10}")


def _schedule_ends(config: SpeechConfig, facts: Facts) -> Iterator[Broken]:
    scheduler = config.model.lr_scheduler
    if scheduler is None or scheduler.target != _COSINE:
        return
    if scheduler.kwargs.get("max_steps") is None and config.trainer.max_steps == -1:
        yield Broken("model.lr_scheduler.max_steps", None, "a number when trainer.max_steps is not given")


def _validation_runs(config: SpeechConfig, facts: Facts) -> Iterator[Broken]:
    manager = config.exp_manager
    if config.trainer.limit_val_batches != 0 or manager is None or not manager.create_checkpoint_callback:
        return
    params = manager.checkpoint_callback_params
    if params.monitor.startswith("val") and params.save_top_k not in (0, -1):
        limit = "a value that is logged; trainer.limit_val_batches = 0 switches validation off"
        yield Broken("exp_manager.checkpoint_callback_params.monitor", params.monitor, limit)


def _one_directory(config: SpeechConfig, facts: Facts) -> Iterator[Broken]:
    folder = config.trainer.default_root_dir
    if folder is not None and config.exp_manager is not None:
        limit = "absent when there is an exp_manager section, which says where the run writes"
        yield Broken("trainer.default_root_dir", folder, limit)


def _time_limit_saves(config: SpeechConfig, facts: Facts) -> Iterator[Broken]:
    manager = config.exp_manager
    if manager is not None and manager.max_time_per_run and not manager.create_checkpoint_callback:
        limit = "absent without a checkpoint callback: the run saves before it stops"
        yield Broken("exp_manager.max_time_per_run", manager.max_time_per_run, limit)


def _one_sample_rate(config: SpeechConfig, facts: Facts) -> Iterator[Broken]:
    ours = config.data.train_ds.sample_rate
    for path, block in data_sets(config):
        if block.sample_rate != ours:
            yield Broken(f"{path}.sample_rate", block.sample_rate, f"data.train_ds.sample_rate = {ours}")


def _whole_lengths(config: SpeechConfig, facts: Facts) -> Iterator[Broken]:
    for path, block in data_sets(config):
        if not block.measure_total_length:
            limit = "true: a micro-batch is padded to its whole length, answers included"
            yield Broken(f"{path}.measure_total_length", False, limit)


def _no_half_parameters(config: SpeechConfig, facts: Facts) -> Iterator[Broken]:
    options = config.trainer.strategy.distributed_config
    policy = options.mp_policy if isinstance(options, FSDP2Config) else None
    if policy is not None and policy.param_dtype == "float16":
        limit = "bfloat16, float32 or null: gradients in float16 vanish without a gradient scaler"
        yield Broken("trainer.strategy.distributed_config.mp_policy.param_dtype", "float16", limit)


def _static_graph_fits(config: SpeechConfig, facts: Facts) -> Iterator[Broken]:
    if not config.trainer.strategy.ddp.static_graph:
        return
    steps = accumulation(config.trainer, layout_of(config, facts.world_size).dp_size)
    if steps is not None and steps > 1:
        limit = f"false with {steps} micro-batches per rank and step: torch's static graph cannot skip a reduction"
        yield Broken("trainer.strategy.static_graph", True, limit)


def _backend_fits_device(config: SpeechConfig, facts: Facts) -> Iterator[Broken]:
    trainer = config.trainer
    on_cpu = trainer.accelerator == "cpu" or facts.accelerators == 0
    if facts.options.to_train and trainer.strategy.process_group_backend == "nccl" and on_cpu:
        yield Broken("trainer.strategy.process_group_backend", "nccl", "gloo or absent for a run on CPU")


def _loggers_installed(config: SpeechConfig, facts: Facts) -> Iterator[Broken]:
    if config.exp_manager is None or not facts.options.to_train:
        return
    for package in ("wandb", "mlflow", "tensorboard"):
        name = f"create_{package}_logger"
        if getattr(config.exp_manager, name) and find_spec(package) is None:
            repair = f"pip install {package}, or {name}: false"
            yield Broken(
                f"exp_manager.{name}", True, f"false: the package {package} is not installed", repair
            )


def _files_exist(config: SpeechConfig, facts: Facts) -> Iterator[Broken]:
    if config.exp_manager is None or not facts.options.to_train:
        return
    for index, file in enumerate(config.exp_manager.files_to_copy):
        if not Path(file).is_file():
            yield Broken(f"exp_manager.files_to_copy.{index}", file, "a file that exists")


EFFECT_RULES: tuple[Rule, ...] = (
    Rule(
        "warm-up-fits-schedule",
        "speech",
        ("model.lr_scheduler", "trainer.max_steps"),
        _warm_up_fits,
        "a schedule that ends during warm-up never reaches its rate",
        "shorten the warm-up",
    ),
    Rule(
        "schedule-has-end",
        "speech",
        ("model.lr_scheduler", "trainer.max_steps"),
        _schedule_ends,
        "a cosine needs to know where it ends",
        "give max_steps",
    ),
    Rule(
        "monitor-needs-validation",
        "speech",
        ("exp_manager", "trainer.limit_val_batches"),
        _validation_runs,
        "the best checkpoint needs a value to compare",
        "save_last keeps the newest checkpoint meanwhile",
        notice=True,
    ),
    Rule(
        "one-directory",
        "speech",
        ("exp_manager", "trainer.default_root_dir"),
        _one_directory,
        "a run writes to one place",
        "exp_manager.exp_dir",
    ),
    Rule(
        "time-limit-saves",
        "speech",
        ("exp_manager",),
        _time_limit_saves,
        "a run that stops without saving has lost its work",
        "exp_manager.create_checkpoint_callback: true",
    ),
    Rule(
        "one-sample-rate",
        "speech",
        ("data",),
        _one_sample_rate,
        "one encoder hears audio of one rate",
        "sample_rate: ${data.train_ds.sample_rate}",
    ),
    Rule(
        "whole-lengths",
        "speech",
        ("data",),
        _whole_lengths,
        "what a batch costs is what it is padded to",
        "measure_total_length: true",
    ),
    Rule(
        "static-graph-reduces-always",
        "speech",
        (
            "trainer.strategy",
            "trainer.devices",
            "trainer.global_micro_batches",
            "trainer.accumulate_grad_batches",
        ),
        _static_graph_fits,
        "gradients of a step are reduced once, with its last micro-batch",
        "static_graph: false",
    ),
    Rule(
        "backend-fits-device",
        "speech",
        ("trainer.strategy", "trainer.accelerator"),
        _backend_fits_device,
        "nccl connects GPUs",
        "process_group_backend: gloo",
    ),
    Rule(
        "logger-installed",
        "speech",
        ("exp_manager",),
        _loggers_installed,
        "a logger that is missing would lose the run's record",
        "install it",
    ),
    Rule(
        "files-exist",
        "speech",
        ("exp_manager",),
        _files_exist,
        "a file that is named is kept with the run",
        "correct the path",
    ),
    Rule(
        "no-half-parameters",
        "speech",
        ("trainer.strategy",),
        _no_half_parameters,
        "fp16 needs a gradient scaler, which arrives later",
        "param_dtype: bfloat16",
        pending=True,
    ),
)
