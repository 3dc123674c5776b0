"""The ``shoal`` command: one module per subcommand, imported when it is run."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module

from shoal import __version__
from shoal.config import ConfigError

COMMANDS = {
    "train": "train a model from a YAML file",
    "evaluate": "answer a manifest with a trained model and measure the word error rate",
    "generate": "answer a manifest with a trained model",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit status; a refused configuration gives 2, without traceback."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words or words[0] in ("-h", "--help"):
        print(_usage())
        return 0 if words else 2
    if words[0] == "--version":
        print(f"shoal {__version__}")
        return 0
    if words[0] not in COMMANDS:
        print(f"shoal: unknown command {words[0]!r}; one of {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    try:
        status: int = import_module(f"shoal.cli.{words[0]}").run(words[1:])
    except ConfigError as error:
        print(f"shoal {words[0]}: {error}", file=sys.stderr)
        return 2
    return status


def _usage() -> str:
    rows = "\n".join(f"  {name:<10} {summary}" for name, summary in COMMANDS.items())
    return f"usage: shoal COMMAND ...\n\n{rows}\n\nshoal COMMAND --help says more; shoal --version prints the version."
