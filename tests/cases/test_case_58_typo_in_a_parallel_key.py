"""Public fault: a misspelt parallel key was ignored and the run went on with the default size.

Seen in torchtitan (PR 4506), ROCm/aorta (PR 247), tinker-cloud (PR 31). Right: an error that names the nearest key,
also when the feature the key belongs to is off.
"""

from __future__ import annotations

import pytest

from shoal.config import ConfigError, load_config, parse_distributed_section
from tests.unit.config.base import base

AUTOMODEL = "nemo.collections.speechlm2.parts.parallel.AutomodelParallelStrategy"
LIGHTNING = "lightning.pytorch.strategies.ModelParallelStrategy"


def _refused(overrides: list[str]) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(base("speech"), overrides, world_size=1)
    assert {finding.rule for finding in caught.value.findings} == {"unknown-key"}
    return str(caught.value)


def test_misspelt_size_names_the_nearest_key() -> None:
    message = _refused([f"trainer.strategy={{_target_: {LIGHTNING}, tensor_paralel: 2}}"])
    assert "trainer.strategy.tensor_paralel = 2" in message
    assert "did you mean trainer.strategy.tensor_parallel_size?" in message


def test_another_spelling_of_a_size_is_not_ignored() -> None:
    message = _refused([f"trainer.strategy={{_target_: {AUTOMODEL}, tensor_parallel: 2}}"])
    assert "trainer.strategy.tensor_parallel = 2" in message
    assert "tp_size" in message


def test_key_of_a_feature_that_is_off_is_refused_too() -> None:
    message = _refused(
        [f"trainer.strategy={{_target_: {AUTOMODEL}, cp_size: 1, cp_load_balancer: head-tail}}"]
    )
    assert "trainer.strategy.cp_load_balancer = 'head-tail'" in message


def test_nested_unknown_keys_are_all_reported_at_once() -> None:
    section = {"tp_siz": 2, "pipeline": {"pp_schedul": "1f1b"}, "moe": {"reshard_after_foward": True}}
    with pytest.raises(ConfigError) as caught:
        parse_distributed_section(section, world_size=2)
    unknown = {
        finding.key: finding.repair for finding in caught.value.findings if finding.rule == "unknown-key"
    }
    assert unknown == {
        "distributed.tp_siz": "did you mean distributed.tp_size?",
        "distributed.pipeline.pp_schedul": "did you mean distributed.pipeline.pp_schedule?",
        "distributed.moe.reshard_after_foward": "did you mean distributed.moe.reshard_after_forward?",
    }
