"""The small files of a model's folder, read so that a damaged one is refused by its name.

transformers reports a broken file in a dozen ways, of which most do not say which file they mean.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoTokenizer, GenerationConfig

FETCH_AGAIN = "repair: fetch or copy it again"
CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    CONFIG,  # the class of the tokenizer may follow from it
)
_LONGEST_REASON = 240


def one_line(error: BaseException) -> str:
    """What an error says, in one line of bounded length; its class when it says nothing."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= _LONGEST_REASON else f"{text[: _LONGEST_REASON - 3]}..."


def read_json(file: Path) -> dict[str, Any]:
    """The object that a JSON file holds.

    Raises:
        ValueError: The file is absent, cannot be read, is not JSON, or holds something other than an object.
    """
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{file}: cannot be read as JSON: {one_line(error)}; {FETCH_AGAIN}") from error
    if not isinstance(content, dict):
        kind = type(content).__name__
        raise ValueError(f"{file}: a JSON object with names is needed, this is a {kind}; {FETCH_AGAIN}")
    return content


def hf_config(folder: str | Path, **options: Any) -> Any:
    """What `AutoConfig.from_pretrained` gives for a folder.

    Args:
        folder: Holds the config.json.
        options: Of `AutoConfig.from_pretrained`.

    Raises:
        ValueError: config.json is absent or broken, or transformers makes no configuration of it.
    """
    return _loaded(AutoConfig, Path(folder), (CONFIG,), (CONFIG,), options)


def hf_generation_config(folder: str | Path) -> GenerationConfig:
    """The generation settings of a folder.

    Raises:
        ValueError: generation_config.json is absent or broken, or holds what transformers refuses.
    """
    names = (GENERATION_CONFIG,)
    loaded: GenerationConfig = _loaded(GenerationConfig, Path(folder), names, names, {})
    return loaded


def hf_tokenizer(folder: str | Path, **options: Any) -> Any:
    """What `AutoTokenizer.from_pretrained` gives for a folder.

    Args:
        folder: Holds the tokenizer's files.
        options: Of `AutoTokenizer.from_pretrained`.

    Raises:
        ValueError: One of the files is broken, or transformers makes no tokenizer of them.
    """
    return _loaded(AutoTokenizer, Path(folder), (), _TOKENIZER_FILES, options)


def _loaded(
    loader: Any, folder: Path, needed: tuple[str, ...], names: tuple[str, ...], options: dict[str, Any]
) -> Any:
    for name in names:
        if name in needed or (folder / name).is_file():
            read_json(folder / name)
    try:
        return loader.from_pretrained(folder, **options)
    except Exception as error:  # transformers, tokenizers and code of the model raise any class
        what = str(folder / needed[0]) if needed else f"{folder}: its tokenizer ({_present(folder, names)})"
        raise ValueError(
            f"{what}: transformers cannot use it: {type(error).__name__}: {one_line(error)}; repair: fetch or copy "
            "the folder again, or install what the message asks for"
        ) from error


def _present(folder: Path, names: tuple[str, ...]) -> str:
    return ", ".join(name for name in names if (folder / name).is_file()) or "no file of one"
