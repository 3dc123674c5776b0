"""``python -m shoal.launch.torchrun ARGUMENTS``: torchrun that ends as its ranks ended.

torchrun by itself ends with status 1 and its own traceback whatever its ranks said, and a SIGTERM leaves them 30
seconds. A scheduler must see the ranks' status (2: the configuration was refused, 75: saved, queue again), and a save
takes as long as it takes. Ranks also end when this process is killed, which torchrun's own do not.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Iterable, Sequence
from types import FrameType

import psutil
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import parse_args, run

from shoal.launch.tied import tied_command

# torchrun ends the ranks itself on these; SIGTERM is passed on to them, and they end by themselves.
_TORCHRUN_SIGNALS = "SIGINT,SIGHUP,SIGQUIT"


def main(arguments: Sequence[str]) -> int:
    """Runs the ranks; returns 0, or what `exit_status` says of those that failed."""
    signal.signal(signal.SIGTERM, _pass_on)
    try:
        options = parse_args(["--signals-to-handle", _TORCHRUN_SIGNALS, *arguments])  # type: ignore[no-untyped-call]
        _tie_ranks(options)
        run(options)  # type: ignore[no-untyped-call]
    except ChildFailedError as error:
        failures = sorted(error.failures.values(), key=lambda failure: failure.timestamp)
        return exit_status(failure.exitcode for failure in failures)
    except SignalException as error:
        return 128 + error.sigval
    return 0


def exit_status(codes: Iterable[int]) -> int:
    """The status of the first rank that failed by itself; 128 + its number for one that a signal ended.

    When one rank has failed, torchrun ends the others with SIGTERM: theirs says nothing.

    >>> exit_status([-15, 2]), exit_status([-9, 75]), exit_status([-15, -15])
    (2, 137, 143)
    """
    own = next((code for code in codes if code != -signal.SIGTERM), -signal.SIGTERM)
    return own if own > 0 else 128 - own


def _tie_ranks(options: argparse.Namespace) -> None:
    """Has each rank start as `shoal.launch.tied`; torchrun starts them from this thread, which lasts as long as it."""
    program = ["-m", options.training_script] if options.module else [options.training_script]
    _, _, module, *rest = tied_command([sys.executable, "-u", *program, *options.training_script_args])
    options.module, options.training_script, options.training_script_args = True, module, rest


def _pass_on(number: int, frame: FrameType | None) -> None:
    for child in psutil.Process().children():
        child.send_signal(number)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
