"""Rules on the trainer section: machine, micro-batches, precision, and who owns logging and saving."""

from __future__ import annotations

import re
from collections.abc import Iterator

from shoal.config.facts import Facts
from shoal.config.rules.base import Broken, Rule, layout_of
from shoal.config.speech import SpeechConfig, TrainerConfig
from shoal.config.steps import accumulation

_TIME = re.compile(r"\d+:\d{2}:\d{2}:\d{2}\Z")
STORED_DTYPES = {
    "32-true": "float32",
    "64-true": "float64",
    "bf16-mixed": "float32",
    "16-mixed": "float32",
    "bf16-true": "bfloat16",
    "bf16-flash": "bfloat16",
}


def _accelerator_exists(config: SpeechConfig, facts: Facts) -> Iterator[Broken]:
    accelerator = config.trainer.accelerator
    if accelerator in ("gpu", "cuda") and facts.accelerators == 0:
        yield Broken("trainer.accelerator", accelerator, "cpu or auto: this machine has no GPU")


def _devices_exist(config: SpeechConfig, facts: Facts) -> Iterator[Broken]:
    trainer = config.trainer
    on_gpu = trainer.accelerator in ("gpu", "cuda") or (
        trainer.accelerator == "auto" and facts.accelerators > 0
    )
    if on_gpu and type(trainer.devices) is int and 0 < facts.accelerators < trainer.devices:
        limit = f"at most the {facts.accelerators} accelerators of this machine"
        yield Broken("trainer.devices", trainer.devices, limit, f"trainer.devices: {facts.accelerators}")


def _world_is_devices(config: SpeechConfig, facts: Facts) -> Iterator[Broken]:
    trainer, world, per_node = config.trainer, facts.launched_world_size, facts.devices_per_node
    if world is None:
        return
    known = type(trainer.devices) is int and trainer.devices > 0
    devices = trainer.devices if known else per_node
    if not isinstance(devices, int) or devices * trainer.num_nodes != world:
        limit = f"devices * num_nodes = {devices} * {trainer.num_nodes} must equal the {world} ranks started"
        repair = (
            f"change the number of ranks started, {'trainer.devices or ' if known else ''}trainer.num_nodes"
        )
        key = "trainer.devices" if known else "trainer.num_nodes"
        yield Broken(key, trainer.devices if known else trainer.num_nodes, limit, repair)


def _sampler_is_ours(config: SpeechConfig, facts: Facts) -> Iterator[Broken]:
    given = config.trainer.use_distributed_sampler
    if given is True or (given is None and config.trainer.strategy.kind != "ddp"):
        limit = "false: batches are composed for the whole job and dealt to the ranks, so it is set to false"
        yield Broken("trainer.use_distributed_sampler", given, limit)


def _counts_divide(config: SpeechConfig, facts: Facts) -> Iterator[Broken]:
    trainer = config.trainer
    steps = accumulation(trainer, layout_of(config, facts.world_size).dp_size)
    if steps is None:
        return
    for name in ("limit_train_batches", "val_check_interval"):
        count = getattr(trainer, name)
        if count is not None and count % steps:
            limit = f"a multiple of {steps}, the micro-batches per rank in one optimizer step"
            nearest = max(steps, count - count % steps)
            yield Broken(f"trainer.{name}", count, limit, f"trainer.{name}: {nearest}")


def _interval_fits_epoch(config: SpeechConfig, facts: Facts) -> Iterator[Broken]:
    trainer = config.trainer
    limit, interval = trainer.limit_train_batches, trainer.val_check_interval
    if (
        limit is not None
        and interval is not None
        and interval > limit
        and trainer.check_val_every_n_epoch is not None
    ):
        words = f"at most trainer.limit_train_batches = {limit}, or no validation ever runs"
        yield Broken("trainer.val_check_interval", interval, words, f"trainer.val_check_interval: {limit}")


