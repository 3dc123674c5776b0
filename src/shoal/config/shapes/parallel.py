"""Reads the flat blocks ``trainer.strategy`` (speech) and ``distributed`` (LLM) into their dataclasses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from shoal.config import aliases
from shoal.config.build import (
    FAILED,
    READERS,
    Report,
    build,
    convert,
    field_types,
    join,
    nearest,
    refuse_unknown,
)
from shoal.config.schema import (
    STRATEGY_OPTIONS,
    CheckpointingMode,
    DDPConfig,
    DistributedConfig,
    FSDP2Config,
    MegatronFSDPConfig,
    MixedPrecisionConfig,
    MoEParallelizerConfig,
    OffloadConfig,
    ParallelismSizes,
    PipelineConfig,
)
from shoal.config.shapes.target import as_mapping, drop_target
from shoal.config.speech import StrategyConfig
from shoal.config.values import PositiveFloat, PositiveInt

_INFERRED = ("none", "None", "auto")
_INFERABLE = ("dp_size", "dp_replicate_size", "data_parallel_size", "tensor_parallel_size")


def without_inferred(block: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a block in which "none" and "auto" of a size that can be inferred are null."""
    return {
        name: None if name in _INFERABLE and value in _INFERRED else value for name, value in block.items()
    }


# ---------------------------------------------------------------- trainer.strategy, as each class spells it


@dataclass(frozen=True)
class _Common:
    process_group_backend: Literal["nccl", "gloo"] | None = None
    timeout: PositiveFloat | None = None
    timeout_minutes: PositiveFloat | None = None


@dataclass(frozen=True)
class _DDPBlock(_Common):
    broadcast_buffers: bool = False
    find_unused_parameters: bool = False
    static_graph: bool = False
    bucket_cap_mb: PositiveInt | None = None
    gradient_as_bucket_view: bool = False


@dataclass(frozen=True)
class _ModelParallelBlock(_Common):
    data_parallel_size: PositiveInt | None = None
    tensor_parallel_size: PositiveInt | None = None
    save_distributed_checkpoint: bool = True


@dataclass(frozen=True)
class _NemoModelParallelBlock(_Common):
    data_parallel: PositiveInt | None = None
    tensor_parallel: PositiveInt | None = None
    find_unused_parameters: bool = False
    save_distributed_checkpoint: bool = True


@dataclass(frozen=True)
class _AutomodelBlock(_Common):
    dp_size: PositiveInt | None = None
    dp_replicate_size: PositiveInt | None = None
    tp_size: PositiveInt = 1
    pp_size: PositiveInt = 1
    cp_size: PositiveInt = 1
    ep_size: PositiveInt = 1
    distributed_config: Any = None
    moe_config: MoEParallelizerConfig | None = None
    activation_checkpointing_llm: CheckpointingMode = False
    activation_checkpointing_perception: bool = False
    save_distributed_checkpoint: bool = True


_BLOCKS: Mapping[str, type[_Common]] = {
    "ddp": _DDPBlock,
    "model_parallel": _ModelParallelBlock,
    "automodel": _AutomodelBlock,
}


def read_strategy(raw: Any, path: str, report: Report) -> Any:
    """Reads ``trainer.strategy``: a name, or a block with ``_target_``, flat sizes and flat options."""
    if isinstance(raw, str):
        raw = {"_target_": raw}
    block = as_mapping(raw, path, report)
    if block is None:
        return FAILED
    target = block.pop("_target_", aliases.STRATEGY_TARGETS["ddp"])
    kind = aliases.STRATEGIES.get(target) if isinstance(target, str) else None
    if kind is None:
        limit = f"one of {', '.join(sorted(aliases.STRATEGIES))}"
        # No nearest one: FSDPStrategy is a letter from DDPStrategy and means something else.
        return report.refuse("strategy", join(path, "_target_"), target, limit, "use one of these strategies")
    cls = _NemoModelParallelBlock if target == aliases.NEMO_MODEL_PARALLEL else _BLOCKS[kind]
    parsed = build(cls, without_inferred(block), path, report, also={"_target_"})
    _refuse_unused_search(parsed, kind, path, report)
    own = _own_fields(parsed, path, report)
    return StrategyConfig(kind=kind, timeout_seconds=_timeout(parsed, path, report), **own)


def _own_fields(parsed: _Common, path: str, report: Report) -> dict[str, Any]:
    values = {item.name: getattr(parsed, item.name) for item in fields(parsed)}
    kept = {name: values[name] for name in values if name in _STRATEGY_FIELDS - {"distributed_config"}}
    if isinstance(parsed, _DDPBlock):
        flags = {item.name for item in fields(DDPConfig)} & set(values)
        return {**kept, "ddp": DDPConfig(**{name: values[name] for name in flags})}
    if isinstance(parsed, _AutomodelBlock):
        sizes = ParallelismSizes(**{item.name: values[item.name] for item in fields(ParallelismSizes)})
        options = _read_distributed_config(parsed.distributed_config, path, report)
        return {**kept, "sizes": sizes, "distributed_config": options}
    dp_size = values.get("data_parallel_size", values.get("data_parallel"))
    tp_size = values.get("tensor_parallel_size", values.get("tensor_parallel")) or 1
    return {**kept, "sizes": ParallelismSizes(dp_size=dp_size, tp_size=tp_size)}


_STRATEGY_FIELDS = {item.name for item in fields(StrategyConfig)}


