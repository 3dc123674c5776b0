"""``shoal verify CONFIG [key=value ...]``: proves that the configured layout does not change the numbers."""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Sequence

from shoal.cli.arguments import add_trust_options, load_options
from shoal.config import ConfigError, Finding, load
from shoal.config.rules.base import keys_as_written


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="shoal verify",
        description="Train a small model of the same architecture on the configured layout and in one plain process, "
        "and compare every number. Exit status: 0 when all agree, 1 when they do not, 2 when the configuration is "
        "refused.",
    )
    parser.add_argument("config", help="path of the YAML file, of the LLM or the speech recipe")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="override of a key, as dotted path")
    parser.add_argument(
        "--world-size",
        type=int,
        metavar="N",
        help="ranks to start here (default: the fewest that have every configured axis, at most 8)",
    )
    parser.add_argument(
        "--model-config", metavar="FOLDER", help="take the language model's config.json from here"
    )
    parser.add_argument(
        "--encoder-config", metavar="FOLDER", help="take the speech encoder's config.json from here"
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument("--no-bisect", action="store_true", help="do not look for the cause of a mismatch")
    parser.add_argument(
        "--timeout", type=float, default=120.0, metavar="SECONDS", help="for one run on ranks (default: 120)"
    )
    add_trust_options(parser)
    return parser


def run(words: Sequence[str]) -> int:
    """Runs the command; returns its exit status.

    Raises:
        ConfigError: The configuration is refused, an architecture cannot be had, or no small layout fits.
    """
    given = _parser().parse_intermixed_args(list(words))
    if given.world_size is not None and given.world_size < 1:
        finding = Finding("world-size", "--world-size", given.world_size, "at least 1", "--world-size 4")
        raise ConfigError([finding])
    loaded = load(
        given.config, given.overrides, options=load_options(given)
    )  # refused before torch is imported
    os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    started = time.monotonic()

    from shoal.verify.prepare import Architectures
    from shoal.verify.run import VerifyOptions, verify_loaded

    options = VerifyOptions(
        world_size=given.world_size,
        sources=Architectures(given.model_config, given.encoder_config),
        bisect=not given.no_bisect,
        timeout=given.timeout,
    )
    with keys_as_written(loaded.config):
        report = verify_loaded(loaded, given.config, options)
    report.seconds = time.monotonic() - started
    print(json.dumps(report.as_data(), indent=2) if given.json else report.as_text(), flush=True)
    return 0 if report.passed else 1
