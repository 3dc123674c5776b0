"""A run that stops twice and goes on elsewhere is the uninterrupted run: numbers, rates, data, optimizer state."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.resume_chain import CHAINS, ONE, STEPS, Recipe, Segment, differences, run_chain
from tests.zygote import RankRunner

LIMIT = 1e-8
"""Relative, fp64: other layouts sum in another order."""

COVERING = (
    "speech, dp 4 to 2 to 4",
    "speech, checkpointing on and off",
    "LLM, fsdp2 to ddp to hsdp",
    "LLM, checkpointing and compile on and off",
    "LoRA, fsdp2 to ddp to hsdp",
    "speech, fsdp2 to tp to one",
    "LLM, tp to fsdp2 to tp",
    "LoRA, tp to ddp to tp",
)
"""Every strategy, number of ranks, recipe and wrapper; docs/resume.md has all chains."""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("resume")


@pytest.fixture(scope="module")
def whole(ranks: RankRunner, root: Path) -> dict[Recipe, Segment]:
    """Uninterrupted runs of one process."""
    recipes: tuple[Recipe, ...] = ("speech", "llm", "llm-lora")
    return {recipe: run_chain(ranks, recipe, root, f"whole-{recipe}", [ONE])[0][0] for recipe in recipes}


@pytest.mark.parametrize("name", COVERING)
def test_a_chain_of_layouts_is_the_uninterrupted_run(
    ranks: RankRunner, root: Path, whole: dict[Recipe, Segment], name: str
) -> None:
    recipe, layouts = CHAINS[name]
    reports = run_chain(ranks, recipe, root, name, layouts)
    expected, parts = whole[recipe], [segment[0] for segment in reports]
    for segment in reports:
        assert {report.start for report in segment} == {segment[0].start}
        assert {report.end for report in segment} == {segment[0].end}
    # What one layout saved, the next one loaded to the last bit: parameters, buffers and both moments of AdamW.
    for one, following in zip(parts, parts[1:], strict=False):
        assert one.end == following.start != one.start
    assert [rates for part in parts for rates in part.rates] == expected.rates
    assert len({rates[0][0] for rates in expected.rates}) > STEPS // 2  # a schedule that moves
    assert [ids for part in parts for ids in part.samples] == expected.samples
    assert all(expected.samples) and len(expected.samples) == STEPS
    for column, difference in differences(parts, expected).items():
        assert difference < LIMIT, (column, difference)


def test_a_lost_step_would_be_seen(ranks: RankRunner, root: Path, whole: dict[Recipe, Segment]) -> None:
    """The comparison is sharp: neighbouring steps differ by far more than the limit."""
    for segment in whole.values():
        for one, following in zip(segment.losses, segment.losses[1:], strict=False):
            assert abs(one - following) / following > 1000 * LIMIT
        assert all(a != b for a, b in zip(segment.samples, segment.samples[1:], strict=False))
