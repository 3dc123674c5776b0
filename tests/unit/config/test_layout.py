"""Every rule on sizes and blocks refuses what it is for, says how to repair it, and lets the repair pass."""

from dataclasses import replace
from typing import Any

import pytest

from shoal.config.layout import LAYOUT_RULES, Layout, LayoutKeys, agreed_checkpointing, layout_findings
from shoal.config.schema import ParallelismSizes


def layout(world_size: int | None = 8, **arguments: Any) -> Layout:
    sizes = {name: arguments.pop(name) for name in list(arguments) if name.endswith("_size")}
    return Layout(ParallelismSizes(**sizes), world_size, **arguments)


# rule, key, refused, part of the message, the same layout repaired
REFUSALS = [
    (
        "axes-divide-world",
        "tp_size",
        layout(tp_size=3),
        "= 3 must divide the world size 8",
        layout(9, tp_size=3),
    ),
    (
        "axes-divide-world",
        "pp_size",
        layout(pp_size=4, tp_size=3),
        "= 12 must",
        layout(12, pp_size=4, tp_size=3),
    ),
    (
        "dp-size-fills-world",
        "dp_size",
        layout(dp_size=2, tp_size=2),
        "dp_size: 4",
        layout(dp_size=4, tp_size=2),
    ),
    ("dp-size-fills-world", "dp_size", layout(dp_size=16), "start 16 ranks", layout(16, dp_size=16)),
    (
        "dp-replicate-size-divides-dp-size",
        "dp_replicate_size",
        layout(dp_replicate_size=3),
        "1, 2, 4",
        layout(dp_replicate_size=4),
    ),
    (
        "dp-replicate-size-divides-dp-size",
        "dp_replicate_size",
        layout(dp_replicate_size=8),
        "below it",
        layout(dp_replicate_size=2),
    ),
    ("ep-size-divides-dp-times-cp", "ep_size", layout(ep_size=3), "ep_size: 2", layout(ep_size=2)),
    (
        "ep-size-divides-dp-times-cp",
        "ep_size",
        layout(ep_size=8, tp_size=2),
        "= 4",
        layout(ep_size=4, tp_size=2),
    ),
    (
        "dp-replicate-size-needs-fsdp2",
        "dp_replicate_size",
        layout(dp_replicate_size=2, strategy="megatron_fsdp"),
        "strategy fsdp2",
        layout(strategy="megatron_fsdp"),
    ),
    (
        "pp-size-needs-fsdp2",
        "pp_size",
        layout(pp_size=2, strategy="megatron_fsdp"),
        "strategy fsdp2",
        layout(strategy="megatron_fsdp"),
    ),
    (
        "ep-size-needs-fsdp2",
        "ep_size",
        layout(ep_size=2, strategy="ddp"),
        "strategy fsdp2",
        layout(strategy="ddp"),
    ),
    (
        "tp-size-needs-fsdp2-or-megatron-fsdp",
        "tp_size",
        layout(tp_size=2, strategy="ddp"),
        "strategy fsdp2",
        layout(tp_size=2, strategy="megatron_fsdp"),
    ),
    (
        "cp-size-needs-fsdp2-or-megatron-fsdp",
        "cp_size",
        layout(cp_size=2, strategy="ddp"),
        "strategy fsdp2",
        layout(cp_size=2, strategy="megatron_fsdp"),
    ),
    (
        "pipeline-block-needs-pp",
        None,
        layout(has_pipeline=True),
        "pipeline_config",
        layout(has_pipeline=True, pp_size=2),
    ),
    (
        "moe-block-needs-ep",
        None,
        layout(has_moe=True),
        "moe_parallel_config",
        layout(has_moe=True, ep_size=2),
    ),
    (
        "activation-checkpointing-mode",
        None,
        layout(checkpointing="selectiv"),
        "selective",
        layout(checkpointing="selective"),
    ),
    (
        "activation-checkpointing-agrees",
        None,
        layout(checkpointing="selective", option_checkpointing=True),
        "'selective'",
        layout(checkpointing=True, option_checkpointing="full"),
    ),
]


@pytest.mark.parametrize(("rule", "size", "refused", "text", "repaired"), REFUSALS)
def test_refusals(rule: str, size: str | None, refused: Layout, text: str, repaired: Layout) -> None:
    (finding,) = layout_findings(refused)
    assert finding.rule == rule
    assert text in str(finding)
    if size is not None:
        assert finding.key == f"parallelism_sizes.{size}"
        assert finding.value == getattr(refused.sizes, size)
    assert layout_findings(repaired) == []


def test_every_rule_has_a_refusal() -> None:
    assert {rule.id for rule in LAYOUT_RULES} == {row[0] for row in REFUSALS}
    assert len({rule.id for rule in LAYOUT_RULES}) == len(LAYOUT_RULES)


@pytest.mark.parametrize("value", ["2", 2.0, -1, 0, True, [2]])
def test_a_size_is_a_positive_integer(value: Any) -> None:
    (finding,) = layout_findings(Layout(ParallelismSizes(tp_size=value), 8))
    assert (finding.rule, finding.key, finding.value) == (
        "size-is-positive-integer",
        "parallelism_sizes.tp_size",
        value,
    )
    (finding,) = layout_findings(Layout(ParallelismSizes(), value))
    assert finding.key == "world_size"


def test_none_is_only_for_sizes_that_can_be_inferred() -> None:
    assert layout_findings(Layout(ParallelismSizes(dp_size=None, dp_replicate_size=None), 8)) == []
    (finding,) = layout_findings(Layout(ParallelismSizes(cp_size=None), 8))  # type: ignore[arg-type]
    assert finding.key == "parallelism_sizes.cp_size"


def test_without_a_world_size_only_what_is_certain_is_refused() -> None:
    unknown = layout(None, tp_size=3, ep_size=5, dp_replicate_size=7)
    assert layout_findings(unknown) == []
    certain = layout(None, dp_size=4, ep_size=3, has_pipeline=True)
    assert [f.rule for f in layout_findings(certain)] == [
        "ep-size-divides-dp-times-cp",
        "pipeline-block-needs-pp",
    ]


def test_findings_carry_the_keys_of_the_file() -> None:
    keys = LayoutKeys("distributed", "distributed.strategy", "distributed.pipeline", "distributed.moe")
    found = layout_findings(replace(layout(dp_size=2, tp_size=2, has_pipeline=True), keys=keys))
    assert [finding.key for finding in found] == ["distributed.dp_size", "distributed.pipeline"]
    assert "distributed.pp_size" in found[1].repair


def test_either_switch_turns_checkpointing_on() -> None:
    assert agreed_checkpointing(layout()) is False
    assert agreed_checkpointing(layout(checkpointing="selective")) == "selective"
    assert agreed_checkpointing(layout(option_checkpointing=True)) is True
