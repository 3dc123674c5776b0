"""The layout that is verified: every axis of the configured one, at a size that a laptop runs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

from shoal.config.errors import ConfigError, Finding
from shoal.config.llm import LLMConfig
from shoal.config.rules.base import layout_of, size_key
from shoal.config.schema import FSDP2Config, OffloadConfig, ParallelismSizes, StrategyOptions
from shoal.config.speech import SpeechConfig
from shoal.verify.shrink import Degrees
from shoal.verify.task import MeshLayout

MOST_RANKS = 8
"""The most ranks that are started without being asked for."""


@dataclass(frozen=True)
class Scaled:
    """A layout, the degrees it had in the configuration and has here, and the configured layout in words."""

    layout: MeshLayout
    degrees: Degrees
    configured: str


def scale_layout(config: SpeechConfig | LLMConfig, configured_world: int | None, world: int | None) -> Scaled:
    """Chooses the degrees to verify.

    Without `world`, every axis whose configured degree is above 1 (data parallelism also when it is left to be
    inferred) gets 2; hybrid sharding gets two replicas of two shards. With `world`, axes grow towards their
    configured degrees, tensor parallelism first, and data parallelism takes the rest.

    Args:
        config: Of either recipe.
        configured_world: Ranks that the configuration implies; None when it does not say.
        world: Ranks to use.

    Raises:
        ConfigError: No such layout fits `world`, or the smallest one needs more than `MOST_RANKS`.
    """
    given = layout_of(config, configured_world).sizes
    dp = _configured_dp(given, configured_world)
    if world is None:
        sizes = _smallest(given, dp)
        world = _product(sizes)
        if world > MOST_RANKS:
            limit = (
                f"at most {MOST_RANKS} ranks unless asked for; this layout has {world} with every axis at 2"
            )
            key = size_key(config, "tp_size")
            raise ConfigError(
                [
                    Finding(
                        "verify-world",
                        key,
                        given.tp_size,
                        limit,
                        f"--world-size {world}, or fewer axes at once",
                    )
                ]
            )
    else:
        sizes = _fitting(config, given, dp, world)
    pairs = {
        axis: (getattr(given, f"{axis}_size"), getattr(sizes, f"{axis}_size"))
        for axis in ("tp", "cp", "pp", "ep")
    }
    return Scaled(_mesh_layout(config, sizes, world), Degrees(**pairs), _words(given, dp))


def _words(given: ParallelismSizes, dp: int | None) -> str:
    """The configured degrees, such as ``dp any x tp 8``."""
    shown = [f"dp {dp or 'any'}"]
    if (given.dp_replicate_size or 1) > 1:
        shown.append(f"dp_replicate {given.dp_replicate_size}")
    for axis in ("tp", "cp", "pp", "ep"):
        if (degree := getattr(given, f"{axis}_size")) > 1:
            shown.append(f"{axis} {degree}")
    return " x ".join(shown)


def _configured_dp(given: ParallelismSizes, world: int | None) -> int | None:
    """The data-parallel degree; None when it is whatever the number of ranks gives."""
    if given.dp_size is not None or world in (None, 1):
        return given.dp_size
    return max(1, world // (given.tp_size * given.cp_size * given.pp_size))


def _smallest(given: ParallelismSizes, dp: int | None) -> ParallelismSizes:
    replicas = given.dp_replicate_size or 1
    least = 1 if dp == 1 and (given.tp_size, given.cp_size, given.pp_size) != (1, 1, 1) else 2
    return replace(
        given,
        dp_size=4 if replicas > 1 else least,
        dp_replicate_size=2 if replicas > 1 else None,
        **{name: min(2, getattr(given, name)) for name in ("tp_size", "cp_size", "pp_size", "ep_size")},
    )


def _product(sizes: ParallelismSizes) -> int:
    return (sizes.dp_size or 1) * sizes.tp_size * sizes.cp_size * sizes.pp_size


def _fitting(
    config: SpeechConfig | LLMConfig, given: ParallelismSizes, dp: int | None, world: int
) -> ParallelismSizes:
    smallest = _smallest(given, dp)
    for sizes in _grown(given, smallest, world):
        if (sizes.dp_size or 0) % (smallest.dp_size or 1) == 0:
            return sizes
    limit = f"a multiple of {_product(smallest)}: every configured axis above 1 keeps at least 2"
    raise ConfigError(
        [Finding("verify-world", "--world-size", world, limit, f"--world-size {_product(smallest)}")]
    )


def _grown(given: ParallelismSizes, smallest: ParallelismSizes, world: int) -> Iterator[ParallelismSizes]:
    """Sizes whose product is `world`, those nearest to the configured ones first."""
    for tp in _degrees(given.tp_size):
        for cp in _degrees(given.cp_size):
            for pp in _degrees(given.pp_size):
                if world % (tp * cp * pp) == 0:
                    dp = world // (tp * cp * pp)
                    ep = next((n for n in _degrees(given.ep_size) if dp * cp % n == 0), 0)
                    if ep:
                        sizes = {"tp_size": tp, "cp_size": cp, "pp_size": pp, "ep_size": ep, "dp_size": dp}
                        yield replace(smallest, **sizes)


def _degrees(configured: int) -> list[int]:
    """Divisors of a configured degree, largest first; 1 only where it is 1."""
    return [n for n in range(configured, 0, -1) if configured % n == 0 and (n > 1 or configured == 1)]


def _mesh_layout(config: SpeechConfig | LLMConfig, sizes: ParallelismSizes, world: int) -> MeshLayout:
    if isinstance(config, LLMConfig):
        section = config.distributed
        return MeshLayout(
            world,
            sizes,
            _options(section.options),
            pipeline=section.pipeline,
            moe=section.moe,
            checkpoint_llm=section.activation_checkpointing,
        )
    strategy = config.trainer.strategy
    options: StrategyOptions = strategy.distributed_config or FSDP2Config()
    checkpointing = strategy.activation_checkpointing_llm or options.activation_checkpointing
    if strategy.kind == "ddp":
        options, checkpointing = strategy.ddp, strategy.ddp.activation_checkpointing
    return MeshLayout(
        world,
        sizes,
        _options(options),
        moe=strategy.moe_config,
        checkpoint_llm=checkpointing,
        checkpoint_perception=strategy.activation_checkpointing_perception,
    )


def _options(options: StrategyOptions) -> StrategyOptions:
    """The strategy's options with mixed precision off and nothing that needs an accelerator."""
    changes: dict[str, Any] = {"activation_checkpointing": False}  # the layout says it once
    if isinstance(options, FSDP2Config):
        changes["mp_policy"] = None
        if options.offload_policy is not None:
            changes["offload_policy"] = OffloadConfig(pin_memory=False)
    known = {field.name for field in fields(options)}
    return replace(options, **{name: value for name, value in changes.items() if name in known})


__all__ = ["MOST_RANKS", "Scaled", "scale_layout"]
