"""What the numbers of a benchmark belong to: commit, versions, machine, formula."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def provenance(document: str, libraries: tuple[str, ...] = ()) -> dict[str, Any]:
    """Facts to write beside the numbers.

    Args:
        document: The benchmark's docstring; its indented lines are the formulas.
        libraries: Distributions whose versions matter, besides those of every benchmark.
    """

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    names = ("shoal", "torch", "transformers", *libraries)
    formula = [line.strip() for line in document.splitlines() if line.startswith("    ")]
    return {
        "commit": git("rev-parse", "HEAD"),
        "modified_files": len(git("status", "--porcelain", "--untracked-files=no", "--", "src").splitlines()),
        "python": sys.version.split()[0],
        "versions": {name: version(name) for name in names},
        "num_cpus": os.cpu_count(),
        "formula": [line for line in formula if not line.startswith("python ")],
    }
