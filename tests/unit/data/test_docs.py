"""The example of the user page loads, and every type it lists is one that opens."""

import re
from pathlib import Path

import yaml

from shoal.config.build import Report, convert
from shoal.config.speech import DataConfig
from shoal.data.sources import _PATHS_OF_TYPE

PAGE = (Path(__file__).parents[3] / "docs" / "dataloaders.md").read_text()


def test_the_example_loads():
    (block,) = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    report = Report()
    config = convert(DataConfig, yaml.safe_load(block)["data"], "data", report)
    assert report.findings == []
    assert [entry.weight for entry in config.train_ds.input_cfg] == [0.7, 0.3]
    assert config.validation_ds.datasets["dev-other"].batch_size == 8


def test_the_table_names_every_type():
    table = PAGE.split("## Sources")[1].split("\n\n`lhotse_as")[0]
    named = {
        name
        for row in table.splitlines()
        for name in re.findall(r"`(\w+)`", row.split("|")[1:2][0] if "|" in row else "")
    }
    assert named - {"type"} == set(_PATHS_OF_TYPE) | {"group"}
