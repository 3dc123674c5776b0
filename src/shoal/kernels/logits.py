"""A model's head, and what is done to its product before the softmax."""

from __future__ import annotations

import re
from typing import Any

from torch import nn
from transformers import PreTrainedModel

# Model types by the attribute whose value multiplies, divides or bounds the logits. The same name means
# opposite things in different families (`logits_scaling`), so a type that is not listed is refused.
_MULTIPLIED = {
    "logit_scale": ("cohere", "cohere2", "cohere2_moe"),
    "logits_scaling": ("hyperclovax",),
    "lm_head_multiplier": ("falcon_h1",),
}
_DIVIDED = {
    "logits_scaling": (
        "granite",
        "granite_swa",
        "granitemoe",
        "granitemoe_swa",
        "granitemoehybrid",
        "granitemoeshared",
        "minicpm3",
    ),
}
_BOUNDED = {
    "final_logit_softcapping": (
        "beam",
        "gemma2",
        "gemma3_text",
        "gemma3n_text",
        "gemma4_text",
        "nanochat",
        "vaultgemma",
    ),
    "logits_soft_cap": ("recurrent_gemma",),
}
_TABLES = (_MULTIPLIED, _DIVIDED, _BOUNDED)
_SUSPICIOUS = re.compile(r"logits?_?.*(scal|cap|mult)|lm_head_.*(scal|mult)|(scal|cap|mult).*_logits?$")
_OF_ROUTERS = re.compile(r"router|attn|attention|gate|expert")


def logit_transforms(config: Any) -> dict[str, float]:
    """Returns the arguments `softcap` and `logit_scale` of `token_losses` that a model's configuration implies.

    Args:
        config: A transformers `PretrainedConfig`; the text part of a composite one is read.

    Returns:
        A dictionary with none, one or both of the keys "softcap" and "logit_scale".

    Raises:
        ValueError: The configuration scales or bounds logits in a way that is not known for its model type.
    """
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    found: dict[str, float] = {}
    known: set[str] = set()
    for key, table in (("logit_scale", _MULTIPLIED), ("logit_scale", _DIVIDED), ("softcap", _BOUNDED)):
        for attribute, model_types in table.items():
            value = getattr(text, attribute, None)
            if text.model_type not in model_types:
                continue
            known.add(attribute)
            if value is not None:
                found[key] = 1.0 / float(value) if table is _DIVIDED else float(value)
    properties = {name: getattr(text, name, None) for table in _TABLES for name in table}
    unknown = {
        name: value
        for name, value in {**text.to_dict(), **properties}.items()
        if name not in known
        and _SUSPICIOUS.search(name)
        and not _OF_ROUTERS.search(name)
        and isinstance(value, int | float)
        and not isinstance(value, bool)
        and value != 1
    }
    if unknown:
        raise ValueError(f"model type {text.model_type}: it is not known what {unknown} does to the logits")
    return found


def linear_head(model: PreTrainedModel) -> nn.Linear:
    """Returns the head of a causal language model whose logits are one product of its last hidden states.

    With it and `logit_transforms`, `token_losses` of `model.base_model`'s last hidden states is the model's loss.

    Args:
        model: A causal language model of transformers, before or after sharding, without an adapter on its head.

    Raises:
        ValueError: The head is something else, or the model has no backbone of its own to take hidden states from.
    """
    head: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    name = type(model).__name__
    if type(head) is not nn.Linear:
        raise ValueError(f"the head of {name} is {type(head).__name__} and no plain linear layer")
    backbone = model.base_model
    if backbone is model:
        raise ValueError(f"{name} does not name its backbone, which would give hidden states")
    for child_name, child in model.named_children():
        if child is not head and child is not backbone and next(child.parameters(), None) is not None:
            raise ValueError(f"{name} has {child_name} besides its backbone and its head")
    return head
