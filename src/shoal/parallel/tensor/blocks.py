"""Where activations are full, partial or sharded over tokens, and which gradients are therefore partial.

A *block* is a module of a decoder layer whose projections are cut (attention, feed-forward). Between its entrance and
the sum behind its last projection every rank computes other heads or features, so gradients are partial there: that
of the input is summed by the entrance, and those of whole parameters (q/k norms, shared key-value heads, an adapter's
A) are listed and summed once per step.

Under sequence parallelism the residual stream between the first layer's input and the last norm's output is sharded
over tokens. Norms on it see a part of the tokens, so their gradients are partial too. What is neither cut nor
pointwise (Mamba mixers, experts) gets the whole sequence and computes the same on every rank: complete gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from shoal.config.errors import ConfigError, Finding
from shoal.parallel.layers import transformer_layers
from shoal.parallel.tensor.plan import ResolvedPlan

Change = Callable[[Tensor], Tensor]

_LAST_NORMS = ("norm", "norm_f", "final_layernorm", "final_layer_norm", "final_norm", "ln_f")


@dataclass(frozen=True)
class Blocks:
    """The parts of a model, by full name.

    Attributes:
        cut: Modules with cut projections.
        whole: Modules of decoder layers that every rank computes in full; only looked for under sequence parallelism.
        sharded: Modules that see a part of the tokens under sequence parallelism: decoder layers and the last norm.
        head: The head when its vocabulary is cut.
    """

    cut: tuple[str, ...]
    whole: tuple[str, ...] = ()
    sharded: tuple[str, ...] = ()
    head: str | None = None

    def is_partial(self, name: str) -> bool:
        """Whether the gradient of a whole (not cut) parameter has to be summed over the tensor-parallel ranks."""
        if self.is_cut(name) or (self.head is not None and _inside(name, (self.head,))):
            return True
        return self.is_sharded(name)

    def is_cut(self, name: str) -> bool:
        """Whether a module or parameter stands in a block, where ranks compute other heads or features."""
        return _inside(name, self.cut)

    def is_sharded(self, name: str) -> bool:
        """Whether a module or parameter works on the residual stream while it is sharded over tokens."""
        return _inside(name, self.sharded) and not _inside(name, (*self.whole, *self.cut))


def find_blocks(model: PreTrainedModel, plan: ResolvedPlan, sequence_parallel: bool) -> Blocks:
    """Sorts the modules of a model.

    Raises:
        ConfigError: Sequence parallelism does not know a part of the model.
    """
    cut = tuple(dict.fromkeys(name.rpartition(".")[0] for name in plan.styles))
    if not sequence_parallel:
        return Blocks(cut, head=plan.head)
    base: nn.Module = model.base_model
    names = {module: name for name, module in model.named_modules()}
    layers = transformer_layers(base)
    last_norms = [module for name, module in base.named_children() if name in _LAST_NORMS]
    _refuse_unknown(model, base, last_norms)
    whole = []
    for layer in layers:
        for child in layer.children():
            name = names[child]
            if name not in cut and not is_pointwise(child):
                whole.append(name)
    nested = [name for name in cut if _inside(name, whole)]
    if nested:
        limit = f"false: {nested[0]} lies deeper than a decoder layer's own modules"
        raise ConfigError([_sp_finding(limit)])
    sharded = tuple(names[module] for module in (*layers, *last_norms))
    return Blocks(cut, tuple(whole), sharded, plan.head)


def is_pointwise(module: nn.Module) -> bool:
    """Whether a module treats every token by itself and has no parameters, or only those of a norm."""
    if type(module).__name__.endswith("Norm") or isinstance(module, nn.LayerNorm | nn.RMSNorm):
        return True
    return next(module.parameters(), None) is None


def _refuse_unknown(model: PreTrainedModel, base: nn.Module, last_norms: list[nn.Module]) -> None:
    """A base model is an embedding, layers and a norm; anything else might work on a part of the tokens unaware."""
    embedding = model.get_input_embeddings()
    for name, child in base.named_children():
        known = (
            child is embedding
            or child in last_norms
            or bool(transformer_layers(nn.ModuleDict({name: child})))
        )
        if not known and next(child.parameters(), None) is not None:
            raise ConfigError(
                [_sp_finding(f"false: it is not known what {name} of {type(model).__name__} does")]
            )
    if not last_norms:
        raise ConfigError(
            [_sp_finding(f"false: {type(model).__name__} has no last norm that is known by name")]
        )


def _sp_finding(limit: str) -> Finding:
    return Finding("sequence-parallel-model", "sequence_parallel", True, limit, "sequence_parallel: false")


def at_entrance(module: nn.Module, change: Change) -> None:
    """Changes the hidden states that a module gets, whether by position or by name."""

    def enter(
        _module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]]:
        return changed_input(change, inputs, named)

    module.register_forward_pre_hook(enter, with_kwargs=True)


def at_exit(module: nn.Module, change: Change) -> None:
    """Changes the hidden states that a module returns, alone or first in a tuple."""

    def leave(_module: nn.Module, _inputs: Any, output: Any) -> Any:
        return (change(output[0]), *output[1:]) if isinstance(output, tuple) else change(output)

    module.register_forward_hook(leave)


def inside_forward(module: nn.Module, change: Change) -> None:
    """As `at_entrance`, but within what activation checkpointing runs again: its hooks keep the unchanged input."""
    forward = module.forward

    def entered(*inputs: Any, **named: Any) -> Any:
        inputs, named = changed_input(change, inputs, named)
        return forward(*inputs, **named)

    module.forward = entered


def changed_input(
    change: Change, inputs: tuple[Any, ...], named: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Applies `change` to the first tensor of a call."""
    if inputs:
        return (change(inputs[0]), *inputs[1:]), named
    key = "hidden_states" if "hidden_states" in named else next(iter(named))
    return inputs, {**named, key: change(named[key])}


def partial_parameters(model: nn.Module, blocks: Blocks) -> list[str]:
    """Names of the trainable parameters whose gradients are partial over the tensor-parallel ranks."""
    return [
        name
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and not isinstance(parameter, DTensor) and blocks.is_partial(name)
    ]


def _inside(name: str, modules: Iterable[str]) -> bool:
    return any(name.startswith(f"{module}.") or name == module for module in modules)


__all__ = ["Blocks", "at_entrance", "at_exit", "find_blocks", "inside_forward", "partial_parameters"]
