"""Names of models: a local folder, or a repository of the hub."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import snapshot_download

_HUB_FILES = ["*.safetensors", "*.json", "*.txt", "*.model", "*.jinja"]


def local_folder(name: str | Path, *files: str) -> Path:
    """A local folder as it is, or the downloaded snapshot of a hub model.

    Args:
        name: Path of the folder, or name on the hub.
        files: Files to fetch besides weights, configuration and tokenizer.

    Raises:
        ValueError: Neither a folder nor reachable on the hub.
    """
    if Path(name).is_dir():
        return Path(name)
    try:
        return Path(snapshot_download(str(name), allow_patterns=[*_HUB_FILES, *files]))
    except Exception as error:  # the hub client raises a dozen unrelated classes
        raise ValueError(
            f"{str(name)!r} is neither a folder nor a hub model that can be fetched: {error}"
        ) from error
