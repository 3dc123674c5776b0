"""Mamba-2 layers of transformers with our convolution and scan, which keep packed documents apart.

transformers' own path in torch cannot tell documents apart: it refuses `seq_idx`, and given only the borders that
attention reads it lets the state of one document run into the next. Only `forward` is replaced, layer by layer (a
replaced class would miss NemotronH, which looks its layers up in a table); parameters keep their names and modules
their classes. With a cache, to generate, the layer's own forward runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from shoal.config.schema import MambaContextMethod
from shoal.kernels.packed import accumulation_dtype
from shoal.kernels.ssd import document_ids
from shoal.kernels.ssd_layer import MambaMixing
from shoal.parallel.context.attention import AttentionContext
from shoal.parallel.context.mamba import context_mixing

_MIXERS = frozenset({"Mamba2Mixer", "BambaMixer", "GraniteMoeHybridMambaLayer", "NemotronHMamba2Mixer"})
"""Classes of transformers that compute the same from the same attributes."""


def substitute_mamba(llm: PreTrainedModel, context_method: MambaContextMethod = "auto") -> int:
    """Gives every Mamba-2 layer below `llm` our convolution and scan, in place; returns their number.

    Borders of documents are read from `cu_seq_lens_q` [N+1] (one row of documents, as for attention), or from
    `position_ids` [R, T] that begin with 0 in every document; without either, each row is one document.

    Args:
        llm: A causal language model of transformers, on any device and before or after sharding.
        context_method: How tokens of a document on several ranks meet, under context parallelism.
    """
    mixers = [module for module in llm.modules() if type(module).__name__ in _MIXERS]
    for mixer in mixers:
        mixer.forward = MethodType(_forward, mixer)
        mixer.separates_documents = True  # type: ignore[assignment]
        mixer.context_method = context_method  # type: ignore[assignment]
    if mixers:
        _Borders().watch(llm)
    return len(mixers)


def restore_mamba(model: nn.Module) -> None:
    """Gives every Mamba-2 layer below `model` its own forward back, which knows no documents; in place."""
    for module in model.modules():
        if type(module).__name__ in _MIXERS:
            vars(module).pop("forward", None)


class _Borders:
    """Hands the numbers of documents down to the layers of a model, whatever its own forwards pass on.

    They travel as an argument of every layer's forward, so that a layer that is recomputed in backward gets them too.
    """

    def __init__(self) -> None:
        self._given: Mapping[str, Any] = {}

    def watch(self, llm: PreTrainedModel) -> None:
        backbone = llm.base_model
        if backbone is not llm:  # Mamba2ForCausalLM keeps its keyword arguments from its backbone
            llm.register_forward_pre_hook(self._remember, with_kwargs=True)
            llm.register_forward_hook(self._forget, always_call=True)
        backbone.register_forward_pre_hook(self._hand_down, with_kwargs=True)

    def _remember(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._given = kwargs

    def _forget(self, *_: Any) -> None:
        self._given = {}

    def _hand_down(
        self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        given = {**self._given, **kwargs}
        if given.get("context") is not None:
            return args, {**kwargs, "context": given["context"]}
        documents = _documents(given, args)
        if documents is None:
            return None
        return args, {**kwargs, "cu_seq_lens_q": given.get("cu_seq_lens_q"), "document_ids": documents}


def _documents(given: Mapping[str, Any], args: tuple[Any, ...]) -> Tensor | None:
    """Numbers of documents [R, T], or None for rows of one document."""
    borders, positions = given.get("cu_seq_lens_q"), given.get("position_ids")
    if borders is not None:
        tokens = next(
            tensor
            for tensor in (*args[:1], given.get("input_ids"), given.get("inputs_embeds"))
            if tensor is not None
        )
        if tokens.shape[0] != 1:
            raise ValueError(
                f"cu_seq_lens_q with {tokens.shape[0]} rows: a Mamba-2 model takes one; pack all documents into one row"
            )
        return document_ids(borders, tokens.shape[1])
    if positions is None or positions.dim() != 2:
        return None
    documents: Tensor = (positions == 0).cumsum(1).int()
    return documents


def _forward(
    mixer: Any,
    hidden_states: Tensor,
    cache: Any = None,
    attention_mask: Tensor | None = None,
    document_ids: Tensor | None = None,
    context: AttentionContext | None = None,
    **others: Any,
) -> Tensor:
    """In place of the forward of a Mamba-2 layer: hidden states [R, T, H] to [R, T, H].

    Args:
        mixer: The layer.
        hidden_states: [R, T, H].
        cache: When given, the layer's own forward runs.
        attention_mask: [R, T], 0 on padding, whose hidden states count as 0; None leaves right padding to itself.
        document_ids: [R, T] int, see `shoal.kernels.ssd`.
        context: With context parallelism, which of the documents' tokens lie where.

    Raises:
        ValueError: A cache together with packed documents.
    """
    if cache is not None:
        if others.get("cu_seq_lens_q") is not None:
            raise ValueError(f"{type(mixer).__name__}: packed documents with a cache; give use_cache=False")
        output: Tensor = type(mixer).forward(
            mixer, hidden_states, cache=cache, attention_mask=attention_mask, **others
        )
        return output
    projected = mixer.in_proj(_without_padding(hidden_states, attention_mask))
    z, xbc, dt = torch.split(projected, [mixer.intermediate_size, mixer.conv_dim, mixer.num_heads], -1)
    if document_ids is not None:
        document_ids = document_ids.expand(len(hidden_states), -1)
    y = mixed_tokens(mixer, xbc, dt, document_ids, attention_mask, context)
    output = mixer.out_proj(mixer.norm(y, z).to(hidden_states.dtype))
    return output


# Borders and chunks are read as numbers and looped over, which a compiled graph cannot do; the rest is compiled around.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def mixed_tokens(
    mixer: Any,
    xbc: Tensor,
    dt: Tensor,
    documents: Tensor | None = None,
    attention_mask: Tensor | None = None,
    context: AttentionContext | None = None,
) -> Tensor:
    """What a layer does between its projections.

    Args:
        mixer: The layer.
        xbc: [R, T, channels of the convolution].
        dt: Raw time steps, [R, T, heads].
        documents: Numbers of documents, [R, T] int, or None.
        attention_mask: [R, T] or None.
        context: Where documents lie on the ranks of context parallelism, in place of `documents`.

    Returns:
        y [R, T, heads * width] in float32 (float64 for float64).
    """
    layer = _mixing_of(mixer)
    if context is not None:
        name = f"layers.{mixer.layer_idx} ({type(mixer).__name__})"
        return context_mixing(xbc, dt, layer, context.layout, context.group, mixer.context_method, name=name)
    xbc = _without_padding(layer.convolve(xbc, documents), attention_mask)
    return layer.scan(xbc, dt, documents)


def _mixing_of(mixer: Any) -> MambaMixing:
    dtype = accumulation_dtype(mixer.A_log.dtype)
    return MambaMixing(
        mixer.conv1d.weight[:, 0],
        mixer.conv1d.bias,
        -mixer.A_log.to(dtype).exp(),
        mixer.D,
        mixer.dt_bias,
        mixer.n_groups,
        mixer.ssm_state_size,
        (float(mixer.time_step_limit[0]), float(mixer.time_step_limit[1])),
        None if mixer.activation in ("silu", "swish") else mixer.act,
    )


def _without_padding(x: Tensor, attention_mask: Tensor | None) -> Tensor:
    return x if attention_mask is None else (x * attention_mask[:, :, None]).to(x.dtype)
