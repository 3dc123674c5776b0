"""The rules on parallel sizes and on the blocks that go with them; YAML and Python share this one list.

A rule is data: an identifier, what it protects, and a check that returns the finding or None.
`layout_findings` applies all of them, so that one attempt reveals everything.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

from shoal.config.errors import Finding
from shoal.config.schema import CheckpointingMode, ParallelismSizes, StrategyName


@dataclass(frozen=True)
class LayoutKeys:
    """Where the user wrote each part, for the findings; the defaults are the arguments in Python."""

    sizes: str = "parallelism_sizes"
    strategy: str = "strategy"
    pipeline: str = "pipeline_config"
    moe: str = "moe_parallel_config"
    checkpointing: str = "activation_checkpointing"
    option_checkpointing: str = "strategy.activation_checkpointing"


@dataclass(frozen=True)
class Layout:
    """What the rules look at.

    Attributes:
        sizes: The degrees as the user gave them.
        world_size: Number of ranks; None when it is not known yet, which skips the rules that need it.
        strategy: Name of the strategy.
        has_pipeline: Whether a pipeline block was given.
        has_moe: Whether a block for expert layers was given.
        checkpointing: The recipe's switch for activation checkpointing.
        option_checkpointing: The same switch on the strategy's options.
        keys: Where these were written.
    """

    sizes: ParallelismSizes
    world_size: int | None = None
    strategy: StrategyName = "fsdp2"
    has_pipeline: bool = False
    has_moe: bool = False
    checkpointing: CheckpointingMode = False
    option_checkpointing: CheckpointingMode = False
    keys: LayoutKeys = LayoutKeys()

    def key(self, size: str) -> str:
        """Full key path of one of the sizes."""
        return f"{self.keys.sizes}.{size}" if self.keys.sizes else size

    @property
    def ranks_per_replica(self) -> int:
        """Ranks that share one data-parallel coordinate: tp_size * pp_size * cp_size."""
        return self.sizes.tp_size * self.sizes.pp_size * self.sizes.cp_size

    @property
    def dp_size(self) -> int | None:
        """The data-parallel degree, inferred when it was not given; None when it does not exist."""
        if self.world_size is None:
            return self.sizes.dp_size
        if self.sizes.dp_size is None and self.world_size % self.ranks_per_replica == 0:
            return self.world_size // self.ranks_per_replica
        return self.sizes.dp_size


@dataclass(frozen=True)
class LayoutRule:
    """One rule: `check` returns what is wrong with a layout, or None. `why` is for the documentation."""

    id: str
    why: str
    check: Callable[[Layout], Finding | None]


def layout_findings(layout: Layout) -> list[Finding]:
    """Everything that is wrong with `layout`, in the order of the rules.

    Sizes that are not positive integers are reported alone: arithmetic with them means nothing.
    """
    wrong = _not_positive_integers(layout)
    if wrong:
        return wrong
    return [finding for rule in LAYOUT_RULES if (finding := rule.check(layout)) is not None]


def agreed_checkpointing(layout: Layout) -> CheckpointingMode:
    """The one activation-checkpointing mode of a layout without findings."""
    return layout.checkpointing or layout.option_checkpointing


def _not_positive_integers(layout: Layout) -> list[Finding]:
    given = {layout.key(field.name): getattr(layout.sizes, field.name) for field in fields(ParallelismSizes)}
    optional = {layout.key("dp_size"), layout.key("dp_replicate_size"), "world_size"}
    given["world_size"] = layout.world_size
    return [
        Finding("size-is-positive-integer", key, value, "1, 2, 3, ...", f"{key.rsplit('.', 1)[-1]}: 1")
        for key, value in given.items()
        if not (value is None and key in optional) and (type(value) is not int or value < 1)
    ]


def _axes_divide_world(layout: Layout) -> Finding | None:
    product = layout.ranks_per_replica
    if layout.world_size is None or layout.world_size % product == 0:
        return None
    name = max(("tp_size", "pp_size", "cp_size"), key=lambda size: getattr(layout.sizes, size))
    return Finding(
        "axes-divide-world",
        layout.key(name),
        getattr(layout.sizes, name),
        f"tp_size * pp_size * cp_size = {product} must divide the world size {layout.world_size}",
        f"start a multiple of {product} ranks, or lower tp_size, pp_size or cp_size",
    )


def _dp_fills_world(layout: Layout) -> Finding | None:
    dp_size, world, product = layout.sizes.dp_size, layout.world_size, layout.ranks_per_replica
    if dp_size is None or world is None or dp_size * product == world:
        return None
    fitting = f"dp_size: {world // product}" if world % product == 0 else "dp_size: none"
    return Finding(
        "dp-size-fills-world",
        layout.key("dp_size"),
        dp_size,
        f"dp_size * tp_size * pp_size * cp_size = {dp_size * product} must equal the world size {world}",
        f"{fitting}, or start {dp_size * product} ranks",
    )


def _replicas_divide_dp(layout: Layout) -> Finding | None:
    dp_size, replicas = layout.dp_size, layout.sizes.dp_replicate_size or 1
    if dp_size is None or replicas == 1 or (dp_size % replicas == 0 and replicas < dp_size):
        return None
    allowed = ", ".join(str(n) for n in range(1, dp_size + 1) if dp_size % n == 0 and (n < dp_size or n == 1))
    return Finding(
        "dp-replicate-size-divides-dp-size",
        layout.key("dp_replicate_size"),
        replicas,
        f"a divisor of dp_size = {dp_size} below it: {allowed}",
        "dp_replicate_size: none (no replicas), or strategy ddp to replicate the whole model",
    )


def _experts_divide_dp_cp(layout: Layout) -> Finding | None:
    dp_size, ep_size = layout.dp_size, layout.sizes.ep_size
    if dp_size is None or (dp_size * layout.sizes.cp_size) % ep_size == 0:
        return None
    product = dp_size * layout.sizes.cp_size
    return Finding(
        "ep-size-divides-dp-times-cp",
        layout.key("ep_size"),
        ep_size,
        f"a divisor of dp_size * cp_size = {product}",
        f"ep_size: {max(n for n in range(1, ep_size) if product % n == 0)}",
    )


def _pipeline_block_needs_stages(layout: Layout) -> Finding | None:
    if not layout.has_pipeline or layout.sizes.pp_size > 1:
        return None
    limit = "a pipeline block needs pp_size > 1"
    repair = f"remove {layout.keys.pipeline}, or set {layout.key('pp_size')}: 2 or more"
    return Finding(
        "pipeline-block-needs-pp", layout.keys.pipeline, f"pp_size {layout.sizes.pp_size}", limit, repair
    )


def _moe_block_needs_experts(layout: Layout) -> Finding | None:
    if not layout.has_moe or layout.sizes.ep_size > 1:
        return None
    limit = "a block for expert parallelism needs ep_size > 1"
    repair = f"remove {layout.keys.moe}, or set {layout.key('ep_size')}: 2 or more"
    return Finding("moe-block-needs-ep", layout.keys.moe, f"ep_size {layout.sizes.ep_size}", limit, repair)


def _checkpointing_mode_exists(layout: Layout) -> Finding | None:
    given = {
        layout.keys.checkpointing: layout.checkpointing,
        layout.keys.option_checkpointing: layout.option_checkpointing,
    }
    for key, value in given.items():
        if not isinstance(value, bool) and value not in ("full", "selective"):
            return Finding(
                "activation-checkpointing-mode", key, value, "false, true, full or selective", f"{key}: true"
            )
    return None


def _checkpointing_agrees(layout: Layout) -> Finding | None:
    switch, option = layout.checkpointing, layout.option_checkpointing
    if not switch or not option or _mode(switch) == _mode(option):
        return None
    return Finding(
        "activation-checkpointing-agrees",
        layout.keys.option_checkpointing,
        option,
        f"the mode of {layout.keys.checkpointing}, which is {switch!r}",
        f"set only {layout.keys.checkpointing}",
    )


def _mode(value: CheckpointingMode) -> CheckpointingMode:
    return "full" if value is True else value


def _needs(name: str, strategies: tuple[StrategyName, ...], why: str) -> LayoutRule:
    """The rule that the axis of size `name` exists under `strategies` only."""
    rule = f"{name}-needs-{'-or-'.join(strategies)}".replace("_", "-")

    def check(layout: Layout) -> Finding | None:
        value = getattr(layout.sizes, name)
        if value in (None, 1) or layout.strategy in strategies:
            return None
        limit = f"1 with strategy {layout.strategy}"
        return Finding(rule, layout.key(name), value, limit, f"{name}: 1, or strategy {strategies[0]}")

    return LayoutRule(rule, why, check)


LAYOUT_RULES: tuple[LayoutRule, ...] = (
    LayoutRule(
        "axes-divide-world", "every replica of the model needs its full set of ranks", _axes_divide_world
    ),
    LayoutRule("dp-size-fills-world", "an explicit dp_size must leave no rank without work", _dp_fills_world),
    LayoutRule(
        "dp-replicate-size-divides-dp-size",
        "hybrid sharding splits the data-parallel ranks into equal groups, each of at least two shards",
        _replicas_divide_dp,
    ),
    LayoutRule(
        "ep-size-divides-dp-times-cp",
        "experts are spread over the data- and context-parallel ranks instead of adding an axis",
        _experts_divide_dp_cp,
    ),
    _needs("dp_replicate_size", ("fsdp2",), "only fsdp2 shards within groups and replicates across them"),
    _needs("pp_size", ("fsdp2",), "only fsdp2 composes with pipeline stages"),
    _needs("ep_size", ("fsdp2",), "only fsdp2 shards experts over an axis of their own"),
    _needs("tp_size", ("fsdp2", "megatron_fsdp"), "ddp is data-parallel only"),
    _needs("cp_size", ("fsdp2", "megatron_fsdp"), "ddp is data-parallel only"),
    LayoutRule(
        "pipeline-block-needs-pp", "a block that would do nothing is a mistake", _pipeline_block_needs_stages
    ),
    LayoutRule("moe-block-needs-ep", "a block that would do nothing is a mistake", _moe_block_needs_experts),
    LayoutRule(
        "activation-checkpointing-mode", "a misspelt mode must not mean off", _checkpointing_mode_exists
    ),
    LayoutRule("activation-checkpointing-agrees", "one switch, one meaning", _checkpointing_agrees),
)

__all__ = ["LAYOUT_RULES", "Layout", "LayoutKeys", "LayoutRule", "agreed_checkpointing", "layout_findings"]
