"""Small models are built like the large ones, and divide where those divide."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, ParakeetEncoderConfig, WhisperConfig

from shoal.verify.architecture import layer_kinds, lost_structure, num_parameters, on_meta
from shoal.verify.shrink import Degrees, choose_layers, shrink_text_model, similar
from shoal.verify.shrink_speech import shrink_encoder
from tests.verify import configurations

LARGE: dict[str, dict[str, Any]] = {
    "llama": {"num_key_value_heads": 8},
    "qwen2": {"num_attention_heads": 28, "num_key_value_heads": 4, "hidden_size": 3584},
    "qwen3": {"head_dim": 128, "tie_word_embeddings": True, "num_key_value_heads": 8},
    "gemma3_text": {"num_hidden_layers": 12, "sliding_window": 512},
    "phi3": {"num_key_value_heads": 8},
    "smollm3": {"num_hidden_layers": 8},
    "gpt2": {"vocab_size": 50257},
    "gpt_oss": {},
    "mixtral": {},
    "qwen3_moe": {"num_hidden_layers": 8, "mlp_only_layers": [2], "decoder_sparse_step": 2},
    "deepseek_v3": {"num_hidden_layers": 8, "n_group": 8, "topk_group": 4},
    "nemotron_h": {},
    "olmo_hybrid": {"num_hidden_layers": 8},
    "granitemoehybrid": {
        "num_hidden_layers": 6,
        "layer_types": ["mamba", "mamba", "attention", "mamba", "mamba", "attention"],
    },
}


def built(config: Any) -> torch.nn.Module:
    factory: Any = AutoModelForCausalLM
    return on_meta(lambda: factory.from_config(config))


@pytest.mark.parametrize("model_type", LARGE)
def test_every_kind_of_layer_survives_in_a_small_model(model_type: str) -> None:
    config = AutoConfig.for_model(model_type, **LARGE[model_type])
    small = type(config).from_dict(shrink_text_model(config.to_dict(), Degrees(tp=(4, 2))))
    original, model = built(config), built(small)
    assert lost_structure(original, model) == []
    assert num_parameters(model) < 1_000_000 < num_parameters(original)
    assert list(layer_kinds(original)) == list(layer_kinds(model))  # in their order, too
    assert small.tie_word_embeddings == config.tie_word_embeddings


def test_a_lost_kind_is_named() -> None:
    config = AutoConfig.for_model(
        "qwen3_moe", num_hidden_layers=4, mlp_only_layers=[1], decoder_sparse_step=1
    )
    dense = AutoConfig.for_model("qwen3_moe", num_hidden_layers=2, mlp_only_layers=[0, 1], vocab_size=99)
    lost = lost_structure(built(config), built(dense))
    assert lost == ["the kind of layer 0 (Qwen3MoeDecoderLayer)"]


@pytest.mark.parametrize("tp", [(8, 2), (4, 2), (2, 2), (8, 4), (3, 3)])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "vocab", "intermediate"),
    [
        (32, 8, 128256, 14336),
        (32, 4, 151937, 9728),
        (24, 8, 32001, 8190),
        (16, 1, 50257, 4096),
        (48, 48, 96, 999),
    ],
)
def test_sizes_divide_where_the_large_ones_do(
    tp: tuple[int, int], heads: int, kv_heads: int, vocab: int, intermediate: int
) -> None:
    fields = {
        "model_type": "llama",
        "hidden_size": heads * 128,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        "intermediate_size": intermediate,
        "num_hidden_layers": 32,
    }
    small = shrink_text_model(fields, Degrees(tp=tp))
    given, used = tp
    for name in ("hidden_size", "num_attention_heads", "vocab_size", "intermediate_size"):
        assert (fields[name] % given == 0) == (small[name] % used == 0), name
    assert small["num_attention_heads"] % small["num_key_value_heads"] == 0
    assert (heads == kv_heads) == (small["num_attention_heads"] == small["num_key_value_heads"])

    def relation(kv: int, degree: int) -> str:
        return "fewer" if kv < degree else "as many" if kv == degree else "more"

    assert relation(kv_heads, given) == relation(small["num_key_value_heads"], used)


def test_layers_keep_their_order_and_pipeline_stages_their_divisibility() -> None:
    fields = {"num_hidden_layers": 30, "layer_types": (["s"] * 5 + ["f"]) * 5, "hidden_size": 64}
    small = shrink_text_model(fields, Degrees())
    assert small["layer_types"] == ["s", "f"] and small["num_hidden_layers"] == 2
    piped = shrink_text_model(fields, Degrees(pp=(4, 2)))
    assert 30 % 4 and piped["num_hidden_layers"] % 2  # does not divide, as before
    assert choose_layers("abcab", 3) == [0, 1, 2]
    assert choose_layers("aab", 3) == [0, 1, 2]


def test_a_hybrid_without_experts_gets_none() -> None:
    """Granite's dense hybrids have 0 of them."""
    none = {"num_local_experts": 0, "num_experts_per_tok": 0, "num_hidden_layers": 4}
    config = AutoConfig.for_model("granitemoehybrid", layer_types=["mamba", "attention"] * 2, **none)
    small = type(config).from_dict(shrink_text_model(config.to_dict(), Degrees()))
    assert small.num_local_experts == 0 and lost_structure(built(config), built(small)) == []


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize(("size", "cp"), [(512, 1), (513, 1), (512, 2), (514, 2), (512, 4), (516, 4)])
def test_packs_divide_where_the_large_ones_do(tmp_path: Path, size: int, tp: int, cp: int) -> None:
    from shoal.config import LLMConfig, load_config
    from shoal.verify.prepare import Architectures, prepare
    from shoal.verify.world import scale_layout

    sizes = {"tp_size": tp, "cp_size": cp, "dp_size": 2}
    sections = {"distributed": sizes, "packed_sequence": {"packed_sequence_size": size}}
    config = load_config(configurations.text(sections=sections))
    assert isinstance(config, LLMConfig)
    prepared = prepare(config, scale_layout(config, None, None), tmp_path, Architectures())
    packs = [batch["input_ids"].shape[1] for batch in prepared.task.draw(0)]
    assert len(set(packs)) == 1 and packs[0] < 100
    assert (size % tp == 0) == (packs[0] % tp == 0) and (size % cp == 0) == (packs[0] % min(cp, 2) == 0)


def test_no_small_size_is_an_error() -> None:
    with pytest.raises(ValueError, match="no small size behaves like 7"):
        similar(7, 4, (2, 2), multiple_of=2)


@pytest.mark.parametrize("kind", ["whisper", "parakeet"])
def test_encoders_keep_their_kind(kind: str) -> None:
    config = WhisperConfig(dropout=0.25) if kind == "whisper" else ParakeetEncoderConfig(dropout=0.25)
    small = shrink_encoder(config.to_dict(), {"dropout": 0.0})
    assert small["model_type"] == config.model_type
    assert small["dropout"] == 0.0  # what the configuration overrides is in it already
    built_small = type(config).from_dict(small)
    assert built_small.num_mel_bins == config.num_mel_bins
