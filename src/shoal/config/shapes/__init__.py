"""Readers of the sections whose YAML shape differs from their dataclass; importing this registers them."""

from __future__ import annotations

from shoal.config.shapes import data, llm, parallel, perception, target

__all__ = ["data", "llm", "parallel", "perception", "target"]
