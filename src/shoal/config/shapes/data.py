"""Reads data sets whose input_cfg is kept in a YAML file of its own, and the trainer's older spellings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from shoal.config import aliases
from shoal.config.build import FAILED, READERS, Report, build, convert, field_types, join
from shoal.config.errors import ConfigError
from shoal.config.reading import read_list
from shoal.config.shapes.target import as_mapping
from shoal.config.speech import DatasetConfig, InputConfig, TrainerConfig
from shoal.config.values import FrozenDict


def read_input(raw: Any, path: str, report: Report) -> Any:
    """Reads one source of examples."""
    block = _with_input_file(raw, path, report)
    return FAILED if block is None else build(InputConfig, block, path, report)


def read_dataset(raw: Any, path: str, report: Report) -> Any:
    """Reads a data set; each entry of ``datasets`` becomes the block itself with the entry's keys on top."""
    block = _with_input_file(raw, path, report)
    if block is None:
        return FAILED
    named = block.pop("datasets", None) or {}
    shared = build(DatasetConfig, block, path, report)
    if not isinstance(named, Mapping):
        return convert(field_types(DatasetConfig)["datasets"], named, join(path, "datasets"), report)
    sets = {name: _named(own, block, join(path, f"datasets.{name}"), report) for name, own in named.items()}
    return FAILED if FAILED in sets.values() else replace(shared, datasets=FrozenDict(sets))


def _named(raw: Any, shared: Mapping[str, Any], path: str, report: Report) -> Any:
    own = _with_input_file(raw, path, report)
    if own is None:
        return FAILED
    if own.pop("datasets", None):
        key = join(path, "datasets")
        return report.refuse("nested-datasets", key, None, "one level of named sets", f"delete {key}")
    trial = Report(allow_targets=report.allow_targets)
    built = build(DatasetConfig, {**shared, **own}, path, trial)
    # What is wrong in the shared block was reported there.
    mine = [item for item in trial.findings if item.key[len(path) + 1 :].split(".")[0] in own]
    report.findings.extend(mine)
    report.failed |= {item.key for item in mine}
    return built


def _with_input_file(raw: Any, path: str, report: Report) -> dict[str, Any] | None:
    """Replaces an input_cfg that is the path of a YAML list by that list."""
    block = as_mapping(raw, path, report)
    if block is not None and isinstance(block.get("input_cfg"), str) and block["input_cfg"] != "???":
        try:
            block["input_cfg"] = read_list(block["input_cfg"])
        except ConfigError as error:
            report.findings.extend(error.findings)
            report.failed.add(join(path, "input_cfg"))
            block["input_cfg"] = None
    return block


def read_trainer(raw: Any, path: str, report: Report) -> Any:
    """Reads ``trainer``; Lightning's older names of precisions are replaced by today's."""
    block = as_mapping(raw, path, report)
    if block is None:
        return FAILED
    precision = block.get("precision")
    if type(precision) in (int, str):
        block["precision"] = aliases.PRECISIONS.get(precision, precision)
    return build(TrainerConfig, block, path, report)


READERS[InputConfig] = read_input
READERS[DatasetConfig] = read_dataset
READERS[TrainerConfig] = read_trainer
