"""Packed attention inside the models of transformers, through its attention interface.

A model whose `config._attn_implementation` is a name registered here builds no mask: which tokens see each other
follows from `cu_seq_lens_q`, given to the model's forward and handed down to every attention layer, or, where a
family does not hand it down, from `position_ids` that begin with 0 in every document.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from shoal.kernels.attention import Backend, varlen_attention
from shoal.kernels.packed import TensorMemo, accumulation_dtype, borders

PACKED_ATTENTION = "shoal"
"""The name under which the recipes register it."""

_registered: dict[str, Backend] = {}
_starts = TensorMemo[Tensor]()
_chunked = TensorMemo[Tensor]()


def register_attention(name: str = PACKED_ATTENTION, backend: Backend = "auto") -> None:
    """Makes `varlen_attention` available to `model.set_attn_implementation(name)`.

    Nothing is registered with the mask interface of the same name, so transformers builds no mask at all: padded
    batches have to be right-padded and causal, and generation has to use another implementation.

    Args:
        name: Name in transformers' `AttentionInterface`; a second registration replaces the first.
        backend: Backend of `varlen_attention`.
    """
    AttentionInterface.register(name, _attention_function(name, backend))
    _registered[name] = backend


def registered_backend(name: str) -> Backend:
    """Returns the backend that a name was registered with.

    Raises:
        KeyError: It was not registered here.
    """
    return _registered[name]


def is_registered(name: str | None) -> bool:
    """Whether a name of transformers' attention interface is one of ours, which leaves padding behind a pack alone."""
    return name in _registered


def _attention_function(name: str, backend: Backend) -> Callable[..., tuple[Tensor, None]]:
    def attend(
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
        cu_seq_lens_q: Tensor | None = None,
        cu_seq_lens_k: Tensor | None = None,
        position_ids: Tensor | None = None,
        **others: Any,
    ) -> tuple[Tensor, None]:
        """query [B, Hq, T, D], key [B, Hkv, T, D], value [B, Hkv, T, Dv] to [B, T, Hq, Dv]."""
        where = f"attention {name!r} in {type(module).__name__}"
        refuse_what_is_not_computed(where, query, key, attention_mask, dropout, others)
        causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
        batch, _, length, _ = query.shape
        cu_q = cu_k = _documents(where, cu_seq_lens_q, position_ids, batch, length, causal)
        if cu_seq_lens_q is not None and cu_seq_lens_k is not None:
            cu_k = cu_seq_lens_k
        if counts_positions(module):
            query = tuned(module, query, _positions(cu_q, batch * length).view(batch, length))
        if chunk := chunk_size(module):
            cu_q = cu_k = _in_chunks(cu_q, chunk)
        q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
        out, _ = varlen_attention(
            q,
            k,
            v,
            cu_q,
            cu_k,
            causal=causal,
            scale=scaling,
            window=sliding_window,
            softcap=softcap,
            sinks=s_aux,
            backend=backend,
        )
        return out.view(batch, length, *out.shape[1:]), None

    # Borders are read as numbers, which a compiled graph cannot do; the rest of a layer is compiled around it.
    disabled: Callable[..., tuple[Tensor, None]] = torch.compiler.disable(attend)  # type: ignore[no-untyped-call]
    return disabled


def refuse_what_is_not_computed(
    where: str,
    query: Tensor,
    key: Tensor,
    attention_mask: Tensor | None,
    dropout: float,
    others: dict[str, Any],
) -> None:
    """Refuses what a model asks of its attention and packed attention does not do.

    Raises:
        ValueError: Beginning with `where`.
    """
    if attention_mask is not None:
        raise ValueError(f"{where}: got a mask; give cu_seq_lens_q or position_ids, and no attention_mask")
    if dropout:
        raise ValueError(f"{where}: attention dropout {dropout} is not supported; set attention_dropout to 0")
    if key.shape[2] != query.shape[2]:
        raise ValueError(
            f"{where}: {query.shape[2]} queries over {key.shape[2]} cached keys; to generate, call "
            "model.set_attn_implementation('sdpa') first, or 'eager' where a family has no sdpa"
        )
    for unsupported in ("position_bias", "head_mask", "output_attentions"):
        value = others.get(unsupported)
        if value is not None and value is not False:
            raise ValueError(f"{where}: {unsupported} is not supported; leave it out")


