"""Rules on dropout that draws from a generator: ranks that share a micro-batch would draw different masks."""

from __future__ import annotations

from collections.abc import Iterator

from shoal.config.facts import Facts, llm_folder
from shoal.config.llm import LLMConfig
from shoal.config.rules.base import Broken, Rule, size_key, sizes_of
from shoal.config.speech import SpeechConfig

Config = SpeechConfig | LLMConfig


def _shared(config: Config) -> str:
    """The sizes by which ranks share a micro-batch, for the message; empty when none is above 1."""
    sizes = [(name, getattr(sizes_of(config), name)) for name in ("tp_size", "cp_size", "pp_size")]
    return ", ".join(f"{size_key(config, name)} = {size}" for name, size in sizes if size > 1)


def _attention_dropout(config: Config, facts: Facts) -> Iterator[Broken]:
    shared, folder = _shared(config), llm_folder(config)
    if not shared:
        return
    for name, value in facts.attention_dropout.items():
        limit = f"0 with {shared}"
        if folder is None:
            yield Broken(f"model.config.{name}", value, limit, f"model.config.{name}: 0")
        else:
            key = "model.pretrained_llm" if isinstance(config, SpeechConfig) else "model"
            limit = f"a model whose config.json says {name}: 0 (this one: {value}) with {shared}"
            yield Broken(key, str(folder), limit, f"set {name} to 0 in {folder / 'config.json'}")


def _adapter_dropout(config: Config, facts: Facts) -> Iterator[Broken]:
    if not isinstance(config, SpeechConfig):
        return
    adapter, shared = config.model.perception.modality_adapter, _shared(config)
    if shared and adapter.kind == "conformer" and adapter.dropout > 0.0:
        key = "model.perception.modality_adapter.dropout"
        yield Broken(key, adapter.dropout, f"0 with {shared}", f"{key}: 0")


_KEYS = ("model", "trainer.strategy", "distributed")
_WHY = "ranks that share a micro-batch would draw different masks from their generators"

DROPOUT_RULES: tuple[Rule, ...] = (
    Rule("attention-dropout", "both", _KEYS, _attention_dropout, _WHY, "set it to 0"),
    Rule("adapter-dropout", "speech", _KEYS, _adapter_dropout, _WHY, "dropout: 0"),
)
