"""A rule is data: what it is called, which keys it reads, what it refuses, why, and what to do instead."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, NamedTuple

from shoal.config.errors import ConfigError, Finding
from shoal.config.facts import Facts
from shoal.config.layout import Layout, LayoutKeys
from shoal.config.llm import LLMConfig
from shoal.config.schema import FSDP2Config, MegatronFSDPConfig, ParallelismSizes
from shoal.config.speech import SpeechConfig

Recipe = Literal["speech", "llm", "both"]


class Broken(NamedTuple):
    """How a rule is broken: the key, its value, the limit, and a repair when the rule's own is not exact."""

    key: str
    value: object
    limit: str
    repair: str | None = None


Check = Callable[[Any, Facts], Iterable[Broken]]


@dataclass(frozen=True)
class Rule:
    """One rule.

    Attributes:
        id: Identifier, shown in every message.
        recipe: Whose configurations it looks at.
        keys: Paths it reads, as fields of the configuration; a key that failed to build skips the rule.
        check: Yields how the configuration breaks the rule.
        why: The reason, for the documentation.
        repair: What to do, when `check` does not say it more exactly.
        notice: Whether it informs instead of refusing.
        pending: Whether it refuses something whose implementation arrives later.
    """

    id: str
    recipe: Recipe
    keys: tuple[str, ...]
    check: Check
    why: str
    repair: str
    notice: bool = False
    pending: bool = False

    def findings(self, config: SpeechConfig | LLMConfig, facts: Facts) -> Iterator[Finding]:
        """Yields a finding for everything in which `config` breaks this rule."""
        for broken in self.check(config, facts):
            yield Finding(self.id, broken.key, broken.value, broken.limit, broken.repair or self.repair)

    def applies_to(self, config: SpeechConfig | LLMConfig) -> bool:
        """Returns whether the rule looks at configurations of this recipe."""
        return self.recipe in ("both", "speech" if isinstance(config, SpeechConfig) else "llm")


_SPEECH_KEYS = LayoutKeys(
    sizes="trainer.strategy",
    strategy="trainer.strategy._target_",
    moe="trainer.strategy.moe_config",
    checkpointing="trainer.strategy.activation_checkpointing_llm",
    option_checkpointing="trainer.strategy.distributed_config.activation_checkpointing",
)
_LLM_KEYS = LayoutKeys(
    sizes="distributed",
    strategy="distributed.strategy",
    pipeline="distributed.pipeline",
    moe="distributed.moe",
    checkpointing="distributed.activation_checkpointing",
    option_checkpointing="distributed.activation_checkpointing",
)

_LIGHTNING_SIZES = {"dp_size": "data_parallel_size", "tp_size": "tensor_parallel_size"}


def layout_of(config: SpeechConfig | LLMConfig, world_size: int | None) -> Layout:
    """Returns the parallel layout that a configuration of either recipe asks for."""
    if isinstance(config, LLMConfig):
        section = config.distributed
        return Layout(
            sizes=section.sizes,
            world_size=world_size,
            strategy=section.strategy,
            has_pipeline=section.pipeline is not None,
            has_moe=section.moe is not None,
            checkpointing=section.activation_checkpointing,
            option_checkpointing=section.options.activation_checkpointing,
            keys=_LLM_KEYS,
        )
    strategy = config.trainer.strategy
    megatron = isinstance(strategy.distributed_config, MegatronFSDPConfig)
    options = strategy.distributed_config
    return Layout(
        sizes=strategy.sizes,
        world_size=world_size,
        strategy="ddp" if strategy.kind == "ddp" else "megatron_fsdp" if megatron else "fsdp2",
        has_moe=strategy.moe_config is not None,
        checkpointing=strategy.activation_checkpointing_llm,
        option_checkpointing=options.activation_checkpointing if options is not None else False,
        keys=_SPEECH_KEYS,
    )


def layout_keys(config: SpeechConfig | LLMConfig) -> tuple[str, ...]:
    """Returns the paths a layout rule reads."""
    return ("trainer.strategy",) if isinstance(config, SpeechConfig) else ("distributed",)


def spelled(config: SpeechConfig | LLMConfig, key: str) -> str:
    """Returns a size's key as the strategy of `config` spells it."""
    head, _, name = key.rpartition(".")
    if isinstance(config, SpeechConfig) and config.trainer.strategy.kind == "model_parallel":
        return f"{head}.{_LIGHTNING_SIZES.get(name, name)}"
    return key


def size_key(config: SpeechConfig | LLMConfig, name: str) -> str:
    """Returns the user's key of a size, such as ``trainer.strategy.tp_size``."""
    return spelled(config, f"{layout_keys(config)[0]}.{name}")


def sizes_of(config: SpeechConfig | LLMConfig) -> ParallelismSizes:
    """Returns the parallel sizes of either recipe."""
    return config.trainer.strategy.sizes if isinstance(config, SpeechConfig) else config.distributed.sizes


def strategy_options_key(config: SpeechConfig | LLMConfig) -> str:
    """Returns the key of the section that holds the strategy's options."""
    return "trainer.strategy.distributed_config" if isinstance(config, SpeechConfig) else "distributed"


@contextmanager
def keys_as_written(config: SpeechConfig | LLMConfig) -> Iterator[None]:
    """Inside, what is refused by names of Python arguments is refused by the keys of the user's file.

    Building a mesh or a model knows `tp_size` and `tp_plan`; whoever wrote a file looks for
    ``trainer.strategy.tp_size`` or ``distributed.tp_plan``.
    """
    try:
        yield
    except ConfigError as error:
        raise ConfigError(replace(f, key=_as_written(config, f.key)) for f in error.findings) from error


def _as_written(config: SpeechConfig | LLMConfig, key: str) -> str:
    name = key.removeprefix("parallelism_sizes.")
    if name in {field.name for field in fields(ParallelismSizes)}:
        return size_key(config, name)
    if name in {field.name for field in fields(FSDP2Config)}:
        return f"{strategy_options_key(config)}.{name}"
    return key
