"""Cuts a model over the tensor-parallel ranks, in place: the plan, the collectives, and the gradients to sum."""

from __future__ import annotations

import copy as copying
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module
from transformers import PreTrainedModel

from shoal.config.values import FunctionName
from shoal.kernels.vocab import VocabShard
from shoal.mesh import regions
from shoal.parallel.layers import transformer_layers
from shoal.parallel.summed import SummedGradients, local_gradient
from shoal.parallel.tensor.blocks import (
    Blocks,
    at_entrance,
    at_exit,
    find_blocks,
    inside_forward,
    partial_parameters,
)
from shoal.parallel.tensor.plan import ResolvedPlan, num_heads, resolve_plan, shares_key_values
from shoal.parallel.tensor.seen import place_dropout
from shoal.parallel.tensor.styles import (
    Column,
    Cutter,
    Head,
    PerHead,
    Row,
    Rows,
    VocabEmbedding,
    head_rows,
    num_rows,
)


@dataclass
class TensorParallel:
    """How a model is cut, for its trainable module and the training step.

    Attributes:
        group: The tensor-parallel ranks.
        sequence_parallel: Whether the residual stream is sharded over tokens.
        vocab: The head's part of the vocabulary on this rank; None when the head is whole.
        partial: The modules and names of parameters whose gradients are summed over the group once per step.
        full_logits: Whether the head returns the logits of the whole vocabulary, for generation and for callers that
            know nothing of tensor parallelism; otherwise its logits are local and the loss works on these.
        length: Tokens of the sequence that is on its way through the layers.
    """

    group: ProcessGroup
    sequence_parallel: bool
    vocab: VocabShard | None = None
    partial: list[tuple[nn.Module, str]] = field(default_factory=list)
    full_logits: bool = False
    length: int = 0

    def __post_init__(self) -> None:
        self._summed = SummedGradients(self.partial_parameters, self.group.size())

    @property
    def rank(self) -> int:
        """Coordinate of this rank."""
        return self.group.rank()

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.group.size()

    @contextmanager
    def gathering_logits(self) -> Iterator[None]:
        """The head returns full logits inside."""
        before, self.full_logits = self.full_logits, True
        try:
            yield
        finally:
            self.full_logits = before

    def enter(self, hidden: Tensor) -> Tensor:
        """Into a region of partial gradients."""
        if self.sequence_parallel:
            return regions.gather_sequence(hidden, self.group, self.length)
        return regions.copy(hidden, self.group)

    def leave(self, hidden: Tensor) -> Tensor:
        """Out of it: the partial results become one."""
        if self.sequence_parallel:
            return regions.reduce_scatter_sequence(hidden, self.group)
        return regions.reduce(hidden, self.group)

    def scatter(self, hidden: Tensor) -> Tensor:
        """Onto the residual stream, which is sharded over tokens."""
        self.length = hidden.shape[regions.TOKEN_DIM]
        return regions.scatter_sequence(hidden, self.group)

    def gather(self, hidden: Tensor) -> Tensor:
        """From the residual stream into what every rank computes in full."""
        return regions.gather_replicated(hidden, self.group, self.length)

    def finish_logits(self, logits: Tensor) -> Tensor:
        """What the head returns."""
        if not self.full_logits or self.vocab is None:
            return logits
        return regions.gather_features(logits, self.group, self.vocab.num_total)

    def sum_partial_gradients(self) -> None:
        """Sums the gradients that are partial over the group, in one all-reduce for each dtype."""
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for parameter in self.partial_parameters():
            if parameter.grad is not None:
                local = local_gradient(parameter.grad)
                by_dtype.setdefault(local.dtype, []).append(local)
        for gradients in by_dtype.values():
            self._sum(gradients)
        self._summed.note()

    def share_partial_gradients(self) -> None:
        """Before more is added to gradients that have been summed; see `shoal.parallel.summed`."""
        self._summed.share()

    def partial_parameters(self) -> list[nn.Parameter]:
        """The parameters of `partial`, as FSDP2 has placed them by now."""
        found = (module._parameters[name] for module, name in self.partial)
        return [parameter for parameter in found if parameter is not None]

    def _sum(self, gradients: list[Tensor]) -> None:
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        home = flat.device
        flat = flat.to(
            _device_of(self.group, home)
        )  # offloaded gradients live on the host, the group may not
        dist.all_reduce(flat, group=self.group)
        parts = torch.split(flat.to(home), [gradient.numel() for gradient in gradients])
        for gradient, part in zip(gradients, parts, strict=True):
            gradient.copy_(part.view_as(gradient))


def shard_tensor_parallel(
    model: PreTrainedModel,
    mesh: DeviceMesh,
    *,
    sequence_parallel: bool = False,
    plan: Mapping[str, str] | FunctionName | None = None,
) -> TensorParallel:
    """Cuts a causal LM over a mesh of one axis, in place.

    Args:
        model: With its adapters, `requires_grad` final, on the meta device or with the same values on every rank.
        mesh: The tensor-parallel axis.
        sequence_parallel: Shard the residual stream over tokens; any number of tokens, padded inside.
        plan: An explicit plan, patterns of module names to styles, or the name of a function that makes one; None takes
            the family's or transformers'.

    Returns:
        The handle: cut parameters are DTensors on `mesh` whose gradients are complete, whole ones are plain, and
        `sum_partial_gradients` completes those that need it.

    Raises:
        ConfigError: The model cannot be cut like this; on every rank, before any communication.
    """
    resolved = resolve_plan(model, mesh.size(), plan)
    blocks = find_blocks(model, resolved, sequence_parallel)
    group = mesh.get_group()
    state = TensorParallel(group, sequence_parallel, _vocab_shard(model, resolved, group))
    styles = _styles(model, resolved, state, Cutter(mesh))
    _localise_heads(model, resolved, state)
    parallelize_module(model, mesh, styles, src_data_rank=None)
    _place_collectives(model, blocks, state)
    place_dropout(model, resolved, blocks, state.rank, state.size)
    for name in partial_parameters(model, blocks):
        module, _, leaf = name.rpartition(".")
        state.partial.append((model.get_submodule(module), leaf))
    return state


