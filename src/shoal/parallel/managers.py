"""Models that are their own training module: spread over the mesh in place, called and named as before.

The gradient rule is the one of the training step. A rank's loss is the sum of its token losses divided by the
number of tokens of *all* ranks and micro-batches of the step; gradients are summed over micro-batches and ranks,
and never averaged.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from shoal.config.errors import ConfigError, Finding
from shoal.config.schema import DDPConfig, FSDP2Config
from shoal.mesh.axes import MeshAxisName
from shoal.mesh.context import MeshContext
from shoal.parallel.activation_checkpointing import checkpoint_activations
from shoal.parallel.ddp import replicate_in_place
from shoal.parallel.fsdp2 import fsdp2_model, shard_fsdp2
from shoal.parallel.model import ParallelModel
from shoal.parallel.tensor import TensorParallel, shard_tensor_parallel

_ATTRIBUTE = "_shoal_parallel"


def remember(parallel: ParallelModel) -> nn.Module:
    """Notes on a module how it is parallel, for `gradient_sync`; returns the module."""
    setattr(parallel.module, _ATTRIBUTE, parallel)
    return parallel.module


def gradient_sync(model: nn.Module, last: bool = True) -> AbstractContextManager[None]:
    """Surrounds forward and backward of one micro-batch; gradients are summed over the ranks at the last one.

    Args:
        model: From `shoal.AutoModelForCausalLM` or a manager of this file.
        last: Whether this is the step's last micro-batch. The others only add to this rank's gradients, without
            communication, unless `FSDP2Config.defer_fsdp_grad_sync` is off.

    Raises:
        ValueError: The model comes from elsewhere, so nothing is known of its gradients.
    """
    parallel = getattr(model, _ATTRIBUTE, None)
    if not isinstance(parallel, ParallelModel):
        raise ValueError(
            f"gradient_sync: {type(model).__name__} was not made parallel by Shoal; repair: build it with "
            "shoal.AutoModelForCausalLM, or call FSDP2Manager(config, mesh_context).parallelize(model)"
        )
    return parallel.gradient_sync(last)


@dataclass(frozen=True)
class FSDP2Manager:
    """Shards models that hold their weights already; to load shards only, use `shoal.AutoModelForCausalLM`.

    Attributes:
        config: Options of the strategy; mp_policy None computes in the stored dtype.
        mesh_context: From `DistributedSetup.build(...)`.
    """

    config: FSDP2Config
    mesh_context: MeshContext

    def parallelize(self, model: nn.Module) -> nn.Module:
        """Shards `model` in place and returns it; collective. Every rank must hold the same values.

        Raises:
            ConfigError: With tp_size > 1, `model` cannot be cut over tensor-parallel ranks.
            ValueError: cp_size > 1: who calls the model hands it whole sequences, which nobody splits.
        """
        if self.mesh_context.cp_size > 1:
            raise ValueError(
                f"parallelism_sizes.cp_size = {self.mesh_context.cp_size}: 1 for a model that is called directly, "
                "whose sequences nobody splits over ranks; repair: cp_size=1, or train with the LLM recipe"
            )
        state = self._cut(model) if self.mesh_context.tp_size > 1 else None
        if self.config.activation_checkpointing:
            checkpoint_activations(model)
        shard_fsdp2(model, self.mesh_context.fsdp_mesh(), self.config, self.config.mp_policy)
        assert isinstance(model, FSDPModule)
        group = self.mesh_context.group(MeshAxisName.DP)
        return remember(fsdp2_model(model, group, device_of(self.mesh_context), self.config, state))

    def _cut(self, model: nn.Module) -> TensorParallel:
        if not isinstance(model, PreTrainedModel):
            limit = "1: only causal language models of transformers have a plan for their layers"
            raise ConfigError([Finding("tp-plan", "tp_size", self.mesh_context.tp_size, limit, "tp_size: 1")])
        mesh = self.mesh_context.mesh(MeshAxisName.TP)
        state = shard_tensor_parallel(
            model, mesh, sequence_parallel=self.config.sequence_parallel, plan=self.config.tp_plan
        )
        state.full_logits = True
        return state


@dataclass(frozen=True)
class DDPManager:
    """Replicates models that hold their weights already.

    Attributes:
        config: Options of the strategy.
        mesh_context: From `DistributedSetup.build(strategy="ddp")`.
    """

    config: DDPConfig
    mesh_context: MeshContext

    def parallelize(self, model: nn.Module) -> nn.Module:
        """Replicates `model` in place and returns it; collective. Every rank must hold the same values."""
        if self.config.activation_checkpointing:
            checkpoint_activations(model)
        group = self.mesh_context.group(MeshAxisName.DP)
        return remember(replicate_in_place(model, group, device_of(self.mesh_context), self.config))


def device_of(context: MeshContext) -> torch.device:
    """Where this rank computes: the current device of the mesh's kind."""
    kind = context.device_mesh.device_type
    return torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)
