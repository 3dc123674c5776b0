"""Options that several commands share."""

from __future__ import annotations

import argparse

from shoal.config import LoadOptions


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