def _accumulation_agrees(config: SpeechConfig, facts: Facts) -> Iterator[Broken]:
    trainer, dp_size = config.trainer, layout_of(config, facts.world_size).dp_size
    total, given = trainer.global_micro_batches, trainer.accumulate_grad_batches
    if total is None or given == 1 or dp_size is None or total == given * dp_size:
        return
    limit = f"accumulate_grad_batches * dp_size = {given * dp_size} when both are given"
    repair = "keep trainer.global_micro_batches and delete trainer.accumulate_grad_batches"
    yield Broken("trainer.global_micro_batches", total, limit, repair)


def _step_fills_ranks(config: SpeechConfig, facts: Facts) -> Iterator[Broken]:
    total, dp_size = config.trainer.global_micro_batches, layout_of(config, facts.world_size).dp_size
    if total is not None and dp_size is not None and total % dp_size:
        limit = (
            f"a multiple of dp_size = {dp_size}; the ranks left over run empty micro-batches of zero weight"
        )
        yield Broken("trainer.global_micro_batches", total, limit, f"use {-(-total // dp_size) * dp_size}")


def _run_ends(config: SpeechConfig, facts: Facts) -> Iterator[Broken]:
    trainer = config.trainer
    if trainer.max_steps == -1 and trainer.max_epochs is None and trainer.max_time is None:
        yield Broken(
            "trainer.max_steps", -1, "one of max_steps, max_epochs or max_time, so that the run ends"
        )


def _times_are_written(config: SpeechConfig, facts: Facts) -> Iterator[Broken]:
    times = {"trainer.max_time": config.trainer.max_time}
    if config.exp_manager is not None:
        times["exp_manager.max_time_per_run"] = config.exp_manager.max_time_per_run
    for key, value in times.items():
        if value is not None and not _TIME.match(value):
            yield Broken(key, value, "DD:HH:MM:SS", f"{key}: 00:03:50:00 for 3 h 50 min")


def _dtype_agrees(config: SpeechConfig, facts: Facts) -> Iterator[Broken]:
    given, stored = config.model.torch_dtype, STORED_DTYPES[config.trainer.precision]
    if given is not None and given != stored:
        limit = f"{stored}, which trainer.precision = {config.trainer.precision} stores"
        yield Broken("model.torch_dtype", given, limit)


def _no_masters(config: SpeechConfig, facts: Facts) -> Iterator[Broken]:
    if config.trainer.precision in ("bf16-true", "bf16-flash"):
        limit = "bf16 weights without fp32 masters: updates below a weight's resolution are lost"
        yield Broken("trainer.precision", config.trainer.precision, limit)


def _one_owner(config: SpeechConfig, facts: Facts) -> Iterator[Broken]:
    trainer: TrainerConfig = config.trainer
    if config.exp_manager is None:
        return
    for name in ("logger", "enable_checkpointing"):
        if getattr(trainer, name):
            yield Broken(
                f"trainer.{name}",
                True,
                "false when there is an exp_manager section",
                f"trainer.{name}: false",
            )


def _monitor_exists(config: SpeechConfig, facts: Facts) -> Iterator[Broken]:
    manager = config.exp_manager
    if manager is None or not manager.create_checkpoint_callback or config.data.validation_ds is not None:
        return
    params = manager.checkpoint_callback_params
    if params.monitor.startswith("val") and params.save_top_k not in (0, -1):
        limit = "a value that is logged; there is no data.validation_ds, so no checkpoint is ranked"
        repair = "add data.validation_ds; save_last keeps the newest checkpoint meanwhile"
        yield Broken("exp_manager.checkpoint_callback_params.monitor", params.monitor, limit, repair)


def _schedule_length(config: SpeechConfig, facts: Facts) -> Iterator[Broken]:
    scheduler, steps = config.model.lr_scheduler, config.trainer.max_steps
    given = scheduler.kwargs.get("max_steps") if scheduler is not None else None
    if given is not None and steps != -1 and given != steps:
        limit = f"trainer.max_steps = {steps} for a schedule that ends with the run"
        yield Broken("model.lr_scheduler.max_steps", given, limit)


