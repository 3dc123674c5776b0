"""The example of the user page loads, and every type it lists is one that opens."""

import re
from pathlib import Path

import yaml

from shoal.config.build import Report, convert
from shoal.config.speech import DataConfig
from shoal.data.sources import _PATHS_OF_TYPE
from tests.zygote import RankRunner

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


def run_the_example_for_peers(rank, world):
    (block,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    names = {}
    exec(block, names)
    return [batch.tolist() for batch in names["batches"]], names["loader"].source is not None


def test_peers_share_the_loader_of_the_example(ranks: RankRunner):
    results = ranks(run_the_example_for_peers, 4)
    for rank, (batches, has_source) in enumerate(results):
        mine = list(range(rank // 2, 24, 2))
        assert batches == [mine[:4], mine[4:8], mine[8:]] * 2
        assert has_source == (rank % 2 == 0)
