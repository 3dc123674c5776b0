"""Every format gives the same rows; what is not there is refused with its path."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import pytest

from shoal.config.text import TextDatasetConfig
from shoal.data.text import open_documents
from shoal.data.text_corpus import write_corpus
from shoal.data.text_rows import open_rows

ROWS = [{"text": f"row {index}"} for index in range(7)]


def open_path(path: Any, **config: Any) -> list[str]:
    rows = open_rows(TextDatasetConfig(path=path, type="text", **config), "dataset")
    return [rows[index]["text"] for index in range(len(rows))]


def write(folder: Path, kind: str) -> Path:
    whole = datasets.Dataset.from_list(ROWS)
    file = folder / f"data.{kind}"
    if kind == "jsonl":
        file.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    elif kind == "json":
        file.write_text(json.dumps(ROWS))
    elif kind == "parquet":
        whole.to_parquet(file)
    elif kind == "csv":
        whole.to_csv(file)
    elif kind == "arrow":
        whole.save_to_disk(folder / "saved")
        file = next((folder / "saved").glob("*.arrow"))
    return file


@pytest.mark.parametrize("kind", ["jsonl", "json", "parquet", "csv", "arrow"])
def test_formats(tmp_path: Path, kind: str) -> None:
    assert open_path(str(write(tmp_path, kind))) == [row["text"] for row in ROWS]


def test_folders(tmp_path: Path) -> None:
    (tmp_path / "part").mkdir()
    for name in ("b", "a"):
        (tmp_path / "part" / f"{name}.jsonl").write_text(json.dumps({"text": name}) + "\n")
    assert open_path(str(tmp_path / "part")) == ["a", "b"]
    saved = datasets.DatasetDict(
        {"train": datasets.Dataset.from_list(ROWS), "dev": datasets.Dataset.from_list(ROWS[:2])}
    )
    saved.save_to_disk(tmp_path / "dict")
    assert open_path(str(tmp_path / "dict"), split="dev") == ["row 0", "row 1"]
    with pytest.raises(ValueError, match="dataset.split = 'test': one of train, dev"):
        open_path(str(tmp_path / "dict"), split="test")
    saved["train"].save_to_disk(tmp_path / "one")
    assert len(open_path(str(tmp_path / "one"))) == 7


def files_of(folder: Path, *names: str) -> str:
    for name in names:
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("".join(json.dumps({"text": f"{name} {row}"}) + "\n" for row in range(2)))
    return str(folder)


def test_files_are_of_the_split_that_their_names_tell(tmp_path: Path) -> None:
    """Validation of a mirrored data set must not be on what it trains on."""
    mirror = files_of(
        tmp_path / "m", "README.md", "data/validation.jsonl", "data/train-1.jsonl", "data/train-0.jsonl"
    )
    train = [f"data/train-{file}.jsonl {row}" for file in (0, 1) for row in (0, 1)]
    assert open_path(mirror) == open_path(mirror, split="train") == train
    assert open_path(mirror, split="train[1:3]") == train[1:3]
    assert open_path(mirror, split="validation") == [f"data/validation.jsonl {row}" for row in (0, 1)]
    with pytest.raises(
        ValueError, match=r"dataset.split = 'test': .* tell of train, validation; repair: name one"
    ):
        open_path(mirror, split="test")


def test_files_without_the_name_of_a_split_are_all_there_is(tmp_path: Path) -> None:
    plain = files_of(tmp_path / "p", "a.jsonl", "part/b.jsonl")
    assert len(open_path(plain)) == 4
    with pytest.raises(
        ValueError, match=r"dataset.split = 'validation': .* tell of no splits; .* leave split out"
    ):
        open_path(plain, split="validation")
    guide = files_of(tmp_path / "g", "a.jsonl", "dev-guide.jsonl")  # nothing is named train
    assert len(open_path(guide)) == 4
    assert open_path(guide, split="validation") == ["dev-guide.jsonl 0", "dev-guide.jsonl 1"]
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "README.md").write_text("a text like any other")
    assert open_path(str(tmp_path / "r")) == ["a text like any other"]
    named = str(tmp_path / "p" / "a.jsonl")  # one file is what it is
    assert open_path(named, split="validation[:1]") == ["a.jsonl 0"]


def test_several_files_and_a_limit(tmp_path: Path) -> None:
    first, second = (tmp_path / name for name in ("z.jsonl", "a.jsonl"))
    first.write_text('{"text": "1"}\n{"text": "2"}\n')
    second.write_text('{"text": "3"}\n')
    assert open_path((str(first), str(second))) == ["1", "2", "3"]
    assert open_path((str(first), str(second)), limit_dataset_samples=2) == ["1", "2"]


@pytest.mark.parametrize(("sample_by", "expected"), [("document", 1), ("line", 4), ("paragraph", 2)])
def test_plain_text_is_cut_into_documents(tmp_path: Path, sample_by: str, expected: int) -> None:
    file = tmp_path / "a.txt"
    file.write_text("one\ntwo\n\nthree\n")
    assert len(open_path(str(file), sample_by=sample_by)) == expected


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("absent.jsonl", "there is no such file"),
        ("./absent", "there is no such file"),
        (("absent.jsonl", "b.jsonl"), "no file absent.jsonl, b.jsonl"),
        (("a.jsonl", "b.txt"), "files of one kind"),
        ("a.docx", "files of one kind"),
        ("empty", "no .json"),
        ("broken.jsonl", "dataset.path = 'broken.jsonl': cannot be read as json .*JSON parse error"),
        ("nothing.jsonl", "dataset.path = 'nothing.jsonl': holds not one row"),
    ],
)
def test_what_cannot_be_opened_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: Any, words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in (
        ("a.jsonl", '{"text": "1"}\n'),
        ("b.txt", "a"),
        ("a.docx", "a"),
        ("broken.jsonl", '{"text": '),
        ("nothing.jsonl", ""),
    ):
        (tmp_path / name).write_text(text)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=words):
        open_path(path)


def test_a_name_of_the_hub_that_cannot_be_reached_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match="neither a file or folder nor a data set"):
        open_path("somebody/absent-data-set")


def test_tokens_need_no_tokenizer_and_other_types_do(tmp_path: Path) -> None:
    write_corpus([[1, 2, 3], [4]], tmp_path, vocab_size=10, tokenizer="t")
    documents = open_documents(TextDatasetConfig(path=str(tmp_path), type="tokens"), None, "dataset")
    assert [documents.length(index) for index in range(len(documents))] == [3, 1]
    limited = TextDatasetConfig(path=str(tmp_path), type="tokens", limit_dataset_samples=1)
    assert len(open_documents(limited, None, "dataset")) == 1
    with pytest.raises(ValueError, match="needs a tokenizer"):
        open_documents(TextDatasetConfig(path=str(tmp_path), type="text"), None, "dataset")