def _vocab_shard(model: PreTrainedModel, plan: ResolvedPlan, group: ProcessGroup) -> VocabShard | None:
    if plan.head is None:
        return None
    total = num_rows(model.get_submodule(plan.head))
    start, end = regions.chunk_bounds(total, group.size(), group.rank())
    return VocabShard(group, start, end - start, total)


def _styles(
    model: PreTrainedModel, plan: ResolvedPlan, state: TensorParallel, cutter: Cutter
) -> dict[str, ParallelStyle]:
    styles: dict[str, ParallelStyle] = {}
    per_head: dict[str, list[str]] = {}
    for name, style in plan.styles.items():
        owner, _, leaf = name.rpartition(".")
        if style == "per_head":
            per_head.setdefault(owner, []).append(leaf)
        elif style == "rowwise":
            styles[name] = Row(cutter, state.leave, state.rank == 0)
        elif style.startswith("fused"):
            styles[name] = Rows(_fused_rows(model, name, style, state))
        elif shares_key_values(model, name, state.size):
            rows = num_rows(model.get_submodule(name))
            styles[name] = Rows([head_rows(rows, num_heads(model)[1], state.size, state.rank)])
        else:
            styles[name] = Column(cutter)
    styles |= {owner: PerHead(cutter, names) for owner, names in per_head.items()}
    if plan.embedding is not None:
        rows = num_rows(model.get_submodule(plan.embedding))
        bounds = regions.chunk_bounds(rows, state.size, state.rank)
        styles[plan.embedding] = VocabEmbedding(cutter, partial(regions.reduce, group=state.group), *bounds)
    if plan.head is not None:
        styles[plan.head] = Head(cutter, state.finish_logits)
    return styles


def _fused_rows(
    model: PreTrainedModel, name: str, style: str, state: TensorParallel
) -> list[tuple[int, int]]:
    """The rows of this rank in projections that are stacked in one."""
    rows = num_rows(model.get_submodule(name))
    queries, key_values = num_heads(model)
    width = rows // (queries + 2 * key_values)
    heads = (queries, key_values, key_values)
    parts = (
        [(count * width, count) for count in heads] if style == "fused_qkv" else [(rows // 2, rows // 2)] * 2
    )
    ranges, offset = [], 0
    for height, count in parts:
        start, end = head_rows(height, count, state.size, state.rank)
        ranges.append((offset + start, offset + end))
        offset += height
    return ranges


class _LocalHeads:
    """A configuration that counts this rank's heads; everything else is asked of the model's own."""

    def __init__(self, config: Any, **counts: int) -> None:
        self.__dict__.update(counts, _config=config)

    def __getattr__(self, name: str) -> Any:
        if name == "_config":  # a copy that has no attributes yet asks what it can do
            raise AttributeError(name)
        return getattr(self._config, name)


def _localise_heads(model: PreTrainedModel, plan: ResolvedPlan, state: TensorParallel) -> None:
    """Tells attention modules, which keep numbers of heads beside their shapes, how many are here."""
    queries, key_values = num_heads(model)
    counts = {"queries": queries // state.size, "key_values": max(1, key_values // state.size)}
    local = {
        "num_heads": counts["queries"],
        "num_attention_heads": counts["queries"],
        "num_key_value_heads": counts["key_values"],
        "num_key_value_groups": counts["queries"] // counts["key_values"],
    }
    for owner in {name.rpartition(".")[0] for name in plan.styles}:
        attention = model.get_submodule(owner)
        if not hasattr(attention, "num_key_value_groups"):
            continue
        for name, value in local.items():
            if isinstance(getattr(attention, name, None), int):
                setattr(attention, name, value)
        attention.config = _LocalHeads(  # type: ignore[assignment]
            attention.config,
            num_attention_heads=local["num_attention_heads"],
            num_key_value_heads=local["num_key_value_heads"],
        )


def _place_collectives(model: PreTrainedModel, blocks: Blocks, state: TensorParallel) -> None:
    for name in blocks.cut:
        at_entrance(model.get_submodule(name), state.enter)
    for name in blocks.whole:
        at_entrance(model.get_submodule(name), state.gather)
        at_exit(model.get_submodule(name), lambda hidden: regions.scatter_sequence(hidden, state.group))
    if state.sequence_parallel:
        inside_forward(transformer_layers(model.base_model)[0], state.scatter)
    if state.vocab is not None:
        _at_last_hidden_state(model.base_model, state.enter)
    elif state.sequence_parallel:
        _at_last_hidden_state(model.base_model, state.gather)


def _at_last_hidden_state(base: nn.Module, change: Any) -> None:
    def leave(_module: nn.Module, _inputs: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return (change(output[0]), *output[1:])
        output = copying.copy(output)
        output.last_hidden_state = change(output.last_hidden_state)
        return output

    base.register_forward_hook(leave)


def _device_of(group: ProcessGroup, home: torch.device) -> torch.device:
    if "nccl" in dist.get_backend(group):
        return torch.device("cuda", torch.cuda.current_device())
    return home


__all__ = ["TensorParallel", "shard_tensor_parallel"]
