"""What is wrong is refused before anything starts: key, value, limit and repair in one cheap message."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from shoal.config import ConfigError, LoadOptions, load_config
from tests.unit.config.bad_configs import BAD_CONFIGS, Bad, write_bad_config
from tests.unit.config.base import base

SECONDS_OF_CPU = 0.5
_HEAVY = ("torch", "transformers", "lhotse", "lightning", "pydantic", "omegaconf")
_CLI = "import sys; from shoal.cli import main; status = main(); print(*(set(sys.modules) & set({heavy})));"


def _by_name(bad: Bad) -> str:
    return bad.name.replace(" ", "-")


@pytest.mark.parametrize("bad", BAD_CONFIGS, ids=_by_name)
def test_message_names_key_value_limit_and_repair(bad: Bad, tmp_path: Path) -> None:
    file = write_bad_config(bad, base("speech"), tmp_path)
    with pytest.raises(ConfigError) as caught:
        load_config(file, world_size=bad.world, options=LoadOptions(accelerators=0))
    mine = [finding for finding in caught.value.findings if finding.rule == bad.rule]
    assert [finding.key for finding in mine] == [bad.key], str(caught.value)
    assert bad.limit in mine[0].limit
    assert bad.repair in mine[0].repair
    block = f"  {bad.key} = {mine[0].value!r}"[:100]
    assert block in str(caught.value)


def test_table_has_forty_cases_and_no_duplicates() -> None:
    assert len({bad.name for bad in BAD_CONFIGS}) == len(BAD_CONFIGS) >= 40


@pytest.mark.parametrize("bad", BAD_CONFIGS[::4], ids=_by_name)
def test_command_line_refuses_cheaply_without_torch(bad: Bad, tmp_path: Path) -> None:
    file = write_bad_config(bad, base("speech"), tmp_path)
    ranks = [] if bad.world is None else ["--nproc-per-node", str(bad.world)]
    code = _CLI.format(heavy=_HEAVY) + "sys.exit(status)"
    command = [sys.executable, "-c", code, "train", str(file), *ranks]
    before = os.times()
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    )
    after = os.times()
    assert done.returncode == 2, done.stderr
    assert bad.key in done.stderr
    assert f"[{bad.rule}]" in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout.split() == []
    used = after.children_user + after.children_system - before.children_user - before.children_system
    assert used <= SECONDS_OF_CPU
