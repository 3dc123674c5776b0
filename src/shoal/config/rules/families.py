"""Rules on the family of the language model: what packing, context parallelism and compilation can do with it."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

from shoal.config.facts import Facts
from shoal.config.families import DEAF, HYBRIDS, PACKABLE
from shoal.config.llm import LLMConfig
from shoal.config.rules.base import Broken, Rule, size_key, sizes_of, strategy_options_key
from shoal.config.schema import FSDP2Config
from shoal.config.speech import SpeechConfig

Config = SpeechConfig | LLMConfig


def _packing(config: Config) -> tuple[str, object, str] | None:
    """Key and value that switch packing on, and what switches it off; None without packing."""
    if isinstance(config, SpeechConfig):
        return ("model.packed_sequences", True, "false") if config.model.packed_sequences else None
    size = config.packed_sequence.packed_sequence_size
    return ("packed_sequence.packed_sequence_size", size, "0") if size else None


def _family_was_compared(config: Config, facts: Facts) -> Iterator[Broken]:
    family, cp_size = facts.model_type, sizes_of(config).cp_size
    if family is None or family in PACKABLE | HYBRIDS:
        return
    reason = f"with model type {family}, whose documents have not been compared packed with unpacked"
    if packing := _packing(config):
        key, value, off = packing
        yield Broken(key, value, f"{off} {reason}", f"{key}: {off}")
    if cp_size > 1:
        yield Broken(size_key(config, "cp_size"), cp_size, f"1 {reason}", "cp_size: 1")


def _layers_hand_arguments_down(config: Config, facts: Facts) -> Iterator[Broken]:
    cp_size = sizes_of(config).cp_size
    if cp_size > 1 and facts.model_type in DEAF:
        limit = f"1 with model type {facts.model_type}, whose layers do not tell attention where tokens lie"
        yield Broken(size_key(config, "cp_size"), cp_size, limit)


def _chunks_need_whole_documents(config: Config, facts: Facts) -> Iterator[Broken]:
    options = config.distributed.options if isinstance(config, LLMConfig) else None
    if isinstance(config, SpeechConfig):
        options = config.trainer.strategy.distributed_config
    method = options.cp_method if isinstance(options, FSDP2Config) else FSDP2Config().cp_method
    chunked = "chunked_attention" in facts.layer_types
    chunked |= facts.model_type == "llama4_text" and not facts.layer_types  # as its configuration fills it in
    if sizes_of(config).cp_size > 1 and chunked and method != "ulysses":
        key = f"{strategy_options_key(config)}.cp_method"
        yield Broken(key, method, "ulysses for a model with chunked attention")


def _graphs_break_at_borders(config: LLMConfig, facts: Facts) -> Iterator[Broken]:
    if not config.compile.enabled or not config.compile.fullgraph or config.model is None:
        return
    has_mamba = facts.model_type in HYBRIDS or "mamba" in facts.layer_types
    reasons = {
        "packed sequences": _packing(config) is not None,
        "cp_size > 1": config.distributed.sizes.cp_size > 1,
        "attention by shoal": config.model.attn_implementation == "shoal"
        or config.model.backend.attn == "te",
        "Mamba-2 layers": has_mamba,
    }
    if found := [reason for reason, holds in reasons.items() if holds]:
        yield Broken("compile.fullgraph", True, f"false with {', '.join(found)}")


def _flash_installed(config: LLMConfig, facts: Facts) -> Iterator[Broken]:
    if config.model is None or not facts.options.to_train or any(map(find_spec, ("flash_attn", "kernels"))):
        return
    for key, value, flash in (
        ("model.attn_implementation", config.model.attn_implementation, "flash_attention_2"),
        ("model.backend.attn", config.model.backend.attn, "flash"),
    ):
        if value == flash:
            yield Broken(key, value, "a kernel of an installed package; flash_attn is not", f"{key}: auto")


_KEYS = ("model", "trainer.strategy", "distributed")

FAMILY_RULES: tuple[Rule, ...] = (
    Rule(
        "family-was-compared",
        "both",
        (*_KEYS, "packed_sequence"),
        _family_was_compared,
        "a model that mixes documents gives wrong results without an error",
        "switch packing off",
    ),
    Rule(
        "cp-reaches-attention",
        "both",
        _KEYS,
        _layers_hand_arguments_down,
        "attention needs to know which tokens lie where",
        "cp_size: 1",
    ),
    Rule(
        "chunks-need-ulysses",
        "both",
        _KEYS,
        _chunks_need_whole_documents,
        "only whole documents can be cut into chunks that do not see each other",
        "cp_method: ulysses",
    ),
    Rule(
        "fullgraph-has-no-borders",
        "llm",
        (*_KEYS, "packed_sequence", "compile"),
        _graphs_break_at_borders,
        "borders of documents are read as numbers, for which a graph is broken",
        "compile.fullgraph: false",
    ),
    Rule(
        "flash-installed",
        "llm",
        ("model",),
        _flash_installed,
        "a kernel that is named and missing is an error, not another kernel",
        "attn_implementation: auto",
    ),
)
