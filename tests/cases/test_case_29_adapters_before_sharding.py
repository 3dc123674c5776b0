"""Case 29: adapters are equal on all ranks after initialisation and after three steps, as on a single process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM

from shoal.data.batch import StepBatch
from shoal.data.position import StreamPosition
from shoal.models.assemble import ModelPlan, Numerics, assemble
from shoal.models.causal_lm import CausalLM
from shoal.models.load import WeightSource
from shoal.parallel.model import ParallelModel
from shoal.train.step import agree_on_step, train_step
from tests.tiny import empty_micro_batch, ragged_micro_batches
from tests.unit.checkpoint.models import CPU, LORA, full, save_source, setup_of, unequal
from tests.zygote import RankRunner

STEPS, MICRO_BATCHES = 3, 3


def assembled(folder: Path, layout: str, world: int) -> ParallelModel:
    """Qwen3 with heads of 16: q_proj is 64 x 32, so that a shape taken from the wrong side would show."""

    def build() -> nn.Module:
        config = AutoConfig.from_pretrained(folder)
        return CausalLM(AutoModelForCausalLM.from_config(config, dtype=torch.float64))

    plan = ModelPlan(build, weights=(WeightSource("llm", folder),), lora=LORA, seed=3)
    return assemble(plan, setup_of(layout, world), Numerics(stored=torch.float64), CPU)


def take_steps(model: ParallelModel) -> None:
    """Three AdamW steps; the ranks get one or two micro-batches with different numbers of tokens."""
    trained = [p for p in model.module.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    for step in range(STEPS):
        stream = ragged_micro_batches(MICRO_BATCHES, seed=step, without_audio=tuple(range(MICRO_BATCHES)))
        mine = stream[model.dp_rank :: model.dp_size]
        mine += [empty_micro_batch()] * (-(-MICRO_BATCHES // model.dp_size) - len(mine))
        batch = StepBatch(mine, StreamPosition(), None, {})
        header = agree_on_step(batch, model.group, CPU)
        train_step(model, batch, optimizer, step=step, seed=0, max_norm=1.0, header=header)


def run(rank: int, world: int, layout: str, folder: Path) -> list[dict[str, Tensor]]:
    """The whole adapters after initialisation and after the steps, and the local shapes of q_proj's."""
    torch.manual_seed(rank)  # what the ranks' generators hold must not matter
    model = assembled(folder, layout, world)

    def adapters() -> dict[str, Tensor]:
        return {name: full(p) for name, p in model.module.named_parameters() if ".lora_" in name}

    start = adapters()
    take_steps(model)
    return [start, adapters()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_source(tmp_path_factory.mktemp("model") / "source", "qwen3", head_dim=16)


@pytest.fixture(scope="module")
def alone(ranks: RankRunner, folder: Path) -> list[dict[str, Tensor]]:
    (report,) = ranks(run, 1, "plain", folder, init=False)
    return report


@pytest.mark.parametrize(("layout", "world"), [("ddp", 2), ("fsdp2", 2), ("fsdp2", 3), ("hsdp", 4)])
def test_adapters_are_those_of_a_single_process(
    ranks: RankRunner, folder: Path, alone: list[dict[str, Tensor]], layout: str, world: int
) -> None:
    reports = ranks(run, world, layout, folder)
    q_proj = "llm.model.layers.0.self_attn.q_proj"
    assert alone[0][f"{q_proj}.lora_A.default.weight"].shape == (3, 32)
    assert alone[0][f"{q_proj}.lora_B.default.weight"].shape == (64, 3)
    for start, end in reports:
        assert unequal(start, alone[0]) == []
        assert unequal(end, reports[0][1]) == []
        for name, tensor in alone[1].items():
            torch.testing.assert_close(end[name], tensor, rtol=0, atol=1e-10, msg=name)
            assert not torch.equal(tensor, alone[0][name]), f"{name} was not trained"


def injected_late(rank: int, world: int, folder: Path) -> tuple[float, float, bool]:
    """The fault: adapters put into a sharded model. How far they are apart between ranks at the start and after."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(rank)
    llm = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    module: Any = CausalLM(llm)
    fully_shard(module, mesh=init_device_mesh("cpu", (world,)))
    inject_adapter_in_model(LoraConfig(**LORA), llm)
    adapters = [p for name, p in module.named_parameters() if ".lora_A." in name]

    def distance(values: Callable[[Tensor], Tensor] = lambda p: p.detach()) -> float:
        other = [values(p).clone() for p in adapters]
        for tensor in other:
            dist.broadcast(tensor, src=0)
        return max(float((a - values(b)).abs().max()) for a, b in zip(other, adapters, strict=True))

    return distance(), float(len(adapters)), any(isinstance(p, DTensor) for p in adapters)


def test_the_fault_would_be_seen(ranks: RankRunner, folder: Path) -> None:
    """Adapters injected after `fully_shard` are plain tensors that differ between ranks."""
    reports = ranks(injected_late, 2, folder)
    assert reports[1][0] > 0.1 and reports[1][1] > 0
    assert not reports[0][2]
