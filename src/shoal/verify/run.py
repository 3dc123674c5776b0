"""``shoal verify``: loads, shrinks, trains twice, compares, and on a mismatch finds out where it comes from."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from shoal.config import ConfigError, Loaded, LoadOptions, load
from shoal.verify.bisect import find_cause
from shoal.verify.compare import compare
from shoal.verify.parity import train_on_mesh
from shoal.verify.prepare import Architectures, Prepared, prepare
from shoal.verify.ranks import RanksFailed, refuse_unsafe_fork, run_ranks
from shoal.verify.reference import train_plain
from shoal.verify.report import Report
from shoal.verify.world import scale_layout


@dataclass(frozen=True)
class VerifyOptions:
    """What the command line decides.

    Attributes:
        world_size: Ranks to use; None takes the fewest that have every configured axis.
        sources: Other sources of architectures.
        bisect: Look for the cause of a mismatch.
        timeout: Seconds for one run on ranks.
    """

    world_size: int | None = None
    sources: Architectures = Architectures()
    bisect: bool = True
    timeout: float = 120.0


def verify(
    source: str | Path | Mapping[str, Any],
    overrides: Sequence[str] = (),
    *,
    load_options: LoadOptions = LoadOptions(),  # noqa: B008 (frozen)
    options: VerifyOptions = VerifyOptions(),  # noqa: B008 (frozen)
) -> Report:
    """Verifies the layout of a configuration; forks this process, which must have a single thread.

    Args:
        source: Path of a YAML file, or its data.
        overrides: Of its keys.
        load_options: What the command line allows.
        options: How to verify.

    Raises:
        ConfigError: See `verify_loaded`; or the configuration is refused by its rules.
        ValueError: This process cannot be forked.
    """
    name = "a configuration" if isinstance(source, Mapping) else str(source)
    return verify_loaded(load(source, overrides, options=load_options), name, options)


def verify_loaded(loaded: Loaded, name: str, options: VerifyOptions) -> Report:
    """Verifies the layout of a configuration that has been loaded.

    Args:
        loaded: For the world that it implies.
        name: What the report calls it.
        options: How to verify.

    Raises:
        ConfigError: The layout fits no world of this size, an architecture cannot be had or made small, or every rank
            that was to train it refuses it.
        ValueError: This process cannot be forked.
    """
    started = time.monotonic()
    refuse_unsafe_fork()
    scaled = scale_layout(loaded.config, loaded.facts.world_size, options.world_size)
    # What transformers says about small configurations is beside the point.
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="shoal-verify-") as folder:
        prepared = prepare(loaded.config, scaled, Path(folder), options.sources)
        report = check(prepared, options)
    report.name, report.configured = name, scaled.configured
    report.seconds = time.monotonic() - started
    return report


def check(prepared: Prepared, options: VerifyOptions) -> Report:
    """Trains a prepared task in one plain process and on its layout, and compares."""
    task, layout = prepared.task, prepared.layout
    plain = run_ranks(lambda rank: train_plain(task), 1, timeout=options.timeout, group=False)[0]
    report = Report(prepared, plain)
    try:
        ranks = run_ranks(lambda rank: train_on_mesh(task, layout), layout.world, timeout=options.timeout)
        report.comparison = compare(task, plain, ranks)
    except RanksFailed as failed:
        if failed.refused:
            raise ConfigError(failed.refused) from failed
        report.failed = failed
    if not report.passed and options.bisect:
        report.cause = find_cause(task, layout, report.failed, options.timeout)
    return report
