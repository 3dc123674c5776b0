"""`shoal verify` finds faults that are planted in the parallel code, and names what they are."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.verify import configurations
from tests.verify.faults import FAULTS
from tests.zygote import RankRunner

TP = ("distributed.tp_size=2",)
SP = (*TP, "distributed.sequence_parallel=true")
CP = ("distributed.cp_size=2", "distributed.dp_size=1", "packed_sequence.packed_sequence_size=4096")
SPEECH_CP = ("trainer.strategy.cp_size=2", "trainer.strategy.dp_size=1", "model.packed_sequences=true")
DDP = ("distributed.strategy=ddp",)


@dataclass(frozen=True)
class Planted:
    """A fault, where it is planted, and what has to be said about it.

    Attributes:
        kinds: Names of the cause that are right.
        necessary: What the mismatch has to go away without.
        groups: Kinds of parameters that differ, all of them; None says nothing.
        output: What the first differing output's name contains; None when no output may differ.
        parameter: What the first differing parameter's name contains.
    """

    fault: str
    kinds: tuple[str, ...]
    necessary: tuple[str, ...]
    overrides: tuple[str, ...] = ()
    world: int = 2
    recipe: str = "text"
    groups: frozenset[str] | None = None
    output: str | None = None
    parameter: str = ""
    words: str = ""


ALL = frozenset({"embedding", "attention", "feed-forward", "norms", "head"})
TABLE = [
    Planted("averaged_over_dp", ("averaged",), ("dp",), groups=ALL, words="averaged over dp"),
    Planted("averaged_by_ddp", ("averaged",), ("dp",), DDP, groups=ALL),
    Planted("summed_twice", ("multiplied",), ("dp",), DDP, groups=ALL),
    Planted("never_synchronised", ("missing-sum-dp_shard",), ("dp",), DDP, groups=ALL),
    Planted("only_the_last_micro_batch", ("not-accumulated",), ("accumulation",), DDP, groups=ALL),
    Planted("loss_times_dp_size", ("multiplied",), ("dp",), groups=ALL, words="the loss is 2 times"),
    Planted("local_token_mean", ("local-token-mean",), ("dp",), groups=ALL),
    Planted("mean_of_micro_batches", ("micro-batch-mean",), (), groups=ALL),
    Planted("labels_not_shifted", ("loss",), (), groups=ALL, words="labels"),
    Planted("labels_not_shifted_anywhere", ("trainable-module",), (), words="not the layout"),
    Planted("tokens_cut_off", ("truncated",), (), output="embed_tokens"),
    Planted("stale_rotary_buffer", ("forward",), (), output="rotary_emb"),
    Planted(
        "adapters_of_each_rank",
        ("initial-weights", "initial-weights-of-ranks"),
        ("dp",),
        recipe="adapters",
        groups=frozenset({"adapters"}),
        output="lora_A",
        parameter="lora_A",
    ),
    Planted("ranks_with_the_same_data", ("batches",), ("dp",), words="reached several"),
    Planted("norm_of_this_rank", ("local-norm",), ("dp",)),
    Planted("replicas_in_the_norm", ("norm-counts-twice",), ("dp",), DDP, words="all parameters 2 times"),
    Planted("not_clipped", ("clipping",), ("clipping",)),
    Planted("stepped_twice", ("optimizer",), ()),
    Planted("statistics_of_each_rank", ("running-statistics",), ("dp",), recipe="parakeet"),
    Planted("encoder_skipped_without_audio", ("hang", "crash"), ("dp",), recipe="whisper"),
    Planted(
        "peers_with_different_data", ("batches",), ("tp",), TP, 4, words="share data-parallel coordinate"
    ),
    Planted("missing_sum_over_tp", ("missing-sum-tp",), ("tp",), SP, 4, groups=frozenset({"norms"})),
    Planted("norms_left_out_of_the_sum", ("missing-sum-tp",), ("tp",), SP, 4, "qwen3", frozenset({"norms"})),
    Planted(
        "key_values_left_out_of_the_sum",
        ("missing-sum-tp",),
        ("tp",),
        ("distributed.tp_size=8",),
        4,
        groups=frozenset({"attention"}),
        parameter="k_proj",
    ),
    Planted(
        "complete_gradients_summed_over_tp",
        ("multiplied",),
        ("tp",),
        TP,
        4,
        groups=frozenset({"norms"}),
        words="over tp again",
    ),
    Planted(
        "sequence_cut_to_a_multiple", ("forward",), ("tp", "sequence parallel"), SP, 4, output="layers.0"
    ),
    Planted("input_gradient_not_summed", ("backward", "missing-sum-tp"), ("tp",), TP, 4),
    Planted(
        "norms_counted_twice", ("norm-counts-twice",), ("tp",), TP, 4, words="norms 2 times, once for each tp"
    ),
    Planted("labels_shifted_after_the_split", ("loss",), ("cp",), CP, groups=ALL, words="labels"),
    Planted("tokens_counted_by_every_context_rank", ("token-count",), (), CP, groups=ALL, words="2 times"),
    Planted("positions_of_this_rank", ("forward",), ("cp",), CP, output="rotary_emb"),
    Planted("key_gradients_stay_at_home", ("backward",), ("cp",), CP),
    Planted("states_begin_at_zero", ("forward",), ("cp",), CP, recipe="hybrid", output="mamba"),
    Planted(
        "clips_of_other_ranks_without_gradient",
        ("backward",),
        ("cp",),
        SPEECH_CP,
        recipe="whisper",
        groups=frozenset({"encoder", "projection"}),
    ),
]


def verified(
    rank: int, world: int, fault: str | None, recipe: str, overrides: tuple[str, ...], folder: Path, size: int
) -> dict[str, Any]:
    """Runs in a process of its own: plants, verifies, returns the result as data."""
    from shoal.verify.run import VerifyOptions, verify

    if fault is not None:
        FAULTS[fault]()
    options = VerifyOptions(world_size=size, timeout=20 if fault == "encoder_skipped_without_audio" else 200)
    return verify(configuration(recipe, folder), overrides, options=options).as_data()


def configuration(recipe: str, folder: Path) -> dict[str, Any]:
    if recipe == "hybrid":
        return configurations.hybrid({"distributed": {"mamba_cp": "state"}})
    if recipe in ("parakeet", "whisper"):
        return configurations.speech(folder, recipe)
    adapters = {"peft": {"target_modules": ["q_proj", "down_proj"], "dim": 8}}
    return configurations.text(
        "qwen3" if recipe == "qwen3" else "llama", adapters if recipe == "adapters" else None
    )


@pytest.mark.slow
@pytest.mark.parametrize("planted", TABLE, ids=lambda planted: planted.fault)
def test_planted_fault_is_found_and_named(ranks: RankRunner, tmp_path: Path, planted: Planted) -> None:
    arguments = (planted.fault, planted.recipe, planted.overrides, tmp_path, planted.world)
    result = ranks(verified, 1, *arguments, init=False, timeout=600)[0]
    assert result["verdict"] == "fail"
    cause = result["cause"]
    assert cause["kind"] in planted.kinds, cause
    assert set(planted.necessary) <= set(cause["necessary"]), cause
    assert planted.words in cause["words"], cause
    assert planted.parameter in (cause["first_parameter"] or ""), cause
    if planted.groups is not None:
        assert set(cause["groups"]) == planted.groups, cause
    if planted.output is None:
        assert cause["first_output"] is None, cause
    else:
        assert planted.output in cause["first_output"], cause


def test_every_fault_is_planted() -> None:
    assert {planted.fault for planted in TABLE} == set(FAULTS)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "overrides", "world"),
    [
        ("text", (), 2),
        ("text", DDP, 2),
        ("adapters", (), 2),
        ("text", SP, 4),
        ("qwen3", TP, 4),
        ("text", ("distributed.tp_size=8",), 4),
        ("parakeet", (), 2),
        ("whisper", (), 2),
        ("text", (*CP, "distributed.tp_size=2", "distributed.sequence_parallel=true"), 4),
        ("text", (*CP, "distributed.cp_method=ulysses"), 2),
        ("text", ("distributed.cp_size=2", "distributed.cp_method=allgather"), 4),
        ("hybrid", CP, 2),
        ("whisper", (*SPEECH_CP, "trainer.strategy.tp_size=2", "trainer.devices=4"), 4),
        ("parakeet", ("model.packed_sequences=true",), 2),
    ],
)
def test_without_a_fault_the_same_configurations_pass(
    ranks: RankRunner, tmp_path: Path, recipe: str, overrides: tuple[str, ...], world: int
) -> None:
    result = ranks(verified, 1, None, recipe, overrides, tmp_path, world, init=False, timeout=300)[0]
    assert result["verdict"] == "pass", result
    assert result["batches"]["identical"] and not result["model"]["lost"]
    errors = [table["error"] for step in result["gradients"] for table in step.values()]
    assert len(errors) >= (2 if recipe == "adapters" else 10) and max(errors) <= 1e-10
