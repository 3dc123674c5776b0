"""Lightning's trainer keys behave as their users expect, although one Lightning batch is an optimizer step here."""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy

from shoal.checkpoint.store import CheckpointStore
from shoal.config import LoadOptions, SpeechConfig, load_config
from shoal.config.speech import TrainerConfig
from shoal.train.data import SpeechData
from shoal.train.plans import prompts_of
from shoal.train.recipes import run_training, speech_module
from shoal.train.strategy import AutomodelParallelStrategy
from shoal.train.trainer import World, launched_world, plan_steps
from tests.e2e.test_strategies import Recorder, run_of, train_on_rank
from tests.e2e.tiny_run import AUTOMODEL, configuration
from tests.zygote import RankRunner


def run(ranks: RankRunner, tmp_path: Path, world: int = 1, **trainer: Any) -> dict[str, Any]:
    strategy = {"_target_": AUTOMODEL} if world > 1 else None
    return ranks(train_on_rank, world, run_of(tmp_path, world, strategy, **trainer), init=False, timeout=90)[
        0
    ]


def test_limits_and_intervals_count_micro_batches_per_rank(ranks: RankRunner, tmp_path: Path) -> None:
    # 4 micro-batches a step on 2 ranks: 2 per rank and step, so 8 per epoch are 4 steps and 4 are 2 steps.
    done = run(
        ranks,
        tmp_path,
        world=2,
        max_steps=8,
        limit_train_batches=8,
        val_check_interval=4,
        limit_val_batches=1,
    )
    assert [validation["step"] for validation in done["validations"]] == [2, 4, 6, 8]


def test_max_epochs_ends_after_the_data(ranks: RankRunner, tmp_path: Path) -> None:
    # 23 clips in twos are 12 micro-batches: 3 steps of 4.
    options = run_of(tmp_path, 1, None, max_steps=-1, max_epochs=2)
    options["model"]["lr_scheduler"]["max_steps"] = 6
    done = ranks(train_on_rank, 1, options, init=False, timeout=90)[0]
    assert len(done["losses"]) == 6


def test_accumulation_alone_fixes_micro_batches_per_rank(ranks: RankRunner, tmp_path: Path) -> None:
    one = run(ranks, tmp_path, max_steps=3, global_micro_batches=4)
    two = run(ranks, tmp_path, world=2, max_steps=3, global_micro_batches=None, accumulate_grad_batches=2)
    assert two["losses"] == pytest.approx(one["losses"], rel=1e-8)


def test_validation_every_second_epoch_and_never(ranks: RankRunner, tmp_path: Path) -> None:
    done = run(ranks, tmp_path, max_steps=6, check_val_every_n_epoch=2)  # three steps an epoch
    assert [validation["step"] for validation in done["validations"]] == [6]
    # Without epochs to count, the interval runs across their borders.
    done = run(ranks, tmp_path, max_steps=8, check_val_every_n_epoch=None, val_check_interval=16)
    assert [validation["step"] for validation in done["validations"]] == [4, 8]
    assert run(ranks, tmp_path, max_steps=3, limit_val_batches=0)["validations"] == []


def test_max_time_ends_the_run_on_every_rank_alike(ranks: RankRunner, tmp_path: Path) -> None:
    options = run_of(tmp_path, 2, {"_target_": AUTOMODEL}, max_steps=-1, max_time="00:00:00:01")
    options["model"]["lr_scheduler"] = None
    first, second = ranks(train_on_rank, 2, options, init=False, timeout=90)
    assert len(first["losses"]) == len(second["losses"]) > 0


def switches_during_a_step(rank: int, world: int, mapping: dict[str, Any]) -> dict[str, Any]:
    """What torch says in the middle of training about the switches that the trainer section sets."""
    folder = Path(mapping["data"]["train_ds"]["input_cfg"][0]["manifest_filepath"]).parent
    (folder / "my_callbacks.py").write_text(
        "from tests.e2e.test_trainer_keys import Switches\n\nclass Mine(Switches):\n    pass\n"
    )
    sys.path.insert(0, str(folder))
    mapping["trainer"]["callbacks"] = [{"_target_": "my_callbacks.Mine"}]
    config = load_config(mapping, world_size=world, options=LoadOptions(allow_targets=("my_callbacks",)))
    assert isinstance(config, SpeechConfig)
    run_training(config)
    return dict(sys.modules["my_callbacks"].Mine.seen)


class Switches(pl.Callback):
    """Made by the ``callbacks`` key; notes torch's switches after each step."""

    seen: ClassVar[dict[str, Any]] = {}

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.seen |= {
            "deterministic": torch.are_deterministic_algorithms_enabled(),
            "only_warns": torch.is_deterministic_algorithms_warn_only_enabled(),
            "anomaly": torch.is_anomaly_enabled(),
            "benchmark": torch.backends.cudnn.benchmark,
            "root": trainer.default_root_dir,
            "logger": type(trainer.logger).__name__,
        }


