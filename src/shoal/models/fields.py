"""A model's configuration from its fields; those that no model of its type has are refused.

transformers keeps a field that it does not know and builds the default for the one that was meant.
"""

from __future__ import annotations

import difflib
import inspect
import re
import sys
from collections.abc import Mapping
from functools import cache
from typing import Any

from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig


def configuration_of(fields: Mapping[str, Any], key: str) -> PreTrainedConfig:
    """The configuration that transformers makes of `fields`, which have a `model_type`.

    A field is known when the source of its configuration class, or of a class that this is derived from, names it: some
    are read from keyword arguments and are no fields of the class.

    Args:
        fields: As in a config.json.
        key: Where the user wrote them, for messages.

    Raises:
        ValueError: A field is not known, or there is no such type; all of them, each with the nearest that there is.
    """
    rest = dict(fields)
    model_type = str(rest.pop("model_type"))
    if model_type not in CONFIG_MAPPING:
        raise ValueError(
            _unknown(f"{key}.model_type = {model_type!r}", model_type, list(CONFIG_MAPPING), "types")
        )
    names, words = _known(model_type)
    messages = [
        _unknown(f"{key}.{name}", name, names, f"fields of {model_type}")
        for name in rest
        if name not in words
    ]
    if messages:
        raise ValueError("\n  ".join(messages))
    config: PreTrainedConfig = AutoConfig.for_model(model_type, **rest)
    return config


@cache
def _known(model_type: str) -> tuple[list[str], frozenset[str]]:
    """Fields to suggest, and every word that may name a field."""
    config_class = CONFIG_MAPPING[model_type]
    names = [*vars(config_class()), *config_class.attribute_map]
    modules = {sys.modules[parent.__module__] for parent in config_class.__mro__ if parent is not object}
    words = {word for module in modules for word in re.findall(r"\w+", inspect.getsource(module))}
    return [name for name in names if not name.startswith("_")], frozenset(words | set(names))


def _unknown(what: str, name: str, known: list[str], kind: str) -> str:
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"{what}: none of the {kind}; repair: {near[0] if near else 'leave it out'}"
