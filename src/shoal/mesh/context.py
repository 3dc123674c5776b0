"""MeshContext: the device meshes of a run, and the process group of every axis."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shoal.config.schema import StrategyName
from shoal.mesh.axes import EXPERT_AXES, FLATTENED_AXES, MESH_AXES, MeshAxisName
from shoal.mesh.sizes import MeshCoordinate, ResolvedSizes

DeviceType = Literal["cpu", "cuda"]


@dataclass(frozen=True)
class MeshContext:
    """The meshes a model is spread over; the same object describes one process and a thousand.

    Attributes:
        device_mesh: (pp, dp_replicate, dp_shard, cp, tp) with dp, dp_shard_cp and dp_cp flattened from it;
            for megatron_fsdp (dp, cp, tp) with dp_cp; for ddp (dp).
        moe_mesh: (pp, ep_shard, ep), and tp when tp > 1, over the same ranks; None when ep is 1.
        sizes: The size of every axis.
        strategy: Whose axes the device mesh has.
        flattened: The one-dimensional meshes of the flattened axes; slicing them out of `device_mesh` by name
            is deprecated in torch.
    """

    device_mesh: DeviceMesh
    moe_mesh: DeviceMesh | None
    sizes: ResolvedSizes
    strategy: StrategyName
    flattened: Mapping[MeshAxisName, DeviceMesh]

    @classmethod
    def build(
        cls, sizes: ResolvedSizes, device_type: DeviceType, strategy: StrategyName = "fsdp2"
    ) -> MeshContext:
        """Create the meshes and the process groups of their axes. Collective: every rank calls it.

        Raises ValueError when no process group is initialised or its size is not `sizes.world`.
        """
        if not dist.is_initialized():
            raise ValueError("no process group is initialised; call shoal.initialize_distributed() first")
        if dist.get_world_size() != sizes.world:
            raise ValueError(
                f"sizes.world = {sizes.world} but the process group has {dist.get_world_size()} ranks; "
                f"resolve the sizes for {dist.get_world_size()} ranks"
            )
        axes = MESH_AXES[strategy]
        shape = tuple(sizes.size(axis) for axis in axes)
        device_mesh = init_device_mesh(device_type, shape, mesh_dim_names=_names(axes))
        flattened = {
            flat: device_mesh[_names(parts)]._flatten(flat.value)
            for flat, parts in FLATTENED_AXES[strategy].items()
        }
        return cls(device_mesh, _build_moe_mesh(sizes, device_type), sizes, strategy, flattened)

    @property
    def coordinate(self) -> MeshCoordinate:
        """Where this rank sits."""
        return self.sizes.coordinate(dist.get_rank())

    @property
    def dp_rank(self) -> int:
        """Data-parallel coordinate of this rank: which share of the data it sees."""
        return self.coordinate.dp

    @property
    def dp_size(self) -> int:
        """Number of data-parallel coordinates."""
        return self.sizes.dp

    @property
    def dp_replicate_size(self) -> int:
        """Number of replicas under hybrid sharding."""
        return self.sizes.dp_replicate

    @property
    def dp_shard_size(self) -> int:
        """Number of data-parallel ranks that share one replica's parameters."""
        return self.sizes.dp_shard

    @property
    def cp_size(self) -> int:
        """Degree of context parallelism."""
        return self.sizes.cp

    @property
    def tp_size(self) -> int:
        """Degree of tensor parallelism."""
        return self.sizes.tp

    @property
    def pp_size(self) -> int:
        """Number of pipeline ranks."""
        return self.sizes.pp

    @property
    def ep_size(self) -> int:
        """Degree of expert parallelism."""
        return self.sizes.ep

    def mesh(self, axis: MeshAxisName) -> DeviceMesh:
        """The one-dimensional mesh of `axis` that this rank belongs to, flattened axes included.

        Raises ValueError when this run's meshes do not have the axis.
        """
        if axis in self.flattened:
            return self.flattened[axis]
        if axis in MESH_AXES[self.strategy]:
            return self.device_mesh[axis.value]
        if axis in (MeshAxisName.EP, MeshAxisName.EP_SHARD) and self.moe_mesh is not None:
            return self.moe_mesh[axis.value]
        known = [*MESH_AXES[self.strategy], *self.flattened]
        if self.moe_mesh is not None:
            known += [MeshAxisName.EP_SHARD, MeshAxisName.EP]
        raise ValueError(
            f"axis = {axis.value!r} is not on the {self.strategy} mesh with ep_size {self.ep_size}; "
            f"it has {', '.join(name.value for name in known)}"
        )

    def group(self, axis: MeshAxisName) -> ProcessGroup:
        """The process group of `axis` that this rank belongs to."""
        return self.mesh(axis).get_group()

    def group_over(self, axes: Collection[MeshAxisName]) -> ProcessGroup | None:
        """The ranks that differ from this one along `axes` alone, or None when all of them have size 1.

        Rank 0 of the group has coordinate 0 on every one of the axes. Over several axes the group is created
        when it is first asked for, which is collective: every rank asks. Raises ValueError for an expert axis.
        """
        flattened = FLATTENED_AXES[self.strategy]
        parts = {part for axis in axes for part in flattened.get(axis, (axis,)) if self.sizes.size(part) > 1}
        wide = tuple(axis for axis in MESH_AXES[self.strategy] if axis in parts)
        if len(wide) < len(parts):
            refused = ", ".join(sorted(parts.difference(wide)))
            limit = ", ".join(MESH_AXES[self.strategy])
            raise ValueError(f"axes = {refused}: no axes of the {self.strategy} mesh; name some of {limit}")
        if len(wide) < 2:
            return self.group(wide[0]) if wide else None
        return self.device_mesh[_names(wide)]._flatten("_".join(wide)).get_group()

    def fsdp_mesh(self) -> DeviceMesh:
        """The mesh that parameters are sharded over.

        One-dimensional (dp_shard_cp), or (dp_replicate, dp_shard_cp) under hybrid sharding. Context-parallel
        ranks hold the same parameters, so they share the shards. Raises ValueError for other strategies.
        """
        if self.strategy != "fsdp2":
            raise ValueError(f"strategy = {self.strategy!r} has no FSDP2 mesh; use strategy='fsdp2'")
        if self.dp_replicate_size > 1:
            axes = (MeshAxisName.DP_REPLICATE, MeshAxisName.DP_SHARD_CP)
            return DeviceMesh._concatenate([self.mesh(axis) for axis in axes])
        return self.mesh(MeshAxisName.DP_SHARD_CP)


def _build_moe_mesh(sizes: ResolvedSizes, device_type: DeviceType) -> DeviceMesh | None:
    if sizes.ep == 1:
        return None
    axes = EXPERT_AXES + ((MeshAxisName.TP,) if sizes.tp > 1 else ())
    ranks = torch.arange(sizes.world).view([sizes.size(axis) for axis in axes])
    return DeviceMesh(device_type, ranks, mesh_dim_names=_names(axes))


def _names(axes: tuple[MeshAxisName, ...]) -> tuple[str, ...]:
    return tuple(axis.value for axis in axes)


__all__ = ["DeviceType", "MeshContext"]