def _refuse_unused_search(parsed: _Common, kind: str, path: str, report: Report) -> None:
    if kind != "ddp" and getattr(parsed, "find_unused_parameters", False):
        report.refuse(
            "find-unused-parameters",
            join(path, "find_unused_parameters"),
            True,
            "false: only the ddp strategy searches for unused parameters",
            "find_unused_parameters: false",
        )


def _timeout(parsed: _Common, path: str, report: Report) -> float | None:
    if parsed.timeout is not None and parsed.timeout_minutes is not None:
        key, limit = join(path, "timeout_minutes"), "either timeout (seconds) or timeout_minutes"
        report.refuse("given-twice", key, parsed.timeout_minutes, limit, f"delete {key}")
    return parsed.timeout if parsed.timeout_minutes is None else parsed.timeout_minutes * 60


def _read_distributed_config(raw: Any, path: str, report: Report) -> Any:
    if raw is None:
        return None
    named = str(raw.get("_target_", "")) if isinstance(raw, Mapping) else ""
    options = MegatronFSDPConfig if named.endswith(".MegatronFSDPConfig") else FSDP2Config
    value = convert(options, raw, join(path, "distributed_config"), report)
    return None if value is FAILED else value


# --------------------------------------------------------------------------------------------- distributed


def read_distributed(raw: Any, path: str, report: Report) -> Any:
    """Reads ``distributed``: flat sizes, flat options of the strategy, and the blocks pipeline and moe."""
    block = as_mapping(raw, path, report)
    if block is None:
        return FAILED
    name = block.pop("strategy", "fsdp2")
    strategy = aliases.DISTRIBUTED_STRATEGIES.get(name) if isinstance(name, str) else None
    if strategy is None:
        limit = f"one of {', '.join(aliases.DISTRIBUTED_STRATEGIES)}"
        near = nearest(name, STRATEGY_OPTIONS) if isinstance(name, str) else None
        return report.refuse("strategy", join(path, "strategy"), name, limit, f"strategy: {near or 'fsdp2'}")
    if strategy != "fsdp2" and block.get("sequence_parallel") is False:
        del block["sequence_parallel"]
    options = STRATEGY_OPTIONS[strategy]
    size_names = {item.name for item in fields(ParallelismSizes)}
    option_names = {item.name for item in fields(options)} - {"activation_checkpointing"}
    known = size_names | option_names | _BLOCK_NAMES
    _refuse_options_of_others(block, known, strategy, path, report)
    refuse_unknown(block, known, path, report, also={"strategy"})
    block = without_inferred(block)
    values = {name: _one(DistributedConfig, name, block, path, report) for name in _BLOCK_NAMES & set(block)}
    return DistributedConfig(
        strategy=strategy,  # type: ignore[arg-type]
        sizes=build(ParallelismSizes, _picked(block, size_names), path, report),
        options=build(options, _picked(block, option_names), path, report),
        **{name: value for name, value in values.items() if value is not None},
    )


_BLOCK_NAMES = {"pipeline", "moe", "activation_checkpointing"}


def _refuse_options_of_others(
    block: dict[str, Any], known: set[str], strategy: str, path: str, report: Report
) -> None:
    """Refuses options that another strategy has, by that strategy's name and not as a misspelt key."""
    for name in [name for name in block if name not in known]:
        owners = [own for own, cls in STRATEGY_OPTIONS.items() if name in {item.name for item in fields(cls)}]
        if owners:
            limit = f"a key of strategy {' and '.join(owners)}, not of {strategy}"
            repair = f"leave it out, or strategy: {owners[0]}"
            report.refuse("option-of-strategy", join(path, name), block.pop(name), limit, repair)


def _picked(block: Mapping[str, Any], names: set[str]) -> dict[str, Any]:
    return {name: value for name, value in block.items() if name in names}


def _one(cls: type, name: str, block: Mapping[str, Any], path: str, report: Report) -> Any:
    if block[name] is None:
        return None
    value = convert(field_types(cls)[name], block[name], join(path, name), report)
    return None if value is FAILED else value


# ------------------------------------------------------------------------------------------ option classes


def _class_reader(cls: type, targets: tuple[str, ...]) -> None:
    """Registers a dataclass whose block may repeat the name of its class as ``_target_``."""

    def read(raw: Any, path: str, report: Report) -> Any:
        block = as_mapping(raw, path, report)
        if block is None:
            return FAILED
        drop_target(block, targets, path, report)
        return build(cls, _with_dtype_names(block), path, report, also={"_target_"})

    READERS[cls] = read


def _with_dtype_names(block: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: aliases.DTYPES.get(value, value)
        if name.endswith("_dtype") and isinstance(value, str)
        else value
        for name, value in block.items()
    }


_CONFIG_MODULES = ("nemo_automodel.components.distributed.config", "shoal")
for _cls in (FSDP2Config, MegatronFSDPConfig, MoEParallelizerConfig):
    _class_reader(_cls, tuple(f"{module}.{_cls.__name__}" for module in _CONFIG_MODULES))
_class_reader(PipelineConfig, ("nemo_automodel.components.distributed.pipelining.config.PipelineConfig",))
_class_reader(MixedPrecisionConfig, ("torch.distributed.fsdp.MixedPrecisionPolicy",))
_class_reader(OffloadConfig, ("torch.distributed.fsdp.CPUOffloadPolicy",))
READERS[StrategyConfig] = read_strategy
READERS[DistributedConfig] = read_distributed
