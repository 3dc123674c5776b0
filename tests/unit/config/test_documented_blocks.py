"""Every YAML block of the public documents on these parallelisms loads, or is refused by exactly the named rules."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from shoal.config import ConfigError, LoadOptions, load
from tests.unit.config.base import base, merged

BLOCKS = sorted((Path(__file__).parent / "documented_blocks").glob("*.yaml"))


@pytest.mark.parametrize("path", BLOCKS, ids=lambda path: path.stem)
def test_block_loads_or_is_refused_by_name(path: Path) -> None:
    case = yaml.safe_load(path.read_text())
    data = merged(base(case["recipe"]), case["block"])
    options = LoadOptions(accelerators=8)
    try:
        loaded = load(data, world_size=case["world_size"], options=options)
    except ConfigError as error:
        assert sorted(finding.rule for finding in error.findings) == sorted(case["refused"]), str(error)
    else:
        assert case["refused"] == []
        assert loaded.facts.world_size == case["world_size"]


def test_command_lines_of_the_documents_are_accepted_as_overrides() -> None:
    overrides = [
        "exp_manager.name=s2s_training",
        "exp_manager.wandb_logger_kwargs.name=s2s_training",
        "trainer.num_nodes=4",
        "exp_manager.explicit_log_dir=results/s2s_training",
        "data.train_ds.seed=1234",
    ]
    config = load(base("speech"), overrides, world_size=32, options=LoadOptions(accelerators=8)).config
    assert config.exp_manager.name == "s2s_training"
    assert config.exp_manager.wandb_logger_kwargs == {"name": "s2s_training"}
    assert config.trainer.devices == 8
    assert config.data.train_ds.seed == 1234
