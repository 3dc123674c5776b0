"""Context-parallel attention with all keys on every rank: queries stay, keys and values are gathered.

One collective per layer and direction, against a ring of steps: the better choice for short documents, where a step of
the ring is too little work to hide its message. Every rank holds the keys of all ranks while a layer runs.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from shoal.kernels.attention import Backend, varlen_attention
from shoal.kernels.packed import AttentionSpec
from shoal.mesh.exchange import gather
from shoal.parallel.context.split import DualChunks, borders_of, gathered_places, local_places, take


def allgather_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: DualChunks,
    group: ProcessGroup,
    spec: AttentionSpec,
    sinks: Tensor | None,
    backend: Backend,
) -> Tensor:
    """Attention of this rank's queries over the keys of all ranks; arguments and result as in `ring_attention`.

    Raises:
        ValueError: Attention is not causal: the keys after a chunk could not be left out then.
    """
    if not spec.causal:
        raise ValueError("cp_method = 'allgather' computes causal attention only; repair: cp_method: ulysses")
    # Together, which halves the number of messages; their widths may differ.
    joined = gather(torch.cat([k, v], -1), group)
    keys = joined.index_select(0, gathered_places(layout, q.device))
    k, v = keys[..., : k.shape[2]], keys[..., k.shape[2] :]
    out = q.new_zeros(*q.shape[:2], v.shape[2])
    for half in (0, 1):
        # A chunk is the end of the prefix of its document that it can see.
        chunk = layout.halves(layout.rank)[half]
        queries = layout.real(layout.rank, half)
        seen = tuple(
            min(length, (chunk + 1) * size) if real else 0
            for length, size, real in zip(layout.lengths, layout.chunks, queries, strict=True)
        )
        places = local_places(layout, layout.rank, half, q.device)
        part, _ = varlen_attention(
            take(q, places),
            k,
            v,
            _tensor(borders_of(queries), q.device),
            _tensor(borders_of(seen), q.device),
            causal=True,
            scale=spec.scale,
            window=spec.window,
            softcap=spec.softcap,
            sinks=sinks,
            cu_seqlens_k_padded=_tensor(borders_of(layout.lengths), q.device),
            backend=backend,
        )
        at = torch.arange(places.start, places.stop, device=q.device) if isinstance(places, slice) else places
        out = out.index_add(0, at, part)
    return out


def _tensor(values: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)
