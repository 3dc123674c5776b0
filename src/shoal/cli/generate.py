"""``shoal generate key=value ...``: answers a manifest with a trained model."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from shoal.cli.arguments import (
    add_ranks_option,
    add_trust_options,
    load_options,
    requested_ranks,
    run_on_ranks,
)
from shoal.config import load_arguments
from shoal.config.evaluate import GenerateConfig


def run(words: Sequence[str]) -> int:
    """Runs the command; returns its exit status.

    Raises:
        ConfigError: The arguments are refused; nothing has been started.
    """
    parser = argparse.ArgumentParser(prog="shoal generate", description="Answer a manifest.")
    parser.add_argument("arguments", nargs="*", metavar="key=value", help="fields of GenerateConfig")
    add_ranks_option(parser, "one")
    add_trust_options(parser)
    given = parser.parse_intermixed_args(list(words))
    config = load_arguments(GenerateConfig, given.arguments, options=load_options(given))
    status = run_on_ranks("generate", words, requested_ranks(given))
    if status is not None:
        return status

    from shoal.train.llm_trained import kind_of

    if kind_of(config.pretrained_name) == "llm":
        from shoal.evaluate.llm_generate import run_llm_generation

        return run_llm_generation(config)
    from shoal.evaluate.run import run_generation

    return run_generation(config, allow_commands=given.allow_commands)
