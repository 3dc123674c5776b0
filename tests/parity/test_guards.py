"""The parity table can fail: each planted fault, of a kind that users of other systems met, is noticed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch.distributed.fsdp import FSDPModule

import shoal.models.assemble as assemble_module
import shoal.models.init as init_module
import shoal.parallel.ddp as ddp_module
import shoal.parallel.fsdp2 as fsdp2_module
import shoal.train.step as step_module
from shoal.config.schema import ParallelismSizes
from tests.parity.harness import Case, Layout, Record, assert_parity, reference, run_layout
from tests.zygote import RankRunner

CASE = Case(num_steps=2)


def average_over_ranks() -> None:
    """Leaves torch's averaging on: gradients come out 1/dp of the right ones."""
    fsdp2_module._sum_gradients = lambda module, mesh: None  # type: ignore[assignment]
    ddp_module.DistributedDataParallel.register_comm_hook = lambda *_: None  # type: ignore[method-assign]


def local_token_mean() -> None:
    """Divides by this rank's token count instead of the step's."""
    honest = step_module.agree_on_step

    def local(batch, group, device, **options):  # type: ignore[no-untyped-def]
        header = honest(batch, group, device, **options)
        tokens = sum(step_module.num_supervised(one) for one in batch.micro_batches)
        return dataclasses.replace(header, num_tokens=tokens)

    import tests.parity.harness as harness

    harness.agree_on_step = local


def never_synchronise() -> None:
    """Leaves every rank with its own gradients."""
    fsdp2_module._synchronised = lambda module, reduce, last: _switched_off(module)  # type: ignore[assignment]
    create = ddp_module.DistributedDataParallel.__init__

    def without_reduction(self, *args, **options):  # type: ignore[no-untyped-def]
        create(self, *args, **options)
        self.require_backward_grad_sync = False

    ddp_module.DistributedDataParallel.__init__ = without_reduction  # type: ignore[method-assign]


def _switched_off(module: FSDPModule) -> nullcontext[None]:
    module.set_requires_gradient_sync(False)
    return nullcontext()


def report_half_the_loss() -> None:
    """Averages the reported loss over two ranks that already hold their share of the sum."""
    honest = step_module.all_reduce_sum
    step_module.all_reduce_sum = lambda tensor, group: honest(tensor, group) / 2  # type: ignore[assignment]


def local_norm() -> None:
    """Clips with the norm of this rank's shard."""

    def norm(parameters, norm_type=2.0):  # type: ignore[no-untyped-def]
        local = [getattr(p.grad, "_local_tensor", p.grad) for p in parameters if p.grad is not None]
        return torch.stack([g.double().norm() for g in local]).norm()

    step_module.gradient_norm = norm


def initial_values_by_rank() -> None:
    """Draws initial values that depend on the rank."""
    honest = init_module.derive_seed
    init_module.derive_seed = lambda seed, name: honest(seed + torch.distributed.get_rank(), name)


def dropout_by_rank() -> None:
    """Draws dropout that depends on the rank and not on the place of the micro-batch."""
    honest = step_module.derive_seed
    step_module.derive_seed = lambda seed, step, index: honest(seed, step, torch.distributed.get_rank())


def train_what_is_frozen() -> None:
    """Trains what should be frozen."""
    assemble_module.freeze_parameters = lambda module, freeze, keep: ()


FAULTS: dict[str, tuple[Callable[[], None], tuple[str, ...], Case]] = {
    "average": (average_over_ranks, ("fsdp2", "hsdp", "ddp"), CASE),
    "local-token-mean": (local_token_mean, ("fsdp2", "hsdp", "ddp"), CASE),
    "no-synchronisation": (never_synchronise, ("fsdp2", "ddp"), CASE),
    "half-loss": (report_half_the_loss, ("fsdp2", "ddp"), CASE),
    "local-norm": (local_norm, ("fsdp2", "hsdp"), CASE),
    "rank-seeds": (initial_values_by_rank, ("fsdp2",), CASE),
    "dropout-seeds": (dropout_by_rank, ("fsdp2", "ddp"), Case(dropout=0.2, num_micro_batches=4)),
    "unfrozen": (train_what_is_frozen, ("fsdp2",), Case(freeze=(r"^perception\.encoder\..+",))),
}
LAYOUTS = {
    "fsdp2": Layout("fsdp2", 2),
    "hsdp": Layout("hsdp", 4, sizes=ParallelismSizes(dp_replicate_size=2)),
    "ddp": Layout("ddp", 2, "ddp"),
}


def run_with_fault(rank: int, world: int, fault: str, layout: str) -> Record | None:
    plant, _, case = FAULTS[fault]
    plant()  # this rank is a forked process: the fault dies with it
    return run_layout(rank, world, case, LAYOUTS[layout])


@pytest.mark.parametrize(
    ("fault", "layout"), [(name, layout) for name, (_, layouts, _) in FAULTS.items() for layout in layouts]
)
def test_a_planted_fault_breaks_parity(ranks: RankRunner, fault: str, layout: str) -> None:
    case = FAULTS[fault][2]
    actual = ranks(run_with_fault, LAYOUTS[layout].world, fault, layout)[0]
    with pytest.raises(AssertionError):
        assert_parity(actual, reference(case), case)
