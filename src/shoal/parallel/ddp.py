"""DDP: every rank holds the whole model, gradients are summed by all-reduce.

torch's DDP averages over ranks by itself; a communication hook replaces that by the sum, because the loss of a
micro-batch is already divided by the number of supervised tokens of the whole step.
"""

# No `from __future__ import annotations` here: torch checks the hook's annotations, which must be the classes.
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import GradBucket, ProcessGroup  # type: ignore[attr-defined]
from torch.distributed._composable.replicate import replicate
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from shoal.config.schema import DDPConfig
from shoal.parallel.model import MicroBatch, ParallelModel, Sums, surrounded
from shoal.parallel.summed import SummedGradients


def sum_gradients_hook(group: ProcessGroup, bucket: GradBucket) -> Future[torch.Tensor]:
    """All-reduces a bucket of gradients with SUM; half-precision gradients are reduced in fp32.

    The gradient of each parameter becomes the sum over the ranks, identical on all of them.
    """
    buffer = bucket.buffer()
    wide = buffer.float() if buffer.dtype in (torch.bfloat16, torch.float16) else buffer
    future = dist.all_reduce(wide, op=dist.ReduceOp.SUM, group=group, async_op=True).get_future()

    def store(done: Future[list[torch.Tensor]]) -> torch.Tensor:
        reduced = done.value()[0]
        return reduced if wide is buffer else buffer.copy_(reduced)

    stored: Future[torch.Tensor] = future.then(store)
    return stored


def wrap_ddp(
    module: nn.Module,
    group: ProcessGroup,
    device: torch.device,
    config: DDPConfig,
    autocast: torch.dtype | None = None,
) -> ParallelModel:
    """Replicates a materialised and loaded module over `group`.

    Args:
        module: The whole trainable module, on `device`, with the same values on every rank.
        group: The data-parallel group.
        device: The device of this rank.
        config: The flags of torch's DDP wrapper.
        autocast: Compute dtype of mixed precision; None computes in the stored dtype.
    """
    wrapper = DistributedDataParallel(
        module,
        device_ids=[device] if device.type == "cuda" else None,
        process_group=group,
        **_flags(config),
    )
    wrapper.register_comm_hook(group, sum_gradients_hook)

    def gradient_sync(last: bool) -> AbstractContextManager[None]:
        return nullcontext() if last else wrapper.no_sync()

    return ParallelModel(module, autocasting(wrapper, device, autocast), gradient_sync, group, device)


def replicate_in_place(
    model: nn.Module, group: ProcessGroup, device: torch.device, config: DDPConfig
) -> ParallelModel:
    """Replicates a loaded model over `group` without wrapping it: it is called, and named, as before.

    torch's composable DDP does with hooks what the wrapper does in its forward. `gradient_sync` has to surround the
    forward as well as the backward.

    Args:
        model: On `device`, with the same values on every rank; its parameters are used in its own forward only.
        group: The data-parallel group.
        device: The device of this rank.
        config: The flags of torch's DDP wrapper.
    """
    replicate(model, process_group=group, device_id=device, **_flags(config))
    model.register_comm_hook(group, sum_gradients_hook)  # type: ignore[operator]

    @contextmanager
    def gradient_sync(last: bool) -> Iterator[None]:
        model.set_requires_gradient_sync(last)  # type: ignore[operator]
        yield

    summed = SummedGradients(model.parameters, group.size())
    sync = surrounded(gradient_sync, summed.share, summed.note)
    return ParallelModel(model, model, sync, group, device)


def _flags(config: DDPConfig) -> dict[str, Any]:
    return {
        "forward_sync_buffers": config.broadcast_buffers,
        "find_unused_parameters": config.find_unused_parameters,
        "static_graph": config.static_graph,
        "bucket_cap_mb": config.bucket_cap_mb,
        "gradient_as_bucket_view": config.gradient_as_bucket_view,
    }


def autocasting(
    module: nn.Module, device: torch.device, dtype: torch.dtype | None
) -> Callable[[MicroBatch], Sums]:
    """Runs `module` under autocast to `dtype`; None runs it as it is."""
    if dtype is None:
        return module

    def forward(micro_batch: MicroBatch) -> Sums:
        with torch.autocast(device.type, dtype):
            sums: Sums = module(micro_batch)
        return sums

    return forward
