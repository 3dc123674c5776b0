"""Which module is cut how: from an explicit plan, a family's, or the one transformers carries with the model.

Everything is decided, and everything that does not fit refused, from names and sizes alone: before a parameter is
touched or a collective is called.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from shoal.config.errors import ConfigError, Finding
from shoal.config.targets import resolve_target
from shoal.config.values import FunctionName
from shoal.mesh.regions import chunk_size
from shoal.parallel.tensor.explicit import KEY, in_experts, of_any_layer, plan_findings
from shoal.parallel.tensor.families import FAMILY_PLANS, Plan
from shoal.parallel.tensor.styles import base_of, num_rows

STYLES = ("colwise", "rowwise", "fused_qkv", "fused_gate_up", "per_head", "embedding", "head")

_TRANSLATED: Mapping[str, str | None] = {
    "colwise": "colwise",
    "rowwise": "rowwise",
    "replicated_with_grad_allreduce": None,  # follows from where the parameter stands, see blocks.py
    "replicate": None,
    "sequence_parallel": None,
    "embedding_rowwise": "embedding",
    "colwise_gather_output": "head",
    "colwise_rep": "head",
}
_OF_EXPERTS = re.compile(r"\.experts(\.|$)")
_KEY_VALUE = ("k_proj", "v_proj")


@dataclass(frozen=True)
class ResolvedPlan:
    """A plan for one model and degree.

    Attributes:
        styles: Style by full name of a module (of a parameter for per_head), in the order of registration.
        origin: "explicit", "family" or "transformers".
        embedding, head: Names of the modules whose vocabulary is cut, or None.
    """

    styles: Mapping[str, str]
    origin: str
    embedding: str | None
    head: str | None


def resolve_plan(
    model: PreTrainedModel, tp_size: int, explicit: Plan | FunctionName | None = None
) -> ResolvedPlan:
    """Finds the plan of a model and checks that it fits.

    Args:
        model: A causal LM, on the meta device or not, adapters included.
        tp_size: Tensor-parallel ranks.
        explicit: Patterns of full module names and their styles, or the name of a function that returns them for a
            model; nothing else is cut then.

    Raises:
        ConfigError: No plan cuts this model, a style or pattern of the explicit plan is unknown, or sizes do not fit;
            all findings in one message.
    """
    called = _called(explicit, model) if isinstance(explicit, FunctionName) else explicit
    plan, origin = _choose(model, tp_size, called)
    names, modules = _names(model), dict(model.named_modules())
    matched = {pattern: _matching(pattern, names) for pattern in plan}
    if origin == "explicit" and (findings := [*plan_findings(model, plan, matched)]):
        raise ConfigError(findings)
    chosen = {name: plan[pattern] for pattern, found in matched.items() for name in found}
    styles = {name: chosen[name] for name in names if name in chosen and not in_experts(name, modules)}
    embedding = _only(styles, "embedding")
    head = _only(styles, "head")
    if origin != "explicit":
        embedding, head = _name_of(model, "get_input_embeddings"), _name_of(model, "get_output_embeddings")
    styles = {name: style for name, style in styles.items() if style not in ("embedding", "head")}
    resolved = ResolvedPlan(styles, origin, embedding, head)
    findings = [*_misfits(model, resolved, tp_size)]
    if findings:
        raise ConfigError(findings)
    return resolved


def num_heads(model: PreTrainedModel) -> tuple[int, int]:
    """Query heads and key-value heads of a model's attention."""
    config: Any = model.config.get_text_config()
    queries: int = config.num_attention_heads
    return queries, getattr(config, "num_key_value_heads", None) or queries


def shares_key_values(model: PreTrainedModel, name: str, tp_size: int) -> bool:
    """Whether a projection makes keys or values of heads that several ranks share."""
    return name.rpartition(".")[2] in _KEY_VALUE and num_heads(model)[1] < tp_size


def _called(function: FunctionName, model: PreTrainedModel) -> Plan:
    plan = resolve_target(function.target, function.allow, function.key)(model)
    if not isinstance(plan, Mapping) or not all(
        isinstance(text, str) for item in plan.items() for text in item
    ):
        limit = "a function of a model that returns a mapping of patterns to styles"
        raise ConfigError(
            [Finding("tp-plan-style", function.key or KEY, function.target, limit, "return a dict")]
        )
    return plan


def _choose(model: PreTrainedModel, tp_size: int, explicit: Plan | None) -> tuple[dict[str, str], str]:
    """The plan with full names, and where it comes from."""
    if model.base_model is model:
        limit = f"1: {type(model).__name__} does not name its backbone, which would give hidden states"
        raise ConfigError([Finding("tp-plan", "tp_size", tp_size, limit, "tp_size: 1")])
    if explicit is not None:
        return {pattern: _canonical(style) for pattern, style in explicit.items()}, "explicit"
    prefix = f"{model.base_model_prefix}."
    family = FAMILY_PLANS.get(model.config.get_text_config().model_type)
    if family is not None:
        return {prefix + pattern: style for pattern, style in family.items()}, "family"
    own: Mapping[str, str] = getattr(model, "tp_plan", None) or {}
    own = {pattern: style for pattern, style in own.items() if not _OF_EXPERTS.search(pattern)}
    unknown = sorted({style for style in own.values() if style not in _TRANSLATED})
    translated = {pattern: _TRANSLATED.get(style) for pattern, style in own.items()}
    inside = {pattern for pattern in own if ".*." in pattern}
    gathered = {pattern for pattern in inside if translated[pattern] == "head"}
    if unknown or gathered or not {"colwise", "rowwise"} <= {translated[p] for p in inside}:
        name, model_type = type(model).__name__, model.config.model_type
        why = (
            f"its plan in transformers has {', '.join(unknown)}"
            if unknown
            else "transformers cuts no layer of it"
        )
        if gathered:
            why = "transformers computes its attention whole on every rank"
        allowed, repair = "1, or an own plan", "tp_size: 1, or give tp_plan: {pattern: colwise | rowwise}"
        if not any(isinstance(module, nn.Linear) for module in model.base_model.modules()):
            allowed, repair = "1", "tp_size: 1; its layers are no nn.Linear, which an own plan could cut"
        limit = f"{allowed}: no tensor-parallel plan for {name} ({model_type}); {why}"
        raise ConfigError([Finding("tp-plan", "tp_size", tp_size, limit, repair)])
    return {pattern: style for pattern, style in translated.items() if style is not None}, "transformers"