_COUNTS = (
    "trainer.accumulate_grad_batches",
    "trainer.global_micro_batches",
    "trainer.limit_train_batches",
    "trainer.val_check_interval",
)
_DP_KEYS = ("trainer.strategy", "trainer.devices", "trainer.num_nodes")

TRAINER_RULES: tuple[Rule, ...] = (
    Rule(
        "accelerator-exists",
        "speech",
        ("trainer.accelerator",),
        _accelerator_exists,
        "a run never falls back to another device silently",
        "trainer.accelerator=cpu",
    ),
    Rule(
        "devices-exist",
        "speech",
        ("trainer.accelerator", "trainer.devices"),
        _devices_exist,
        "two ranks must not share a device",
        "lower trainer.devices",
    ),
    Rule(
        "world-is-devices-times-nodes",
        "speech",
        ("trainer.devices", "trainer.num_nodes"),
        _world_is_devices,
        "the ranks that were started are the ranks of the run",
        "change trainer.devices or trainer.num_nodes",
    ),
    Rule(
        "counts-divide-by-accumulation",
        "speech",
        (*_DP_KEYS, *_COUNTS),
        _counts_divide,
        "these keys count micro-batches per data-parallel rank; a step takes them in whole groups",
        "use a multiple",
    ),
    Rule(
        "validation-interval-fits-epoch",
        "speech",
        ("trainer.limit_train_batches", "trainer.val_check_interval", "trainer.check_val_every_n_epoch"),
        _interval_fits_epoch,
        "an interval longer than the epoch is never reached",
        "lower the interval",
    ),
    Rule(
        "accumulation-agrees",
        "speech",
        (*_DP_KEYS, "trainer.accumulate_grad_batches", "trainer.global_micro_batches"),
        _accumulation_agrees,
        "the size of a step has one definition",
        "give one of the two",
    ),
    Rule(
        "step-fills-ranks",
        "speech",
        (*_DP_KEYS, "trainer.global_micro_batches"),
        _step_fills_ranks,
        "ranks without work wait for the others",
        "use a multiple of dp_size",
        notice=True,
    ),
    Rule(
        "run-ends",
        "speech",
        ("trainer.max_steps", "trainer.max_epochs", "trainer.max_time"),
        _run_ends,
        "a run without an end is a mistake",
        "set trainer.max_steps",
    ),
    Rule(
        "time-format",
        "speech",
        ("trainer.max_time", "exp_manager.max_time_per_run"),
        _times_are_written,
        "a time limit has one spelling",
        "write DD:HH:MM:SS",
    ),
    Rule(
        "dtype-agrees-with-precision",
        "speech",
        ("model.torch_dtype", "trainer.precision"),
        _dtype_agrees,
        "the stored dtype has one definition",
        "delete model.torch_dtype",
    ),
    Rule(
        "no-master-weights",
        "speech",
        ("trainer.precision",),
        _no_masters,
        "small updates vanish in bf16",
        "trainer.precision: bf16-mixed keeps fp32 weights",
        notice=True,
    ),
    Rule(
        "sampler-is-ours",
        "speech",
        ("trainer.use_distributed_sampler", "trainer.strategy"),
        _sampler_is_ours,
        "a second sampler would deal the data twice",
        "trainer.use_distributed_sampler: false",
        notice=True,
    ),
    Rule(
        "exp-manager-owns-logging-and-saving",
        "speech",
        ("trainer.logger", "trainer.enable_checkpointing", "exp_manager"),
        _one_owner,
        "two owners would write twice",
        "set it to false",
    ),
    Rule(
        "monitor-is-logged",
        "speech",
        ("exp_manager", "data.validation_ds"),
        _monitor_exists,
        "the best checkpoint needs a value to compare",
        "add data.validation_ds",
        notice=True,
    ),
    Rule(
        "schedule-ends-with-run",
        "speech",
        ("model.lr_scheduler", "trainer.max_steps"),
        _schedule_length,
        "a schedule of another length ends early or never",
        "max_steps: ${trainer.max_steps}",
        notice=True,
    ),
)
