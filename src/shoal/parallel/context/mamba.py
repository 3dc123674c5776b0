"""Context parallelism in Mamba-2 layers: every rank has some tokens of every document, and a state runs through all.

    method        what travels per layer and direction                          needs
    all_to_all    all tokens' channels, so that each rank scans whole documents ranks that divide the heads
                  for its share of the heads
    state         of every chunk of a document its last state, and K - 1 tokens nothing
                  for the convolution: the same however long the documents are

Padding reaches neither convolution nor scan. Gradients of what belongs to tokens are complete; those of the layer's
parameters are this rank's part, of its heads (all_to_all) or its tokens (state).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from shoal.config.schema import MambaContextMethod
from shoal.kernels.packed import accumulation_dtype
from shoal.kernels.ssd import document_ids
from shoal.kernels.ssd_layer import MambaMixing
from shoal.mesh.exchange import all_to_all, gather
from shoal.parallel.context.split import DualChunks, borders_of, gathered_places, local_places, take


def context_mixing(
    xbc: Tensor,
    dt: Tensor,
    layer: MambaMixing,
    layout: DualChunks,
    group: ProcessGroup,
    method: MambaContextMethod = "auto",
    *,
    name: str = "Mamba-2 layer",
) -> Tensor:
    """Convolution and scan of this rank's tokens within documents that lie on all ranks. Collective.

    Args:
        xbc: [1, num_local, H * P + 2 * G * N]; padding may hold anything finite.
        dt: Raw time steps, [1, num_local, H].
        layer: The layer's parameters, all of them on every rank.
        layout: Where the documents' tokens lie.
        group: The ranks that share them.
        method: "auto" takes the one that sends less.
        name: Of the layer, for errors.

    Returns:
        y [1, num_local, H * P] in float32 (float64 for float64); 0 on padding.

    Raises:
        ValueError: On every rank, before anything is sent: the ranks do not divide the heads, which `all_to_all` needs.
    """
    if method == "auto":
        method = cheaper_method(layer, layout)
    if method == "state":
        return _through_states(xbc[0], dt[0], layer, layout, group)[None]
    if method != "all_to_all":
        raise ValueError(f"mamba_cp = {method!r}: one of auto, all_to_all, state; repair: mamba_cp: auto")
    refuse_indivisible_heads(name, layer.heads, layout.size)
    return _through_heads(xbc[0], dt[0], layer, layout, group)[None]


def share_mamba_tokens(model: nn.Module, method: MambaContextMethod, size: int) -> None:
    """Tells the Mamba-2 layers below `model`, which `shoal.models.mamba` has substituted, how to share tokens.

    Raises:
        ValueError: `size` ranks do not divide a layer's heads, which ``all_to_all`` needs; with the layer's name.
    """
    for name, layer in model.named_modules():
        if getattr(layer, "separates_documents", False):
            if method == "all_to_all":
                refuse_indivisible_heads(name, layer.num_heads, size)
            layer.context_method = method


def refuse_indivisible_heads(name: str, heads: int, size: int) -> None:
    """Refuses a layer whose heads cannot be dealt evenly.

    Raises:
        ValueError: With the layer's name and both numbers.
    """
    if heads % size:
        raise ValueError(
            f"mamba_cp = 'all_to_all': the {heads} heads of {name} cannot be dealt to cp_size = {size} ranks; "
            "repair: mamba_cp: state"
        )


def cheaper_method(layer: MambaMixing, layout: DualChunks) -> Literal["all_to_all", "state"]:
    """The method that sends fewer numbers; the same on every rank."""
    if layer.heads % layout.size:
        return "state"
    sent = {method: sent_numbers(layer, layout, method) for method in ("all_to_all", "state")}
    return "state" if sent["state"] < sent["all_to_all"] else "all_to_all"


def sent_numbers(layer: MambaMixing, layout: DualChunks, method: str) -> int:
    """How many numbers each rank sends to others in a layer's forward; backward sends as many."""
    others = layout.size - 1
    if method == "all_to_all":
        copies = group_copies(layer.heads, layer.groups, layout.size)
        channels = 2 * layer.inner + 2 * layer.groups * copies * layer.states + layer.heads
        return others * layout.num_local * channels // layout.size
    of_a_chunk = (
        layer.inner * layer.states + layer.heads + (layer.weight.shape[1] - 1) * layer.weight.shape[0]
    )
    return others * 2 * len(layout.lengths) * of_a_chunk


def group_copies(heads: int, groups: int, size: int) -> int:
    """How often each group is repeated so that every rank gets the groups of its heads, and no others.

    >>> [group_copies(8, groups, 4) for groups in (8, 4, 2, 1)]
    [1, 1, 2, 4]
    """
    per_group = heads // groups
    return next(n for n in range(1, per_group + 1) if per_group % n == 0 and (groups * n) % size == 0)


