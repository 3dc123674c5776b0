"""Mamba-2 mixing on ranks that share documents, and the same in one process, for tests of values and gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.config.schema import MambaContextMethod
from shoal.kernels.ssd import document_ids
from shoal.kernels.ssd_layer import MambaMixing
from shoal.kernels.ssd_reference import reference_convolution, reference_scan
from shoal.mesh import exchange
from shoal.parallel.context import mamba
from shoal.parallel.context.mamba import context_mixing
from shoal.parallel.context.split import DualChunks, borders_of, local_index

HUGE = 1e6
RAGGED = (7, 3, 1, 0, 33, 2)
"""Shorter than 2 * ranks, of one token, of none, and one that nothing divides."""
PARAMETERS = ("weight", "bias", "log_a", "d", "dt_bias")
TOKENS = ("xbc", "dt")


@dataclass(frozen=True)
class Problem:
    """Documents and the sizes of a layer."""

    lengths: tuple[int, ...] = RAGGED
    heads: int = 4
    groups: int = 2
    width: int = 3
    states: int = 5
    taps: int = 4
    dtype: torch.dtype = torch.float64


def inputs(problem: Problem) -> dict[str, Tensor]:
    """Parameters, xbc and dt of all tokens in the order of the documents, and the gradient of the output."""
    generator = torch.Generator().manual_seed(3)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(problem.dtype)

    total, inner = sum(problem.lengths), problem.heads * problem.width
    channels = inner + 2 * problem.groups * problem.states
    return {
        "weight": drawn(channels, problem.taps),
        "bias": drawn(channels),
        "log_a": drawn(problem.heads) / 2 - 1,
        "d": drawn(problem.heads),
        "dt_bias": drawn(problem.heads),
        "xbc": drawn(total, channels),
        "dt": drawn(total, problem.heads),
        "grad": drawn(total, inner),
    }


def layer_of(problem: Problem, leaves: dict[str, Tensor]) -> MambaMixing:
    return MambaMixing(
        leaves["weight"],
        leaves["bias"],
        -leaves["log_a"].exp(),
        leaves["d"],
        leaves["dt_bias"],
        problem.groups,
        problem.states,
        (0.1, float("inf")),
    )


def in_one_process(problem: Problem) -> dict[str, Tensor]:
    """Output and gradients by name, token by token."""
    leaves = inputs(problem)
    for name in (*PARAMETERS, *TOKENS):
        leaves[name].requires_grad_()
    layer = layer_of(problem, leaves)
    documents = document_ids(torch.tensor(borders_of(problem.lengths)), sum(problem.lengths))
    mixed = reference_convolution(leaves["xbc"][None], layer.weight, layer.bias, documents)
    x, b, c = layer.parts(torch.nn.functional.silu(mixed))
    y = reference_scan(
        x,
        leaves["dt"][None],
        layer.a,
        b,
        c,
        d=layer.d,
        dt_bias=layer.dt_bias,
        dt_softplus=True,
        dt_limit=layer.dt_limit,
        documents=documents,
    )
    y = y.flatten(2)[0]
    (y * leaves["grad"]).sum().backward()
    return {"y": y.detach(), **{name: leaves[name].grad for name in (*PARAMETERS, *TOKENS)}}  # type: ignore[dict-item]


def on_a_rank(
    rank: int, world: int, problem: Problem, method: MambaContextMethod, fault: str = ""
) -> dict[str, Any]:
    """This rank's output and gradients; `index` and `is_real` say which tokens they belong to.

    Padding is filled with huge values, which must not be seen, and its gradients have to be 0.
    """
    if fault:
        FAULTS[fault]()  # this rank is a forked process: the fault dies with it
    group = dist.group.WORLD
    assert group is not None
    layout = DualChunks(problem.lengths, world, rank)
    index, is_real = local_index(layout, borders_of(problem.lengths)[:-1], torch.device("cpu"))
    given = inputs(problem)
    padded = {
        name: torch.cat([given[name], given[name].new_zeros(1, given[name].shape[1])])
        for name in given
        if name in (*TOKENS, "grad")
    }
    local = {name: value[index] for name, value in padded.items()}
    for name in TOKENS:
        local[name][~is_real] = HUGE
        local[name].requires_grad_()
    for name in PARAMETERS:
        given[name].requires_grad_()
    layer = layer_of(problem, given)
    y = context_mixing(local["xbc"][None], local["dt"][None], layer, layout, group, method, name="layer 3")[0]
    (y * local["grad"]).sum().backward()
    gradients = {name: local[name].grad for name in TOKENS}
    parameters = {name: given[name].grad for name in PARAMETERS}
    return {"y": y.detach(), **gradients, **parameters, "index": index, "is_real": is_real}


def sent_on_a_rank(rank: int, world: int, problem: Problem, method: MambaContextMethod) -> int:
    """How many numbers a forward hands to collectives for other ranks."""
    sent = 0
    exchanged, gathered = exchange._exchanged, dist.all_gather_single

    def counting_exchange(tensor: Tensor, *arguments: Any) -> Tensor:
        nonlocal sent
        sent += tensor.numel() * (world - 1) // world
        return exchanged(tensor, *arguments)

    def counting_gather(output: Tensor, own: Tensor, **options: Any) -> Any:
        nonlocal sent
        sent += own.numel() * (world - 1)
        return gathered(output, own, **options)

    exchange._exchanged, dist.all_gather_single = counting_exchange, counting_gather  # in this rank only
    on_a_rank(rank, world, problem, method)
    return sent // 2 if method == "all_to_all" else sent  # its backward exchanges as much, a gather's sums


def joined(results: list[dict[str, Any]], problem: Problem) -> dict[str, Tensor]:
    """Output and gradients of all ranks: tokens in the order of the documents, parameters summed."""
    whole: dict[str, Tensor] = {}
    for name in ("y", *TOKENS):
        like = results[0][name]
        whole[name] = like.new_full((sum(problem.lengths), *like.shape[1:]), torch.nan)
        for result in results:
            index, is_real = result["index"], result["is_real"]
            assert (result[name][~is_real] == 0).all(), f"{name} of padding"
            assert whole[name][index[is_real]].isnan().all(), "a token lies on two ranks"
            whole[name][index[is_real]] = result[name][is_real]
    for name in PARAMETERS:
        whole[name] = torch.stack([result[name] for result in results]).sum(0)
    return whole


def chunks_in_rank_order() -> None:
    """Forgets that the later chunks lie on the ranks in reverse."""
    mamba._in_order = lambda gathered, layout: gathered.unflatten(1, (-1, 2)).movedim(2, 0).flatten(0, 1)  # type: ignore[no-untyped-call]


def no_halo() -> None:
    """Lets the convolution see nothing before a chunk."""
    mamba._tail = lambda layout, width, document, position: None


def no_states() -> None:
    """Lets every chunk begin at 0."""
    right = mamba._first_states
    mamba._first_states = lambda *arguments: right(*arguments) * 0


def dual_chunk_order() -> None:
    """Scans tokens in the order in which they arrive from the ranks."""
    right = mamba.gathered_places
    mamba.gathered_places = lambda layout, device: right(layout, device).sort().values


FAULTS: dict[str, Callable[[], None]] = {
    "chunks-in-rank-order": chunks_in_rank_order,
    "no-halo": no_halo,
    "no-states": no_states,
    "dual-chunk-order": dual_chunk_order,
}
