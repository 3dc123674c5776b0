"""``shoal evaluate key=value ...``: measures the word error rate, or the perplexity of a language model."""

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
from shoal.config.evaluate import EvaluateConfig


def run(words: Sequence[str]) -> int:
    """Runs the command; returns its exit status.

    Raises:
        ConfigError: The arguments are refused; nothing has been started.
    """
    parser = argparse.ArgumentParser(
        prog="shoal evaluate", description="Measure the word error rate, or the perplexity."
    )
    parser.add_argument("arguments", nargs="*", metavar="key=value", help="fields of EvaluateConfig")
    add_ranks_option(parser, "one")
    add_trust_options(parser)
    given = parser.parse_intermixed_args(list(words))
    config = load_arguments(EvaluateConfig, given.arguments, options=load_options(given))
    status = run_on_ranks("evaluate", words, requested_ranks(given))
    if status is not None:
        return status

    from shoal.train.llm_trained import kind_of

    if kind_of(config.pretrained_name) == "llm":
        from shoal.evaluate.llm import run_llm_evaluation

        return run_llm_evaluation(config)
    from shoal.evaluate.run import run_evaluation

    return run_evaluation(config, allow_commands=given.allow_commands)