def test_switches_and_callbacks_reach_the_run(ranks: RankRunner, tmp_path: Path) -> None:
    root = str(tmp_path / "root")
    keys = {"detect_anomaly": True, "benchmark": True, "default_root_dir": root, "logger": True}
    mapping = run_of(tmp_path, 1, None, max_steps=3, limit_val_batches=0, deterministic="warn", **keys)
    seen = ranks(switches_during_a_step, 1, mapping, init=False, timeout=90)[0]
    assert seen.pop("logger") in ("TensorBoardLogger", "CSVLogger")
    assert seen == {
        "deterministic": True,
        "only_warns": True,
        "anomaly": True,
        "benchmark": True,
        "root": root,
    }
    assert list(Path(root).iterdir())  # the logger's files
    plain = run_of(tmp_path, 1, None, max_steps=3, limit_val_batches=0, deterministic=True)
    seen = ranks(switches_during_a_step, 1, plain, init=False, timeout=90)[0]
    assert (seen["deterministic"], seen["only_warns"], seen["anomaly"]) == (True, False, False)
    assert seen["logger"] == "NoneType"


def test_enable_checkpointing_without_exp_manager_keeps_the_newest(tmp_path: Path) -> None:
    root = tmp_path / "root"
    mapping = run_of(tmp_path, 1, None, max_steps=4, enable_checkpointing=True, default_root_dir=str(root))
    config = load_config(mapping, world_size=1)
    assert isinstance(config, SpeechConfig)
    run_training(config)
    latest = CheckpointStore(root / "checkpoints").latest()
    assert latest is not None and latest.name.startswith("step=")


def flags_on_rank(rank: int, world: int, block: dict[str, Any]) -> dict[str, Any]:
    """What the wrapper and the process group of a run were given."""
    import torch.nn.parallel.distributed as torch_ddp

    given: dict[str, Any] = {}
    create, connect = torch_ddp.DistributedDataParallel.__init__, torch.distributed.init_process_group

    def wrapping(self: Any, *args: Any, **options: Any) -> None:
        given.update(options)
        create(self, *args, **options)

    def connecting(backend: Any = None, **options: Any) -> None:
        given.update({"backend": backend, "timeout": options.get("timeout")})
        connect(backend, **options)

    torch_ddp.DistributedDataParallel.__init__ = wrapping  # type: ignore[method-assign]
    torch.distributed.init_process_group = connecting  # this rank is a forked process
    tmp = block.pop("tmp")
    options = {"max_steps": 3, "limit_val_batches": 0, "global_micro_batches": world}
    train_on_rank(rank, world, run_of(Path(tmp), world, block, **options))
    return {name: value for name, value in given.items() if isinstance(value, bool | int | str | timedelta)}


def test_flags_of_the_wrapper_and_of_the_process_group_arrive(ranks: RankRunner, tmp_path: Path) -> None:
    flags = {
        "broadcast_buffers": True,
        "find_unused_parameters": True,
        "static_graph": True,
        "bucket_cap_mb": 7,
        "gradient_as_bucket_view": True,
    }
    block = {"_target_": "lightning.pytorch.strategies.DDPStrategy", **flags}
    group = {"process_group_backend": "gloo", "timeout": 77}
    given = ranks(flags_on_rank, 2, {**block, **group, "tmp": str(tmp_path)}, init=False, timeout=90)[0]
    wanted = {**flags, "forward_sync_buffers": flags.pop("broadcast_buffers")}
    del wanted["broadcast_buffers"]
    assert {name: given[name] for name in wanted} == wanted
    assert (given["backend"], given["timeout"]) == ("gloo", timedelta(seconds=77))
    for target in (AUTOMODEL, "lightning.pytorch.strategies.ModelParallelStrategy"):
        block = {"_target_": target, **group, "tmp": str(tmp_path)}
        given = ranks(flags_on_rank, 2, block, init=False, timeout=90)[0]
        assert (given["backend"], given["timeout"]) == ("gloo", timedelta(seconds=77))


def test_sanity_validation_runs_before_training(ranks: RankRunner, tmp_path: Path) -> None:
    done = run(ranks, tmp_path, max_steps=3, num_sanity_val_steps=1)
    assert done["validations"][0]["step"] == 0 and len(done["validations"]) == 2


def test_clipping_bounds_the_update_and_not_the_reported_norm(ranks: RankRunner, tmp_path: Path) -> None:
    free = run(ranks, tmp_path, max_steps=3, gradient_clip_val=None)
    clipped = run(ranks, tmp_path, max_steps=3, gradient_clip_val=1e-4)
    assert free["norms"][0] == clipped["norms"][0] > 1
    assert free["losses"][0] == clipped["losses"][0] and free["losses"][1] != clipped["losses"][1]


