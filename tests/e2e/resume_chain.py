"""Trains one run in segments on different layouts and records everything that must not depend on that."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from shoal.config import LLMConfig, SpeechConfig, load_config
from tests.e2e import tiny_llm, tiny_run
from tests.zygote import RankRunner

Recipe = Literal["speech", "llm", "llm-lora"]
STEPS, SEGMENT = 9, 3


@dataclass(frozen=True)
class Layout:
    """How a segment is spread: a strategy, a number of ranks, and what wraps the layers."""

    strategy: Literal["one", "ddp", "fsdp2", "hsdp", "tp2-sp"]
    ranks: int
    checkpointing: bool = False
    compiled: bool = False

    def __str__(self) -> str:
        wrappers = "".join((" + AC" * self.checkpointing, " + compile" * self.compiled))
        return f"{self.strategy} {self.ranks}{wrappers}"


@dataclass(frozen=True)
class Segment:
    """What one rank of a segment saw.

    Attributes:
        losses, norms: of every step, in full precision.
        rates: (learning rate, weight decay) of every optimizer group that each step used.
        samples: ids of the samples of every step over all ranks, sorted.
        start, end: digests of all parameters, buffers and optimizer states before the first and after the last step.
    """

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    rates: list[list[tuple[float, float]]] = field(default_factory=list)
    samples: list[list[str]] = field(default_factory=list)
    start: str = ""
    end: str = ""


ONE = Layout("one", 1)
CHAINS: dict[str, tuple[Recipe, tuple[Layout, Layout, Layout]]] = {
    "speech, dp 4 to 2 to 4": ("speech", (Layout("fsdp2", 4), Layout("fsdp2", 2), Layout("fsdp2", 4))),
    "speech, fsdp2 to ddp to hsdp": ("speech", (Layout("fsdp2", 2), Layout("ddp", 2), Layout("hsdp", 4))),
    "speech, hsdp to ddp to fsdp2": ("speech", (Layout("hsdp", 4), Layout("ddp", 4), Layout("fsdp2", 2))),
    "speech, checkpointing on and off": (
        "speech",
        (Layout("fsdp2", 2, checkpointing=True), Layout("ddp", 2), Layout("hsdp", 4, checkpointing=True)),
    ),
    "speech, one to fsdp2 to one": ("speech", (ONE, Layout("fsdp2", 3), ONE)),
    "LLM, dp 4 to 2 to 4": ("llm", (Layout("fsdp2", 4), Layout("fsdp2", 2), Layout("fsdp2", 4))),
    "LLM, fsdp2 to ddp to hsdp": ("llm", (Layout("fsdp2", 2), Layout("ddp", 2), Layout("hsdp", 4))),
    "LLM, hsdp to ddp to fsdp2": ("llm", (Layout("hsdp", 4), Layout("ddp", 4), Layout("fsdp2", 2))),
    "LLM, checkpointing and compile on and off": (
        "llm",
        (Layout("fsdp2", 2, True, True), Layout("ddp", 2), Layout("hsdp", 4, compiled=True)),
    ),
    "LLM, one to fsdp2 to one": ("llm", (ONE, Layout("fsdp2", 4), ONE)),
    "speech, fsdp2 to tp to one": ("speech", (Layout("fsdp2", 2), Layout("tp2-sp", 4), ONE)),
    "LLM, tp to fsdp2 to tp": (
        "llm",
        (Layout("tp2-sp", 2), Layout("fsdp2", 4), Layout("tp2-sp", 4, checkpointing=True)),
    ),
    "LoRA, tp to ddp to tp": ("llm-lora", (Layout("tp2-sp", 4), Layout("ddp", 2), Layout("tp2-sp", 2))),
    "LoRA, fsdp2 to ddp to hsdp": ("llm-lora", (Layout("fsdp2", 2), Layout("ddp", 2), Layout("hsdp", 4))),
    "LoRA, dp 4 to 2 to 4": ("llm-lora", (Layout("fsdp2", 4), Layout("fsdp2", 2), Layout("fsdp2", 4))),
}


def run_of(recipe: Recipe, root: Path, name: str, layout: Layout, max_steps: int) -> dict[str, Any]:
    """The configuration of a segment that goes on where `name` stopped, up to `max_steps`."""
    return (_speech_run if recipe == "speech" else _llm_run)(recipe, root, name, layout, max_steps)


def _speech_run(recipe: Recipe, root: Path, name: str, layout: Layout, max_steps: int) -> dict[str, Any]:
    automodel = {
        "_target_": tiny_run.AUTOMODEL,
        "dp_replicate_size": 2 if layout.strategy == "hsdp" else None,
        "activation_checkpointing_llm": layout.checkpointing,
        "activation_checkpointing_perception": layout.checkpointing,
    }
    if layout.strategy == "tp2-sp":
        automodel |= {"tp_size": 2, "distributed_config": {"sequence_parallel": True}}
    strategy = {} if layout.strategy in ("one", "ddp") else {"strategy": automodel}
    run = tiny_run.configuration(
        root,
        devices=layout.ranks,
        max_steps=max_steps,
        precision="64-true",
        enable_progress_bar=False,
        limit_val_batches=0,
        **strategy,
    )
    run["model"]["lr_scheduler"]["max_steps"] = STEPS
    run["exp_manager"] = {
        "explicit_log_dir": str(root / name),
        "resume_if_exists": True,
        "resume_ignore_no_checkpoint": True,
        "create_tensorboard_logger": False,
        "checkpoint_callback_params": {"every_n_train_steps": SEGMENT, "monitor": "loss"},
    }
    return run


def _llm_run(recipe: Recipe, root: Path, name: str, layout: Layout, max_steps: int) -> dict[str, Any]:
    distributed: dict[str, Any] = {"strategy": "ddp" if layout.strategy in ("one", "ddp") else "fsdp2"}
    if layout.strategy == "hsdp":
        distributed["dp_replicate_size"] = 2
    if layout.strategy == "tp2-sp":
        distributed |= {"tp_size": 2, "sequence_parallel": True}
    if layout.checkpointing:
        distributed["activation_checkpointing"] = True
    sections: dict[str, Any] = {
        "distributed": distributed,
        "step_scheduler": {"max_steps": max_steps, "ckpt_every_steps": SEGMENT, "val_every_steps": 100},
        "lr_scheduler": {"lr_decay_steps": STEPS},
        "checkpoint": {
            "checkpoint_dir": str(root / name),
            "restore_from": "latest",
            "model_save_format": "safetensors",
        },
    }
    if layout.compiled:
        sections["compile"] = {"enabled": True, "backend": "eager"}
    if recipe == "llm-lora":
        sections["peft"] = {"dim": 2, "alpha": 8, "target_modules": ["q_proj", "down_proj"]}
    return {**tiny_llm.configuration(root, **sections), "precision": "64-true"}


def train_segment(rank: int, world: int, run: dict[str, Any]) -> Segment:
    """Trains as `shoal train` does; a step is watched from around the module's own."""
    from shoal.train.llm_recipe import run_llm_training
    from shoal.train.modules import ShoalModule
    from shoal.train.recipes import run_training

    seen, modules = Segment(), []
    honest = ShoalModule.training_step

    def watched(module: ShoalModule, batch: Any, batch_idx: int) -> Any:
        if not modules:
            modules.append(module)
            object.__setattr__(seen, "start", digest(module))
        (optimizer,) = module.trainer.optimizers
        seen.rates.append([(float(g["lr"]), float(g["weight_decay"])) for g in optimizer.param_groups])
        own = [sample for one in batch.micro_batches if not one["is_empty"] for sample in one["sample_ids"]]
        seen.samples.append(sorted(_gathered(own, module.parallel.group)))
        result = honest(module, batch, batch_idx)
        assert module.last_result is not None
        seen.losses.append(module.last_result.loss)
        seen.norms.append(float(module.last_result.gradient_norm))
        return result

    ShoalModule.training_step = watched  # type: ignore[method-assign]
    config = load_config(run, world_size=world)
    if isinstance(config, SpeechConfig):
        run_training(config)
    else:
        assert isinstance(config, LLMConfig)
        run_llm_training(config)
    return dataclasses.replace(seen, end=digest(modules[0]))


