"""Rank arithmetic: properties that hold for every layout, and the refusals of sizes that do not fit."""

import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.config.errors import ConfigError
from shoal.config.schema import ParallelismSizes
from shoal.mesh.axes import MeshAxisName
from shoal.mesh.sizes import ResolvedSizes, resolve_sizes

SMALL = st.integers(1, 4)
A = MeshAxisName


@st.composite
def resolved(draw: st.DrawFn) -> ResolvedSizes:
    """Sizes of any valid layout of up to 1,024 ranks."""
    pp, replicate, shard, cp, tp = (draw(SMALL) for _ in range(5))
    if shard == 1:
        replicate = 1  # hybrid sharding needs at least two shards in a replica
    dp_cp = replicate * shard * cp
    ep = draw(st.sampled_from([n for n in range(1, dp_cp + 1) if dp_cp % n == 0]))
    sizes = ParallelismSizes(dp_replicate_size=replicate, tp_size=tp, pp_size=pp, cp_size=cp, ep_size=ep)
    return resolve_sizes(sizes, pp * dp_cp * tp)


@given(resolved())
def test_products(sizes: ResolvedSizes) -> None:
    assert sizes.world == sizes.pp * sizes.dp_replicate * sizes.dp_shard * sizes.cp * sizes.tp
    assert sizes.ep * sizes.ep_shard == sizes.dp * sizes.cp
    assert sizes.dp == sizes.dp_replicate * sizes.dp_shard


@given(resolved(), st.sampled_from(list(A)))
def test_the_groups_of_an_axis_partition_the_world(sizes: ResolvedSizes, axis: MeshAxisName) -> None:
    groups = {sizes.group_ranks(axis, rank) for rank in range(sizes.world)}
    assert Counter(rank for group in groups for rank in group) == Counter(range(sizes.world))
    assert {len(group) for group in groups} == {sizes.size(axis)}


@given(resolved(), st.sampled_from([A.PP, A.DP_REPLICATE, A.DP_SHARD, A.DP, A.CP, A.TP, A.EP, A.EP_SHARD]))
def test_a_group_is_ordered_by_the_coordinate_along_its_axis(
    sizes: ResolvedSizes, axis: MeshAxisName
) -> None:
    for rank in range(0, sizes.world, max(1, sizes.world // 16)):
        group = sizes.group_ranks(axis, rank)
        assert [getattr(sizes.coordinate(member), axis) for member in group] == list(range(len(group)))
        assert group[getattr(sizes.coordinate(rank), axis)] == rank


@given(resolved())
def test_coordinates_are_unique_and_flattened_axes_compose(sizes: ResolvedSizes) -> None:
    places = {sizes.coordinate(rank) for rank in range(sizes.world)}
    assert len(places) == sizes.world
    rank = sizes.world - 1
    by_parts = {
        member
        for first in sizes.group_ranks(A.DP_REPLICATE, rank)
        for second in sizes.group_ranks(A.DP_SHARD, first)
        for member in sizes.group_ranks(A.CP, second)
    }
    assert tuple(sorted(by_parts)) == sizes.group_ranks(A.DP_CP, rank)
    by_experts = {m for s in sizes.group_ranks(A.EP_SHARD, rank) for m in sizes.group_ranks(A.EP, s)}
    assert by_experts == by_parts


@given(resolved())
def test_neighbours_on_faster_axes_are_closer(sizes: ResolvedSizes) -> None:
    order = (A.TP, A.CP, A.DP_SHARD, A.DP_REPLICATE, A.PP)
    strides = [group[1] - group[0] for axis in order if len(group := sizes.group_ranks(axis, 0)) > 1]
    assert strides == sorted(strides)
    if sizes.ep > 1:
        assert sizes.group_ranks(A.EP, 0) == tuple(range(0, sizes.ep * sizes.tp, sizes.tp))


def test_everything_is_inferred_from_the_world() -> None:
    assert resolve_sizes(ParallelismSizes(), 6) == ResolvedSizes(6, 1, 1, 6, 1, 1, 1, 6)
    assert resolve_sizes(
        ParallelismSizes(dp_replicate_size=2, tp_size=2, cp_size=2, ep_size=4), 16
    ) == ResolvedSizes(world=16, pp=1, dp_replicate=2, dp_shard=2, cp=2, tp=2, ep=4, ep_shard=2)


def test_a_rank_outside_the_world_is_refused() -> None:
    sizes = resolve_sizes(ParallelismSizes(tp_size=2), 4)
    for rank in (-1, 4):
        with pytest.raises(ValueError, match=r"outside 0\.\.3"):
            sizes.coordinate(rank)
        with pytest.raises(ValueError, match=r"outside 0\.\.3"):
            sizes.group_ranks(A.TP, rank)


def test_every_finding_is_reported_at_once() -> None:
    with pytest.raises(ConfigError) as refusal:
        resolve_sizes(ParallelismSizes(dp_size=3, dp_replicate_size=2, tp_size=4, ep_size=7), 6)
    assert [finding.rule for finding in refusal.value.findings] == [
        "axes-divide-world",
        "dp-size-fills-world",
        "dp-replicate-size-divides-dp-size",
        "ep-size-divides-dp-times-cp",
    ]
    for finding in refusal.value.findings:
        assert finding.key.startswith("parallelism_sizes.")
        assert finding.key in str(refusal.value) and finding.repair in str(refusal.value)


@given(
    world=st.integers(1, 24),
    dp=st.none() | st.integers(1, 6),
    replicate=st.none() | st.integers(1, 4),
    tp=SMALL,
    pp=SMALL,
    cp=SMALL,
    ep=SMALL,
)
def test_sizes_are_refused_exactly_when_they_do_not_fit(
    world: int, dp: int | None, replicate: int | None, tp: int, pp: int, cp: int, ep: int
) -> None:
    data_parallel = world / (tp * pp * cp)
    fits = (
        data_parallel.is_integer()
        and (dp is None or dp == data_parallel)
        and (
            replicate in (None, 1) or ((data_parallel / replicate).is_integer() and replicate < data_parallel)
        )
        and math.fmod(data_parallel * cp, ep) == 0
    )
    given_sizes = ParallelismSizes(dp, replicate, tp, pp, cp, ep)
    if fits:
        assert resolve_sizes(given_sizes, world).dp == data_parallel
    else:
        with pytest.raises(ConfigError):
            resolve_sizes(given_sizes, world)
