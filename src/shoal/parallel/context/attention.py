"""Context-parallel attention inside the models of transformers, through their attention interface.

What a layer needs to know travels with its arguments, under the keyword `context`, so that a layer that is recomputed
in backward gets what it had in forward.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from transformers import AttentionInterface

from shoal.config.schema import ContextMethod
from shoal.kernels.attention import Backend
from shoal.kernels.attention_hf import (
    chunk_size,
    counts_positions,
    refuse_what_is_not_computed,
    tuned,
)
from shoal.kernels.packed import AttentionSpec
from shoal.parallel.context.allgather import allgather_attention
from shoal.parallel.context.ring import ring_attention
from shoal.parallel.context.split import DualChunks, local_index
from shoal.parallel.context.ulysses import ulysses_attention

CONTEXT_ATTENTION = "shoal-cp"
"""The name that models with context parallelism get for their attention."""


@dataclass(frozen=True)
class AttentionContext:
    """What attention layers share about one micro-batch.

    Attributes:
        layout: Where the documents' tokens lie.
        group: The ranks that share them.
        method: How queries and keys meet.
        backend: Kernel of the local computation.
    """

    layout: DualChunks
    group: ProcessGroup
    method: ContextMethod
    backend: Backend


def context_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    context: AttentionContext,
    spec: AttentionSpec,
    *,
    sinks: Tensor | None = None,
    document_chunk: int | None = None,
) -> Tensor:
    """Attention of this rank's tokens over the documents on all ranks. Collective.

    Args:
        q: [num_local, Hq, D].
        k: [num_local, Hkv, D].
        v: [num_local, Hkv, Dv]; padding may hold anything.
        context: Of this micro-batch.
        spec: What is computed; the same on all ranks.
        sinks: [Hq] or None. Gradients of all inputs but the sinks are complete; that of the sinks is this rank's part.
        document_chunk: Size of chunks that do not see each other, or None.

    Returns:
        [num_local, Hq, Dv] in q's dtype (under autocast in its dtype); 0 on padding.

    Raises:
        ValueError: The method or the backend cannot compute this; on every rank, before anything is sent.
    """
    layout, method = context.layout, context.method
    if len(q) != layout.num_local:
        raise ValueError(
            f"context parallelism: {len(q)} tokens reach attention, but each rank has {layout.num_local}; "
            "the model must not add or drop tokens"
        )
    if document_chunk is not None and method != "ulysses":
        raise ValueError(
            f"cp_method = {method!r} cannot compute chunked attention (chunks of {document_chunk} tokens); "
            "repair: cp_method: ulysses"
        )
    device = q.device.type
    if torch.is_autocast_enabled(device):
        q, k, v = (x.to(torch.get_autocast_dtype(device)) for x in (q, k, v))
    with torch.autocast(device, enabled=False):
        arguments = (q, k, v, layout, context.group, spec, sinks, context.backend)
        if method == "ulysses":
            return ulysses_attention(*arguments, document_chunk)
        return (ring_attention if method == "ring" else allgather_attention)(*arguments)


def register_context_attention() -> None:
    """Makes `context_attention` available to models as `CONTEXT_ATTENTION`; again is harmless.

    Nothing is registered with the mask interface, so transformers builds no mask: which tokens see each other follows
    from the documents.
    """
    # Which tokens lie where is read as numbers, which a compiled graph cannot do.
    AttentionInterface.register(
        CONTEXT_ATTENTION,
        torch.compiler.disable(_attend),  # type: ignore[no-untyped-call]
    )


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    context: AttentionContext | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """query [1, Hq, T, D], key [1, Hkv, T, D], value [1, Hkv, T, Dv] to [1, T, Hq, Dv], of the local tokens."""
    where = f"context-parallel attention in {type(module).__name__}"
    refuse_what_is_not_computed(where, query, key, attention_mask, dropout, others)
    if context is None:
        raise ValueError(
            f"{where}: its model does not hand keyword arguments down to attention, so it cannot run with cp_size > 1"
        )
    if counts_positions(module):
        starts = (0,) * len(context.layout.lengths)
        query = tuned(module, query, local_index(context.layout, starts, query.device)[0][None])
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    spec = AttentionSpec(causal, scale, sliding_window, softcap, s_aux is not None)
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    out = context_attention(q, k, v, context, spec, sinks=s_aux, document_chunk=chunk_size(module))
    return out[None], None


__all__ = [
    "CONTEXT_ATTENTION",
    "AttentionContext",
    "context_attention",
    "register_context_attention",
]
