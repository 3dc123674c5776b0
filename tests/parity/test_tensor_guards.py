"""The table of tensor parallelism can fail: each planted fault, of a kind met elsewhere, is noticed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import shoal.mesh.regions as regions
import shoal.parallel.tensor.apply as apply_module
import shoal.parallel.tensor.blocks as blocks_module
import shoal.train.clip as clip_module
from shoal.config.schema import FSDP2Config, ParallelismSizes
from tests.parity.harness import Layout, Record, assert_parity, reference, run_layout
from tests.parity.text import text_case
from tests.zygote import RankRunner

LAYOUTS = {
    "tp": Layout("dp2-tp2", 4, sizes=ParallelismSizes(tp_size=2)),
    "sp": Layout("tp2-sp", 2, sizes=ParallelismSizes(tp_size=2), fsdp2=FSDP2Config(sequence_parallel=True)),
    "tp4": Layout("tp4", 4, sizes=ParallelismSizes(tp_size=4)),
    "sp4": Layout("tp4-sp", 4, sizes=ParallelismSizes(tp_size=4), fsdp2=FSDP2Config(sequence_parallel=True)),
}
CASE, BIASED = text_case("qwen3", 3), text_case("llama-odd", 3)


def leave_partial_gradients() -> None:
    """Forgets to sum the gradients of norms, and of key-value heads that ranks share."""
    apply_module.TensorParallel.sum_partial_gradients = lambda self: None  # type: ignore[method-assign]


def sum_complete_gradients() -> None:
    """Sums gradients that every rank has computed in full as well."""
    blocks_module.Blocks.is_partial = lambda self, name: True  # type: ignore[method-assign]


def no_sum_at_the_entrance() -> None:
    """The gradient of a block's input stays that of the rank's own heads."""
    regions._Copy.backward = staticmethod(lambda ctx, gradient: (gradient, None))  # type: ignore[assignment]


def average_at_the_exit() -> None:
    """Averages the partial results of a block."""
    honest = regions._all_reduced
    regions._all_reduced = lambda tensor, group: honest(tensor, group) / group.size()


def truncate_the_sequence() -> None:
    """Loses the tokens that do not divide by the number of ranks."""
    honest = apply_module.TensorParallel.scatter

    def scatter(self: Any, hidden: Tensor) -> Tensor:
        kept = hidden.shape[1] // self.size * self.size
        lost = hidden.shape[1] - kept
        return honest(self, torch.nn.functional.pad(hidden[:, :kept], (0, 0, 0, lost)))

    apply_module.TensorParallel.scatter = scatter  # type: ignore[method-assign]


def every_rank_adds_the_bias() -> None:
    """Adds the bias behind a sum once for each rank."""
    import shoal.parallel.tensor.styles as styles

    styles._zero = lambda parameter: parameter


def count_replicas_in_the_norm() -> None:
    """Counts a gradient that ranks have in common once for each of them."""
    honest = clip_module._norm_of_one_place

    def norm(parameters: list[Any], norm_type: float) -> Tensor:
        value = honest(parameters, norm_type)
        whole = getattr(parameters[0], "device_mesh", None)
        return value * 2**0.5 if whole is not None and whole.ndim == 1 else value

    clip_module._norm_of_one_place = norm


def skip_strided_shards_in_the_norm() -> None:
    """Takes what FSDP2 makes of a cut parameter for a replica."""
    from torch.distributed.tensor.placement_types import _StridedShard

    _StridedShard.is_replicate = lambda self: True


FAULTS: dict[str, tuple[Callable[[], None], str, Any]] = {
    "partial-gradients": (leave_partial_gradients, "tp", CASE),
    "partial-gradients-of-norms": (leave_partial_gradients, "sp", CASE),
    "partial-gradients-of-shared-heads": (leave_partial_gradients, "tp4", BIASED),
    "complete-gradients-summed": (sum_complete_gradients, "tp", CASE),
    "entrance": (no_sum_at_the_entrance, "tp", CASE),
    "exit": (average_at_the_exit, "tp", CASE),
    "truncation": (truncate_the_sequence, "sp4", CASE),
    "bias": (every_rank_adds_the_bias, "tp", BIASED),
    "norm-of-replicas": (count_replicas_in_the_norm, "tp", CASE),
    "norm-of-strided-shards": (skip_strided_shards_in_the_norm, "tp", CASE),
}


def run_with_fault(rank: int, world: int, fault: str) -> Record | None:
    plant, layout, case = FAULTS[fault]
    plant()  # this rank is a forked process: the fault dies with it
    return run_layout(rank, world, case, LAYOUTS[layout])


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_breaks_parity(ranks: RankRunner, fault: str) -> None:
    _, layout, case = FAULTS[fault]
    actual = ranks(run_with_fault, LAYOUTS[layout].world, fault)[0]
    with pytest.raises(AssertionError):
        assert_parity(actual, reference(case), case)
