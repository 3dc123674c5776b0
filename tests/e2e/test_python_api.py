"""The loop in the document runs as it stands, on one process and on two ranks, with the same losses."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.families import tiny_lm

DOCUMENT = Path(__file__).parents[2] / "docs" / "python_api.md"


def losses(command: list[str], script: Path, model: Path) -> list[float]:
    done = subprocess.run(
        [*command, str(script), str(model)],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [float(value) for value in re.findall(r"loss ([\d.]+)", done.stdout)]


def test_the_documented_loop(tmp_path: Path) -> None:
    (example,) = re.findall(r"^```python\n(.*?)^```", DOCUMENT.read_text(), re.DOTALL | re.MULTILINE)
    script, model = tmp_path / "loop.py", tmp_path / "model"
    script.write_text(example)
    tiny_lm("llama").save_pretrained(model)
    alone = losses([sys.executable], script, model)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    assert len(alone) == 3 and alone[0] != alone[2]
    assert losses(launcher, script, model) == pytest.approx(alone, abs=2e-6)
