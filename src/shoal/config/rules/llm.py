"""Rules on the sections of the LLM recipe."""

from __future__ import annotations

from collections.abc import Iterator

from shoal.config.facts import Facts
from shoal.config.llm import LLMConfig
from shoal.config.rules.base import Broken, Rule, layout_of


def _packing_needs_one_row(config: LLMConfig, facts: Facts) -> Iterator[Broken]:
    rows = config.step_scheduler.local_batch_size
    if config.packed_sequence.packed_sequence_size > 0 and rows != 1:
        yield Broken(
            "step_scheduler.local_batch_size", rows, "1 with packed sequences: a pack is a batch already"
        )


def _packing_divides_by_cp(config: LLMConfig, facts: Facts) -> Iterator[Broken]:
    size, cp_size = config.packed_sequence.packed_sequence_size, config.distributed.sizes.cp_size
    if size % cp_size:
        limit = f"a multiple of cp_size = {cp_size}"
        repair = f"packed_sequence_size: {max(1, size // cp_size) * cp_size}"
        yield Broken("packed_sequence.packed_sequence_size", size, limit, repair)


def _batch_divides(config: LLMConfig, facts: Facts) -> Iterator[Broken]:
    steps, dp_size = config.step_scheduler, layout_of(config, facts.world_size).dp_size
    if dp_size is None or steps.global_batch_size % (steps.local_batch_size * dp_size) == 0:
        return
    rows = steps.local_batch_size * dp_size
    limit = f"a multiple of local_batch_size * dp_size = {rows}"
    repair = f"step_scheduler.global_batch_size: {-(-steps.global_batch_size // rows) * rows}"
    yield Broken("step_scheduler.global_batch_size", steps.global_batch_size, limit, repair)


LLM_RULES: tuple[Rule, ...] = (
    Rule(
        "packing-needs-one-row",
        "llm",
        ("packed_sequence", "step_scheduler"),
        _packing_needs_one_row,
        "a pack is a batch already",
        "step_scheduler.local_batch_size: 1",
    ),
    Rule(
        "packing-divides-by-cp",
        "llm",
        ("packed_sequence", "distributed"),
        _packing_divides_by_cp,
        "every context-parallel rank holds the same number of tokens",
        "use a multiple",
    ),
    Rule(
        "global-batch-divides",
        "llm",
        ("step_scheduler", "distributed"),
        _batch_divides,
        "a step is a whole number of micro-batches on every rank",
        "use a multiple",
    ),
)
