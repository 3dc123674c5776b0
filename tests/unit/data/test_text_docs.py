"""The page on text data says what the code does: its examples load and its tables are whole."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import yaml

from shoal.config import LLMConfig, load_config
from shoal.config.text import TextDatasetType
from shoal.data.text_corpus import HEADER, OFFSETS, TOKENS
from shoal.data.text_rows import _BUILDERS

PAGE = (Path(__file__).parents[3] / "docs" / "text-data.md").read_text()


def test_the_examples_load() -> None:
    data, packing = (yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL))
    config = load_config({"model": {"config": {"model_type": "llama"}}, **data, **packing})
    assert isinstance(config, LLMConfig)
    assert set(config.validation_datasets) == {"default", "math"}
    assert config.packed_sequence.packed_sequence_size == 4096


def test_the_table_names_every_type() -> None:
    table = PAGE.split("| `type` |")[1].split("\n\n")[0]
    named = {
        name
        for row in table.splitlines()
        for name in re.findall(r"`(\w+)`", row.split("|")[1] if "|" in row[:1] else "")
    }
    assert named == set(get_args(TextDatasetType))


def test_formats_and_files_are_named() -> None:
    assert all(f"`{suffix}`" in PAGE for suffix in _BUILDERS)
    assert all(f"`{name}`" in PAGE for name in (TOKENS, OFFSETS, HEADER))
