"""Tokenizes texts once, into a corpus that `dataset: {type: tokens, path: FOLDER}` maps into memory.

    python scripts/tokenize_corpus.py --tokenizer MODEL_FOLDER --output FOLDER FILE_OR_FOLDER ...

Inputs are what `dataset: {type: text}` reads: .jsonl, .json, .parquet, .csv or .arrow with a column of texts, or plain
.txt and .md. Each document ends with the tokenizer's end token. The format is described in
`src/shoal/data/text_corpus.py`.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

from transformers import AutoTokenizer

from shoal.config.text import TextDatasetConfig
from shoal.data.byte_tokenizer import byte_tokenizer
from shoal.data.text_corpus import write_corpus
from shoal.data.text_encoding import PlainEncoder
from shoal.data.text_rows import Rows, open_rows


def main() -> None:
    """Writes the corpus and says how large it is."""
    parser = argparse.ArgumentParser(description="Tokenize texts into a memory-mapped corpus.")
    parser.add_argument("inputs", nargs="+", help="files or folders of texts")
    parser.add_argument("--tokenizer", required=True, help="folder or hub name, or bytes")
    parser.add_argument("--output", required=True, help="folder to write")
    parser.add_argument("--column", default="text", help="column of the text")
    parser.add_argument("--sample-by", default="document", choices=("line", "paragraph", "document"))
    arguments = parser.parse_args()
    name = arguments.tokenizer
    tokenizer: Any = byte_tokenizer() if name == "bytes" else AutoTokenizer.from_pretrained(name)
    paths = arguments.inputs[0] if len(arguments.inputs) == 1 else tuple(arguments.inputs)
    config = TextDatasetConfig(path=paths, type="text", sample_by=arguments.sample_by)
    rows = open_rows(config, "inputs")
    documents = _tokenized(rows, PlainEncoder(tokenizer, column=arguments.column))
    num_tokens = write_corpus(documents, arguments.output, vocab_size=len(tokenizer), tokenizer=name)
    print(f"{arguments.output}: {len(rows):,} documents, {num_tokens:,} tokens of {name}")


def _tokenized(rows: Rows, encode: PlainEncoder) -> Iterator[tuple[int, ...]]:
    for index in range(len(rows)):
        yield encode(rows[index]).input_ids


if __name__ == "__main__":
    main()
