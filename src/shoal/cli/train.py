"""``shoal train CONFIG [key=value ...]``: checks the configuration, starts the ranks, trains."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from shoal.cli.arguments import add_ranks_option, add_trust_options, load_options, requested_ranks
from shoal.config import ConfigError, Finding, LLMConfig, Loaded, LoadOptions, SpeechConfig, load
from shoal.config.rules.base import keys_as_written
from shoal.launch.local import launched_world_size, run_local


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="shoal train", description="Train a model from a YAML file.")
    parser.add_argument("config", help="path of the YAML file")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="override of a key, as dotted path")
    add_ranks_option(parser, "trainer.devices, or one per GPU")
    parser.add_argument(
        "--strict-topology", action="store_true", help="refuse layouts that leave the fast links of a node"
    )
    add_trust_options(parser)
    return parser


def run(words: Sequence[str]) -> int:
    """Runs the command; returns its exit status.

    Raises:
        ConfigError: The configuration is refused; nothing has been started.
    """
    arguments = _parser().parse_intermixed_args(list(words))
    return train(
        arguments.config,
        arguments.overrides,
        options=load_options(arguments),
        program=["-m", "shoal.cli", "train", *words],
        num_ranks=requested_ranks(arguments),
    )


def train(
    source: str | Path | Mapping[str, Any],
    overrides: Sequence[str] = (),
    *,
    options: LoadOptions,
    program: Sequence[str],
    num_ranks: int | None = None,
) -> int:
    """Trains in this process when it is a rank or the only one; otherwise starts the ranks.

    Args:
        source: The configuration, as a path or as data.
        overrides: Overrides of its keys.
        options: What the command line allows.
        program: What each rank runs when this process starts them: ``-m MODULE ...`` or ``SCRIPT ...``.
        num_ranks: Ranks to start here; None means trainer.devices, for an LLM one per GPU.

    Returns:
        The exit status.

    Raises:
        ConfigError: The configuration is refused; nothing has been started.
    """
    options = replace(options, to_train=True)
    launched = launched_world_size()
    if launched is not None:
        return _train(load(source, overrides, world_size=launched, options=options))
    loaded = load(source, overrides, world_size=num_ranks, options=options)
    _refuse_several_nodes(loaded)
    ranks = loaded.facts.world_size or 1
    return _train(loaded) if ranks == 1 else run_local(ranks, program)


def _refuse_several_nodes(loaded: Loaded) -> None:
    nodes = loaded.config.trainer.num_nodes if isinstance(loaded.config, SpeechConfig) else 1
    if nodes > 1:
        limit = "1 when this command starts the ranks itself"
        repair = "start the same command on every rank with srun, or with torchrun on every node"
        raise ConfigError([Finding("nodes-need-launcher", "trainer.num_nodes", nodes, limit, repair)])


def _train(loaded: Loaded) -> int:
    with keys_as_written(loaded.config):
        if isinstance(loaded.config, LLMConfig):
            from shoal.train.llm_recipe import run_llm_training

            return run_llm_training(loaded.config, loaded.notices)
        from shoal.train.recipes import run_training

        allowed = loaded.config.options.allow_commands
        return run_training(loaded.config, loaded.notices, allow_commands=allowed)
