"""Any family of transformers, cut by its plan over two ranks, against itself in one process."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

import shoal
from shoal.config.errors import ConfigError
from shoal.config.schema import FSDP2Config, ParallelismSizes
from shoal.models.meta import cast_stored
from shoal.parallel.managers import gradient_sync
from shoal.parallel.tensor.plan import resolve_plan
from tests.parity.harness import relative_errors
from tests.unit.kernels.families import VOCAB, InDouble, tiny_model
from tests.zygote import RankRunner, RanksFailed

IDS = torch.randint(4, VOCAB, (2, 9), generator=torch.Generator().manual_seed(3))
"""An odd number of tokens, so that sequence parallelism has to pad."""


def model_of(family: str) -> Any:
    model = tiny_model(family)
    cast_stored(model, torch.float64)
    return model


def loss_of(model: Any) -> Tensor:
    logits = model(input_ids=IDS, use_cache=False).logits
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), IDS[:, 1:].flatten())


def on_rank(rank: int, world: int, family: str, sequence_parallel: bool) -> tuple[float, dict[str, Tensor]]:
    setup = shoal.DistributedSetup.build(parallelism_sizes=ParallelismSizes(tp_size=world))
    manager = shoal.FSDP2Manager(FSDP2Config(sequence_parallel=sequence_parallel), setup.mesh_context)
    model = manager.parallelize(model_of(family))
    with InDouble(), gradient_sync(model):
        loss = loss_of(model)
        loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return float(loss.detach()), {
        name: gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
        for name, gradient in gradients.items()
    }


def error_of(ranks: RankRunner, family: str, sequence_parallel: bool) -> float | str:
    """The largest relative error of loss and gradients, or why the family is refused."""
    plain = model_of(family)
    try:
        resolve_plan(plain, 2)
        with InDouble():
            loss = loss_of(plain)
            loss.backward()
        actual, gradients = ranks(on_rank, 2, family, sequence_parallel)[0]
    except ConfigError as error:
        return str(error.findings[0].limit)
    except RanksFailed as error:
        limits = [line.partition("limit:")[2].strip() for line in str(error).splitlines() if "limit:" in line]
        if not limits:
            raise
        return limits[0]
    expected = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
    return max(abs(actual - float(loss.detach())), *relative_errors(gradients, expected).values())
