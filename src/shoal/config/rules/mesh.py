"""Rules on the mesh: sizes against the world, the model and the machine, for both recipes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

from shoal.config.aliases import SCHEDULE_NAMES, canonical_schedule
from shoal.config.facts import Facts, ModelShape
from shoal.config.layout import LAYOUT_RULES, LayoutRule
from shoal.config.llm import LLMConfig
from shoal.config.rules.base import (
    Broken,
    Check,
    Rule,
    layout_of,
    size_key,
    sizes_of,
    spelled,
    strategy_options_key,
)
from shoal.config.schema import FSDP2Config
from shoal.config.speech import SpeechConfig

Config = SpeechConfig | LLMConfig
_STRATEGY_KEYS = ("trainer.strategy", "trainer.devices", "trainer.num_nodes", "distributed")


def _from_layout(rule: LayoutRule) -> Rule:
    def check(config: Config, facts: Facts) -> Iterator[Broken]:
        finding = rule.check(layout_of(config, facts.world_size))
        if finding is not None:
            yield Broken(spelled(config, finding.key), finding.value, finding.limit, finding.repair)

    return Rule(rule.id, "both", _STRATEGY_KEYS, check, rule.why, "change the sizes")


def _divides(size: str, shape_field: str, noun: str) -> Check:
    """A check that a degree divides a number of the model; the limit names the degrees that do."""

    def check(config: Config, facts: Facts) -> Iterator[Broken]:
        degree = getattr(sizes_of(config), size)
        count = getattr(facts.shape or ModelShape(), shape_field)
        if count is None or count % degree == 0:
            return
        allowed = [n for n in range(1, count + 1) if count % n == 0]
        shown = ", ".join(str(n) for n in allowed[:12]) + (", ..." if len(allowed) > 12 else "")
        nearest = max(n for n in allowed if n < degree)
        limit = f"a divisor of the model's {count} {noun}: {shown}"
        yield Broken(size_key(config, size), degree, limit, f"{size}: {nearest}")

    return check


def _key_value_heads(config: Config, facts: Facts) -> Iterator[Broken]:
    tp_size = sizes_of(config).tp_size
    count = (facts.shape or ModelShape()).num_kv_heads
    if count is None or count % tp_size == 0 or tp_size % count == 0:
        return
    divisors = ", ".join(str(n) for n in range(1, count + 1) if count % n == 0)
    limit = f"a divisor of the model's {count} key-value heads ({divisors}), or a multiple of {count}"
    nearest = max(n for n in range(1, tp_size) if count % n == 0 or n % count == 0)
    yield Broken(size_key(config, "tp_size"), tp_size, limit, f"tp_size: {nearest}")


def _fsdp2_options(config: Config) -> tuple[str, FSDP2Config | None]:
    """Returns the key of the strategy's options and the options, when they are FSDP2's."""
    options: object = None
    if isinstance(config, LLMConfig):
        options = config.distributed.options
    else:
        options = config.trainer.strategy.distributed_config
    return strategy_options_key(config), options if isinstance(options, FSDP2Config) else None


def _sequence_parallel_needs_tp(config: Config, facts: Facts) -> Iterator[Broken]:
    key, options = _fsdp2_options(config)
    if options is not None and options.sequence_parallel and sizes_of(config).tp_size == 1:
        yield Broken(f"{key}.sequence_parallel", True, "false with tp_size = 1")


def _plan_needs_tp(config: Config, facts: Facts) -> Iterator[Broken]:
    key, options = _fsdp2_options(config)
    if options is not None and options.tp_plan is not None and sizes_of(config).tp_size == 1:
        yield Broken(f"{key}.tp_plan", options.tp_plan, "absent with tp_size = 1")


def _method_needs_cp(config: Config, facts: Facts) -> Iterator[Broken]:
    key, options = _fsdp2_options(config)
    if options is not None and options.cp_method != "ring" and sizes_of(config).cp_size == 1:
        yield Broken(f"{key}.cp_method", options.cp_method, "absent with cp_size = 1")


def _mamba_method_needs_cp(config: Config, facts: Facts) -> Iterator[Broken]:
    key, options = _fsdp2_options(config)
    if options is not None and options.mamba_cp != "auto" and sizes_of(config).cp_size == 1:
        yield Broken(f"{key}.mamba_cp", options.mamba_cp, "absent with cp_size = 1")


def _mamba_heads(config: Config, facts: Facts) -> Iterator[Broken]:
    key, options = _fsdp2_options(config)
    cp_size, heads = sizes_of(config).cp_size, (facts.shape or ModelShape()).num_mamba_heads
    if options is None or options.mamba_cp != "all_to_all" or heads is None or heads % cp_size == 0:
        return
    limit = f"state: cp_size = {cp_size} does not divide the {heads} heads of the model's Mamba layers"
    yield Broken(f"{key}.mamba_cp", "all_to_all", limit)


def _heads_for_ulysses(config: Config, facts: Facts) -> Iterator[Broken]:
    key, options = _fsdp2_options(config)
    sizes, heads = sizes_of(config), (facts.shape or ModelShape()).num_heads
    if options is None or options.cp_method != "ulysses" or heads is None or heads % sizes.tp_size:
        return
    local = heads // sizes.tp_size
    if local % sizes.cp_size:
        limit = (
            f"ring or allgather: cp_size = {sizes.cp_size} does not divide the {local} query heads of a rank"
        )
        yield Broken(f"{key}.cp_method", "ulysses", limit)


def _te_has_no_allgather(config: Config, facts: Facts) -> Iterator[Broken]:
    key, options = _fsdp2_options(config)
    if config.model is None or options is None or options.cp_method != "allgather":
        return
    kernels = config.model.automodel_backend if isinstance(config, SpeechConfig) else config.model.backend
    if kernels.attn == "te":
        yield Broken(f"{key}.cp_method", "allgather", "ring or ulysses with attn: te")


def _experts_exist(config: Config, facts: Facts) -> Iterator[Broken]:
    ep_size = sizes_of(config).ep_size
    if ep_size > 1 and facts.shape is not None and facts.shape.num_experts is None:
        yield Broken(size_key(config, "ep_size"), ep_size, "1: this model has no experts")


def _stages_fit_layers(config: Config, facts: Facts) -> Iterator[Broken]:
    pp_size = sizes_of(config).pp_size
    layers = facts.shape.num_layers if facts.shape is not None else None
    if layers is not None and pp_size > layers:
        yield Broken(size_key(config, "pp_size"), pp_size, f"at most the model's {layers} layers")


def _layers_fill_stages(config: Config, facts: Facts) -> Iterator[Broken]:
    pipeline = config.distributed.pipeline if isinstance(config, LLMConfig) else None
    layers = facts.shape.num_layers if facts.shape is not None else None
    if pipeline is None or pipeline.layers_per_stage is None or layers is None:
        return
    if pipeline.round_virtual_stages_to_pp_multiple is not None:
        return
    stages, pp_size = math.ceil(layers / pipeline.layers_per_stage), sizes_of(config).pp_size
    if stages % pp_size:
        yield Broken(
            "distributed.pipeline.layers_per_stage",
            pipeline.layers_per_stage,
            f"a number that cuts {layers} layers into a multiple of pp_size = {pp_size} stages, not {stages}",
        )


def _schedule_is_known(config: Config, facts: Facts) -> Iterator[Broken]:
    pipeline = config.distributed.pipeline if isinstance(config, LLMConfig) else None
    if pipeline is None:
        return
    if pipeline.pp_schedule_csv is not None and not Path(pipeline.pp_schedule_csv).is_file():
        key = "distributed.pipeline.pp_schedule_csv"
        yield Broken(key, pipeline.pp_schedule_csv, "an existing CSV file", "check the path")
    if canonical_schedule(pipeline.pp_schedule) is None:
        limit = f"one of {', '.join(SCHEDULE_NAMES)}, or torch's own name of a schedule"
        yield Broken("distributed.pipeline.pp_schedule", pipeline.pp_schedule, limit)


def _tp_inside_node(config: Config, facts: Facts) -> Iterator[Broken]:
    tp_size, per_node = sizes_of(config).tp_size, facts.devices_per_node
    if per_node is None or per_node % tp_size == 0:
        return
    better = ", ".join(str(n) for n in range(1, per_node + 1) if per_node % n == 0)
    limit = f"a divisor of the {per_node} devices of a node: {better}"
    yield Broken(size_key(config, "tp_size"), tp_size, limit)


def _shards_inside_node(config: Config, facts: Facts) -> Iterator[Broken]:
    layout, per_node = layout_of(config, facts.world_size), facts.devices_per_node
    replicas = layout.sizes.dp_replicate_size or 1
    if replicas == 1 or per_node is None or layout.dp_size is None:
        return
    shard = layout.dp_size // replicas * layout.ranks_per_replica
    if shard > per_node:
        limit = f"sharding groups of at most the {per_node} devices of a node, not {shard}"
        repair = f"dp_replicate_size: {layout.dp_size * layout.ranks_per_replica // per_node}"
        yield Broken(size_key(config, "dp_replicate_size"), replicas, limit, repair)


def _topology(check: Check, strict: bool) -> Check:
    def only(config: Config, facts: Facts) -> Iterator[Broken]:
        if facts.options.strict_topology is strict:
            yield from check(config, facts)

    return only


def _topology_rules() -> Iterator[Rule]:
    checks = (
        ("tp-inside-node", _tp_inside_node, "tensor parallelism talks in every layer", "lower tp_size"),
        ("shards-inside-node", _shards_inside_node, "sharding talks in every layer", "add replicas"),
    )
    for identifier, check, why, repair in checks:
        for strict in (True, False):
            yield Rule(
                identifier, "both", _STRATEGY_KEYS, _topology(check, strict), why, repair, notice=not strict
            )


MESH_RULES: tuple[Rule, ...] = (
    *(_from_layout(rule) for rule in LAYOUT_RULES),
    Rule(
        "tp-divides-heads",
        "both",
        _STRATEGY_KEYS,
        _divides("tp_size", "num_heads", "attention heads"),
        "each tensor-parallel rank holds whole heads",
        "lower tp_size",
    ),
    Rule(
        "tp-divides-kv-heads",
        "both",
        _STRATEGY_KEYS,
        _key_value_heads,
        "each tensor-parallel rank holds whole key-value heads, or shares one",
        "lower tp_size",
    ),
    Rule(
        "sequence-parallel-needs-tp",
        "both",
        _STRATEGY_KEYS,
        _sequence_parallel_needs_tp,
        "the sequence is sharded over the tensor-parallel ranks",
        "sequence_parallel: false, or tp_size: 2",
    ),
    Rule(
        "tp-plan-needs-tp",
        "both",
        _STRATEGY_KEYS,
        _plan_needs_tp,
        "a plan says how layers are cut over the tensor-parallel ranks",
        "leave tp_plan out, or tp_size: 2",
    ),
    Rule(
        "cp-method-needs-cp",
        "both",
        _STRATEGY_KEYS,
        _method_needs_cp,
        "a method says how attention reaches the tokens of other ranks",
        "leave cp_method out, or cp_size: 2",
    ),
    Rule(
        "mamba-cp-needs-cp",
        "both",
        _STRATEGY_KEYS,
        _mamba_method_needs_cp,
        "a method says how Mamba-2 layers reach the tokens of other ranks",
        "leave mamba_cp out, or cp_size: 2",
    ),
    Rule(
        "ulysses-divides-heads",
        "both",
        _STRATEGY_KEYS,
        _heads_for_ulysses,
        "each context-parallel rank attends with whole heads",
        "cp_method: ring",
    ),
    Rule(
        "te-has-no-allgather",
        "both",
        (*_STRATEGY_KEYS, "model"),
        _te_has_no_allgather,
        "the kernel is asked only for as many queries as keys, and gathered keys are more",
        "cp_method: ring",
    ),
    Rule(
        "ep-divides-experts",
        "both",
        _STRATEGY_KEYS,
        _divides("ep_size", "num_experts", "experts"),
        "each expert-parallel rank holds whole experts",
        "lower ep_size",
    ),
    Rule("ep-needs-experts", "both", _STRATEGY_KEYS, _experts_exist, "no experts to spread", "ep_size: 1"),
    Rule(
        "cp-divides-mamba-heads",
        "both",
        _STRATEGY_KEYS,
        _mamba_heads,
        "mamba_cp: all_to_all gives each rank whole heads of Mamba layers",
        "mamba_cp: auto",
    ),
    Rule(
        "pp-fits-layers",
        "both",
        _STRATEGY_KEYS,
        _stages_fit_layers,
        "a stage needs at least one layer",
        "lower pp_size",
    ),
    Rule(
        "layers-fill-stages",
        "llm",
        _STRATEGY_KEYS,
        _layers_fill_stages,
        "every pipeline rank holds the same number of stages",
        "round_virtual_stages_to_pp_multiple: up",
    ),
    Rule(
        "pipeline-schedule",
        "llm",
        _STRATEGY_KEYS,
        _schedule_is_known,
        "a schedule is found by name",
        "pp_schedule: 1f1b",
    ),
    *_topology_rules(),
)
