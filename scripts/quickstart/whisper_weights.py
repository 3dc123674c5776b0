"""Converts a CTranslate2 Whisper file into a transformers folder.

A CTranslate2 model file is a little-endian sequence: version u32, name, revision u32, number of variables u32,
then for each variable its name, rank u8, dimensions u32, type u8, number of bytes u32 and data. A name is a u16
length that counts the closing zero byte, then the bytes. Types: 0 float32, 1 int8, 2 int16, 3 int32, 4 float16.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import WhisperConfig, WhisperFeatureExtractor, WhisperForConditionalGeneration

_TYPES = {0: "<f4", 1: "<i1", 2: "<i2", 3: "<i4", 4: "<f2"}
_FRAMES_PER_SECOND = 50  # of the encoder: 100 log-mel frames a second, halved by the second convolution


class _Reader:
    """A cursor over the bytes of a file."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._offset = 0

    def number(self, code: str) -> int:
        (value,) = struct.unpack_from(f"<{code}", self._data, self._offset)
        self._offset += struct.calcsize(f"<{code}")
        return int(value)

    def raw(self, size: int) -> bytes:
        start, self._offset = self._offset, self._offset + size
        return self._data[start : self._offset]

    def name(self) -> str:
        return self.raw(self.number("H")).rstrip(b"\0").decode()


def read_variables(path: Path) -> dict[str, NDArray[np.float32]]:
    """Every floating-point variable of a CTranslate2 Whisper file as float32."""
    reader = _Reader(path.read_bytes())
    reader.number("I")
    spec = reader.name()
    if spec != "WhisperSpec":
        raise ValueError(f"{path}: holds a {spec}, not a WhisperSpec")
    reader.number("I")
    variables = {}
    for _ in range(reader.number("I")):
        name = reader.name()
        shape = [reader.number("I") for _ in range(reader.number("B"))]
        dtype = np.dtype(_TYPES[reader.number("B")])
        array = np.frombuffer(reader.raw(reader.number("I")), dtype).reshape(shape)
        if dtype.kind == "f":
            variables[name] = array.astype(np.float32)
    return variables


def convert_whisper(model_file: Path, target: Path, window_seconds: int) -> WhisperForConditionalGeneration:
    """Write `target` as a transformers Whisper whose encoder reads windows of `window_seconds`.

    Whisper's encoder positions are absolute and its convolutions local, so a shorter window is the same network
    with the position table cut to `50 * window_seconds` rows; nothing else changes.
    """
    variables = read_variables(model_file)
    positions = _FRAMES_PER_SECOND * window_seconds
    state = _state_dict(variables)
    key = "model.encoder.embed_positions.weight"
    if positions > len(state[key]):
        raise ValueError(
            f"window_seconds: {window_seconds} is longer than the encoder's {len(state[key]) // 50} s"
        )
    state[key] = state[key][:positions].clone()
    model = WhisperForConditionalGeneration(_config(variables, positions))
    model.load_state_dict(state, strict=True)
    model.tie_weights()
    model.save_pretrained(target)
    mels = model.config.num_mel_bins
    WhisperFeatureExtractor(feature_size=mels, chunk_length=window_seconds).save_pretrained(target)
    return model


def _num_layers(variables: Mapping[str, NDArray[np.float32]], side: str) -> int:
    found = (re.match(rf"{side}/layer_(\d+)/", name) for name in variables)
    return 1 + max(int(match[1]) for match in found if match)


def _config(variables: Mapping[str, NDArray[np.float32]], positions: int) -> WhisperConfig:
    width, mels, _ = variables["encoder/conv1/weight"].shape
    inner = len(variables["encoder/layer_0/ffn/linear_0/bias"])
    end_of_text = 50256  # of the English-only vocabulary
    return WhisperConfig(
        vocab_size=len(variables["decoder/embeddings/weight"]),
        num_mel_bins=mels,
        d_model=width,
        encoder_layers=_num_layers(variables, "encoder"),
        decoder_layers=_num_layers(variables, "decoder"),
        encoder_attention_heads=width // 64,
        decoder_attention_heads=width // 64,
        encoder_ffn_dim=inner,
        decoder_ffn_dim=inner,
        max_source_positions=positions,
        max_target_positions=len(variables["decoder/position_encodings/encodings"]),
        pad_token_id=end_of_text,
        bos_token_id=end_of_text,
        eos_token_id=end_of_text,
        decoder_start_token_id=end_of_text + 1,
        suppress_tokens=None,
        begin_suppress_tokens=[220, end_of_text],
    )


