"""The example files, and NeMo's own with only paths and model names changed, load for a machine with GPUs."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.config import ConfigError, Loaded, LoadOptions, load
from shoal.config.speech import ModalityAdapterConfig

HERE = Path(__file__).parent
EXAMPLES = HERE.parents[2] / "examples" / "speechlm2" / "conf"
PATHS = (
    "data.train_ds.input_cfg.0.cuts_path=train.jsonl.gz",
    "data.validation_ds.datasets.dev.input_cfg.0.cuts_path=dev.jsonl.gz",
)


def _load(file: Path, *overrides: str) -> Loaded:
    return load(file, overrides, options=LoadOptions(accelerators=8))


def test_nemo_salm_loads() -> None:
    loaded = _load(HERE / "nemo_salm.yaml")
    config = loaded.config
    assert {notice.rule for notice in loaded.notices} == {"no-master-weights"}
    assert config.trainer.devices == loaded.facts.world_size == 8
    assert config.model.perception.modality_adapter == ModalityAdapterConfig(
        kind="conformer", feat_in=1024, d_model=1024, xscaling=True
    )
    assert config.model.lr_scheduler.kwargs["max_steps"] == 100000
    assert config.data.validation_ds.datasets["val_set_0"].batch_size == 1
    assert config.exp_manager.max_time_per_run == "00:03:50:00"


@pytest.mark.parametrize("name", ["salm", "salm_automodel"])
def test_examples_need_only_paths(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        _load(EXAMPLES / f"{name}.yaml")
    assert [f"{finding.key}={finding.value}" for finding in caught.value.findings] == [
        path.rpartition("=")[0] + "=???" for path in PATHS
    ]
    assert _load(EXAMPLES / f"{name}.yaml", *PATHS).facts.world_size == 8


@pytest.mark.parametrize(
    ("override", "rule"),
    [
        ("model.perception.modality_adapter.conv_norm_type=layer_norm", "adapter-variant"),
        ("model.perception.modality_adapter.att_context_size=[70,1]", "adapter-variant"),
        ("model.perception.modality_adapter.dropout_att=0.1", "adapter-variant"),
        ("model.perception.preprocessor={features: 80}", "perception-preprocessor"),
        (
            "model.perception.encoder={_target_: nemo.collections.asr.modules.ConformerEncoder, stochastic_depth: 1}",
            "unknown-key",
        ),
        ("trainer.strategy.ep_size=8", "unknown-key"),
    ],
)
def test_variants_we_do_not_have_are_refused_by_name(override: str, rule: str) -> None:
    with pytest.raises(ConfigError) as caught:
        _load(HERE / "nemo_salm.yaml", override)
    assert [finding.rule for finding in caught.value.findings] == [rule]


def test_nemo_encoder_settings_become_those_of_transformers() -> None:
    block = "{_target_: nemo.collections.asr.modules.ConformerEncoder, n_layers: 4, d_model: 64}"
    config = _load(HERE / "nemo_salm.yaml", f"model.perception.encoder={block}").config
    assert config.model.perception.encoder == {"num_hidden_layers": 4, "hidden_size": 64}