# ------------------------------------------------------------------------------------------------ by heads


def _through_heads(
    xbc: Tensor, dt: Tensor, layer: MambaMixing, layout: DualChunks, group: ProcessGroup
) -> Tensor:
    """xbc [num_local, channels] and dt [num_local, H] to y [num_local, H * P]."""
    size = layout.size
    copies = group_copies(layer.heads, layer.groups, size)
    x, b, c = (part[0] for part in layer.parts(xbc[None]))
    b, c = (part.repeat_interleave(copies, 1) for part in (b, c))
    # One message: for every rank its heads' and groups' channels, side by side.
    parts = torch.cat([part.reshape(len(part), size, -1) for part in (x, b, c, dt)], -1)
    everywhere = all_to_all(parts, group, split_dim=1, join_dim=0)[:, 0]
    order = gathered_places(layout, xbc.device)
    whole = everywhere.index_select(0, order)[None]
    own = layer.of_heads(group.rank(), size, copies)
    whole_xbc, whole_dt = torch.split(whole, [own.weight.shape[0], own.heads], -1)
    documents = _numbers(layout.lengths, xbc.device)
    y = own.scan(own.convolve(whole_xbc, documents), whole_dt, documents)[0]
    spread = y.new_zeros(len(everywhere), y.shape[1]).index_copy(0, order, y)
    return all_to_all(spread, group, split_dim=0, join_dim=1)


def _numbers(lengths: Sequence[int], device: torch.device) -> Tensor:
    borders = torch.tensor(borders_of(tuple(lengths)), dtype=torch.int32, device=device)
    return document_ids(borders, sum(lengths))


# ----------------------------------------------------------------------------------------------- by states


def _through_states(
    xbc: Tensor, dt: Tensor, layer: MambaMixing, layout: DualChunks, group: ProcessGroup
) -> Tensor:
    """xbc [num_local, channels] and dt [num_local, H] to y [num_local, H * P]."""
    places = local_places(layout, layout.rank, None, xbc.device)
    pieces = _pieces(layout)
    documents = _numbers(pieces, xbc.device)
    xbc, dt = take(xbc, places), take(dt, places)
    # Also without a document every parameter takes part: peers wait for its gradient.
    xbc = _convolved(xbc, layer, layout, group) if pieces else layer.convolve(xbc[None], documents)[0]
    y = layer.scan(xbc[None], dt[None], documents)[0]
    if pieces:
        with torch.autocast(xbc.device.type, enabled=False):
            y = y + _carried_over(xbc, dt, layer, layout, group)
    index = torch.arange(layout.num_local, device=y.device)[places]
    return y.new_zeros(layout.num_local, y.shape[1]).index_copy(0, index, y)


def _carried_over(
    xbc: Tensor, dt: Tensor, layer: MambaMixing, layout: DualChunks, group: ProcessGroup
) -> Tensor:
    """What this rank's real tokens read of the states before their pieces, [tokens, H * P]. Collective."""
    pieces, dtype = _pieces(layout), accumulation_dtype(xbc.dtype)
    steps = layer.steps(dt.to(dtype))
    x, b, c = (part[0].to(dtype) for part in layer.parts(xbc[None]))
    decays = torch.split(steps * layer.a.to(dtype), pieces)
    states = _last_states(torch.split(x * steps[..., None], pieces), torch.split(b, pieces), decays)
    totals = torch.stack([decay.sum(0) for decay in decays])
    first = _first_states(states, totals, layout, group)
    return torch.cat(_reads(first, torch.split(c, pieces), decays))


def _pieces(layout: DualChunks) -> list[int]:
    """Real tokens of this rank's chunks: of each document, the earlier and the later one."""
    pairs = zip(layout.real(layout.rank, 0), layout.real(layout.rank, 1), strict=True)
    return [length for pair in pairs for length in pair]


def _last_states(driven: Sequence[Tensor], b: Sequence[Tensor], decays: Sequence[Tensor]) -> Tensor:
    """The state after each piece, had it begun at 0; [pieces, H, P, N].

    Args:
        driven: dt * x of each piece, [tokens, H, P].
        b: [tokens, G, N].
        decays: dt * a, [tokens, H].
    """
    states = []
    for x, keys, decay in zip(driven, b, decays, strict=True):
        after = decay.flip(0).cumsum(0).flip(0) - decay
        x = x * after.exp()[..., None]
        groups = x.unflatten(1, (keys.shape[1], -1))  # type: ignore[no-untyped-call]
        states.append(torch.einsum("tgrp,tgn->grpn", groups, keys).flatten(0, 1))
    return torch.stack(states)


