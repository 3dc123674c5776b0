"""Memory-mapped corpora: what is written is read, and what does not fit together is refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from shoal.data.text_corpus import HEADER, OFFSETS, TOKENS, TokenCorpus, write_corpus

DOCUMENTS = [[5, 6, 7], [], [65535], list(range(100))]


@pytest.mark.parametrize(("vocab", "bytes_per_token"), [(65536, 2), (65537, 4), (200000, 4)])
def test_round_trip(tmp_path: Path, vocab: int, bytes_per_token: int) -> None:
    documents = [*DOCUMENTS, [vocab - 1]]
    assert write_corpus(documents, tmp_path, vocab_size=vocab, tokenizer="t") == 105
    corpus = TokenCorpus(tmp_path)
    assert (tmp_path / TOKENS).stat().st_size == 105 * bytes_per_token
    assert len(corpus) == 5 and corpus.tokenizer == "t"
    assert [corpus.length(index) for index in range(5)] == [3, 0, 1, 100, 1]
    assert [corpus.tokens(index).tolist() for index in range(5)] == documents
    assert corpus.tokens(3, start=97, length=50).tolist() == [97, 98, 99]
    assert corpus.tokens(3, start=10, length=2).tolist() == [10, 11]
    assert corpus.tokens(0).dtype == np.int64


def test_empty_corpus(tmp_path: Path) -> None:
    write_corpus([], tmp_path, vocab_size=10, tokenizer="t")
    assert len(TokenCorpus(tmp_path)) == 0


@pytest.mark.parametrize("document", [[10], [-1]])
def test_a_token_outside_the_vocabulary_is_refused(tmp_path: Path, document: list[int]) -> None:
    with pytest.raises(ValueError, match=r"document 1: a token outside \[0, 10\)"):
        write_corpus([[1], document], tmp_path, vocab_size=10, tokenizer="t")
    with pytest.raises(ValueError, match=HEADER):  # and what was written so far is no corpus
        TokenCorpus(tmp_path)


@pytest.mark.parametrize("name", [TOKENS, OFFSETS, HEADER])
def test_a_missing_file_is_refused(tmp_path: Path, name: str) -> None:
    write_corpus(DOCUMENTS, tmp_path, vocab_size=65536, tokenizer="t")
    (tmp_path / name).unlink()
    with pytest.raises(ValueError, match=name):
        TokenCorpus(tmp_path)


def test_files_of_different_corpora_are_refused(tmp_path: Path) -> None:
    write_corpus(DOCUMENTS, tmp_path, vocab_size=65536, tokenizer="t")
    with (tmp_path / TOKENS).open("ab") as file:
        file.write(b"\0\0")
    with pytest.raises(ValueError, match="write it again"):
        TokenCorpus(tmp_path)
    write_corpus(DOCUMENTS, tmp_path, vocab_size=65536, tokenizer="t")
    header = json.loads((tmp_path / HEADER).read_text())
    (tmp_path / HEADER).write_text(json.dumps({**header, "num_documents": 3}))
    with pytest.raises(ValueError, match="write it again"):
        TokenCorpus(tmp_path)
