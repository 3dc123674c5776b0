"""The check of the chosen kernels when training starts, before the first step.

A fused backward can return gradients many times too large on some device while its forward is right; training would
go wrong without a message. The check costs milliseconds.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel

from shoal.kernels.check import KernelError, KernelReport, check_kernel
from shoal.kernels.check_model import check_attention
from shoal.mesh.collectives import all_gather_objects


def check_kernels(
    module: nn.Module, llm: nn.Module, dtype: torch.dtype, device: torch.device
) -> tuple[KernelReport, ...]:
    """Compares the kernels that a model has chosen with their references, forward and gradients. Collective.

    Args:
        module: The trainable module.
        llm: Its language model; nothing is checked for a model that is not of transformers.
        dtype: What it computes in.
        device: Of this rank.

    Returns:
        What was found on this rank.

    Raises:
        KernelError: On every rank, naming the ranks whose kernel is off or cannot run.
    """
    if not isinstance(llm, PreTrainedModel):
        return ()
    reports: tuple[KernelReport, ...] = ()
    complaint = None
    try:
        reports = _reports(module, llm, dtype, device)
    except Exception as error:  # whatever a kernel fails with: one rank that raises leaves the others waiting
        complaint = str(error) if isinstance(error, KernelError) else f"{type(error).__name__}: {error}"
    world = dist.group.WORLD if dist.is_initialized() else None
    found: dict[str, list[int]] = {}
    for rank, message in enumerate(all_gather_objects(complaint, world)):
        if message is not None:
            found.setdefault(message, []).append(rank)
    if found:
        blocks = (f"on ranks {', '.join(map(str, ranks))}: {message}" for message, ranks in found.items())
        raise KernelError("training has not started, a kernel failed its check\n" + "\n".join(blocks))
    return reports


def _reports(
    module: nn.Module, llm: PreTrainedModel, dtype: torch.dtype, device: torch.device
) -> tuple[KernelReport, ...]:
    spread = getattr(module, "context_parallel", None)
    attention = check_attention(llm, device, dtype, None if spread is None else spread.backend)
    return (*attention, check_kernel("loss", device, dtype=dtype))
