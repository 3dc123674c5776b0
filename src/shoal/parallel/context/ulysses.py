"""Context-parallel attention by heads: all-to-all gives each rank all tokens of some heads, and back.

Four messages per layer and direction, of queries, keys, values and outputs; each rank then runs the ordinary packed
kernel over whole documents. The ranks have to divide the query heads. Source: arXiv 2309.14509.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from shoal.kernels.attention import Backend, varlen_attention
from shoal.kernels.packed import AttentionSpec
from shoal.mesh.exchange import all_to_all
from shoal.parallel.context.split import DualChunks, borders_of, gathered_places


def ulysses_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: DualChunks,
    group: ProcessGroup,
    spec: AttentionSpec,
    sinks: Tensor | None,
    backend: Backend,
    document_chunk: int | None = None,
) -> Tensor:
    """Attention of this rank's queries over the keys of all ranks; arguments and result as in `ring_attention`.

    Args:
        document_chunk: Cuts documents into chunks that do not see each other, as Llama 4's chunked attention does.

    Raises:
        ValueError: The number of ranks does not divide the query heads.
    """
    refuse_indivisible_heads(q.shape[1], group.size())
    copies = kv_copies(q.shape[1], k.shape[1], group.size())
    k, v = (x.repeat_interleave(copies, 1) if copies > 1 else x for x in (k, v))
    order = gathered_places(layout, q.device)
    q, k, v = (all_to_all(x, group, split_dim=1, join_dim=0) for x in (q, k, v))
    total = len(q)
    q, k, v = (x.index_select(0, order) for x in (q, k, v))
    if sinks is not None:
        sinks = sinks.chunk(group.size())[group.rank()]
    lengths = layout.lengths if document_chunk is None else _in_chunks(layout.lengths, document_chunk)
    cu_seqlens = torch.tensor(borders_of(lengths), dtype=torch.int32, device=q.device)
    out, _ = varlen_attention(
        q,
        k,
        v,
        cu_seqlens,
        cu_seqlens,
        causal=spec.causal,
        scale=spec.scale,
        window=spec.window,
        softcap=spec.softcap,
        sinks=sinks,
        backend=backend,
    )
    everywhere = out.new_zeros(total, *out.shape[1:]).index_add(0, order, out)
    return all_to_all(everywhere, group, split_dim=0, join_dim=1)


def refuse_indivisible_heads(num_heads: int, size: int) -> None:
    """Refuses heads that cannot be dealt evenly.

    Raises:
        ValueError: With both numbers.
    """
    if num_heads % size:
        raise ValueError(
            f"cp_method = 'ulysses': {num_heads} query heads per rank cannot be dealt to cp_size = {size} ranks; "
            "repair: cp_method: ring"
        )


def kv_copies(num_heads: int, num_kv_heads: int, size: int) -> int:
    """How often each key head is repeated so that every rank gets the key heads of its query heads, and no others.

    >>> [kv_copies(8, kv_heads, 4) for kv_heads in (8, 4, 2, 1)]
    [1, 1, 2, 4]
    """
    groups = num_heads // num_kv_heads
    return next(n for n in range(1, groups + 1) if groups % n == 0 and (num_kv_heads * n) % size == 0)


def _in_chunks(lengths: tuple[int, ...], chunk: int) -> tuple[int, ...]:
    return tuple(min(chunk, length - at) for length in lengths for at in range(0, length, chunk))
