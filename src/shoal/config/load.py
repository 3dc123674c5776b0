"""From a YAML file, command-line overrides or a mapping to one validated, frozen configuration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import shoal.config.shapes  # noqa: F401  (registers the readers)
from shoal.config.build import FAILED, Report, build, convert
from shoal.config.errors import ConfigError, Finding
from shoal.config.facts import Facts, gather_facts
from shoal.config.llm import LLMConfig
from shoal.config.options import LoadOptions
from shoal.config.reading import Interpolator, apply_overrides, read_source
from shoal.config.rules import apply_rules
from shoal.config.schema import DistributedConfig
from shoal.config.sources import check_sources
from shoal.config.speech import SpeechConfig

_Config = TypeVar("_Config")
_NO_OPTIONS = LoadOptions()
_SPEECH_SECTIONS = frozenset({"trainer", "data", "exp_manager"})


@dataclass(frozen=True)
class Loaded:
    """A valid configuration and what is worth knowing about it (topology, changed defaults)."""

    config: SpeechConfig | LLMConfig
    notices: tuple[Finding, ...]
    facts: Facts


def load_config(
    source: str | Path | Mapping[str, Any],
    overrides: Sequence[str] = (),
    *,
    world_size: int | None = None,
    options: LoadOptions = _NO_OPTIONS,
) -> SpeechConfig | LLMConfig:
    """Returns the configuration alone; see `load` for the notices.

    Raises:
        ConfigError: Everything that is wrong, in one message.
    """
    return load(source, overrides, world_size=world_size, options=options).config


def load(
    source: str | Path | Mapping[str, Any],
    overrides: Sequence[str] = (),
    *,
    world_size: int | None = None,
    options: LoadOptions = _NO_OPTIONS,
) -> Loaded:
    """Reads, resolves, builds and checks a configuration; the recipe follows from its sections.

    Args:
        source: Path of a YAML file, or its data.
        overrides: ``key.path=value``, ``+key.path=value`` or ``~key.path``, applied in order.
        world_size: Ranks that were or will be started; None means what the configuration implies.
        options: What the command line allows.

    Raises:
        ConfigError: Everything that is wrong, in one message.
    """
    report = Report(allow_targets=options.allow_targets)
    data = _plain_data(source, overrides, report)
    if not options.allow_commands:
        report.findings.extend(check_sources(data, ""))
    recipe = SpeechConfig if _SPEECH_SECTIONS & set(data) else LLMConfig
    config = convert(recipe, data, "", report)
    facts = gather_facts(config, options, world_size)
    refused, notices = apply_rules(config, facts, report)
    if report.findings or refused:
        raise ConfigError([*report.findings, *refused])
    if isinstance(config, SpeechConfig):
        devices = facts.devices_per_node or 1
        trainer = replace(config.trainer, use_distributed_sampler=False, devices=devices)
        config = replace(config, trainer=trainer)
    config = replace(config, options=options)
    return Loaded(config, tuple(notices), facts)


def _plain_data(
    source: str | Path | Mapping[str, Any], overrides: Sequence[str], report: Report
) -> dict[str, Any]:
    tree = read_source(source)
    report.findings.extend(apply_overrides(tree, overrides))
    interpolator = Interpolator(tree)
    data = interpolator.resolve()
    report.findings.extend(interpolator.findings)
    report.failed.update(finding.key for finding in interpolator.findings)
    return data


def load_arguments(cls: type[_Config], overrides: Sequence[str], *, options: LoadOptions) -> _Config:
    """Builds a flat configuration, such as `EvaluateConfig`, from ``key=value`` arguments alone.

    Raises:
        ConfigError: Everything that is wrong, in one message.
    """
    report = Report(allow_targets=options.allow_targets)
    data = _plain_data({}, overrides, report)
    if not options.allow_commands:
        report.findings.extend(check_sources(data, ""))
    config: _Config = build(cls, data, "", report)
    if report.findings:
        raise ConfigError(report.findings)
    return config


def parse_distributed_section(
    section: Mapping[str, Any], world_size: int | None = None, *, options: LoadOptions = _NO_OPTIONS
) -> DistributedConfig:
    """Reads and checks a ``distributed`` section by itself.

    Args:
        section: The section as YAML gives it; it is not changed.
        world_size: Ranks of the job; None skips the rules that need it.
        options: What the command line allows.

    Raises:
        ConfigError: Everything that is wrong, in one message.
    """
    report = Report(allow_targets=options.allow_targets)
    distributed = convert(DistributedConfig, section, "distributed", report)
    if distributed is FAILED:
        raise ConfigError(report.findings)
    config = LLMConfig(distributed=distributed)
    facts = Facts(options=options, world_size=world_size)
    refused, _ = apply_rules(config, facts, report)
    # The batch sizes of the recipe's defaults say nothing about this section.
    own = [finding for finding in refused if finding.key.startswith("distributed")]
    if report.findings or own:
        raise ConfigError([*report.findings, *own])
    return config.distributed
