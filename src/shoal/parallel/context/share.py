"""A rank's share of a micro-batch: its tokens, and what attention has to know about them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from transformers import PreTrainedModel

from shoal.config.schema import ContextMethod
from shoal.kernels.attention import Backend
from shoal.kernels.attention_hf import PACKED_ATTENTION, registered_backend
from shoal.kernels.packable import packable
from shoal.kernels.packed import borders
from shoal.mesh.exchange import refuse_disagreement
from shoal.parallel.context.attention import (
    CONTEXT_ATTENTION,
    AttentionContext,
    register_context_attention,
)
from shoal.parallel.context.split import DualChunks, local_index
from shoal.parallel.context.ulysses import refuse_indivisible_heads

_BACKENDS: Mapping[str | None, Backend] = {
    None: "auto",
    "sdpa": "sdpa",
    "flash_attention_2": "flash",
}
"""Which kernel computes locally, by the attention a model was built with; ours keeps its own."""


@dataclass(frozen=True)
class Share:
    """This rank's tokens of a micro-batch.

    Attributes:
        index: Place of each local token among the flattened tokens of the micro-batch, int64 [num_local].
        is_real: False on padding, bool [num_local].
        attention: For the attention layers, as the keyword `context`.
    """

    index: Tensor
    is_real: Tensor
    attention: AttentionContext

    def tokens(self, values: Tensor) -> Tensor:
        """Values [B, S, ...] of this rank's tokens, [1, num_local, ...]; padding repeats those of a real token."""
        return values.flatten(0, 1).index_select(0, self.index)[None]

    def inputs(self, **values: Tensor) -> dict[str, Any]:
        """What a model of transformers gets of this rank's tokens, from its arguments [B, S, ...] for all of them.

        `position_ids` are those in whole documents.
        """
        local = {name: self.tokens(value) for name, value in values.items()}
        return {**local, "use_cache": False, "context": self.attention}

    def labels(self, labels: Tensor, ignore: int) -> Tensor:
        """Labels [B, S], already shifted, of this rank's tokens [1, num_local]; `ignore` on padding."""
        return self.tokens(labels).masked_fill(~self.is_real, ignore)


@dataclass(frozen=True)
class ContextParallel:
    """How the ranks of a group share the tokens of every micro-batch.

    Attributes:
        group: The ranks along the cp axis; all get the same micro-batches.
        method: How queries and keys meet in attention.
        backend: Kernel of the local computation.
    """

    group: ProcessGroup
    method: ContextMethod
    backend: Backend = "auto"

    def share(self, micro_batch: Mapping[str, Any]) -> Share:
        """This rank's share of a micro-batch. Collective, once per micro-batch, over the cp ranks.

        Args:
            micro_batch: `input_ids` and `loss_mask` [B, S]. A pack has its documents in `cu_seqlens` int32 [N + 1];
                of rows, each is a document of `text_lens` int64 [B] tokens.

        Raises:
            ValueError: On every rank, when they did not get the same micro-batch.
        """
        starts, lengths = _documents(micro_batch)
        layout = DualChunks(lengths, self.group.size(), self.group.rank())
        refuse_disagreement(
            [sum(lengths), _digest_of_all(micro_batch)],
            self.group,
            "the micro-batch (number of tokens, digest of all its tensors)",
            "give all cp ranks of a data-parallel coordinate the same data",
        )
        index, is_real = local_index(layout, starts, micro_batch["input_ids"].device)
        return Share(index, is_real, AttentionContext(layout, self.group, self.method, self.backend))


def make_context_parallel(
    llm: PreTrainedModel, group: ProcessGroup, method: ContextMethod, tp_size: int = 1
) -> ContextParallel:
    """Switches a language model to context-parallel attention, on any device and before sharding over data.

    Args:
        llm: Its configuration is changed: attention is `CONTEXT_ATTENTION`.
        group: The ranks that share tokens.
        method: How queries and keys meet.
        tp_size: Ranks that the heads of attention are cut over.

    Raises:
        ValueError: The model mixes tokens in ways that are not split, has attention dropout or an attention that
            cannot be split, or its heads cannot be dealt to the ranks.
    """
    attention = llm.config._attn_implementation
    backend = registered_backend(attention) if attention == PACKED_ATTENTION else _BACKENDS.get(attention)
    if backend is None:
        raise ValueError(
            f"model.attn_implementation = {attention!r}: auto, sdpa, flash_attention_2 or shoal with cp_size > 1, "
            "because its scores would miss the tokens of other ranks; repair: attn_implementation: auto"
        )
    try:
        packable(llm)
    except ValueError as error:
        raise ValueError(f"cp_size = {group.size()}: {error}, and cp_size: 1") from None
    if method == "ulysses":
        refuse_indivisible_heads(llm.config.get_text_config().num_attention_heads // tp_size, group.size())
    if method == "allgather" and backend == "te":
        raise ValueError(
            "cp_method = 'allgather': backend te is asked only for as many queries as keys, and gathered keys are "
            "more; repair: cp_method: ring"
        )
    register_context_attention()
    llm.set_attn_implementation(CONTEXT_ATTENTION)
    return ContextParallel(group, method, backend)


def attach_context_parallel(
    module: nn.Module, llm: PreTrainedModel, group: ProcessGroup, method: ContextMethod, tp_size: int = 1
) -> None:
    """Gives a trainable module the attribute `context_parallel`, by which its forward splits micro-batches.

    Raises:
        ValueError: The module does not split its micro-batches, or its model cannot; see `make_context_parallel`.
    """
    if not hasattr(module, "context_parallel"):
        raise ValueError(
            f"cp_size = {group.size()}: {type(module).__name__} does not split its micro-batches over ranks; "
            "repair: cp_size: 1"
        )
    module.context_parallel = make_context_parallel(llm, group, method, tp_size)  # type: ignore[assignment]


def _documents(micro_batch: Mapping[str, Any]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Where the documents begin among the flattened tokens, and their lengths."""
    if "cu_seqlens" in micro_batch:
        ends = borders(micro_batch["cu_seqlens"])
        return ends[:-1], tuple(b - a for a, b in zip(ends, ends[1:], strict=False))
    rows, columns = micro_batch["input_ids"].shape
    return tuple(range(0, rows * columns, columns)), tuple(micro_batch["text_lens"].tolist())


def _digest(values: Tensor) -> int:
    """A number that differs, almost surely, for tensors that differ."""
    flat = values.flatten().long()
    # int64 arithmetic wraps around, which is as good as a modulus here.
    weights = torch.arange(1, len(flat) + 1, device=flat.device) * 2654435761 + 97
    return int(((flat + 1) * weights).sum()) ^ (values.shape[0] << 32)


def _digest_of_all(micro_batch: Mapping[str, Any]) -> int:
    """Of every tensor by its name: audio and seeds as well, from which ranks would compute different things."""
    total = 0
    for name, value in micro_batch.items():
        if isinstance(value, Tensor):
            if value.is_floating_point():  # of audio the sums of rows, which take no memory
                value = value.view(_BITS[value.element_size()]).sum(-1, dtype=torch.int64)
            total += crc32(name.encode()) * _digest(value)
    return total & (2**63 - 1)


_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


__all__ = ["ContextParallel", "Share", "attach_context_parallel", "make_context_parallel"]
