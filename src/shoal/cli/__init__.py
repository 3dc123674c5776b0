"""The ``shoal`` command: one module per subcommand, imported when it is run."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path

from shoal import __version__
from shoal.config import ConfigError

_PACKAGE = Path(__file__).parents[1]

COMMANDS = {
    "train": "train a model from a YAML file",
    "evaluate": "answer a manifest with a trained model and measure the word error rate",
    "generate": "answer a manifest with a trained model",
    "verify": "prove on this machine that the configured layout does not change the numbers",
    "doctor": "compare the kernels of this machine with their references",
    "export": "write a checkpoint's model as a Hugging Face folder",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit status; see `report_errors` for what fails."""
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
    command = words[0]
    return report_errors(f"shoal {command}", lambda: import_module(f"shoal.cli.{command}").run(words[1:]))


def report_errors(program: str, action: Callable[[], int]) -> int:
    """Runs `action` and returns its exit status; what Shoal itself refuses is a message and not a traceback.

    A refused configuration gives 2. Any other error that Shoal's own code raises (weights, tokenizer, data, a
    gradient that is not finite) gives 1; with SHOAL_DEBUG=1 it keeps its traceback. Errors of other libraries, and
    mistakes in the code, always do.
    """
    rank = os.environ.get("RANK")
    name = program if rank is None else f"{program} (rank {rank})"
    try:
        return action()
    except ConfigError as error:
        _say(f"{name}: {error}")
        return 2
    except (ValueError, OSError, RuntimeError, FloatingPointError) as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        if os.environ.get("SHOAL_DEBUG") == "1" or _PACKAGE not in Path(place.filename).parents:
            raise
        where = f"{Path(place.filename).relative_to(_PACKAGE.parent)}:{place.lineno}"
        _say(f"{name}: {error}\n  [{where}; SHOAL_DEBUG=1 shows the traceback]")
        return 1


def _say(message: str) -> None:
    """One write, so that the messages of ranks that fail together do not run into each other."""
    sys.stderr.write(f"{message}\n")
    sys.stderr.flush()


def _usage() -> str:
    rows = "\n".join(f"  {name:<10} {summary}" for name, summary in COMMANDS.items())
    return f"usage: shoal COMMAND ...\n\n{rows}\n\nshoal COMMAND --help says more; shoal --version prints the version."
