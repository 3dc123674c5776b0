"""Rows of text data sets on disk: JSON lines, JSON, parquet, arrow, CSV, plain text, and folders of them.

Hugging Face `datasets` reads them memory-mapped, so a row costs nothing until it is asked for, and every rank
sees the same rows in the same order.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from shoal.config.text import TextDatasetConfig

_BUILDERS = {
    ".json": "json",
    ".jsonl": "json",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".csv": "csv",
    ".txt": "text",
    ".md": "text",
}

_UNNAMED = {"train": ["**"]}
"""What `datasets` finds in a folder when no file is named after a split."""

Row = Mapping[str, Any]


class Rows(Protocol):
    """Rows by number."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Row: ...


def open_rows(config: TextDatasetConfig, key: str) -> Rows:
    """Opens the rows of a data set of any type but ``tokens``.

    A path of several files is their concatenation, a folder holds files of one kind (``train``, ``validation`` and
    ``test`` in their names are splits) or what `datasets.Dataset.save_to_disk` wrote, and any other name is a data set
    of the hub.

    Raises:
        ValueError: Nothing is there, files are of an unknown or of different kinds, or there is no such split.
    """
    import datasets  # takes a second, which a speech run need not spend

    paths = [config.path] if isinstance(config.path, str) else list(config.path)
    bar = datasets.is_progress_bar_enabled()
    datasets.disable_progress_bars()
    try:
        rows = _opened(datasets, config, paths, key)
    finally:
        if bar:
            datasets.enable_progress_bars()
    if config.limit_dataset_samples is not None:
        rows = rows.select(range(min(config.limit_dataset_samples, len(rows))))
    if len(rows) == 0:
        raise ValueError(f"{key}.path = {config.path!r}: holds not one row")
    return rows  # type: ignore[no-any-return]


def _opened(datasets: Any, config: TextDatasetConfig, paths: list[str], key: str) -> Any:
    if len(paths) == 1 and Path(paths[0]).is_dir():
        folder = Path(paths[0])
        if (folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file():
            return _split_of(datasets, datasets.load_from_disk(str(folder)), config, key)
        paths = _files_of(folder, config.split, key)
    elif len(paths) == 1 and not Path(paths[0]).exists():
        return _from_hub(datasets, config, paths[0], key)
    missing = [path for path in paths if not Path(path).is_file()]
    if missing:
        raise ValueError(f"{key}.path: no file {', '.join(missing)}; check the paths")
    kinds = {_BUILDERS.get(Path(path).suffix) for path in paths}
    if len(kinds) != 1 or None in kinds:
        limit = ", ".join(_BUILDERS)
        raise ValueError(f"{key}.path = {paths[:5]}: files of one kind out of {limit} go together")
    if not any(Path(path).stat().st_size for path in paths):
        raise ValueError(f"{key}.path = {config.path!r}: holds not one row")
    (kind,) = kinds
    options = {"sample_by": config.sample_by} if kind == "text" else {}
    try:
        files = {_name_of(config.split): paths}  # so that a part of it may be asked for
        return datasets.load_dataset(kind, data_files=files, split=config.split, **options)
    except Exception as error:  # readers of each format raise their own classes
        cause: BaseException = error
        while cause.__cause__ is not None:  # the outermost says no more than that something is wrong
            cause = cause.__cause__
        reason = f"{type(cause).__name__}: {cause}".rstrip(": ")
        raise ValueError(
            f"{key}.path = {config.path!r}: cannot be read as {kind} ({reason}); check the file"
        ) from error


def _files_of(folder: Path, split: str, key: str) -> list[str]:
    """The files of a folder that belong to a split, which their names tell as on the hub; all if no name does."""
    from datasets.data_files import DataFilesDict, EmptyDatasetError, get_data_patterns

    files = [str(file) for file in sorted(folder.rglob("*")) if file.suffix in _BUILDERS]
    if not files:
        raise ValueError(
            f"{key}.path = {str(folder)!r}: no {', '.join(_BUILDERS)} file in it; name a folder of data"
        )
    named, wanted = {}, _name_of(split)
    try:
        patterns = get_data_patterns(str(folder))
    except EmptyDatasetError:  # a README is no data to it
        patterns = _UNNAMED
    if patterns != _UNNAMED:
        named = {str(name): list(of) for name, of in DataFilesDict.from_patterns(patterns, folder).items()}
    if wanted in named:
        return [file for file in named[wanted] if Path(file).suffix in _BUILDERS]
    if "train" in named or wanted != "train":
        raise ValueError(
            f"{key}.split = {split!r}: the names of the files in {str(folder)!r} tell of "
            f"{', '.join(named) or 'no splits'}; repair: name one of these, or the files (path), or leave split out"
        )
    return files


def _name_of(split: str) -> str:
    """The split of which ``split`` takes a part, as in ``train[:100]``."""
    return split.partition("[")[0]


def _from_hub(datasets: Any, config: TextDatasetConfig, name: str, key: str) -> Any:
    if Path(name).suffix in _BUILDERS or name.startswith((".", "/")):
        raise ValueError(f"{key}.path = {name!r}: there is no such file")
    try:
        return datasets.load_dataset(name, config.name, split=config.split)
    except Exception as error:  # the hub client raises a dozen unrelated classes
        raise ValueError(
            f"{key}.path = {name!r}: neither a file or folder nor a data set that the hub gives: {error}"
        ) from error


def _split_of(datasets: Any, found: Any, config: TextDatasetConfig, key: str) -> Any:
    if isinstance(found, datasets.Dataset):
        return found
    if config.split not in found:
        raise ValueError(f"{key}.split = {config.split!r}: one of {', '.join(found)}")
    return found[config.split]
