"""Case 11: a sequence that the ranks do not divide is truncated, takes another shape, or hangs."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from shoal.mesh import regions
from tests.cases.test_case_05_labels_shift_before_sharding import CASE
from tests.parity.harness import CPU, Layout, plan_of
from tests.zygote import RankRunner


def logits(rank: int, world: int, length: int) -> torch.Tensor:
    from shoal.config.schema import FSDP2Config, ParallelismSizes
    from shoal.models.assemble import Numerics, assemble
    from shoal.parallel.setup import DistributedSetup

    setup = None
    if world > 1:
        setup = DistributedSetup.build(FSDP2Config(sequence_parallel=True), ParallelismSizes(tp_size=world))
    model = assemble(plan_of(CASE, Layout("any", world)), setup, Numerics(stored=torch.float64), CPU)
    state = model.module.tensor_parallel
    if state is not None:
        state.full_logits = True
    ids = torch.arange(4, 4 + length)[None].expand(2, -1)
    out = _through_the_root(model.module, ids)
    return out.detach()


def _through_the_root(module: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """The logits, from inside of the root's forward, where its parameters are gathered."""
    kept = []
    handle = module.llm.register_forward_hook(lambda _module, _inputs, output: kept.append(output.logits))
    module._chunked = False
    module.tensor_parallel, state = None, module.tensor_parallel  # the loss is not looked at
    module({"input_ids": ids, "loss_mask": torch.ones_like(ids, dtype=torch.bool)})
    module.tensor_parallel = state
    handle.remove()
    return kept[0]


@pytest.mark.parametrize(("world", "length"), [(2, 4), (2, 5), (4, 5), (4, 2)])
def test_any_length_on_any_number_of_ranks(ranks: RankRunner, world: int, length: int) -> None:
    expected = logits(0, 1, length)
    assert expected.shape[:2] == (2, length - 1)  # those with a label
    for actual in ranks(logits, world, length):
        torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)


def round_trip(rank: int, world: int, length: int) -> tuple[torch.Size, torch.Tensor]:
    group = dist.group.WORLD
    assert group is not None
    full = torch.arange(2.0 * length * 3).view(2, length, 3)
    own = regions.scatter_sequence(full, group)
    return own.shape, regions.gather_replicated(own, group, length)


@pytest.mark.parametrize("length", [1, 4, 5])
def test_a_full_tensor_is_cut_and_not_taken_for_a_part(ranks: RankRunner, length: int) -> None:
    for shape, whole in ranks(round_trip, 2, length):
        assert shape == (2, -(-length // 2), 3)
        assert torch.equal(whole, torch.arange(2.0 * length * 3).view(2, length, 3))