def _state_dict(variables: Mapping[str, NDArray[np.float32]]) -> dict[str, Tensor]:
    tensors = {name: torch.from_numpy(array) for name, array in variables.items()}
    state: dict[str, Tensor] = {}
    for conv in ("conv1", "conv2"):
        _copy(state, f"model.encoder.{conv}", tensors, f"encoder/{conv}", "weight", "bias")
    for side in ("encoder", "decoder"):
        for layer in range(_num_layers(variables, side)):
            _copy_layer(
                state, f"model.{side}.layers.{layer}", tensors, f"{side}/layer_{layer}", side == "decoder"
            )
        _copy(state, f"model.{side}.layer_norm", tensors, f"{side}/layer_norm", "gamma", "beta")
        state[f"model.{side}.embed_positions.weight"] = tensors[f"{side}/position_encodings/encodings"]
    state["model.decoder.embed_tokens.weight"] = tensors["decoder/embeddings/weight"]
    state["proj_out.weight"] = tensors["decoder/embeddings/weight"]
    return state


def _copy_layer(
    state: dict[str, Tensor], target: str, tensors: Mapping[str, Tensor], source: str, is_decoder: bool
) -> None:
    norms = {"self_attn_layer_norm": "self_attention", "final_layer_norm": "ffn"}
    if is_decoder:
        norms["encoder_attn_layer_norm"] = "attention"
        _copy_cross_attention(state, f"{target}.encoder_attn", tensors, f"{source}/attention")
    for ours, theirs in norms.items():
        _copy(state, f"{target}.{ours}", tensors, f"{source}/{theirs}/layer_norm", "gamma", "beta")
    _copy_self_attention(state, f"{target}.self_attn", tensors, f"{source}/self_attention")
    for ours, theirs in {"fc1": "linear_0", "fc2": "linear_1"}.items():
        _copy(state, f"{target}.{ours}", tensors, f"{source}/ffn/{theirs}", "weight", "bias")


def _copy_self_attention(
    state: dict[str, Tensor], target: str, tensors: Mapping[str, Tensor], source: str
) -> None:
    """Query, key and value are one matrix in the source; Whisper's key has no bias (theirs is zero)."""
    weights = tensors[f"{source}/linear_0/weight"].chunk(3)
    biases = tensors[f"{source}/linear_0/bias"].chunk(3)
    for name, weight, bias in zip(("q_proj", "k_proj", "v_proj"), weights, biases, strict=True):
        state[f"{target}.{name}.weight"] = weight.clone()
        if name != "k_proj":
            state[f"{target}.{name}.bias"] = bias.clone()
    _copy(state, f"{target}.out_proj", tensors, f"{source}/linear_1", "weight", "bias")


def _copy_cross_attention(
    state: dict[str, Tensor], target: str, tensors: Mapping[str, Tensor], source: str
) -> None:
    """Key and value are one matrix in the source."""
    _copy(state, f"{target}.q_proj", tensors, f"{source}/linear_0", "weight", "bias")
    key, value = tensors[f"{source}/linear_1/weight"].chunk(2)
    state[f"{target}.k_proj.weight"], state[f"{target}.v_proj.weight"] = key.clone(), value.clone()
    state[f"{target}.v_proj.bias"] = tensors[f"{source}/linear_1/bias"].chunk(2)[1].clone()
    _copy(state, f"{target}.out_proj", tensors, f"{source}/linear_2", "weight", "bias")


def _copy(
    state: dict[str, Tensor], target: str, tensors: Mapping[str, Tensor], source: str, weight: str, bias: str
) -> None:
    state[f"{target}.weight"] = tensors[f"{source}/{weight}"]
    state[f"{target}.bias"] = tensors[f"{source}/{bias}"]
