"""LoRA adapters, injected while the model is on the meta device and before it is sharded.

Injected later, an adapter would be a plain tensor beside sharded weights: each rank would train its own copy.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import nn
from transformers import PreTrainedModel

if TYPE_CHECKING:
    from peft import LoraConfig

ADAPTER_PATTERN = r"^.+\.lora_.+$"
"""Names of adapter parameters; they train even when everything around them is frozen."""


def add_lora(
    model: PreTrainedModel, options: Mapping[str, Any] | LoraConfig, key: str = "target_modules"
) -> None:
    """Adds adapters in place and freezes the rest of `model`, as peft does.

    An adapted layer keeps its own weight under ``NAME.base_layer.weight``.

    Args:
        model: A causal LM with parameters on the meta device.
        options: A `peft.LoraConfig`, or its arguments: r, lora_alpha, lora_dropout, target_modules, ...
        key: Where the user names the modules, for messages.

    Raises:
        ValueError: No module of the model matches `target_modules`.
    """
    from peft import LoraConfig, inject_adapter_in_model  # a third of a second that only adapters need

    if isinstance(options, Mapping):
        options = LoraConfig(**{"task_type": "CAUSAL_LM", **options})
    try:
        inject_adapter_in_model(options, model, low_cpu_mem_usage=True)
    except ValueError as error:  # no module of that name, or no default for this model
        linear = {
            name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, nn.Linear)
        }
        raise ValueError(f"{key}: {error} Linear layers here: {', '.join(sorted(linear))}") from error


def adapted_modules(model: nn.Module) -> tuple[str, ...]:
    """Full names of the modules that carry an adapter."""
    return tuple(name for name, module in model.named_modules() if hasattr(module, "base_layer"))
