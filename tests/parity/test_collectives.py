"""Accumulating gradients costs no communication: reductions are counted, per optimizer step."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from shoal.config.schema import DDPConfig, FSDP2Config
from shoal.models.assemble import Numerics, assemble
from shoal.parallel.setup import DistributedSetup
from shoal.train.step import agree_on_step, train_step
from tests.parity.harness import CPU, Layout, deal, micro_batches_of, plan_of
from tests.parity.text import text_case
from tests.zygote import RankRunner

WORLD = 2
REDUCTIONS = ("reduce_scatter", "reduce_scatter_single", "reduce_scatter_tensor", "all_reduce")
GATHERS = ("all_gather_into_tensor", "all_gather", "all_gather_single")


def count_calls(counts: Counter[str]) -> None:
    """Counts tensors of at least a gradient's size that this rank hands to torch.distributed from here on."""

    def counted(name: str) -> Any:
        original = getattr(dist, name)

        def call(*arguments: Any, **options: Any) -> Any:
            tensor = next(a for a in (*arguments, *options.values()) if isinstance(a, torch.Tensor | list))
            largest = (
                max((t.numel() for t in tensor), default=0) if isinstance(tensor, list) else tensor.numel()
            )
            counts[name] += (
                largest > 64
            )  # counts of tokens and norms are smaller than any bucket of gradients
            return original(*arguments, **options)

        return call

    for name in (*REDUCTIONS, *GATHERS):
        if hasattr(dist, name):
            setattr(dist, name, counted(name))


def collectives_of_a_step(
    rank: int, world: int, strategy: str, defer: bool, accumulation: int
) -> tuple[dict[str, int], int]:
    """Collectives of the second step by name, and the number of sharding units."""
    case = text_case("llama", accumulation * world)
    options = DDPConfig() if strategy == "ddp" else FSDP2Config(defer_fsdp_grad_sync=defer)
    setup = DistributedSetup.build(options)
    model = assemble(plan_of(case, Layout("", world)), setup, Numerics(stored=torch.float64), CPU)
    optimizer = torch.optim.AdamW(model.module.parameters(), lr=1e-3)
    counts: Counter[str] = Counter()
    for step in range(2):
        if step == 1:  # DDP settles its buckets and FSDP2 its order in the first
            count_calls(counts)
        batch = deal(micro_batches_of(case, step), model)
        assert len(batch.micro_batches) == accumulation
        header = agree_on_step(batch, model.group, CPU)
        train_step(model, batch, optimizer, step=step, seed=0, max_norm=1.0, header=header)
    units = sum(isinstance(module, FSDPModule) for module in model.module.modules())
    return dict(counts), units


def reductions(counts: dict[str, int]) -> int:
    return sum(counts.get(name, 0) for name in REDUCTIONS)


def test_fsdp2_reduces_each_unit_once_a_step(ranks: RankRunner) -> None:
    seen = {a: ranks(collectives_of_a_step, WORLD, "fsdp2", True, a)[0] for a in (1, 2, 4)}
    for counts, units in seen.values():
        assert units == 3  # two layers and the root
        assert reductions(counts) == units
    gathers = {a: sum(counts.get(name, 0) for name in GATHERS) for a, (counts, _) in seen.items()}
    assert (
        gathers[4] > gathers[1] > 0
    )  # parameters are gathered for every micro-batch: memory bought with traffic


def test_without_deferring_fsdp2_reduces_every_micro_batch(ranks: RankRunner) -> None:
    counts, units = ranks(collectives_of_a_step, WORLD, "fsdp2", False, 4)[0]
    assert reductions(counts) == 4 * units


def test_ddp_reduces_its_buckets_once_a_step(ranks: RankRunner) -> None:
    seen = {a: reductions(ranks(collectives_of_a_step, WORLD, "ddp", True, a)[0][0]) for a in (1, 4)}
    assert seen[4] == seen[1] > 0


@pytest.mark.parametrize("strategy", ["fsdp2", "ddp"])
def test_the_count_sees_what_it_counts(ranks: RankRunner, strategy: str) -> None:
    """A step that synchronises every micro-batch is noticed."""
    assert ranks(eager_reductions, WORLD, strategy)[0] > reductions(
        ranks(collectives_of_a_step, WORLD, strategy, True, 4)[0][0]
    )


def eager_reductions(rank: int, world: int, strategy: str) -> int:
    import dataclasses
    from contextlib import nullcontext

    import shoal.train.step as step_module

    honest = step_module.train_step

    def eager(model: Any, *arguments: Any, **options: Any) -> Any:
        return honest(
            dataclasses.replace(model, gradient_sync=lambda last: nullcontext()), *arguments, **options
        )

    globals()["train_step"] = eager  # this rank is a forked process
    return reductions(collectives_of_a_step(rank, world, strategy, True, 4)[0])
