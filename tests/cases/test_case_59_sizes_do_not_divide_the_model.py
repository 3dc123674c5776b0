"""Public fault: a degree that does not divide heads, experts or layers failed in the middle of the forward pass.

Seen in torchtitan (PR 2577, 2574), transformers 48307, LlamaFactory PR 10794, Automodel 799. Right: a message before
anything starts, with the value, the degree and the sizes that are allowed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shoal.config import ConfigError, Finding, load_config
from tests.unit.config.base import base, merged

AUTOMODEL = "nemo.collections.speechlm2.parts.parallel.AutomodelParallelStrategy"
SHAPE = {
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "num_local_experts": 6,
    "mamba_num_heads": 6,
}
BY_HEADS = {"mamba_cp": "all_to_all"}


def _findings(folder: Path, shape: dict[str, Any], world_size: int, **sizes: Any) -> dict[str, Finding]:
    (folder / "config.json").write_text(json.dumps(shape))
    strategy = {"_target_": AUTOMODEL, **sizes}
    data = merged(
        base("speech"), {"model": {"pretrained_llm": str(folder)}, "trainer": {"strategy": strategy}}
    )
    with pytest.raises(ConfigError) as caught:
        load_config(data, world_size=world_size)
    return {finding.rule: finding for finding in caught.value.findings}


def test_three_ranks_cannot_share_two_key_value_heads(tmp_path: Path) -> None:
    shape = {**SHAPE, "num_attention_heads": 12}
    found = _findings(tmp_path, shape, 3, tp_size=3)
    assert set(found) == {"tp-divides-kv-heads"}
    kv_heads = found["tp-divides-kv-heads"]
    assert (kv_heads.key, kv_heads.value) == ("trainer.strategy.tp_size", 3)
    assert kv_heads.limit == "a divisor of the model's 2 key-value heads (1, 2), or a multiple of 2"
    assert kv_heads.repair == "tp_size: 2"


def test_four_ranks_share_two_key_value_heads(tmp_path: Path) -> None:
    found = _findings(tmp_path, SHAPE, 4 * 7, tp_size=4, cp_size=7, distributed_config=BY_HEADS)
    assert "tp-divides-kv-heads" not in found and "cp-divides-mamba-heads" in found


def test_mamba_heads_that_ranks_cannot_share(tmp_path: Path) -> None:
    found = _findings(tmp_path, SHAPE, 4, cp_size=4, distributed_config=BY_HEADS)
    heads = found["cp-divides-mamba-heads"]
    assert (heads.key, heads.value) == ("trainer.strategy.distributed_config.mamba_cp", "all_to_all")
    assert heads.limit == "state: cp_size = 4 does not divide the 6 heads of the model's Mamba layers"
    assert heads.repair == "mamba_cp: auto"


@pytest.mark.parametrize(
    ("sizes", "rule", "limit"),
    [
        ({"tp_size": 3}, "tp-divides-heads", "8 attention heads: 1, 2, 4, 8"),
        ({"ep_size": 4}, "ep-divides-experts", "6 experts: 1, 2, 3, 6"),
        ({"pp_size": 4}, "pp-fits-layers", "3 layers"),
    ],
)
def test_each_degree_is_checked_against_the_model(
    sizes: dict[str, Any], rule: str, limit: str, tmp_path: Path
) -> None:
    found = _findings(tmp_path, SHAPE, 60, **sizes)[rule]
    assert found.value == next(iter(sizes.values()))
    assert limit in found.limit


def test_expert_axis_without_experts(tmp_path: Path) -> None:
    dense = {key: value for key, value in SHAPE.items() if key != "num_local_experts"}
    assert (
        _findings(tmp_path, dense, 4, ep_size=2)["ep-needs-experts"].limit == "1: this model has no experts"
    )


def test_sizes_of_a_nested_text_model_are_read(tmp_path: Path) -> None:
    nested = {"hidden_size": 7, "text_config": SHAPE}
    assert "8 attention heads" in _findings(tmp_path, nested, 3, tp_size=3)["tp-divides-heads"].limit


@pytest.mark.parametrize("fields", [SHAPE, {"text_config": SHAPE}])
def test_sizes_that_stand_in_the_file_itself_are_read(fields: dict[str, Any]) -> None:
    data = {
        **base("llm"),
        "model": {"config": {"model_type": "llama", **fields}},
        "distributed": {"tp_size": 3},
    }
    with pytest.raises(ConfigError) as caught:
        load_config(data, world_size=3)
    found = {finding.rule: finding for finding in caught.value.findings}
    assert set(found) == {"tp-divides-heads", "tp-divides-kv-heads"}
    assert found["tp-divides-heads"].key == "distributed.tp_size"
    assert found["tp-divides-heads"].repair == "tp_size: 2"


def test_all_that_does_not_divide_is_in_one_message(tmp_path: Path) -> None:
    found = _findings(tmp_path, SHAPE, 5 * 4 * 7, tp_size=5, ep_size=4, pp_size=4, cp_size=7)
    assert {"tp-divides-heads", "tp-divides-kv-heads", "ep-divides-experts", "pp-fits-layers"} <= set(found)


def test_heads_that_context_parallel_ranks_cannot_share(tmp_path: Path) -> None:
    by_heads: dict[str, Any] = {"distributed_config": {"cp_method": "ulysses"}}
    found = _findings(tmp_path, SHAPE, 12, tp_size=2, cp_size=3, **by_heads)["ulysses-divides-heads"]
    assert found.key == "trainer.strategy.distributed_config.cp_method"
    assert "cp_size = 3 does not divide the 4 query heads of a rank" in found.limit
    assert found.repair == "cp_method: ring"