@pytest.mark.parametrize(
    ("trainer", "dp_size", "steps"),
    [
        (TrainerConfig(accumulate_grad_batches=4, limit_train_batches=100), 2, (8, 4, 25, None)),
        (TrainerConfig(global_micro_batches=6, limit_train_batches=8, val_check_interval=4), 4, (6, 2, 4, 2)),
        (TrainerConfig(), 3, (3, 1, None, None)),
    ],
)
def test_counts_resolve_to_steps(trainer: TrainerConfig, dp_size: int, steps: tuple[Any, ...]) -> None:
    planning = plan_steps(trainer, dp_size)
    assert (
        planning.global_micro_batches,
        planning.accumulation,
        planning.steps_per_epoch,
        planning.val_check_interval,
    ) == steps


def test_a_limit_inside_a_step_is_refused() -> None:
    with pytest.raises(ValueError, match=r"trainer.limit_train_batches = 9.*a multiple of 4"):
        plan_steps(TrainerConfig(accumulate_grad_batches=4, limit_train_batches=9), 1)


def test_the_launcher_decides_the_world() -> None:
    slurm = {"SLURM_NTASKS": "16", "SLURM_PROCID": "3", "SLURM_NNODES": "2"}
    assert launched_world(slurm, TrainerConfig()) == World(16, 8, 3)
    assert launched_world({}, TrainerConfig(devices=2, num_nodes=3)) == World(6, 2, 0)


PYTHON_STRATEGIES = {
    "automodel": lambda world: AutomodelParallelStrategy(dp_size=None, dp_replicate_size=1),
    "ddp": lambda world: DDPStrategy(find_unused_parameters=True),
    "model-parallel": lambda world: ModelParallelStrategy(data_parallel_size=world, tensor_parallel_size=1),
}


def fit_in_python(rank: int, world: int, mapping: dict[str, Any], strategy: str) -> list[float]:
    """What a user types: a stock Trainer with one of the strategies, our module and our data."""
    config = load_config(mapping, world_size=world)
    assert isinstance(config, SpeechConfig)
    prompts = prompts_of(config.model)
    recorder = Recorder()
    trainer = pl.Trainer(
        strategy=PYTHON_STRATEGIES[strategy](world),
        devices=world,
        accelerator="cpu",
        precision="32-true",
        max_steps=4,
        use_distributed_sampler=False,
        num_sanity_val_steps=0,
        enable_progress_bar=False,
        enable_checkpointing=False,
        logger=False,
        callbacks=[recorder],
    )
    module = speech_module(config, prompts)
    trainer.fit(module, SpeechData(config.data, prompts, global_micro_batches=4))
    assert trainer.strategy.distributed_sampler_kwargs == {"num_replicas": world, "rank": rank}  # type: ignore[attr-defined]
    return recorder.losses


@pytest.mark.parametrize("strategy", PYTHON_STRATEGIES)
def test_a_trainer_built_in_python_equals_the_yaml(ranks: RankRunner, tmp_path: Path, strategy: str) -> None:
    yaml_losses = run(ranks, tmp_path, world=2, max_steps=4, precision="32-true")["losses"]
    mapping = configuration(tmp_path, devices=2)
    mapping["trainer"]["max_steps"] = 4
    losses = ranks(fit_in_python, 2, mapping, strategy, init=False)[0]
    assert losses == pytest.approx(yaml_losses, rel=1e-5)


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
@pytest.mark.parametrize(
    "strategy", [{"_target_": AUTOMODEL}, {"_target_": "lightning.pytorch.strategies.DDPStrategy"}]
)
def test_bf16_stays_close_to_fp32(
    ranks: RankRunner, tmp_path: Path, precision: str, strategy: dict[str, Any]
) -> None:
    def losses(name: str) -> list[float]:
        options = run_of(tmp_path, 2, strategy, precision=name, max_steps=4)
        done = ranks(train_on_rank, 2, options, init=False, timeout=90)[0]
        stored = {weight.dtype for weight in done["weights"].values()}
        assert {str(dtype) for dtype in stored} == {
            "torch.bfloat16" if name == "bf16-true" else "torch.float32"
        }
        return done["losses"]

    assert losses(precision) == pytest.approx(losses("32-true"), rel=0.05)
    assert losses(precision) != losses("32-true")


def test_gradients_of_a_hand_built_trainer_are_not_clipped_twice(tmp_path: Path) -> None:
    trainer = pl.Trainer(
        gradient_clip_val=1.0, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False
    )
    config = load_config(configuration(tmp_path), world_size=1)
    assert isinstance(config, SpeechConfig)
    prompts = prompts_of(config.model)
    with pytest.raises(ValueError, match=r"gradient_clip_val.*ShoalModule"):
        trainer.fit(speech_module(config, prompts), SpeechData(config.data, prompts))
