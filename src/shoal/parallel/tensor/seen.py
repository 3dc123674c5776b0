"""Which features and tokens the dropout modules of a cut model see, so that they take their part of the whole mask."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import PreTrainedModel

from shoal.config.errors import ConfigError, Finding
from shoal.mesh.regions import chunk_bounds
from shoal.parallel.tensor.blocks import Blocks
from shoal.parallel.tensor.plan import ResolvedPlan
from shoal.parallel.tensor.styles import base_of

_OF_ADAPTER = ".lora_dropout."


def place_dropout(model: PreTrainedModel, plan: ResolvedPlan, blocks: Blocks, rank: int, size: int) -> None:
    """Tells every `nn.Dropout` of a model its `feature_start` and its `token_part` (rank, size), as attributes.

    An adapter's dropout sees what the adapted layer does: all tokens, and of a layer whose input is cut this rank's
    features. On the residual stream a module sees all features, and under sequence parallelism this rank's tokens.

    Raises:
        ConfigError: Dropout between the projections of a cut block, where only the model's code knows what it sees.
    """
    findings = []
    for name, module in model.named_modules():
        if not isinstance(module, nn.Dropout):
            continue
        owner, is_adapter, _ = name.partition(_OF_ADAPTER)
        start, part = 0, (0, 1)
        if is_adapter and plan.styles.get(owner) == "rowwise":
            base: Any = base_of(model.get_submodule(owner))
            start = chunk_bounds(base.in_features, size, rank)[0]
        elif not is_adapter and blocks.is_cut(name) and module.p > 0.0:
            limit = f"1: {name} stands between projections that are cut"
            findings.append(Finding("tp-dropout", "tp_size", size, limit, f"set the dropout of {name} to 0"))
        elif blocks.is_sharded(name):
            part = (rank, size)
        module.feature_start, module.token_part = start, part  # type: ignore[assignment]
    if findings:
        raise ConfigError(findings)


__all__ = ["place_dropout"]