def _canonical(style: str) -> str:
    canonical = style if style in STYLES else _TRANSLATED.get(style)
    if canonical is None:
        limit = f"one of {', '.join(STYLES)}"
        raise ConfigError([Finding("tp-plan-style", KEY, style, limit, "colwise or rowwise")])
    return canonical


def _names(model: nn.Module) -> list[str]:
    """Modules and the parameters they own, outermost first; what adapters add is left out."""
    names = []
    for name, module in model.named_modules():
        if ".base_layer" in name or ".lora_" in name:
            continue
        names.append(name)
        names += [
            f"{name}.{own}"
            for own, _ in module.named_parameters(recurse=False)
            if own not in ("weight", "bias")
        ]
    return names


def _matching(pattern: str, names: list[str]) -> list[str]:
    expression = re.compile(re.escape(pattern).replace(r"\*", r"[^.]+"))
    return [name for name in names if expression.fullmatch(name)]


def _only(styles: Mapping[str, str], style: str) -> str | None:
    found = [name for name, value in styles.items() if value == style]
    if len(found) > 1:
        limit = f"at most one module, not {', '.join(found)}"
        raise ConfigError([Finding("tp-plan-style", KEY, style, limit, f"name one {style}")])
    return found[0] if found else None


def _name_of(model: PreTrainedModel, getter: str) -> str | None:
    wanted = getattr(model, getter)()
    for name, module in model.named_modules(remove_duplicate=False):
        if wanted is not None and base_of(module) is base_of(wanted) and ".base_layer" not in f".{name}":
            return str(name)
    return None


def _misfits(model: PreTrainedModel, plan: ResolvedPlan, tp_size: int) -> Iterator[Finding]:
    """Everything about sizes and adapters that this plan cannot do with this degree."""
    queries, key_values = num_heads(model)
    if queries % tp_size:
        yield _indivisible("attention heads", queries, tp_size)
    if key_values % tp_size and tp_size % key_values:
        yield _indivisible("key-value heads", key_values, tp_size)
    yield from _open_blocks(plan)
    for name in filter(None, (plan.embedding, plan.head)):
        rows = num_rows(model.get_submodule(name))
        if chunk_size(rows, tp_size) * (tp_size - 1) >= rows:
            yield _indivisible("rows of the vocabulary", rows, tp_size)
    if plan.embedding is not None and hasattr(model.get_submodule(plan.embedding), "base_layer"):
        limit = "no adapter on the input embedding, whose rows are cut"
        yield Finding("tp-embedding-adapter", "tp_size", tp_size, limit, "leave it out of target_modules")
    head: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    tied = model.get_input_embeddings().weight is getattr(head, "weight", None)
    if tied and (plan.embedding is None) is not (plan.head is None):
        limit = "both the embedding and the head, which are tied, or none"
        yield Finding("tp-plan-tied", KEY, plan.embedding or plan.head, limit, "name both")


def _open_blocks(plan: ResolvedPlan) -> Iterator[Finding]:
    """Local features that nothing sums up again, or a sum of features that nobody has cut; once for like layers."""
    blocks: dict[str, set[str]] = {}
    for name, style in plan.styles.items():
        blocks.setdefault(name.rpartition(".")[0], set()).add(style)
    wrong = {
        f"{of_any_layer(block)}: {', '.join(sorted(styles))}": opened
        for block, styles in blocks.items()
        if (opened := bool(styles & {"colwise", "fused_qkv", "fused_gate_up"})) is not ("rowwise" in styles)
    }
    for found, opened in wrong.items():
        limit = "colwise projections and a rowwise one in the same module"
        yield Finding("tp-plan-block", KEY, found, limit, f"add the {'rowwise' if opened else 'colwise'} one")


def _indivisible(noun: str, count: int, tp_size: int) -> Finding:
    allowed = [n for n in range(1, count + 1) if count % n == 0]
    if noun == "key-value heads":
        limit = f"a divisor or a multiple of the model's {count} {noun}"
    else:
        limit = f"a divisor of the model's {count} {noun}: {', '.join(map(str, allowed[:12]))}"
    if noun.startswith("rows"):
        limit = f"few enough ranks that each holds some of the {count} {noun}"
    nearest = max(n for n in allowed if n <= tp_size)
    return Finding("tp-fits-model", "tp_size", tp_size, limit, f"tp_size: {nearest}")


__all__ = ["KEY", "STYLES", "ResolvedPlan", "num_heads", "resolve_plan", "shares_key_values"]
