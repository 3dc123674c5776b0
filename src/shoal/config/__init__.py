"""One frozen specification of a run: YAML, command line and Python build the same validated objects."""

from __future__ import annotations

from shoal.config.errors import ConfigError, Finding
from shoal.config.llm import LLMConfig
from shoal.config.speech import SpeechConfig

__all__ = ["ConfigError", "Finding", "LLMConfig", "SpeechConfig"]
