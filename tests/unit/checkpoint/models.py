"""Assembled models in any data-parallel layout, and what plain transformers makes of an exported folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from shoal.config.schema import DDPConfig, FSDP2Config, ParallelismSizes
from shoal.models.assemble import ModelPlan, Numerics, assemble
from shoal.models.load import WeightSource
from shoal.parallel.setup import DistributedSetup
from tests.families import tiny_lm
from tests.tiny import tiny_tokenizer

CPU = torch.device("cpu")
LAYOUTS = (("plain", 1), ("ddp", 2), ("fsdp2", 2), ("fsdp2", 3), ("hsdp", 4))
LORA = {"r": 3, "lora_alpha": 12, "target_modules": ["q_proj", "down_proj"]}


class LanguageModel(nn.Module):
    """A language model as the child `llm` of the module that is trained."""

    def __init__(self, llm: PreTrainedModel) -> None:
        super().__init__()
        self.llm = llm

    def forward(self, micro_batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """The loss of predicting `input_ids` [B, T]."""
        ids = micro_batch["input_ids"]
        logits = self.llm(input_ids=ids, use_cache=False).logits[:, :-1].float()
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="sum")
        return {"loss_sum": loss, "num_tokens": loss.new_tensor(ids[:, 1:].numel())}


def save_source(folder: Path, family: str = "llama", **changes: Any) -> Path:
    """A Hugging Face folder with weights, a tokenizer and generation settings that differ from the defaults."""
    model = tiny_lm(family, **changes)
    model.generation_config.max_new_tokens = 17
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def setup_of(layout: str, world: int) -> DistributedSetup | None:
    """The mesh of a layout; None for one process."""
    if layout == "plain":
        return None
    options = DDPConfig() if layout == "ddp" else FSDP2Config()
    sizes = ParallelismSizes(dp_replicate_size=2 if layout == "hsdp" else None)
    return DistributedSetup.build(strategy=options, parallelism_sizes=sizes, world_size=world)


def build(folder: Path, layout: str, world: int, **changes: Any) -> LanguageModel:
    """Assemble the model of a folder in a layout."""

    def make() -> nn.Module:
        config = AutoConfig.from_pretrained(folder)
        return LanguageModel(AutoModelForCausalLM.from_config(config, dtype=torch.float32))

    plan = ModelPlan(make, weights=(WeightSource("llm", folder),), seed=3, **changes)
    module = assemble(plan, setup_of(layout, world), Numerics(), CPU).module
    assert isinstance(module, LanguageModel)
    return module


def read_folder(folder: Path, stem: str = "model") -> dict[str, Tensor]:
    """Every tensor of a folder's safetensors files."""
    tensors: dict[str, Tensor] = {}
    for file in sorted(folder.glob(f"{stem}*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118
                assert name not in tensors, f"{name} is in two files"
                tensors[name] = opened.get_tensor(name)
    return tensors


def full(tensor: Tensor) -> Tensor:
    """The whole tensor, detached and copied; collective when it is sharded."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def parameters_of(module: nn.Module) -> dict[str, Tensor]:
    """The whole parameters by name; collective when they are sharded."""
    return {name: full(parameter) for name, parameter in module.named_parameters()}


def unequal(left: dict[str, Tensor], right: dict[str, Tensor]) -> list[str]:
    """Names that are not in both, or whose tensors differ in a bit."""
    common = left.keys() & right.keys()
    return sorted(
        (left.keys() ^ right.keys()) | {name for name in common if not torch.equal(left[name], right[name])}
    )
