"""Case 44: a rank whose batch has no audio skips the encoder's collectives, and the job hangs."""

from __future__ import annotations

import pytest

from tests.parity.harness import Case, Layout, assert_parity, reference, run_layout
from tests.zygote import RankRunner

FROZEN = (r"^perception\.encoder\..+",)
CASES = {
    "audio on rank 0 alone": Case(num_micro_batches=4, without_audio=(1, 3)),
    "no audio anywhere": Case(num_micro_batches=4, without_audio=(0, 1, 2, 3)),
    "encoder frozen": Case(num_micro_batches=4, without_audio=(1, 3), freeze=FROZEN),
    "parakeet": Case(encoder="parakeet", num_micro_batches=4, without_audio=(1, 3), freeze=FROZEN),
}


@pytest.mark.parametrize("strategy", ["fsdp2", "ddp"])
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_ranks_without_audio_keep_step(
    ranks: RankRunner, case: str, strategy: str, checkpointing: bool
) -> None:
    layout = Layout(strategy, 2, strategy, checkpoint_llm=checkpointing, checkpoint_perception=checkpointing)
    actual = ranks(run_layout, 2, CASES[case], layout, timeout=30)[0]
    assert_parity(actual, reference(CASES[case]), CASES[case])
