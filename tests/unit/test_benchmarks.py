"""The benchmarks run, compare what they say they compare, and write what they measured."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import checkpoint, dropout, loading, loss, overhead, peers, report, smollm2


@pytest.mark.slow
@pytest.mark.full
def test_overhead_measures_two_loops_that_do_the_same_work(tmp_path: Path) -> None:
    command = [
        sys.executable,
        overhead.__file__,
        "--repetitions",
        "1",
        "--steps",
        "7",
        "--results",
        str(tmp_path),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    result = json.loads((tmp_path / "overhead.json").read_text())
    for name, ratio in result["ratios"].items():
        assert 0.5 < ratio < 3
        assert f"{name:<9} {ratio:.3f}" in done.stdout
    assert result["largest_loss_difference"] < overhead.LOSS_TOLERANCE
    assert "S(shoal) / S(bare)" in result["formula"] and len(result["commit"]) == 40


def test_overhead_refuses_to_compare_loops_that_do_different_work() -> None:
    bare = [{"losses": [7.0, 6.0]}, {"losses": [8.0, 6.0]}]
    assert overhead.compare_losses(bare, [{"losses": [7.5, 6.0]}]) == 0
    with pytest.raises(SystemExit, match="do not do the same work"):
        overhead.compare_losses(bare, [{"losses": [7.5, 6.1]}])


def test_overhead_leaves_the_first_steps_out_of_the_median() -> None:
    clock = overhead.Clock()
    clock.ends = [10.0, 19.0, 28.0, 37.0, 46.0, 47.0, 49.0, 52.0]  # five slow steps, then 1, 2 and 3 seconds
    assert clock.report() == {"startup": 10.0, "step": 2.0, "losses": []}


def test_peers_refuse_losses_that_differ_in_the_fourth_decimal() -> None:
    assert peers.largest_difference([7.0, 6.00004], [7.0, 6.0]) == pytest.approx(4e-5)
    with pytest.raises(SystemExit, match="do not do the same work"):
        peers.largest_difference([7.0], [7.0001])
    ranks = [{"losses": [1.0, 2.0]}, {"losses": [3.0, 4.0]}]
    assert peers.step_losses("accelerate", ranks) == [2.0, 3.0]
    assert peers.step_losses("shoal", ranks) == [1.0, 2.0]


def test_loading_refuses_shards_that_do_not_add_up() -> None:
    whole = [{"checksum": 10.0, "shard": 8}] * 2
    loading.same_values([{"checksum": 4.0, "shard": 4}, {"checksum": 6.0, "shard": 4}], whole)
    for wrong in ([{"checksum": 4.0, "shard": 4}] * 2, [{"checksum": 5.0, "shard": 3}] * 2):
        with pytest.raises(SystemExit, match="not the same weights"):
            loading.same_values(wrong, whole)


def test_measured_loading_stays_within_its_limit() -> None:
    """The figures in the repository, on checkpoints of at least a gigabyte."""
    result = json.loads((Path(loading.__file__).parent / "results" / "loading.json").read_text())
    assert set(result["cases"]) == set(loading.CHECKPOINTS)
    for case in result["cases"].values():
        assert case["bytes_on_disk"] >= 1e9 and case["memory_ratio"] <= loading.MEMORY_LIMIT


def test_measured_checkpoints_stay_within_their_limits() -> None:
    """The figures in the repository."""
    result = json.loads((Path(checkpoint.__file__).parent / "results" / "checkpoint.json").read_text())
    assert result["targets"] == checkpoint.TARGETS and result["model"] == checkpoint.MODEL
    for name, target in checkpoint.TARGETS.items():
        assert result["ratios"][name] <= target, name
    assert min(result["state_bytes_per_rank"]) > 2e8


@pytest.mark.slow
@pytest.mark.full
def test_checkpoint_measures_every_way_of_saving(tmp_path: Path) -> None:
    command = [sys.executable, checkpoint.__file__, "--repetitions", "1", "--results", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    result = json.loads((tmp_path / "checkpoint.json").read_text())
    for name, ratio in result["ratios"].items():
        assert 0 < ratio < 10 and f"{name:<14} {ratio:.3f}" in done.stdout
    assert {len(result["seconds"][kind]) for kind in (*checkpoint.KINDS, "waiting")} == {2}
    assert len(result["seconds"]["step"]) == 2 * len(result["seconds"]["step while saving"]) == 4


def test_the_page_shows_the_figures_in_the_repository() -> None:
    assert report.DOCUMENT.read_text() == report.document(), "run python benchmarks/report.py"


def measured() -> dict[str, Any]:
    """Every result in the repository that the page shows, by name."""
    files = {name: report.RESULTS / f"{name}.json" for name in report.SECTIONS}
    return {name: json.loads(file.read_text()) for name, file in files.items() if file.is_file()}


def test_the_page_says_which_code_was_measured(tmp_path: Path) -> None:
    result = measured()["peers"]
    for files, said in ((0, f"at commit {result['commit'][:7]},"), (3, "and changes to 3 files,")):
        (tmp_path / "peers.json").write_text(json.dumps({**result, "modified_files": files}))
        assert said in report.document(tmp_path)


def test_measured_figures_stay_within_their_limits() -> None:
    result = measured()
    assert all(case["memory_ratio"] <= loss.MEMORY_LIMIT for case in result["loss"]["cases"].values())
    assert max(result["peers"]["largest_loss_difference"].values()) < 0.5 * 10**-peers.DECIMALS
    assert all(case["time_ratio"] <= dropout.TIME_LIMIT for case in result["dropout"]["cases"].values())
    for name, target in result["overhead"]["targets"].items():
        assert result["overhead"]["ratios"][name] <= target
    smollm2.check(result["smollm2"])


def test_smollm2_refuses_a_reference_that_differs_in_the_fourth_digit() -> None:
    def result(**changes: dict[str, float]) -> dict[str, Any]:
        return {
            "before": {"loss": 3.0, "num_tokens": 9},
            "training": {"validation": {"val_ppl": 17.314}},
            "after": {"perplexity": 17.314, "loss": 2.8515, "num_tokens": 9},
            "transformers": {"perplexity": 17.3141, "num_tokens": 9},
            **changes,
        }

    smollm2.check(result())
    for other in ({"perplexity": 17.32, "num_tokens": 9}, {"perplexity": 17.314, "num_tokens": 8}):
        with pytest.raises(SystemExit, match="transformers finds"):
            smollm2.check(result(transformers=other))
    with pytest.raises(SystemExit, match="did not help"):
        smollm2.check(result(before={"loss": 2.85, "num_tokens": 9}))
    with pytest.raises(SystemExit, match="validation in packs found"):
        smollm2.check(result(after={"perplexity": 17.33, "loss": 2.852, "num_tokens": 9}))
