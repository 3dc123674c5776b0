"""Modality adapters: what stands between the speech encoder and the projection to the LLM's width."""

from __future__ import annotations

import math

from torch import Tensor, nn
from transformers import ParakeetEncoderConfig
from transformers.models.parakeet.modeling_parakeet import (
    ParakeetEncoderBlock,
    ParakeetEncoderRelPositionalEncoding,
)

from shoal.config.speech import ModalityAdapterConfig
from shoal.speech.log_mel import frame_mask


class ModalityAdapter(nn.Module):
    """Base and identity: frames pass unchanged.

    Attributes:
        output_size: Width of the frames that come out.
    """

    def __init__(self, output_size: int) -> None:
        super().__init__()
        self.output_size = output_size

    def forward(self, hidden: Tensor, lengths: Tensor) -> Tensor:
        """Returns adapted frames [B, L, output_size] of hidden [B, L, D] with lengths [B]."""
        return hidden


class MlpAdapter(ModalityAdapter):
    """Layer norm, linear layer and GELU; the projection that follows is the second linear layer."""

    def __init__(self, input_size: int, output_size: int) -> None:
        super().__init__(output_size)
        self.norm = nn.LayerNorm(input_size)
        self.linear = nn.Linear(input_size, output_size)

    def forward(self, hidden: Tensor, lengths: Tensor) -> Tensor:
        """See `ModalityAdapter.forward`."""
        return nn.functional.gelu(self.linear(self.norm(hidden)))


class ConformerAdapter(ModalityAdapter):
    """Conformer layers with full context over each clip, as NeMo's `ConformerEncoder` adapter."""

    def __init__(self, input_size: int, config: ModalityAdapterConfig) -> None:
        width = config.d_model or input_size
        super().__init__(width)
        layer = ParakeetEncoderConfig(
            hidden_size=width,
            num_hidden_layers=config.n_layers,
            num_attention_heads=config.n_heads,
            intermediate_size=width * config.ff_expansion_factor,
            conv_kernel_size=config.conv_kernel_size,
            dropout=config.dropout,
            activation_dropout=config.dropout,
            attention_dropout=config.dropout,
            layerdrop=0.0,
        )
        layer._attn_implementation = "sdpa"
        self.pre_encode = nn.Linear(input_size, width)
        self.input_scale = math.sqrt(width) if config.xscaling else 1.0
        self.encode_positions = ParakeetEncoderRelPositionalEncoding(layer)
        self.layers = nn.ModuleList(ParakeetEncoderBlock(layer, index) for index in range(config.n_layers))

    def forward(self, hidden: Tensor, lengths: Tensor) -> Tensor:
        """See `ModalityAdapter.forward`; frames after a clip's end are neither attended nor convolved."""
        hidden = self.pre_encode(hidden) * self.input_scale
        positions = self.encode_positions(hidden)
        mask = frame_mask(lengths, hidden.shape[1])
        mask = (mask[:, None, :] & mask[:, :, None])[:, None]
        for layer in self.layers:
            hidden = layer(hidden, attention_mask=mask, position_embeddings=positions)
        return hidden


def build_adapter(config: ModalityAdapterConfig, input_size: int) -> ModalityAdapter:
    """Returns the adapter that `model.perception.modality_adapter` describes, for frames of `input_size`."""
    if config.feat_in not in (None, input_size):
        raise ValueError(
            f"model.perception.modality_adapter.feat_in = {config.feat_in}: the frames that come in have width "
            f"{input_size}; leave feat_in out"
        )
    if config.kind == "conformer":
        return ConformerAdapter(input_size, config)
    if config.kind == "mlp":
        return MlpAdapter(input_size, config.d_model or input_size)
    if config.d_model not in (None, input_size):
        raise ValueError(
            f"model.perception.modality_adapter.d_model = {config.d_model}: the identity adapter passes on "
            f"frames of width {input_size}; leave d_model out"
        )
    return ModalityAdapter(input_size)


def stack_frames(hidden: Tensor, lengths: Tensor, factor: int) -> tuple[Tensor, Tensor]:
    """Concatenates every `factor` frames into one.

    Args:
        hidden: Frames [B, L, D]; those behind a clip's end count as zero, so the batch does not matter.
        lengths: Frames of each clip, [B] int64.
        factor: Frames per stacked frame; the last one of a clip is filled with zeros.

    Returns:
        Frames [B, ceil(L / factor), factor * D] and their lengths.
    """
    hidden = hidden * frame_mask(lengths, hidden.shape[1])[..., None]
    hidden = nn.functional.pad(hidden, (0, 0, 0, -hidden.shape[1] % factor))
    return hidden.reshape(hidden.shape[0], -1, factor * hidden.shape[2]), stacked_lengths(lengths, factor)


def stacked_lengths(lengths: Tensor, factor: int) -> Tensor:
    """Returns ceil(lengths / factor)."""
    return (lengths + factor - 1) // factor
