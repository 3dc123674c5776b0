"""Ranks on this machine through torchrun, and what a launcher says about the ranks it has started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from types import FrameType

from shoal.launch.tied import tied_command


def launched_world_size(environment: Mapping[str, str] = os.environ) -> int | None:
    """Returns the ranks of the job when this process is one that torchrun or srun started, else None."""
    if "LOCAL_RANK" in environment and "WORLD_SIZE" in environment:
        return int(environment["WORLD_SIZE"])
    if "SLURM_PROCID" in environment and "SLURM_STEP_ID" in environment:
        return int(environment.get("SLURM_STEP_NUM_TASKS") or environment["SLURM_NTASKS"])
    return None


def torchrun_command(num_ranks: int, program: Sequence[str]) -> list[str]:
    """Returns the command that runs `program` (``-m MODULE ...`` or ``SCRIPT ...``) on `num_ranks` local ranks."""
    torchrun = [sys.executable, "-m", "shoal.launch.torchrun", "--standalone"]
    return [*torchrun, "--nproc-per-node", str(num_ranks), *program]


def run_local(num_ranks: int, program: Sequence[str]) -> int:
    """Runs `program` on local ranks and returns their exit status; see `shoal.launch.torchrun`.

    One thread per rank unless OMP_NUM_THREADS says otherwise: ranks share the cores. SIGINT and SIGTERM are passed
    on, and SIGHUP (a terminal that closes) as SIGTERM, so that the ranks end with this process. When it ends without
    a word, the kernel ends them.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    # A group of its own, so that a Ctrl-C in the terminal reaches the ranks once, through the handler.
    command = tied_command(torchrun_command(num_ranks, program))
    process = subprocess.Popen(command, env=environment, start_new_session=True)

    def forward(number: int, frame: FrameType | None) -> None:
        # torchrun takes SIGHUP as an order to end the ranks at once; SIGTERM lets them save first.
        process.send_signal(signal.SIGTERM if number == signal.SIGHUP else number)

    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # nohup: the run is to outlive the terminal
        numbers.append(signal.SIGHUP)
    previous = {number: signal.signal(number, forward) for number in numbers}
    try:
        status = process.wait()
        return status if status >= 0 else 128 - status
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
