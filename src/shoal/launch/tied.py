"""``python -m shoal.launch.tied PARENT COMMAND...``: becomes COMMAND, which the kernel ends when its parent dies.

A launcher that is killed (kill -9, out of memory) can end nobody any more. Its ranks would go on, hold their GPUs and
write checkpoints into the directory of the run that is started next.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

_PR_SET_PDEATHSIG = 1  # of linux/prctl.h


def tied_command(command: Sequence[str]) -> list[str]:
    """Returns the command that runs `command` as a child of this process, and only as long as it lives.

    The child is tied to the thread that starts it: start it from one that lasts.
    """
    return [sys.executable, "-m", "shoal.launch.tied", str(os.getpid()), *command]


def tie_to(parent: int) -> None:
    """Has the kernel kill this process when its parent ends; the request survives exec, and does nothing off Linux.

    SIGKILL, not SIGTERM: what a parent that had time to say something wants, it says itself.

    Raises:
        SystemExit: The process `parent` is gone already.
    """
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL))
        if os.getppid() != parent:  # it died before the request was made, and nothing will come of that
            sys.exit(128 + signal.SIGKILL)


if __name__ == "__main__":
    tie_to(int(sys.argv[1]))
    os.execvp(sys.argv[2], sys.argv[2:])
