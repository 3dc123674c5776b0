"""Whisper's decoder as a causal language model: the converted attentions compute what Whisper's compute."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import WhisperConfig, WhisperForConditionalGeneration

SCRIPTS = Path(__file__).parents[3] / "scripts" / "quickstart"
WIDTH = 32


@pytest.fixture
def module() -> Iterator[Any]:
    sys.path.insert(0, str(SCRIPTS))
    yield importlib.import_module("language_model")
    sys.path.remove(str(SCRIPTS))
    del sys.modules["language_model"]


@pytest.fixture
def whisper() -> WhisperForConditionalGeneration:
    torch.manual_seed(0)
    config = WhisperConfig(
        vocab_size=50_364, d_model=WIDTH, encoder_layers=1, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48, max_source_positions=20,
        max_target_positions=30, pad_token_id=0, bos_token_id=0, eos_token_id=0, decoder_start_token_id=0,
    )  # fmt: skip
    model = WhisperForConditionalGeneration(config).eval()
    for parameter in model.parameters():  # norms and biases too, which initialise to ones and zeros
        torch.nn.init.normal_(parameter, std=0.3)
    torch.nn.init.constant_(model.model.encoder.layer_norm.weight, 1.7)
    return model


def _gpt2_attention(block: Any, states: Tensor) -> Tensor:
    """The attention sublayer of a block on states [1, L, H]; the last position sees all of them."""
    output: Tensor = block.attn(block.ln_1(states))[0]
    return output


def _build(module: Any, whisper: WhisperForConditionalGeneration, folder: Path) -> Any:
    vocabulary = {"a": 0, "b": 1, "ab": 2, "\u0120": 3}
    file = folder / "tokenizer.json"
    file.write_text(json.dumps({"model": {"vocab": vocabulary, "merges": ["a b"]}}))
    tokenizer = module._short_tokenizer(file, num_pieces=4)
    return module._causal_decoder(whisper, 4, tokenizer).eval()


def test_text_layers_are_whispers_self_attention(module: Any, whisper: Any, tmp_path: Path) -> None:
    model = _build(module, whisper, tmp_path)
    states = torch.randn(1, 5, WIDTH)
    for index, layer in enumerate(whisper.model.decoder.layers):
        normed = layer.self_attn_layer_norm(states)
        mask = torch.full((5, 5), -torch.inf).triu(1)[None, None]
        expected = layer.self_attn(normed, attention_mask=mask)[0]
        block = model.transformer.h[2 * index]
        torch.testing.assert_close(_gpt2_attention(block, states), expected, rtol=1e-4, atol=1e-4)
        feed_forward = block.mlp(block.ln_2(states))
        assert feed_forward.abs().max() == 0


def test_audio_layers_are_whispers_cross_attention(module: Any, whisper: Any, tmp_path: Path) -> None:
    """A query that sees nothing but frames whose scale is the norm's: exactly Whisper's cross-attention."""
    model = _build(module, whisper, tmp_path)
    frames = torch.nn.functional.layer_norm(torch.randn(1, 6, WIDTH), (WIDTH,)) * 1.7
    query = torch.randn(1, 1, WIDTH)
    for index, layer in enumerate(whisper.model.decoder.layers):
        expected = layer.encoder_attn(layer.encoder_attn_layer_norm(query), key_value_states=frames)[0]
        block = model.transformer.h[2 * index + 1]
        projected = block.attn.c_attn(block.ln_1(torch.cat([10 * frames, query], dim=1)))
        queries, keys, values = (part.view(1, 7, 4, 8).transpose(1, 2) for part in projected.chunk(3, dim=-1))
        attended = torch.nn.functional.scaled_dot_product_attention(
            queries[:, :, 6:], keys[:, :, :6], values[:, :, :6]
        )
        found = block.attn.c_proj(attended.transpose(1, 2).reshape(1, 1, WIDTH))
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(
            block.mlp(block.ln_2(query)), layer.fc2(layer.activation_fn(layer.fc1(layer.final_layer_norm(query)))),
            rtol=1e-4, atol=1e-4,
        )  # fmt: skip


def test_two_conversions_are_equal(module: Any, whisper: Any, tmp_path: Path) -> None:
    first, second = (_build(module, whisper, tmp_path).state_dict() for _ in range(2))
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())


def test_projection_is_the_mean_of_the_stacked_frames(module: Any) -> None:
    projection = module._mean_projection(WIDTH, stack_frames=4)
    frames = torch.randn(4, WIDTH)
    found = projection["perception.proj.weight"] @ frames.reshape(-1) + projection["perception.proj.bias"]
    torch.testing.assert_close(found, 10 * frames.mean(0))
