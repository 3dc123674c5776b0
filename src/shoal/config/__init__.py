"""One frozen specification of a run: YAML, command line and Python build the same validated objects."""

from __future__ import annotations

from shoal.config.errors import ConfigError, Finding
from shoal.config.llm import LLMConfig
from shoal.config.load import Loaded, load, load_arguments, load_config, parse_distributed_section
from shoal.config.options import LoadOptions
from shoal.config.rules import support_matrix
from shoal.config.sources import check_manifest_source
from shoal.config.speech import SpeechConfig

__all__ = [
    "ConfigError",
    "Finding",
    "LLMConfig",
    "LoadOptions",
    "Loaded",
    "SpeechConfig",
    "check_manifest_source",
    "load",
    "load_arguments",
    "load_config",
    "parse_distributed_section",
    "support_matrix",
]