def _gathered(own: list[str], group: dist.ProcessGroup | None) -> list[str]:
    """The samples of all data-parallel ranks; tensor-parallel peers have the same."""
    if group is None:
        return own
    parts: list[list[str]] = [[]] * group.size()
    dist.all_gather_object(parts, own, group=group)
    return [sample for part in parts for sample in part]


def digest(module: Any) -> str:
    """A hash of every saved tensor of the model and of its optimizer, whole, by name. Collective when sharded."""
    (optimizer,) = module.trainer.optimizers
    tensors: dict[str, Tensor] = {}
    for name, tensor in module.model.state_dict().items():
        tensors[name.replace("_orig_mod.", "")] = tensor
    for name, parameter in module.model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            tensors[f"{name.replace('_orig_mod.', '')}/{key}"] = (
                torch.as_tensor(value) if not isinstance(value, Tensor) else value
            )
    found = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name]
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        found.update(name.encode())
        found.update(whole.detach().contiguous().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def run_chain(
    ranks: RankRunner, recipe: Recipe, root: Path, name: str, layouts: Sequence[Layout], timeout: float = 180
) -> list[list[Segment]]:
    """Trains segment after segment; returns the reports of all ranks of each."""
    reports = []
    for number, layout in enumerate(layouts):
        stop = STEPS if len(layouts) == 1 else SEGMENT * (number + 1)
        run = run_of(recipe, root, name, layout, stop)
        reports.append(ranks(train_segment, layout.ranks, run, init=False, timeout=timeout))
    return reports


def differences(parts: Sequence[Segment], whole: Segment) -> Mapping[str, float]:
    """Largest relative difference of losses and norms between a chain and an uninterrupted run."""

    def worst(name: str) -> float:
        mine = [value for part in parts for value in getattr(part, name)]
        theirs = getattr(whole, name)
        return max(abs(a - b) / abs(b) for a, b in zip(mine, theirs, strict=True))

    return {name: worst(name) for name in ("losses", "norms")}
