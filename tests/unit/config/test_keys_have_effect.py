"""No accepted key does nothing: the code reads it, or a rule refuses it until it does."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

import shoal
from shoal.config import evaluate, schema, speech
from shoal.config.rules.pending import PENDING_RULES

SOURCE = Path(shoal.__file__).parent

# Read by iterating over the fields of the class, or by the loader and its rules.
WHOLE_CLASSES = {
    "LoraConfig": "handed to peft as keywords",
    "DDPConfig": "handed to torch's wrapper as keywords",
    "MegatronFSDPConfig": "refused as a strategy",
    "MoEParallelizerConfig": "refused with expert parallelism",
    "PipelineConfig": "refused with pipeline parallelism",
    "MoEMetricsConfig": "refused when enabled",
    "DistributedConfig": "the LLM recipe is refused",
    "DistEnvConfig": "the LLM recipe is refused",
}
BY_THE_LOADER = {
    "SalmConfig.torch_dtype": "must agree with trainer.precision",
    "SalmConfig.use_nemo_automodel": "both of NeMo's classes are one implementation",
    "TrainerConfig.use_distributed_sampler": "set to false, with a notice",
    "TrainerConfig.accumulate_grad_batches": "becomes global_micro_batches in shoal.config.steps",
    "ParallelismSizes.ep_size": "refused above 1",
    "SalmConfig.moe_metrics": "refused when enabled",
    "FSDP2Config.sequence_parallel": "refused when true",
}


def _fields() -> list[str]:
    found = []
    for module in (speech, schema, evaluate):
        for name, cls in vars(module).items():
            if dataclasses.is_dataclass(cls) and cls.__module__ == module.__name__:
                found += [
                    f"{name}.{field.name}" for field in dataclasses.fields(cls) if name not in WHOLE_CLASSES
                ]
    return found


def _code() -> str:
    files = (path for path in SOURCE.rglob("*.py") if "config" not in path.relative_to(SOURCE).parts)
    return "\n".join(path.read_text() for path in files)


CODE = _code()
PENDING = {key.rpartition(".")[2] for rule in PENDING_RULES for key in rule.keys}


@pytest.mark.parametrize("field", _fields())
def test_key_is_read_or_refused(field: str) -> None:
    name = field.rpartition(".")[2]
    read = re.search(rf"\.{name}\b|[\"']{name}[\"']", CODE) is not None
    assert read or name in PENDING or field in BY_THE_LOADER


def test_list_of_exceptions_has_no_stale_entry() -> None:
    names = {name for module in (speech, schema, evaluate) for name in vars(module)}
    assert set(WHOLE_CLASSES) <= names
    assert set(BY_THE_LOADER) <= set(_fields())