def _documents(
    where: str, cu_seqlens: Tensor | None, position_ids: Tensor | None, batch: int, length: int, causal: bool
) -> Tensor:
    """Returns the borders of documents among the B * T tokens."""
    if cu_seqlens is not None:
        if batch != 1:
            raise ValueError(f"{where}: cu_seq_lens_q with {batch} rows; pack all documents into one row")
        return cu_seqlens
    if position_ids is None or position_ids.dim() != 2:
        raise ValueError(
            f"{where}: received neither cu_seq_lens_q nor position_ids [B, T], so it cannot tell documents apart"
        )
    if not causal:
        raise ValueError(f"{where}: without a causal mask padding would be seen; give cu_seq_lens_q")
    return _starts.of(position_ids, lambda: _borders_of_positions(position_ids, batch), batch)


def _borders_of_positions(position_ids: Tensor, batch: int) -> Tensor:
    """Returns borders [N+1] int32: a document begins with every row and wherever the position is 0."""
    starts = position_ids.expand(batch, -1) == 0
    starts[:, 0] = True
    ends = torch.tensor([starts.numel()], device=starts.device)
    return torch.cat([starts.flatten().nonzero()[:, 0], ends]).int()


def _positions(cu_seqlens: Tensor, total: int) -> Tensor:
    """Returns the position of each token in its document, int64 [total]; padding counts on from the last border."""
    tokens = torch.arange(total, device=cu_seqlens.device)
    starts = cu_seqlens.to(tokens.dtype)
    return tokens - starts[torch.searchsorted(starts, tokens, right=True) - 1]


def counts_positions(module: nn.Module) -> bool:
    """Whether an attention layer has scaled its queries by their place in the row, as Llama 4 does without rotation."""
    return bool(getattr(module, "attn_temperature_tuning", False)) and not getattr(module, "use_rope", True)


def tuned(module: Any, query: Tensor, positions: Tensor) -> Tensor:
    """Scales queries as their positions in documents ask for, in place of their places in the row.

    Args:
        module: A layer that `counts_positions`.
        query: [B, Hq, T, D], scaled by place.
        positions: In documents, int64 [B, T].
    """

    def scale(places: Tensor) -> Tensor:
        steps = torch.floor((places.float() + 1.0) / module.floor_scale)  # in float32, as the layer has it
        grown: Tensor = torch.log1p(steps) * module.attn_scale + 1.0
        return grown.to(accumulation_dtype(query.dtype))

    right, wrong = scale(positions), scale(torch.arange(query.shape[2], device=query.device))
    return (query * (right / wrong)[:, None, :, None]).to(query.dtype)


def chunk_size(module: nn.Module) -> int | None:
    """Returns the chunk of Llama 4's chunked attention, which transformers would put into the mask."""
    config, index = getattr(module, "config", None), getattr(module, "layer_idx", None)
    kinds = getattr(config, "layer_types", None)
    if index is None or not kinds or kinds[index] != "chunked_attention":
        return None
    size: int = config.attention_chunk_size  # type: ignore[union-attr]
    return size


def _in_chunks(cu_seqlens: Tensor, chunk: int) -> Tensor:
    """Returns borders between which every document is cut into chunks, counted from its beginning."""

    def cut() -> Tensor:
        ends = borders(cu_seqlens)
        starts = [at for a, b in zip(ends, ends[1:], strict=False) for at in range(a, b, chunk)]
        return torch.tensor([*starts, ends[-1]], dtype=torch.int32, device=cu_seqlens.device)

    return _chunked.of(cu_seqlens, cut, chunk)
