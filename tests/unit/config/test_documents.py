"""The documents on configuration say what the code does."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from shoal.config import support_matrix
from shoal.config.aliases import ADAPTER_KINDS, PERCEPTION_TARGETS, PRECISIONS, STRATEGIES, TARGETS

DOCS = Path(__file__).parents[3] / "docs"


def test_support_matrix_in_the_document_is_the_one_the_command_prints() -> None:
    printed = subprocess.run(
        [sys.executable, "-m", "shoal.config"], capture_output=True, text=True, check=True
    ).stdout
    assert printed == support_matrix()
    text = (DOCS / "configuration.md").read_text()
    between = text.split("<!-- support matrix: begin -->\n")[1].split("<!-- support matrix: end -->")[0]
    assert between == printed, "run: python -m shoal.config, and put its output between the two marks"


@pytest.mark.parametrize("name", [*TARGETS, *sorted(PERCEPTION_TARGETS), *ADAPTER_KINDS, *STRATEGIES])
def test_names_of_nemo_are_in_the_compatibility_page_or_spelled_alike(name: str) -> None:
    text = (DOCS / "compatibility.md").read_text()
    documented = set(re.findall(r"[\w.]+", text))
    tail = ".".join(name.split(".")[-2:]) if "from_" in name else name.rpartition(".")[2]
    assert name in documented or any(entry.endswith(tail) for entry in documented)


def test_precisions_in_the_compatibility_page() -> None:
    row = next(
        line for line in (DOCS / "compatibility.md").read_text().splitlines() if "bf16-automodel" in line
    )
    theirs, ours = (re.findall(r"`(?:precision: )?([^`]+)`", cell) for cell in row.strip("|").split("|")[:2])
    assert [PRECISIONS[name] for name in theirs] == ours
