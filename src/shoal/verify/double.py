"""float64 throughout: transformers' models cast to float32 in norms, rotations, softmax and routers.

Such a cast rounds what differs in the last bits to the same number or, now and then, to a neighbour that is a
thousand million times further away. A proof to ten digits needs all of them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from shoal.parallel.layers import transformer_layers


class _InFloat64(TorchFunctionMode):
    """Turns casts to float32 into casts to float64."""

    def __torch_function__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        named = dict(kwargs or {})
        if named.get("dtype") is torch.float32:
            named["dtype"] = torch.float64
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        if func in (torch.Tensor.to, torch.Tensor.type):
            args = tuple(torch.float64 if value is torch.float32 else value for value in args)
        return func(*args, **named)


def compute_in_float64(module: nn.Module) -> None:
    """Makes the language models below `module` compute in float64 wherever they would cast to float32, in place.

    Experts are computed one by one, since transformers' grouped kernel has no float64. Each layer does this for itself,
    because activation checkpointing runs layers again outside of the model's forward.
    """
    for model in module.modules():
        if not isinstance(model, PreTrainedModel) or model.get_output_embeddings() is None:  # type: ignore[no-untyped-call]
            continue
        if hasattr(model.config, "_experts_implementation"):
            model.set_experts_implementation("eager")
        base: nn.Module = model.base_model
        for part in (model, base, *transformer_layers(base)):
            part.forward = _in_float64(part.forward)


def _in_float64(forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def run(*arguments: Any, **named: Any) -> Any:
        with _InFloat64():
            return forward(*arguments, **named)

    return run
