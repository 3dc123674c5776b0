"""Which models keep packed documents apart: those that were compared, packed with one document at a time."""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedModel

from shoal.config.facts import ATTENTION_DROPOUT
from shoal.config.families import HYBRIDS, PACKABLE


def packable(model: PreTrainedModel) -> None:
    """Refuses a model that could let packed documents see each other, or that packed attention cannot serve.

    A model of transformers that does not hand borders down, or mixes tokens in other ways, gives wrong results
    without an error; therefore only families that were compared are let through.

    Args:
        model: A causal language model, on any device and before or after sharding; only its configuration and
            the kinds of its modules are read.

    Raises:
        ValueError: With the model type and the reason.
    """
    model_type = model.config.model_type
    mixing = [name for name, module in model.named_modules() if isinstance(module, nn.Conv1d)]
    mixing = [name for name in mixing if not _separated(model.get_submodule(name.rpartition(".")[0]))]
    if mixing:
        reason = f"{mixing[0]} is a convolution over tokens, which mixes neighbouring documents"
    elif model_type not in PACKABLE | HYBRIDS:
        reason = "its family has not been compared packed with unpacked"
        if not model._supports_attention_backend:
            reason = "it does not take its attention from transformers' attention interface"
    else:
        for name in ATTENTION_DROPOUT:
            if value := getattr(model.config.get_text_config(), name, None):
                raise ValueError(
                    f"model type {model_type} cannot be packed with {name}={value}: packed attention has no dropout; "
                    f"set {name} to 0 in the model's configuration"
                )
        return
    raise ValueError(f"model type {model_type} cannot be packed: {reason}; switch packing off")


def _separated(layer: nn.Module) -> bool:
    """Whether a layer that mixes tokens has been given a forward that keeps documents apart."""
    return getattr(layer, "separates_documents", False)


__all__ = ["HYBRIDS", "PACKABLE", "packable"]
