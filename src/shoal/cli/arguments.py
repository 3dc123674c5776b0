"""Options that several commands share."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from shoal.config import ConfigError, Finding, LoadOptions
from shoal.launch.local import launched_world_size, run_local


def add_ranks_option(parser: argparse.ArgumentParser, default: str) -> None:
    """Adds ``--nproc-per-node``; `default` says what happens without it."""
    parser.add_argument(
        "--nproc-per-node", type=int, metavar="N", help=f"ranks to start here (default: {default})"
    )


def requested_ranks(arguments: argparse.Namespace) -> int | None:
    """Returns ``--nproc-per-node``.

    Raises:
        ConfigError: It is less than one.
    """
    num_ranks: int | None = arguments.nproc_per_node
    if num_ranks is not None and num_ranks < 1:
        finding = Finding("nproc-per-node", "--nproc-per-node", num_ranks, "at least 1", "--nproc-per-node 1")
        raise ConfigError([finding])
    return num_ranks


def run_on_ranks(command: str, words: Sequence[str], num_ranks: int | None) -> int | None:
    """Starts the ranks of a command and returns their exit status.

    None means that the command is to run in this process: it is the only rank, or one that a launcher has started.
    """
    if num_ranks is None or num_ranks == 1 or launched_world_size() is not None:
        return None
    return run_local(num_ranks, ["-m", "shoal.cli", command, *words])


def add_trust_options(parser: argparse.ArgumentParser) -> None:
    """Adds what a user may allow beyond the defaults."""
    parser.add_argument(
        "--allow-target",
        action="append",
        default=[],
        metavar="MODULE",
        help="accept _target_ classes of this module too (may be repeated)",
    )
    parser.add_argument(
        "--allow-commands",
        action="store_true",
        help="accept pipe: paths, command sources and URLs, which run programs or fetch data",
    )


def load_options(arguments: argparse.Namespace) -> LoadOptions:
    """Returns what the options say to the loader."""
    return LoadOptions(
        allow_targets=tuple(arguments.allow_target),
        allow_commands=arguments.allow_commands,
        strict_topology=getattr(arguments, "strict_topology", False),
    )
