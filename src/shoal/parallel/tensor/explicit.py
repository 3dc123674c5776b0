"""What a plan of the user's own says that cannot be right, found from names and classes before anything is cut."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from shoal.config.errors import Finding
from shoal.parallel.tensor.families import FAMILY_PLANS, Plan
from shoal.parallel.tensor.styles import base_of

KEY = "tp_plan"

_TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Projections whose outputs meet: attention scores and gates need the same heads or features of each."""


def plan_findings(model: PreTrainedModel, plan: Plan, matched: Mapping[str, list[str]]) -> Iterator[Finding]:
    """Yields everything that is wrong with an explicit plan.

    Args:
        model: A causal LM, adapters included.
        plan: Patterns and styles, the latter known.
        matched: Names of modules and parameters that each pattern fits.
    """
    modules = dict(model.named_modules())
    for pattern, style in plan.items():
        if not matched[pattern]:
            limit = f"a name of a module of {type(model).__name__}"
            yield Finding("tp-plan-pattern", KEY, pattern, limit, "correct the pattern")
        elif all(in_experts(name, modules) for name in matched[pattern]):
            limit = "modules outside of expert layers, which every rank computes whole"
            yield Finding("tp-plan-pattern", KEY, pattern, limit, "leave the pattern out")
        else:
            yield from _wrong_class(pattern, style, matched[pattern], modules)
            yield from _stacked(model, pattern, style, matched[pattern])
    chosen = {name for names in matched.values() for name in names}
    yield from _apart(chosen, modules)


def in_experts(name: str, modules: Mapping[str, nn.Module]) -> bool:
    """Whether a module belongs to a block of experts, which is not cut: each rank computes it whole."""
    parts = name.split(".")
    return any(".".join(parts[:end]) + ".experts" in modules for end in range(1, len(parts)))


def _wrong_class(
    pattern: str, style: str, names: list[str], modules: Mapping[str, nn.Module]
) -> Iterator[Finding]:
    """A style that cuts something else than what the pattern names."""
    for name in names:
        module = modules.get(name)
        if style == "per_head":
            fits, limit = module is None, "a parameter for per_head"
        elif style == "embedding":
            fits, limit = isinstance(_base(module), nn.Embedding), "an nn.Embedding for embedding"
        else:
            fits, limit = isinstance(_base(module), nn.Linear), f"an nn.Linear for {style}"
        if not fits:
            kind = "parameter" if module is None else type(_base(module)).__name__
            repair = "correct the pattern or its style"
            yield Finding("tp-plan-class", KEY, pattern, f"{limit}; {name} is a {kind}", repair)
            return


def _base(module: nn.Module | None) -> nn.Module | None:
    return None if module is None else base_of(module)


def _stacked(model: PreTrainedModel, pattern: str, style: str, names: list[str]) -> Iterator[Finding]:
    """Projections that are stacked in one: a contiguous part of their rows would be other heads than the part's."""
    config: Any = model.config.get_text_config()
    family = FAMILY_PLANS.get(config.model_type, {})
    fused = {own.rpartition(".")[2]: known for own, known in family.items() if known.startswith("fused")}
    for name in names:
        known = fused.get(name.rpartition(".")[2], style)
        if known != style:
            limit = f"{known}: {name} stacks several projections"
            yield Finding("tp-plan-style", KEY, f"{pattern}: {style}", limit, f"{pattern}: {known}")
            return


def _apart(chosen: set[str], modules: Mapping[str, nn.Module]) -> Iterator[Finding]:
    """Some projections of a block cut, and others, whose outputs meet theirs, not; once for like layers."""
    wrong: dict[str, Finding] = {}
    for owner in sorted({name.rpartition(".")[0] for name in chosen}):
        for group in _TOGETHER:
            present = [f"{owner}.{leaf}" for leaf in group if f"{owner}.{leaf}" in modules]
            left = [of_any_layer(name) for name in present if name not in chosen]
            if left and len(left) < len(present):
                cut = ", ".join(of_any_layer(name) for name in present if name in chosen)
                limit = f"{', '.join(leaf for leaf in group)} of a block together"
                wrong.setdefault(cut, Finding("tp-plan-block", KEY, cut, limit, f"add {', '.join(left)}"))
    yield from wrong.values()


def of_any_layer(name: str) -> str:
    """A module's name as a pattern.

    >>> of_any_layer("model.layers.0.mlp")
    'model.layers.*.mlp'
    """
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


__all__ = ["KEY", "in_experts", "of_any_layer", "plan_findings"]
