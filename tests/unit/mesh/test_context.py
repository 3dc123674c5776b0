"""MeshContext against torch's own meshes: any rank of up to 1,024 can be impersonated without processes."""

import random
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from shoal.config.schema import ParallelismSizes, StrategyName
from shoal.mesh.axes import MeshAxisName
from shoal.mesh.context import MeshContext
from shoal.mesh.sizes import ResolvedSizes, resolve_sizes
from tests.zygote import RankRunner

A = MeshAxisName
NUM_LAYOUTS = 240
MAX_WORLD = 1024


@contextmanager
def impersonate(rank: int, world_size: int) -> Iterator[None]:
    """Be one rank of a job that does not exist."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def random_layouts(count: int) -> list[tuple[ParallelismSizes, int]]:
    """Distinct valid layouts with up to 1,024 ranks, large worlds included."""
    generator = random.Random(1)
    layouts: dict[tuple[int, ...], tuple[ParallelismSizes, int]] = {}
    while len(layouts) < count:
        pp, replicate, shard, cp, tp = (generator.choice([1, 1, 2, 3, 4, 8]) for _ in range(5))
        world, dp_cp = pp * replicate * shard * cp * tp, replicate * shard * cp
        if world > MAX_WORLD or (replicate > 1 and shard == 1):
            continue
        ep = generator.choice([n for n in range(1, dp_cp + 1) if dp_cp % n == 0])
        sizes = ParallelismSizes(None, replicate, tp, pp, cp, ep)
        layouts[(pp, replicate, shard, cp, tp, ep)] = (sizes, world)
    return list(layouts.values())


def test_every_axis_of_random_layouts_agrees_with_the_rank_arithmetic() -> None:
    generator = random.Random(2)
    layouts = random_layouts(NUM_LAYOUTS)
    assert max(world for _, world in layouts) > 512
    for given, world in layouts:
        sizes = resolve_sizes(given, world)
        rank = generator.randrange(world)
        with impersonate(rank, world):
            context = MeshContext.build(sizes, "cpu")
            assert (context.moe_mesh is not None) == (sizes.ep > 1)
            for axis in A:
                if axis in (A.EP, A.EP_SHARD) and sizes.ep == 1:
                    continue
                _check_axis(context, sizes, axis, rank)


def _check_axis(context: MeshContext, sizes: ResolvedSizes, axis: MeshAxisName, rank: int) -> None:
    group = dist.get_process_group_ranks(context.group(axis))
    assert tuple(group) == sizes.group_ranks(axis, rank), (sizes, axis, rank)
    mesh = context.mesh(axis)
    assert (mesh.ndim, mesh.size()) == (1, sizes.size(axis))
    if axis not in (A.DP_SHARD_CP, A.DP_CP):
        assert mesh.get_local_rank() == getattr(context.coordinate, axis)


def test_the_flattened_expert_mesh_is_the_data_and_context_ranks() -> None:
    sizes = resolve_sizes(
        ParallelismSizes(dp_replicate_size=2, tp_size=2, pp_size=2, cp_size=2, ep_size=4), 64
    )
    with impersonate(37, 64):
        context = MeshContext.build(sizes, "cpu")
        assert context.device_mesh.mesh_dim_names == ("pp", "dp_replicate", "dp_shard", "cp", "tp")
        assert context.moe_mesh is not None
        assert context.moe_mesh.mesh_dim_names == ("pp", "ep_shard", "ep", "tp")
        assert torch.equal(context.moe_mesh.mesh, context.device_mesh.mesh.view(2, 4, 4, 2))


def test_the_expert_mesh_has_a_tensor_axis_only_when_there_is_one() -> None:
    with impersonate(3, 8):
        context = MeshContext.build(resolve_sizes(ParallelismSizes(ep_size=4), 8), "cpu")
        assert context.moe_mesh is not None
        assert context.moe_mesh.mesh_dim_names == ("pp", "ep_shard", "ep")


def test_parameters_are_sharded_over_data_and_context_ranks() -> None:
    with impersonate(0, 8):
        mesh = MeshContext.build(resolve_sizes(ParallelismSizes(cp_size=2, tp_size=2), 8), "cpu").fsdp_mesh()
        assert (mesh.mesh_dim_names, mesh.mesh.tolist()) == (("dp_shard_cp",), [0, 2, 4, 6])


def test_hybrid_sharding_replicates_over_the_slower_axis() -> None:
    sizes = resolve_sizes(ParallelismSizes(dp_replicate_size=2, cp_size=2, tp_size=2), 16)
    with impersonate(5, 16):
        context = MeshContext.build(sizes, "cpu")
        mesh = context.fsdp_mesh()
        assert mesh.mesh_dim_names == ("dp_replicate", "dp_shard_cp")
        assert mesh.mesh.tolist() == [[1, 3, 5, 7], [9, 11, 13, 15]]
        # FSDP2 on top of tensor parallelism needs both meshes to come from one root.
        assert mesh._get_root_mesh() is context.device_mesh


@pytest.mark.parametrize(
    ("strategy", "sizes", "names", "present"),
    [
        ("ddp", ParallelismSizes(), ("dp",), {A.DP}),
        (
            "megatron_fsdp",
            ParallelismSizes(cp_size=2, tp_size=2),
            ("dp", "cp", "tp"),
            {A.DP, A.CP, A.TP, A.DP_CP},
        ),
    ],
)
def test_other_strategies_have_their_own_axes(
    strategy: StrategyName, sizes: ParallelismSizes, names: tuple[str, ...], present: set[MeshAxisName]
) -> None:
    resolved = resolve_sizes(sizes, 8)
    with impersonate(6, 8):
        context = MeshContext.build(resolved, "cpu", strategy)
        assert context.device_mesh.mesh_dim_names == names
        for axis in A:
            if axis in present:
                _check_axis(context, resolved, axis, 6)
            else:
                with pytest.raises(ValueError, match=f"axis = '{axis.value}' is not on the {strategy} mesh"):
                    context.mesh(axis)
        with pytest.raises(ValueError, match="has no FSDP2 mesh"):
            context.fsdp_mesh()


def test_no_deprecated_slicing() -> None:
    with impersonate(0, 8), warnings.catch_warnings():
        warnings.simplefilter("error")
        sizes = resolve_sizes(ParallelismSizes(dp_replicate_size=2, tp_size=2, ep_size=2), 8)
        context = MeshContext.build(sizes, "cpu")
        for axis in A:
            context.group(axis)
        context.fsdp_mesh()


def test_sizes_of_another_world_are_refused() -> None:
    with impersonate(0, 4), pytest.raises(ValueError, match=r"sizes\.world = 8 but the process group has 4"):
        MeshContext.build(resolve_sizes(ParallelismSizes(), 8), "cpu")


def test_a_mesh_needs_a_process_group() -> None:
    with pytest.raises(ValueError, match="initialize_distributed"):
        MeshContext.build(resolve_sizes(ParallelismSizes(), 1), "cpu")


def test_private_names_of_torch_still_exist() -> None:
    assert callable(DeviceMesh._flatten) and callable(DeviceMesh._concatenate)


def sums_per_axis(rank: int, world_size: int) -> dict[str, float]:
    sizes = resolve_sizes(ParallelismSizes(dp_replicate_size=2, tp_size=2, ep_size=2), world_size)
    context = MeshContext.build(sizes, "cpu")
    sums = {}
    for axis in A:
        total = torch.tensor(float(2**rank))
        dist.all_reduce(total, group=context.group(axis))
        sums[axis.value] = float(total)
    return sums


def test_groups_communicate_with_the_ranks_the_arithmetic_names(ranks: RankRunner) -> None:
    sizes = resolve_sizes(ParallelismSizes(dp_replicate_size=2, tp_size=2, ep_size=2), 8)
    for rank, sums in enumerate(ranks(sums_per_axis, 8)):
        for axis in A:
            assert sums[axis.value] == sum(2**member for member in sizes.group_ranks(axis, rank))
