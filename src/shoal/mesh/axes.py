"""Names of the axes of the device mesh, and which of them each strategy's mesh has."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from shoal.config.schema import StrategyName


class MeshAxisName(StrEnum):
    """Every axis a rank can be addressed by.

    The mesh is (pp, dp_replicate, dp_shard, cp, tp), tp varying fastest over the ranks. dp, dp_shard_cp and
    dp_cp are flattened from it. The expert mesh (pp, ep_shard, ep, tp) regroups the same ranks: its
    (ep_shard, ep) are (dp_replicate, dp_shard, cp) flattened, ep fastest.
    """

    PP = "pp"
    DP = "dp"
    DP_REPLICATE = "dp_replicate"
    DP_SHARD = "dp_shard"
    DP_SHARD_CP = "dp_shard_cp"
    DP_CP = "dp_cp"
    CP = "cp"
    TP = "tp"
    EP = "ep"
    EP_SHARD = "ep_shard"


A = MeshAxisName

MESH_AXES: Mapping[StrategyName, tuple[MeshAxisName, ...]] = {
    "fsdp2": (A.PP, A.DP_REPLICATE, A.DP_SHARD, A.CP, A.TP),
    "megatron_fsdp": (A.DP, A.CP, A.TP),
    "ddp": (A.DP,),
}
"""Axes of each strategy's device mesh, slowest first."""

FLATTENED_AXES: Mapping[StrategyName, Mapping[MeshAxisName, tuple[MeshAxisName, ...]]] = {
    "fsdp2": {
        A.DP: (A.DP_REPLICATE, A.DP_SHARD),
        A.DP_SHARD_CP: (A.DP_SHARD, A.CP),
        A.DP_CP: (A.DP_REPLICATE, A.DP_SHARD, A.CP),
    },
    "megatron_fsdp": {A.DP_CP: (A.DP, A.CP)},
    "ddp": {},
}
"""Axes that each strategy's mesh has flattened from adjacent ones."""

EXPERT_AXES: tuple[MeshAxisName, ...] = (A.PP, A.EP_SHARD, A.EP)
"""Axes of the expert mesh, slowest first; tp follows when tp_size > 1."""

__all__ = ["EXPERT_AXES", "FLATTENED_AXES", "MESH_AXES", "MeshAxisName"]
