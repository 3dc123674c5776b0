"""DistributedSetup: the specification of a layout together with its mesh."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch.distributed as dist

from shoal.config.errors import ConfigError, Finding
from shoal.config.layout import Layout, agreed_checkpointing, layout_findings
from shoal.config.schema import (
    STRATEGY_OPTIONS,
    CheckpointingMode,
    MoEParallelizerConfig,
    ParallelismSizes,
    PipelineConfig,
    StrategyName,
    StrategyOptions,
)
from shoal.mesh.context import DeviceType, MeshContext
from shoal.mesh.sizes import resolve_sizes


@dataclass(frozen=True)
class DistributedSetup:
    """How one model is spread over the ranks; what model assembly and the training step work from.

    Attributes:
        mesh_context: Meshes and process groups.
        strategy_config: Options of the strategy, whose class says which strategy it is.
        pipeline_config: The pipeline schedule; None exactly when pp_size is 1.
        moe_parallel_config: Options for expert layers; None exactly when ep_size is 1.
        activation_checkpointing: The one switch, whether it was given here or on the strategy's options.
    """

    mesh_context: MeshContext
    strategy_config: StrategyOptions
    pipeline_config: PipelineConfig | None
    moe_parallel_config: MoEParallelizerConfig | None
    activation_checkpointing: CheckpointingMode

    @classmethod
    def build(
        cls,
        strategy: StrategyName | StrategyOptions = "fsdp2",
        parallelism_sizes: ParallelismSizes = ParallelismSizes(),  # noqa: B008 (frozen)
        pipeline_config: PipelineConfig | None = None,
        moe_parallel_config: MoEParallelizerConfig | None = None,
        activation_checkpointing: CheckpointingMode = False,
        world_size: int | None = None,
    ) -> DistributedSetup:
        """Check the layout, then create its meshes. Collective: every rank calls it with the same arguments.

        strategy: A name, for that strategy's defaults, or its options (FSDP2Config, ...).
        pipeline_config: None with pp_size > 1 gives the default schedule.
        moe_parallel_config: None with ep_size > 1 gives the default options.
        world_size: None takes the size of the open process group.

        Raises ConfigError with every finding, before any communication; ValueError without a process group.
        """
        name, options = _strategy(strategy)
        if not dist.is_initialized():
            raise ValueError("no process group is initialised; call shoal.initialize_distributed() first")
        world_size = dist.get_world_size() if world_size is None else world_size
        layout = Layout(
            parallelism_sizes,
            world_size,
            name,
            has_pipeline=pipeline_config is not None,
            has_moe=moe_parallel_config is not None,
            checkpointing=activation_checkpointing,
            option_checkpointing=options.activation_checkpointing,
        )
        findings = layout_findings(layout)
        if findings:
            raise ConfigError(findings)
        if parallelism_sizes.pp_size > 1 and pipeline_config is None:
            pipeline_config = PipelineConfig()
        if parallelism_sizes.ep_size > 1 and moe_parallel_config is None:
            moe_parallel_config = MoEParallelizerConfig()
        mesh_context = MeshContext.build(resolve_sizes(parallelism_sizes, world_size), _device_type(), name)
        return cls(mesh_context, options, pipeline_config, moe_parallel_config, agreed_checkpointing(layout))


def refuse_unimplemented(setup: DistributedSetup) -> None:
    """Refuse what a setup may say and no code does yet.

    A mesh with more axes can be built and asked for its groups, but a model on it would silently be replicated
    along them; and partial recomputation would silently be whole. Raises ConfigError with every finding.
    """
    sizes = setup.mesh_context.sizes
    findings = [
        Finding(
            "axis-not-implemented", f"parallelism_sizes.{axis}_size", size, "1 for now", f"{axis}_size: 1"
        )
        for axis, size in (("pp", sizes.pp), ("ep", sizes.ep))
        if size > 1
    ]
    if setup.activation_checkpointing == "selective":
        key, limit = "activation_checkpointing", "false, true or full for now"
        findings.append(Finding("mode-not-implemented", key, "selective", limit, f"{key}: true"))
    if findings:
        raise ConfigError(findings)


def _strategy(strategy: StrategyName | StrategyOptions) -> tuple[StrategyName, StrategyOptions]:
    """Name and options of a strategy that is given by either."""
    for name, options in STRATEGY_OPTIONS.items():
        if strategy == name:
            return name, options()
        if isinstance(strategy, options):
            return cast("StrategyName", name), strategy
    known = ", ".join(STRATEGY_OPTIONS)
    limit = f"{known}, or an object of {', '.join(options.__name__ for options in STRATEGY_OPTIONS.values())}"
    raise ConfigError([Finding("strategy-known", "strategy", strategy, limit, "strategy: fsdp2")])


def _device_type() -> DeviceType:
    return "cuda" if "nccl" in dist.get_backend_config() else "cpu"


__all__ = ["DistributedSetup", "refuse_unimplemented"]
