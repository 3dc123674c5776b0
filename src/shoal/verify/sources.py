"""Where the architecture of a model comes from: its configuration alone, without weights."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import hf_hub_download
from transformers import PreTrainedConfig

from shoal.config.dump import plain
from shoal.config.errors import ConfigError, Finding
from shoal.models.fields import configuration_of
from shoal.models.folder import hf_config
from shoal.verify.shrink import Fields

_RULE = "verify-architecture"


def read_architecture(
    name: str | Mapping[str, Any],
    key: str,
    option: str,
    *,
    instead: str | None,
    trust_remote_code: bool = False,
) -> PreTrainedConfig:
    """The configuration of a model.

    Args:
        name: A folder, a name on the hub (of which only config.json is fetched), or the fields themselves.
        key: The key that holds `name`, for messages.
        option: The option that names another source, for messages.
        instead: What that option says: a folder with a config.json, or such a file; None when it was not given.
        trust_remote_code: Run a configuration class that comes with the model.

    Raises:
        ConfigError: There is no configuration to be had.
    """
    if instead is not None:
        folder = Path(instead).parent if Path(instead).is_file() else Path(instead)
        if not (folder / "config.json").is_file():
            limit = "a folder with a config.json, or that file"
            raise ConfigError([Finding(_RULE, option, instead, limit, "check the path")])
        return _from_folder(folder, option, trust_remote_code)
    if isinstance(name, Mapping):
        try:
            return configuration_of(plain(name), key)
        except ValueError as error:
            raise ConfigError([Finding(_RULE, key, dict(name), str(error), "as said there")]) from error
    if Path(name).is_dir():
        return _from_folder(Path(name), key, trust_remote_code)
    try:
        folder = Path(hf_hub_download(name, "config.json")).parent
    except Exception as error:  # the hub client raises a dozen unrelated classes
        limit = f"a folder, or a hub model whose config.json can be fetched ({type(error).__name__})"
        repair = f"{option} FOLDER, with the model's config.json in it (weights are not needed)"
        raise ConfigError([Finding(_RULE, key, name, limit, repair)]) from error
    return _from_folder(folder, key, trust_remote_code)


def _from_folder(folder: Path, key: str, trust_remote_code: bool) -> PreTrainedConfig:
    try:
        config: PreTrainedConfig = hf_config(folder, trust_remote_code=trust_remote_code)
    except ValueError as error:
        limit, _, repair = str(error).rpartition("; repair: ")
        raise ConfigError([Finding(_RULE, key, str(folder), limit, repair)]) from error
    return config


def write_folder(original: PreTrainedConfig, fields: Fields, source: object, target: Path) -> None:
    """Writes a folder that holds the small configuration, and from `source` what goes with it.

    Args:
        original: Whose class the small configuration has.
        fields: The small configuration.
        source: The folder of the original, if it is one: its feature extractor settings and code are copied.
        target: The folder to make.
    """
    target.mkdir(parents=True)
    small = type(original).from_dict(fields)
    small.save_pretrained(target)
    written = json.loads((target / "config.json").read_text())
    if "auto_map" in fields:
        (target / "config.json").write_text(json.dumps(written | {"auto_map": fields["auto_map"]}))
    if isinstance(source, str) and Path(source).is_dir():
        for file in (*Path(source).glob("*.py"), *Path(source).glob("preprocessor_config.json")):
            shutil.copy(file, target)
