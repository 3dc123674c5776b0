"""``shoal train CONFIG [key=value ...]``: checks the configuration, starts the ranks, trains."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace

from shoal.cli.arguments import add_trust_options, load_options
from shoal.config import ConfigError, Finding, Loaded, LoadOptions, SpeechConfig, load
from shoal.launch.local import launched_world_size, run_local


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="shoal train", description="Train a model from a YAML file.")
    parser.add_argument("config", help="path of the YAML file")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="override of a key, as dotted path")
    parser.add_argument(
        "--nproc-per-node", type=int, metavar="N", help="ranks to start here (default: trainer.devices)"
    )
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
    options = replace(load_options(arguments), to_train=True)
    launched = launched_world_size()
    if launched is not None:
        return _train(load(arguments.config, arguments.overrides, world_size=launched, options=options))
    loaded = _load_for_here(arguments, options)
    num_ranks = loaded.facts.world_size or 1
    if num_ranks == 1:
        return _train(loaded)
    return run_local(num_ranks, ["train", *words])


def _load_for_here(arguments: argparse.Namespace, options: LoadOptions) -> Loaded:
    """Loads for ranks that this command starts itself, which is possible on one node only."""
    num_ranks = arguments.nproc_per_node
    if num_ranks is not None and num_ranks < 1:
        finding = Finding("nproc-per-node", "--nproc-per-node", num_ranks, "at least 1", "--nproc-per-node 1")
        raise ConfigError([finding])
    loaded = load(arguments.config, arguments.overrides, world_size=num_ranks, options=options)
    if isinstance(loaded.config, SpeechConfig) and loaded.config.trainer.num_nodes > 1:
        limit = "1 when this command starts the ranks itself"
        repair = "start `shoal train` on every rank with srun, or with torchrun on every node"
        raise ConfigError(
            [
                Finding(
                    "nodes-need-launcher", "trainer.num_nodes", loaded.config.trainer.num_nodes, limit, repair
                )
            ]
        )
    return loaded


def _train(loaded: Loaded) -> int:
    from shoal.train.recipes import run_training

    if not isinstance(loaded.config, SpeechConfig):  # the rule llm-recipe has refused it already
        print("shoal train: only the speech recipe can be trained", file=sys.stderr)
        return 2
    return run_training(loaded.config, loaded.notices)
