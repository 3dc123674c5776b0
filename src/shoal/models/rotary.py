"""Rotary embeddings whose frequencies follow the length of the sequence, kept independent of the layout.

transformers chooses the frequencies of two kinds of them in every forward, from the largest position that it sees:
`longrope` takes its long factors beyond the original length, `dynamic` stretches them, and keeps them so until a short
sequence comes. A rank of context parallelism sees only the positions of its own tokens, and a data-parallel rank only
its own micro-batches; with either, the same document would be rotated differently on another layout. Here the longest
document of the micro-batch decides, wherever its tokens lie, and nothing is kept from one micro-batch to the next.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from shoal.parallel.context.attention import AttentionContext


def steady_rotation(llm: PreTrainedModel) -> int:
    """Lets every rotary embedding below `llm` follow the longest document of a micro-batch, in place.

    Args:
        llm: A causal language model of transformers, before activation checkpointing and sharding.

    Returns:
        How many embeddings follow lengths at all; the others are left alone.
    """
    found = [module for module in llm.modules() if any(map(_follows_length, _kinds(module).values()))]
    if found:
        longest = _Longest()
        llm.base_model.register_forward_pre_hook(longest.note, with_kwargs=True)
        for module in found:
            module.forward = longest.rotating(module, module.forward)
    return len(found)


class _Longest:
    """Knows the longest document of the micro-batch that is on its way, where a rank may not hold its end."""

    def __init__(self) -> None:
        self._length: int | None = None

    def note(self, _: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        context = kwargs.get("context")
        lengths = context.layout.lengths if isinstance(context, AttentionContext) else ()
        self._length = max(lengths, default=None)

    def rotating(self, rotary: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        def rotate(x: Tensor, position_ids: Tensor, *others: Any, **named: Any) -> Any:
            _begin_anew(rotary, x.device)
            if not self._length:
                return forward(x, position_ids, *others, **named)
            # One token more, which stands where the longest document ends.
            last = position_ids.new_full((*position_ids.shape[:-1], 1), self._length - 1)
            found = forward(x, torch.cat([position_ids, last], -1), *others, **named)
            return tuple(part[:, :-1] for part in found) if isinstance(found, tuple) else found[:, :-1]

        return rotate


def _kinds(module: nn.Module) -> Mapping[str | None, str]:
    """Kinds of rotation of a rotary embedding, by kind of layer where these differ; none for other modules."""
    kinds = getattr(module, "rope_type", None)
    if isinstance(kinds, str):
        return {None: kinds}
    return kinds if isinstance(kinds, Mapping) else {}


def _follows_length(kind: str) -> bool:
    return kind == "longrope" or "dynamic" in kind


def _begin_anew(rotary: Any, device: torch.device) -> None:
    """Forgets the longest sequence so far, which `dynamic` keeps stretching for."""
    for layer, kind in _kinds(rotary).items():
        if "dynamic" in kind:
            prefix = "" if layer is None else f"{layer}_"
            original = getattr(rotary, f"{prefix}original_inv_freq").to(device)
            rotary.register_buffer(f"{prefix}inv_freq", original, persistent=False)
            setattr(rotary, f"{prefix}max_seq_len_cached", rotary.original_max_seq_len)
