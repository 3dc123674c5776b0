"""Which recipe a path belongs to."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.cli import main
from shoal.train.llm_trained import kind_of


@pytest.mark.parametrize("file", ["data.jsonl", "model.safetensors"])
@pytest.mark.parametrize("command", ["evaluate", "generate"])
def test_a_folder_that_is_no_model_is_refused_before_its_data_is_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str, file: str
) -> None:
    (tmp_path / file).write_text('{"text": "a text"}\n')
    assert main([command, f"pretrained_name={tmp_path}", f"inputs={tmp_path / file}"]) == 1
    message = capsys.readouterr().err
    assert f"pretrained_name = '{tmp_path}'" in message
    assert "config.yaml" in message and "config.json" in message


def test_runs_and_models_are_told_by_their_configuration(tmp_path: Path) -> None:
    speech, llm, model = (tmp_path / name for name in ("speech", "llm", "model"))
    for folder, file, text in (
        (speech, "config.yaml", "model: {}\ntrainer: {}\ndata: {}\n"),
        (llm, "config.yaml", "model: {}\nstep_scheduler: {}\n"),
        (model, "config.json", "{}"),
    ):
        folder.mkdir()
        (folder / file).write_text(text)
    assert [kind_of(folder) for folder in (speech, llm, llm / "step=4", model, tmp_path / "absent")] == [
        "speech",
        "llm",
        "llm",
        "llm",
        "llm",
    ]
