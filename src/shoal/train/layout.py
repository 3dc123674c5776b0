"""The table every run prints at start: how the job is laid out."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from torch.distributed.tensor import DTensor

from shoal.config.schema import ParallelismSizes
from shoal.kernels.check import KernelReport
from shoal.mesh.sizes import ResolvedSizes, resolve_sizes
from shoal.parallel.setup import DistributedSetup


def layout_table(
    setup: DistributedSetup | None, precision: str, module: nn.Module, kernels: Sequence[KernelReport] = ()
) -> str:
    """Formats sizes, strategy, precision, kernels and parameter counts as aligned lines.

    Args:
        setup: None for one process without a process group.
        precision: Name of the precision.
        module: The assembled model; shards are counted as shards, ties once.
        kernels: What the check of the chosen kernels found.
    """
    sizes = resolve_sizes(ParallelismSizes(), 1) if setup is None else setup.mesh_context.sizes
    strategy = "none" if setup is None else _strategy_name(setup)
    rows = {**_size_rows(sizes), "strategy": strategy, "precision": precision, **_kernel_rows(module)}
    if kernels:
        rows["checked"] = _check_row(kernels)
    rows.update(_parameter_rows(module))
    width = max(map(len, rows))
    lines = [f"  {name:<{width}}  {value}" for name, value in rows.items()]
    return "\n".join(["layout", *lines])


def _size_rows(sizes: ResolvedSizes) -> dict[str, str]:
    names = ("world", "pp", "dp_replicate", "dp_shard", "cp", "tp", "ep", "ep_shard")
    return {name: str(getattr(sizes, name)) for name in names}


def _strategy_name(setup: DistributedSetup) -> str:
    return type(setup.strategy_config).__name__.removesuffix("Config").lower()


def _kernel_rows(module: nn.Module) -> dict[str, str]:
    """Attention and expert implementations, as the models themselves report them."""
    configs = [m.config for m in module.modules() if hasattr(m, "config") and hasattr(m, "_init_weights")]
    attention = dict.fromkeys(str(getattr(c, "_attn_implementation", None)) for c in configs)
    experts = dict.fromkeys(
        str(getattr(c, "_experts_implementation", None)) for c in configs if hasattr(c, "num_experts")
    )
    return {"attention": ", ".join(attention) or "none", "experts": ", ".join(experts) or "none"}


def _check_row(kernels: Sequence[KernelReport]) -> str:
    """Which kernel was picked, why, and how far outputs and gradients are from the reference."""
    worst: dict[str, float] = {}
    for report in kernels:
        worst[report.kernel] = max(worst.get(report.kernel, 0.0), *report.errors.values())
    return ", ".join(f"{name} {error:.0e}" for name, error in worst.items()) + " from the reference"


def _parameter_rows(module: nn.Module) -> dict[str, str]:
    parameters = list(module.parameters())
    local = sum((p.to_local() if isinstance(p, DTensor) else p).numel() for p in parameters)
    return {
        "parameters": f"{sum(p.numel() for p in parameters):,}",
        "trainable": f"{sum(p.numel() for p in parameters if p.requires_grad):,}",
        "on this rank": f"{local:,}",
    }
