"""Histories of runs that continue: every step once, nothing lost."""

from __future__ import annotations

import json
from pathlib import Path

from shoal.train.history import StepLines


def steps(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_steps_that_are_taken_again_stand_once(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "training.jsonl"
    for after, last in ((0, 5), (3, 7), (7, 8)):
        lines = StepLines(path)
        lines.begin(after=after)
        for step in range(after + 1, last + 1):
            lines.append({"step": step, "from": after})
    assert steps(path) == list(range(1, 9))
    assert [json.loads(line)["from"] for line in path.read_text().splitlines()] == [0] * 3 + [3] * 4 + [7]
    assert steps(tmp_path / "runs" / "training.undone.jsonl") == [4, 5]


def test_a_validation_that_was_still_due_is_written_again(tmp_path: Path) -> None:
    path = tmp_path / "validation.jsonl"
    for value in ("first", "second"):
        lines = StepLines(path)
        lines.begin(after=4)  # the checkpoint of step 4, before its validation
        lines.append({"step": 4, "value": value})
        lines.append({"step": 8, "value": value})
    assert [json.loads(line)["value"] for line in path.read_text().splitlines()] == ["second"] * 2
    assert steps(tmp_path / "validation.undone.jsonl") == [8, 4]


def test_what_a_crash_has_left_of_a_line_does_not_join_the_next(tmp_path: Path) -> None:
    path = tmp_path / "training.jsonl"
    path.write_text('{"step": 1}\n{"step": 2, "lo')
    lines = StepLines(path)
    lines.begin(after=1)
    lines.append({"step": 2})
    assert steps(path) == [1, 2]
    assert (tmp_path / "training.undone.jsonl").read_text() == '{"step": 2, "lo\n'
