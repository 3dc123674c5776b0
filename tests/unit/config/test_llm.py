"""The sections of the LLM recipe: AutoModel's spelling, ours, and that no key does nothing."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

import shoal
from shoal.config import ConfigError, LLMConfig, LoadOptions, load, load_config
from shoal.config import llm as llm_page
from shoal.config import text as text_page
from shoal.config.rules.pending import PENDING_RULES

HERE = Path(__file__).parent
EXAMPLES = HERE.parents[2] / "examples" / "llm"
GPUS = LoadOptions(accelerators=8, to_train=True)
MODEL = {"pretrained_model_name_or_path": "a-public/llm"}


def _llm(**sections: Any) -> LLMConfig:
    config = load_config({"model": MODEL, "step_scheduler": {}, **sections})
    assert isinstance(config, LLMConfig)
    return config


def test_automodels_squad_example_loads_for_training() -> None:
    loaded = load(HERE / "automodel_llama3_2_1b_squad.yaml", world_size=8, options=GPUS)
    config = loaded.config
    assert isinstance(config, LLMConfig) and loaded.notices == ()
    assert config.dataset.type == "squad" and config.dataset.path == "rajpurkar/squad"
    assert config.validation_datasets["default"].limit_dataset_samples == 64
    assert config.loss_fn.kind == "full" and config.rng.seed == 1111 and config.dataloader.shuffle is False
    assert load_config(config.to_dict(), world_size=8, options=GPUS) == config


def test_automodels_qwen3_moe_example_lacks_only_the_expert_axis() -> None:
    with pytest.raises(ConfigError) as caught:
        load(HERE / "automodel_qwen3_moe_30b.yaml", world_size=8, options=GPUS)
    assert [finding.rule for finding in caught.value.findings] == ["axis-ep"]
    loaded = load(
        HERE / "automodel_qwen3_moe_30b.yaml", ["distributed.ep_size=1"], world_size=8, options=GPUS
    )
    assert [notice.rule for notice in loaded.notices] == ["ci-section"]
    assert loaded.config.model.torch_dtype == "bfloat16" and loaded.config.dataset.type == "hellaswag"


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.stem)
def test_examples_load_for_training(path: Path) -> None:
    refused = {"qwen3_moe_30b": ["axis-ep"]}.get(path.stem, [])
    num_ranks = {"smollm2_135m": 2}.get(path.stem, 8)  # as its first lines say
    found: list[str] = []
    try:
        load(path, world_size=num_ranks, options=GPUS)
    except ConfigError as error:
        found = [finding.rule for finding in error.findings]
    assert found == refused


def test_validation_sets_are_named_by_their_keys() -> None:
    config = _llm(
        validation_dataset={"path": "a.jsonl"}, validation_dataset_hard={"path": "b.jsonl", "type": "text"}
    )
    assert {name: dataset.path for name, dataset in config.validation_datasets.items()} == {
        "default": "a.jsonl",
        "hard": "b.jsonl",
    }
    assert load_config(config.to_dict()) == config
    with pytest.raises(ConfigError, match=r"validation_dataset_hard\.pth"):
        _llm(validation_dataset_hard={"pth": "b.jsonl"})
    with pytest.raises(ConfigError, match="given-twice"):
        _llm(validation_datasets={"default": {"path": "a"}}, validation_dataset={"path": "b"})


@pytest.mark.parametrize(
    ("given", "norm"), [({}, 1.0), ({"max_norm": None}, None), ({"max_norm": 0.5}, 0.5), (2, 2), (None, None)]
)
def test_clipping_is_a_number_or_switched_off(given: Any, norm: float | None) -> None:
    config = _llm(clip_grad_norm=given)
    assert config.clip_grad_norm.max_norm == norm
    assert load_config(config.to_dict()) == config


@pytest.mark.parametrize(("given", "meant"), [("bf16", "bf16-mixed"), (32, "32-true"), ("64", "64-true")])
def test_precision_has_the_spellings_of_lightning(given: Any, meant: str) -> None:
    assert _llm(precision=given).precision == meant


@pytest.mark.parametrize("given", [0, -1.0, "a", {"max_norm": 0}, {"max_norm": None, "max_nrm": 1.0}])
def test_a_largest_norm_that_is_none_is_one_finding(given: Any) -> None:
    with pytest.raises(ConfigError) as refused:
        _llm(clip_grad_norm=given)
    assert len(refused.value.findings) == 1
    assert refused.value.findings[0].key.startswith("clip_grad_norm")


@pytest.mark.parametrize(
    ("sections", "key"),
    [
        (
            {"dataset": {"_target_": "nemo_automodel.components.datasets.llm.mock.Mock", "path": "a"}},
            "dataset._target_",
        ),
        (
            {"loss_fn": {"_target_": "nemo_automodel.components.loss.te_parallel_ce.TEParallelCrossEntropy"}},
            "loss_fn._target_",
        ),
        ({"loss_fn": {"_target_": "x.MaskedCrossEntropy", "fp32_upcast": False}}, "loss_fn.fp32_upcast"),
        ({"dataloader": {"_target_": "my.Loader"}}, "dataloader._target_"),
        ({"dataloader": {"collate_fn": "my.collate"}}, "dataloader.collate_fn"),
        ({"recipe": "KnowledgeDistillationRecipe"}, "recipe"),
        ({"dataset": {"path": "a", "pad_to_max_length": True}}, "dataset.pad_to_max_length"),
        ({"model": {"_target_": "x.Model", **MODEL}}, "model._target_"),
        ({"quantization": {}}, "quantization"),
        ({"packed_sequence": {"packing_strategy": "knapsack"}}, "packed_sequence.packing_strategy"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(sections: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        _llm(**sections)
    assert [finding.key for finding in caught.value.findings] == [key]


def test_names_of_automodel_become_ours() -> None:
    config = _llm(
        packed_sequence={"packed_sequence_size": 8, "packing_strategy": "neat", "drop_long_samples": True},
        checkpoint={"max_recent_checkpoints": 3, "restore_from": "LATEST"},
        peft={"_target_": "nemo_automodel.components._peft.lora.PeftConfig", "match_all_linear": True},
        model={
            "_target_": "nemo_automodel.NeMoAutoModelForCausalLM.from_config",
            "config": {
                "_target_": "transformers.AutoConfig.from_pretrained",
                "pretrained_model_name_or_path": "a-public/llm",
            },
        },
    )
    assert config.packed_sequence.packing_strategy == "best_fit"
    assert config.packed_sequence.long_documents == "drop"
    assert (config.checkpoint.keep_last, config.checkpoint.restore_from) == (3, "latest")
    assert config.model.config == "a-public/llm" and config.model.pretrained_model_name_or_path is None
    assert load_config(config.to_dict()) == config


def _code() -> str:
    source = Path(shoal.__file__).parent
    files = (path for path in source.rglob("*.py") if "config" not in path.relative_to(source).parts)
    return "\n".join(path.read_text() for path in files)


CODE = _code()
PENDING = {key.rpartition(".")[2] for rule in PENDING_RULES for key in rule.keys}
BY_THE_RULES = {
    "RngConfig.ranked": "false is refused",
    "LLMConfig.ci": "noted",
}


def _fields() -> list[str]:
    return [
        f"{name}.{field.name}"
        for module in (llm_page, text_page)
        for name, cls in vars(module).items()
        if dataclasses.is_dataclass(cls) and cls.__module__ == module.__name__
        for field in dataclasses.fields(cls)
    ]


@pytest.mark.parametrize("field", _fields())
def test_key_is_read_or_refused(field: str) -> None:
    name = field.rpartition(".")[2]
    read = re.search(rf"\.{name}\b|[\"']{name}[\"']", CODE) is not None
    assert read or name in PENDING or field in BY_THE_RULES
