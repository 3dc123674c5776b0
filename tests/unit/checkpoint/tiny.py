"""A tiny model with awkward shapes, its optimizer and a training step, in any data-parallel layout."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

LAYOUTS = {"fsdp": ("dp_shard",), "hsdp": ("dp_replicate", "dp_shard"), "ddp": (), "plain": ()}


class Block(nn.Module):
    """Shapes that do not divide: (5, 2) leaves one rank short on 2 or 3 ranks, (1, 2) leaves ranks empty."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(2, 5, bias=False)
        self.down = nn.Linear(5, 2)
        self.gate = nn.Parameter(torch.randn(1, 2))

    def forward(self, x: Tensor) -> Tensor:
        """[B, 2] -> [B, 2]."""
        return x + self.gate * self.down(torch.tanh(self.up(x)))


class Tiny(nn.Module):
    """Two blocks, a persistent buffer, a frozen parameter and a trainable one that gets no gradient."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(2, 3)
        self.frozen = nn.Parameter(torch.randn(3, 2), requires_grad=False)
        self.unused = nn.Parameter(torch.randn(3, 2))
        self.register_buffer("count", torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        """[B, 2] -> [B, 3]; adds the batch's size to `count`."""
        self.count += len(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def build(layout: str, world_size: int) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    """Model (the DDP wrapper under ddp), AdamW with two groups, a cosine schedule."""
    model: nn.Module = Tiny()
    names = LAYOUTS[layout]
    if names:
        shape = (2, world_size // 2) if len(names) == 2 else (world_size,)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    groups = [
        {"params": [p for name, p in named if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for name, p in named if p.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20)
    if layout == "ddp":
        model = DistributedDataParallel(model, find_unused_parameters=True)
    return model, optimizer, schedule


def train(model: nn.Module, optimizer: torch.optim.Optimizer, schedule: Any, steps: int) -> list[float]:
    """Take steps on random data drawn from this rank's generator; returns the losses of this rank."""
    losses = []
    for _ in range(steps):
        loss = model(torch.randn(4, 2)).pow(2).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(loss.item())
    return losses


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Full tensors of parameters, buffers and optimizer states by name. Collective for sharded models."""
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    tensors = {name: full(value) for name, value in inner.state_dict().items()}
    for name, parameter in inner.named_parameters():
        for state, value in optimizer.state.get(parameter, {}).items():
            tensors[f"{name}/{state}"] = full(value)
    return tensors


def full(value: Tensor) -> Tensor:
    """The whole tensor, detached and copied."""
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()


def differences(left: dict[str, Tensor], right: dict[str, Tensor]) -> list[str]:
    """Names that are not in both or not bit-equal."""
    names = left.keys() ^ right.keys()
    return sorted(
        names | {name for name in left.keys() & right.keys() if not torch.equal(left[name], right[name])}
    )
