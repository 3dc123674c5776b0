"""Whether processes that a test started are gone."""

from __future__ import annotations

import time
from collections.abc import Sequence

import psutil


def survivors(processes: Sequence[psutil.Process], seconds: float) -> list[psutil.Process]:
    """Those that still run after that long; what nobody has reaped does not."""
    end = time.monotonic() + seconds
    while True:
        alive = [one for one in processes if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]
        if not alive or time.monotonic() > end:
            return alive
        time.sleep(0.05)