def _reads(first: Tensor, c: Sequence[Tensor], decays: Sequence[Tensor]) -> list[Tensor]:
    """What the tokens of each piece read of the state before it; [tokens, H * P].

    Args:
        first: State before each piece, [pieces, H, P, N].
        c: [tokens, G, N].
        decays: dt * a, [tokens, H].
    """
    reads = []
    for state, queries, decay in zip(first, c, decays, strict=True):
        groups = state.unflatten(0, (queries.shape[1], -1))
        read = torch.einsum("tgn,grpn->tgrp", queries, groups).flatten(1, 2)
        reads.append((read * decay.cumsum(0).exp()[..., None]).flatten(1))
    return reads


def _first_states(states: Tensor, totals: Tensor, layout: DualChunks, group: ProcessGroup) -> Tensor:
    """The state before each of this rank's pieces, from what all ranks' pieces leave behind. Collective.

    Args:
        states: After this rank's pieces, had they begun at 0, [2 * documents, H, P, N].
        totals: Sums of dt * a over them, [2 * documents, H].
    """
    everyone = _in_order(gather(states[None], group), layout)
    sums = _in_order(gather(totals[None], group), layout)
    found = []
    for chunk in layout.halves(layout.rank):
        between = sums[:chunk].flip(0).cumsum(0).flip(0) - sums[:chunk]
        found.append(torch.einsum("jdh,jdhpn->dhpn", between.exp(), everyone[:chunk]))
    return torch.stack(found, 1).flatten(0, 1)


def _in_order(gathered: Tensor, layout: DualChunks) -> Tensor:
    """[ranks, 2 * documents, ...] to [2 * ranks, documents, ...], chunks in the order of the document."""
    halves = gathered.unflatten(1, (-1, 2))  # type: ignore[no-untyped-call]
    return torch.cat([halves[:, :, 0], halves[:, :, 1].flip(0)])


def _convolved(xbc: Tensor, layer: MambaMixing, layout: DualChunks, group: ProcessGroup) -> Tensor:
    """Convolution of this rank's real tokens [tokens, channels], with the tokens before each piece. Collective."""
    halo = _halo(layout, layer.weight.shape[1] - 1, xbc.device)
    nothing = xbc.new_zeros(1, xbc.shape[1])
    tails = gather(torch.cat([xbc, nothing]).index_select(0, halo.sent), group)
    source = torch.cat([xbc, nothing, tails])
    widened = layer.convolve(source.index_select(0, halo.widened)[None], _numbers(halo.lengths, xbc.device))[
        0
    ]
    return widened.index_select(0, halo.own)


@dataclass(frozen=True)
class _Halo:
    """Which tokens surround this rank's pieces; rows of [real tokens, one of zeros, everyone's tails].

    Attributes:
        sent: The last K - 1 real tokens of each piece, zeros where it has fewer, [2 * documents * (K - 1)].
        widened: Each piece that has tokens, with K - 1 tokens before it.
        lengths: Of the widened pieces.
        own: Where the real tokens are among the widened.
    """

    sent: Tensor
    widened: Tensor
    lengths: tuple[int, ...]
    own: Tensor


@lru_cache(maxsize=64)
def _halo(layout: DualChunks, width: int, device: torch.device) -> _Halo:
    pieces = _pieces(layout)
    zeros, starts = sum(pieces), borders_of(tuple(pieces))
    back = range(width, 0, -1)
    sent: list[int] = []
    widened: list[int] = []
    own: list[int] = []
    lengths: list[int] = []
    for piece, (start, length) in enumerate(zip(starts, pieces, strict=False)):
        sent += [start + length - k if k <= length else zeros for k in back]
        if not length:
            continue
        document, half = divmod(piece, 2)
        begin = layout.halves(layout.rank)[half] * layout.chunks[document]
        tails = [_tail(layout, width, document, begin - k) for k in back]
        own += range(len(widened) + width, len(widened) + width + length)
        widened += [zeros if tail is None else zeros + 1 + tail for tail in tails]
        widened += range(start, start + length)
        lengths.append(width + length)
    sent_index, widened_index, own_index = (
        torch.tensor(index, dtype=torch.int64, device=device) for index in (sent, widened, own)
    )
    return _Halo(sent_index, widened_index, tuple(lengths), own_index)


def _tail(layout: DualChunks, width: int, document: int, position: int) -> int | None:
    """Where a token of a document is among the tails of all ranks; None before the document.

    It is among the last `width` of its chunk, which is full: a token of a later chunk asks for it.
    """
    if position < 0:
        return None
    size, chunk = layout.size, layout.chunks[document]
    index, within = divmod(position, chunk)
    rank, half = (index, 0) if index < size else (2 * size - 1 - index, 1)
    piece = rank * 2 * len(layout.lengths) + 2 * document + half
    return piece * width + width - (chunk - within)


__all__ = [
    "cheaper_method",
    "context_mixing",
    "group_copies",
    "refuse_indivisible_heads",
    "sent_numbers",
    "share_mamba_tokens",
]
