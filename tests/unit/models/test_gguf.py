"""GGUF files load in shards, through a conversion that happens once."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor

import shoal
from tests.tiny import tiny_llama, tiny_tokenizer
from tests.unit.models.test_load import setup_of, tensors_of
from tests.zygote import RankRunner

gguf = pytest.importorskip("gguf", reason="the package gguf reads these files")

_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}


def interleaved(weight: Tensor, heads: int) -> Tensor:
    """Rows of a query or key projection in the order of GGUF, which rotates neighbours instead of halves."""
    return weight.view(heads, 2, weight.shape[0] // heads // 2, -1).transpose(1, 2).reshape(weight.shape)


def write_gguf(path: Path) -> dict[str, Tensor]:
    """Writes a tiny Llama in float32; returns its tensors."""
    model = tiny_llama(num_hidden_layers=1)
    config, tensors = model.config, tensors_of(model)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    named = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
    named |= {f"blk.0.{theirs}": f"model.layers.0.{ours}" for theirs, ours in _NAMES.items()}
    for theirs, ours in named.items():
        weight = tensors[f"{ours}.weight"]
        count = heads.get(theirs.rpartition(".")[2])
        weight = interleaved(weight, count) if count else weight
        writer.add_tensor(f"{theirs}.weight", weight.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


def load_on_rank(rank: int, world: int, folder: str) -> dict[str, Tensor]:
    return tensors_of(
        shoal.AutoModelForCausalLM.from_pretrained(
            folder, gguf_file="tiny.gguf", distributed_setup=setup_of("fsdp2", world)
        )
    )


def test_shards_of_a_gguf_file(ranks: RankRunner, tmp_path: Path) -> None:
    expected = write_gguf(tmp_path / "tiny.gguf")
    for actual in ranks(load_on_rank, 2, str(tmp_path), timeout=120):
        differing = [n for n, tensor in expected.items() if not torch.equal(actual[n], tensor)]
        assert not differing
    written = tmp_path / "tiny-safetensors" / "model.safetensors"
    before = written.stat().st_mtime_ns
    assert "quantization_config" not in json.loads(written.with_name("config.json").read_text())
    model = shoal.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="tiny.gguf")
    assert torch.equal(model.get_parameter("lm_head.weight"), expected["lm_head.weight"])
    assert written.stat().st_mtime_ns == before  # converted once
    assert not list(tmp_path.glob("*incomplete*"))


def fail_on_rank(rank: int, world: int, folder: str) -> str:
    with pytest.raises(ValueError, match="gguf_file") as error:
        load_on_rank(rank, world, folder)
    return str(error.value)


def test_a_file_that_does_not_convert_fails_on_every_rank(ranks: RankRunner, tmp_path: Path) -> None:
    (tmp_path / "tiny.gguf").write_bytes(b"GGUF but no more than that")
    tiny_tokenizer().save_pretrained(tmp_path)
    first, second = ranks(fail_on_rank, 2, str(tmp_path), timeout=120)
    assert first == second
    shutil.rmtree(tmp_path / "tiny-safetensors", ignore_errors=True)
