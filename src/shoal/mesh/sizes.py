"""Which rank sits where on the mesh: pure arithmetic, without torch and without processes."""

from __future__ import annotations

from dataclasses import dataclass

from shoal.config.errors import ConfigError
from shoal.config.layout import Layout, layout_findings
from shoal.config.schema import ParallelismSizes
from shoal.mesh.axes import MeshAxisName


@dataclass(frozen=True)
class MeshCoordinate:
    """Where one rank sits; `dp` and the expert coordinates follow from the five of the mesh."""

    pp: int
    dp_replicate: int
    dp_shard: int
    cp: int
    tp: int
    dp: int
    ep_shard: int
    ep: int


@dataclass(frozen=True)
class ResolvedSizes:
    """The size of every axis; built by `resolve_sizes`, which checks that they fit.

    world = pp * dp_replicate * dp_shard * cp * tp, and dp_replicate * dp_shard * cp = ep_shard * ep.
    """

    world: int
    pp: int
    dp_replicate: int
    dp_shard: int
    cp: int
    tp: int
    ep: int
    ep_shard: int

    @property
    def dp(self) -> int:
        """Number of data-parallel coordinates: ranks that see different data."""
        return self.dp_replicate * self.dp_shard

    def size(self, axis: MeshAxisName) -> int:
        """Number of ranks along `axis`, flattened and expert axes included."""
        flattened = {
            MeshAxisName.DP_SHARD_CP: self.dp_shard * self.cp,
            MeshAxisName.DP_CP: self.dp * self.cp,
        }
        return flattened[axis] if axis in flattened else int(getattr(self, axis.value))

    def coordinate(self, rank: int) -> MeshCoordinate:
        """Where `rank` sits. Raises ValueError for a rank outside the world."""
        if not 0 <= rank < self.world:
            raise ValueError(f"rank = {rank} is outside 0..{self.world - 1}; pass a rank of this job")
        rest, tp = divmod(rank, self.tp)
        pp, dp_cp = divmod(rest, self.dp * self.cp)
        dp, cp = divmod(dp_cp, self.cp)
        dp_replicate, dp_shard = divmod(dp, self.dp_shard)
        ep_shard, ep = divmod(dp_cp, self.ep)
        return MeshCoordinate(pp, dp_replicate, dp_shard, cp, tp, dp, ep_shard, ep)

    def group_ranks(self, axis: MeshAxisName, rank: int) -> tuple[int, ...]:
        """Ranks that share every other coordinate with `rank`, ordered by their position along `axis`."""
        stride, count = self._stride(axis), self.size(axis)
        first = rank - (rank // stride % count) * stride
        self.coordinate(rank)  # refuses a rank outside the world
        return tuple(first + position * stride for position in range(count))

    def _stride(self, axis: MeshAxisName) -> int:
        """Distance in ranks of neighbours along `axis`: the product of the sizes of the faster axes."""
        return {
            MeshAxisName.TP: 1,
            MeshAxisName.CP: self.tp,
            MeshAxisName.DP_SHARD: self.cp * self.tp,
            MeshAxisName.DP_SHARD_CP: self.tp,
            MeshAxisName.DP_REPLICATE: self.dp_shard * self.cp * self.tp,
            MeshAxisName.DP: self.cp * self.tp,
            MeshAxisName.DP_CP: self.tp,
            MeshAxisName.PP: self.dp * self.cp * self.tp,
            MeshAxisName.EP: self.tp,
            MeshAxisName.EP_SHARD: self.ep * self.tp,
        }[axis]


def resolve_sizes(sizes: ParallelismSizes, world_size: int) -> ResolvedSizes:
    """Fill in the sizes that were left to be inferred.

    Raises ConfigError with every finding when the sizes do not fit `world_size` or each other.
    """
    layout = Layout(sizes, world_size)
    findings = layout_findings(layout)
    if findings:
        raise ConfigError(findings)
    dp = world_size // layout.ranks_per_replica
    dp_replicate = sizes.dp_replicate_size or 1
    return ResolvedSizes(
        world=world_size,
        pp=sizes.pp_size,
        dp_replicate=dp_replicate,
        dp_shard=dp // dp_replicate,
        cp=sizes.cp_size,
        tp=sizes.tp_size,
        ep=sizes.ep_size,
        ep_shard=dp * sizes.cp_size // sizes.ep_size,
    )


__all__ = ["MeshCoordinate", "ResolvedSizes", "resolve_sizes"]
