"""Reading, overriding, interpolating and giving back a configuration."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.config import ConfigError, LoadOptions, check_manifest_source, load_arguments, load_config
from shoal.config.evaluate import EvaluateConfig
from shoal.config.reading import parse_yaml
from tests.unit.config.base import base, merged

_AUTOMODEL = "nemo.collections.speechlm2.parts.parallel.AutomodelParallelStrategy"


def _rules(error: ConfigError) -> list[str]:
    return [finding.rule for finding in error.findings]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4),
        ("3", 3),
        ("-1", -1),
        ("0.5", 0.5),
        ("00:03:50:00", "00:03:50:00"),
        ("1:30:00", "1:30:00"),
        ("2026-01-02", "2026-01-02"),
        ("none", "none"),
        ("null", None),
        ("1_000", 1000),
        ("[1, 2]", [1, 2]),
        ("0o17", 15),
    ],
)
def test_scalars_of_yaml(text: str, value: Any) -> None:
    parsed = parse_yaml(text, "test")
    assert parsed == value
    assert type(parsed) is type(value)


def test_key_twice_in_a_block_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "twice.yaml"
    file.write_text("trainer:\n  max_steps: 1\n  max_steps: 2\n")
    with pytest.raises(ConfigError, match="'max_steps' stands twice") as caught:
        load_config(file)
    assert "line 3" in str(caught.value)


@pytest.mark.parametrize("text", ["a: [", "- a\n- b\n", "just text"])
def test_what_is_no_yaml_mapping_is_refused(text: str, tmp_path: Path) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"yaml-syntax|config-file"):
        load_config(file)


def test_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        load_config(tmp_path / "absent.yaml")


def test_overrides_write_lists_new_keys_and_delete() -> None:
    overrides = [
        "trainer.max_steps=7",
        "+trainer.log_every_n_steps=1",
        "data.train_ds.input_cfg.0.cuts_path=other.jsonl",
        "data.train_ds.input_cfg.0.tags={context: 'Transcribe:'}",
        "~data.train_ds.batch_size",
        "++data.train_ds.batch_duration=12.5",
        "model.optimizer.betas=[0.9,0.98]",
    ]
    config = load_config(base("speech"), overrides)
    source = config.data.train_ds.input_cfg[0]
    assert (config.trainer.max_steps, config.trainer.log_every_n_steps) == (7, 1)
    assert (source.cuts_path, source.tags) == ("other.jsonl", {"context": "Transcribe:"})
    assert (config.data.train_ds.batch_size, config.data.train_ds.batch_duration) == (None, 12.5)
    assert config.model.optimizer.kwargs == {"lr": 1e-4, "betas": (0.9, 0.98)}


@pytest.mark.parametrize(
    ("override", "rule"),
    [
        ("trainer.max_steps", "override-syntax"),
        ("trainer.max_steps=", "override-syntax"),
        ("=3", "override-syntax"),
        ("~trainer.absent", "override-path"),
        ("trainer.max_steps.deeper=3", "override-path"),
        ("data.train_ds.input_cfg.4.cuts_path=x", "override-path"),
        ("data.train_ds.input_cfg.first.cuts_path=x", "override-path"),
        ("trainer.max_steps=[", "yaml-syntax"),
    ],
)
def test_malformed_overrides_are_refused(override: str, rule: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(base("speech"), [override])
    assert _rules(caught.value) == [rule]


def test_interpolation_keeps_types_and_reads_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_TEST_STEPS", "12")
    overrides = [
        "trainer.max_steps=${oc.env:SHOAL_TEST_STEPS}",
        "trainer.log_every_n_steps=${.max_steps}",
        "trainer.num_sanity_val_steps=${oc.env:SHOAL_TEST_ABSENT,${trainer.log_every_n_steps}}",
        "data.train_ds.audio_locator_tag=${model.audio_locator_tag}",
        "exp_manager.explicit_log_dir=runs/${trainer.max_steps}-${model.prompt_format}",
    ]
    config = load_config(base("speech"), overrides)
    assert config.trainer.log_every_n_steps == config.trainer.num_sanity_val_steps == 12
    assert config.exp_manager.explicit_log_dir == "runs/12-llama2"
    assert config.data.train_ds.audio_locator_tag == "<|audio|>"


@pytest.mark.parametrize(
    ("text", "limit"),
    [
        ("${trainer.absent}", "there is no trainer.absent"),
        ("${oc.env:SHOAL_TEST_ABSENT}", "SHOAL_TEST_ABSENT is not"),
        ("${now:%Y}", "the resolvers oc.env"),
        ("${trainer.max_steps}", "does not lead back"),
    ],
)
def test_broken_references_are_refused(text: str, limit: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(merged(base("speech"), {"trainer": {"max_steps": text}}))
    assert _rules(caught.value) == ["interpolation"]
    assert limit in caught.value.findings[0].limit


@pytest.mark.parametrize("value", ["none", None, "None"])
def test_none_and_null_sizes_are_inferred(value: str | None) -> None:
    strategy = {"_target_": _AUTOMODEL, "dp_size": value, "dp_replicate_size": value}
    config = load_config(merged(base("speech"), {"trainer": {"strategy": strategy}}), world_size=4)
    assert (config.trainer.strategy.sizes.dp_size, config.trainer.devices) == (None, 4)


def test_every_required_key_is_reported_without_a_crash() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config({"trainer": {"max_steps": 1}})
    keys = {finding.key for finding in caught.value.findings}
    assert {"model.pretrained_llm", "model.pretrained_asr", "model.optimizer._target_"} <= keys
    assert "data.train_ds.batch_size" in keys


@pytest.mark.parametrize(
    "path", ["model", "trainer", "data", "model.optimizer", "data.train_ds", "trainer.strategy"]
)
@pytest.mark.parametrize("value", [3, "text", [1], True])
def test_wrong_sections_are_findings_not_crashes(path: str, value: Any) -> None:
    data = base("speech")
    *parents, last = path.split(".")
    node = data
    for name in parents:
        node = node[name]
    node[last] = value
    with pytest.raises(ConfigError) as caught:
        load_config(data)
    assert any(finding.key.startswith(path) for finding in caught.value.findings)


def test_named_validation_sets_share_their_block() -> None:
    shared = {"batch_size": 1, "max_duration": 8.0}
    first = {"input_cfg": [{"type": "nemo", "manifest_filepath": "a.json"}]}
    sets = {"first": first, "second": {**first, "batch_size": 2}}
    config = load_config(merged(base("speech"), {"data": {"validation_ds": {**shared, "datasets": sets}}}))
    named = config.data.validation_ds.datasets
    assert [(item.batch_size, item.max_duration) for item in named.values()] == [(1, 8.0), (2, 8.0)]


def test_error_in_a_shared_block_is_reported_once() -> None:
    block = {"batch_size": "1", "datasets": {"a": {"cuts_path": "a.jsonl"}, "b": {"cuts_path": 3}}}
    with pytest.raises(ConfigError) as caught:
        load_config(merged(base("speech"), {"data": {"validation_ds": block}}))
    assert [finding.key for finding in caught.value.findings] == [
        "data.validation_ds.batch_size",
        "data.validation_ds.datasets.b.cuts_path",
    ]


def test_input_cfg_may_stand_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "sources.yaml"
    file.write_text("- {type: lhotse, cuts_path: a.jsonl}\n")
    config = load_config(base("speech"), [f"data.train_ds.input_cfg={file}"])
    assert config.data.train_ds.input_cfg[0].cuts_path == "a.jsonl"


def test_lora_in_both_spellings_is_the_same() -> None:
    peft = load_config(base("speech"), ["model.lora={r: 4, lora_alpha: 8, lora_dropout: 0.1}"])
    automodel = load_config(base("speech"), ["model.lora={dim: 4, alpha: 8, dropout: 0.1}"])
    assert peft.model.lora == automodel.model.lora
    with pytest.raises(ConfigError, match="given-twice"):
        load_config(base("speech"), ["model.lora={dim: 4, r: 8}"])


def test_configuration_is_frozen_all_the_way_down() -> None:
    config = load_config(base("speech"))
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.trainer.max_steps = 3
    with pytest.raises(TypeError, match="immutable"):
        config.model.optimizer.kwargs["lr"] = 1.0
    assert hash(config) == hash(load_config(base("speech")))
    assert pickle.loads(pickle.dumps(config)) == copy.deepcopy(config) == config


def test_options_are_remembered_for_the_parts_that_run_later() -> None:
    options = LoadOptions(allow_commands=True, allow_targets=("fractions",))
    overrides = [
        "data.train_ds.input_cfg.0.cuts_path=pipe:cat a.jsonl",
        "model.optimizer._target_=fractions.Fraction",
    ]
    overrides += ["~model.optimizer.lr"]
    config = load_config(base("speech"), overrides, options=options)
    assert config.options == options
    assert config.model.optimizer.allow == ("fractions",)


@pytest.mark.parametrize("path", ["pipe:cat a", " pipe:cat a", "https://a/b", "s3://a/b", "ais://a/b"])
def test_manifest_sources_that_run_code_are_refused(path: str) -> None:
    finding = check_manifest_source(path, "cuts.jsonl, cut 3")
    assert finding is not None
    assert (finding.key, finding.value) == ("cuts.jsonl, cut 3", path)


@pytest.mark.parametrize("path", ["a/b.wav", "/a/b.wav", "C:/a.wav", "a__OP_0..3_CL_.tar", "pipeline.jsonl"])
def test_files_are_accepted(path: str) -> None:
    assert check_manifest_source(path) is None


def test_arguments_of_evaluation() -> None:
    config = load_arguments(
        EvaluateConfig, ["pretrained_name=a", "inputs=b.jsonl", "batch_size=2"], options=LoadOptions()
    )
    assert (config.pretrained_name, config.batch_size, config.use_normalizer) == ("a", 2, "english")
    with pytest.raises(ConfigError) as caught:
        load_arguments(EvaluateConfig, ["inputs=b", "use_normaliser=none"], options=LoadOptions())
    assert sorted(_rules(caught.value)) == ["missing-key", "unknown-key"]


_STRATEGIES = st.one_of(
    st.fixed_dictionaries(
        {
            "_target_": st.just("lightning.pytorch.strategies.DDPStrategy"),
            "gradient_as_bucket_view": st.booleans(),
        }
    ),
    st.fixed_dictionaries(
        {
            "_target_": st.just(_AUTOMODEL),
            "dp_replicate_size": st.sampled_from([None, 1, 2]),
            "activation_checkpointing_llm": st.booleans(),
            "distributed_config": st.sampled_from([None, {"mp_policy": {"param_dtype": "bf16"}}]),
            "timeout_minutes": st.integers(1, 90),
        }
    ),
    st.just({"_target_": "nemo.core.ModelParallelStrategy", "data_parallel": 4, "tensor_parallel": 1}),
)


@settings(max_examples=40, deadline=None)
@given(
    strategy=_STRATEGIES,
    precision=st.sampled_from(["32-true", 32, "bf16", "bf16-flash"]),
    adapter=st.sampled_from(
        [{"kind": "mlp"}, {"_target_": "nemo.collections.asr.modules.ConformerEncoder", "d_model": 64}]
    ),
    seed=st.integers(0, 2**31 - 1),
    accumulation=st.integers(1, 5),
)
def test_resolved_configuration_loads_to_itself(
    strategy: dict[str, Any], precision: Any, adapter: dict[str, Any], seed: int, accumulation: int
) -> None:
    change = {
        "model": {"perception": {"modality_adapter": adapter}, "lora": {"dim": 4}},
        "trainer": {"strategy": strategy, "precision": precision, "accumulate_grad_batches": accumulation},
        "data": {
            "train_ds": {"seed": seed},
            "validation_ds": {"batch_size": 1, "datasets": {"a": {"cuts_path": "a"}}},
        },
        "exp_manager": {"explicit_log_dir": "x"},
    }
    config = load_config(merged(base("speech"), change), world_size=4)
    text = yaml.safe_dump(config.to_dict())
    assert load_config(parse_yaml(text, "saved"), world_size=4) == config


@settings(max_examples=60, deadline=None)
@given(
    st.dictionaries(
        st.sampled_from(["model", "trainer", "data", "exp_manager", "strategy", "train_ds", "x"]),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
            lambda inner: (
                st.lists(inner, max_size=3)
                | st.dictionaries(
                    st.sampled_from(["strategy", "train_ds", "optimizer", "_target_", "lora"]),
                    inner,
                    max_size=3,
                )
            ),
            max_leaves=8,
        ),
    )
)
def test_any_data_loads_or_is_refused(data: dict[str, Any]) -> None:
    try:
        config = load_config(data)
    except ConfigError as error:
        assert error.findings
    else:
        assert load_config(config.to_dict()) == config


def test_llm_file_of_automodel_loads() -> None:
    model = {
        "_target_": "nemo_automodel.NeMoAutoModelForCausalLM.from_pretrained",
        "pretrained_model_name_or_path": "a-public/llm",
    }
    config = load_config({"model": model, "distributed": {"strategy": "fsdp2"}}, world_size=8)
    assert config.model.pretrained_model_name_or_path == "a-public/llm" and config.model.config is None
    assert load_config(config.to_dict(), world_size=8) == config
