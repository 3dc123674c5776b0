"""Speech encoders of transformers behind one small interface: features, encode, output_lengths.

Parakeet (FastConformer) takes clips of any length and gives one frame per 0.08 s. Whisper takes windows of a
fixed length and gives one frame per 0.02 s; longer clips are cut into windows and joined again, never
truncated.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    ParakeetEncoder,
    ParakeetEncoderConfig,
    PreTrainedConfig,
    PreTrainedModel,
    WhisperConfig,
)
from transformers.models.whisper.modeling_whisper import WhisperEncoder

from shoal.speech import segments
from shoal.speech.log_mel import MelSettings, ParakeetLogMel, WhisperLogMel, frame_mask
from shoal.speech.seeds import fold_in

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class EncoderSpec:
    """How to build the encoder that a checkpoint folder holds.

    Attributes:
        model_class: The transformers class of the encoder alone.
        config: Its configuration.
        checkpoint_prefix: What stands before the encoder's parameter names in the checkpoint; empty when the
            folder holds the encoder alone.
    """

    model_class: type[PreTrainedModel]
    config: PreTrainedConfig
    checkpoint_prefix: str

    def build(self, dtype: torch.dtype) -> PreTrainedModel:
        """Returns the encoder with initial weights of `dtype` on the current default device (also meta)."""
        model_class: Any = self.model_class
        encoder: PreTrainedModel = model_class._from_config(self.config, dtype=dtype)
        return encoder


def encoder_spec(config: PreTrainedConfig, overrides: Mapping[str, Any] | None = None) -> EncoderSpec:
    """Returns how to build the speech encoder of a model configuration.

    Args:
        config: Of a whole speech model (Whisper, Parakeet CTC/RNNT/TDT) or of an encoder alone.
        overrides: Keys of the encoder's configuration to change (`model.perception.encoder`).

    Raises:
        ValueError: The family is not supported, or an override names no key of the configuration.
    """
    if isinstance(config, WhisperConfig):
        alone = "WhisperEncoder" in (config.architectures or ())
        spec = EncoderSpec(WhisperEncoder, config, "" if alone else "model.encoder.")
    elif isinstance(config, ParakeetEncoderConfig):
        spec = EncoderSpec(ParakeetEncoder, config, "")
    elif isinstance(getattr(config, "encoder_config", None), ParakeetEncoderConfig):
        spec = EncoderSpec(ParakeetEncoder, config.encoder_config, "encoder.")
    else:
        raise ValueError(
            f"model.pretrained_asr: model_type = {config.model_type!r} has no supported speech encoder; "
            "use a whisper or parakeet checkpoint"
        )
    for key, value in (overrides or {}).items():
        if not hasattr(spec.config, key):
            raise ValueError(
                f"model.perception.encoder.{key} = {value!r}: {type(spec.config).__name__} has no such key; "
                "write a key of the encoder's config.json"
            )
        setattr(spec.config, key, value)
    return spec


class SpeechEncoder(ABC):
    """The interface to one encoder family; it refers to the transformers module and owns no parameters.

    Attributes:
        model: The transformers encoder; Any, because attributes of its class are untyped.
        preprocessor: Log-mel module: audios [B, T], audio_lens [B] -> mel [B, F, M] float32, mel_lens [B].
        hidden_size: Width of the encoded frames.
        sampling_rate: Samples per second of the audio.
        frame_seconds: Time between two encoded frames.
    """

    model: Any
    preprocessor: ParakeetLogMel | WhisperLogMel
    hidden_size: int
    sampling_rate: int
    frame_seconds: float

    @property
    @abstractmethod
    def minimum_samples(self) -> int:
        """The least width of an audio batch: shorter ones are padded, so that two frames are encoded."""

    def features(self, audios: Tensor, audio_lens: Tensor) -> tuple[Tensor, Tensor]:
        """Returns mel [B, F, M] float32 and mel_lens [B] of audios [B, T] float32 with audio_lens [B]."""
        mel: Tensor
        mel, mel_lens = self.preprocessor(audios, audio_lens)
        return mel, mel_lens

    @abstractmethod
    def encode(self, mel: Tensor, mel_lens: Tensor) -> tuple[Tensor, Tensor]:
        """Returns hidden [B, L, D], arbitrary after each clip's end, and lengths [B] of mel [B, F, M]."""

    @abstractmethod
    def output_lengths(self, audio_lens: Tensor) -> Tensor:
        """Returns the encoded frames [B] int64 of clips of audio_lens [B] samples; arithmetic alone."""

    def window_seeds(self, seeds: Tensor, mel_lens: Tensor) -> Tensor:
        """Returns the seed of each row of the encoder's hidden states, of seeds [B] and mel_lens [B] of clips."""
        return seeds

    def layers(self) -> nn.ModuleList:
        """Returns the encoder's layers, the units of sharding and of activation checkpointing."""
        layers: nn.ModuleList = self.model.layers
        return layers

    @abstractmethod
    def front_end(self) -> nn.Module | None:
        """Returns the convolutional front end, or None where it is no module."""


def _forbid_layerdrop(model: Any) -> None:
    if model.layerdrop > 0:
        _log.warning(
            "speech encoder: layerdrop %g set to 0, because ranks would skip different layers and then wait "
            "for each other forever",
            model.layerdrop,
        )
    model.layerdrop = 0.0


class ParakeetSpeechEncoder(SpeechEncoder):
    """FastConformer: log-mel every 10 ms, `subsampling_factor` mel frames per encoded frame."""

    def __init__(self, model: ParakeetEncoder, preprocessor_config: Mapping[str, Any] | None) -> None:
        config: ParakeetEncoderConfig = model.config
        defaults = MelSettings(16000, config.num_mel_bins, 512, 400, 160, preemphasis=0.97)
        settings = MelSettings.read(preprocessor_config, defaults)
        _forbid_layerdrop(model)
        self.model = model
        self.preprocessor = ParakeetLogMel(settings)
        self.hidden_size = config.hidden_size
        self.sampling_rate = settings.sampling_rate
        self.frame_seconds = settings.frame_seconds * config.subsampling_factor

    @property
    def minimum_samples(self) -> int:
        """Two encoded frames: batch normalisation in training refuses a single value per channel."""
        factor: int = self.model.config.subsampling_factor
        return 2 * factor * self.preprocessor.settings.hop_length

    def encode(self, mel: Tensor, mel_lens: Tensor) -> tuple[Tensor, Tensor]:
        """See `SpeechEncoder.encode`; padding is masked in attention and convolutions."""
        hidden = self.model(mel, attention_mask=frame_mask(mel_lens, mel.shape[1])).last_hidden_state
        return hidden, self._subsampled(mel_lens)

    def output_lengths(self, audio_lens: Tensor) -> Tensor:
        """See `SpeechEncoder.output_lengths`."""
        return self._subsampled(self.preprocessor.num_frames(audio_lens))

    def _subsampled(self, lengths: Tensor) -> Tensor:
        # In integers; transformers' own rule counts 1 frame for a clip without any.
        config = self.model.config
        padding = 2 * ((config.subsampling_conv_kernel_size - 1) // 2)
        stride = config.subsampling_conv_stride
        reached = 1
        while reached < config.subsampling_factor:
            grown = (lengths + padding - config.subsampling_conv_kernel_size) // stride + 1
            lengths = torch.where(lengths > 0, grown, 0)
            reached *= 2
        return lengths

    def front_end(self) -> nn.Module:
        """The stack of strided convolutions."""
        front_end: nn.Module = self.model.subsampling
        return front_end


class WhisperSpeechEncoder(SpeechEncoder):
    """Whisper: windows of 2 * max_source_positions mel frames (30 s in the published models)."""

    def __init__(self, model: WhisperEncoder, preprocessor_config: Mapping[str, Any] | None) -> None:
        config: WhisperConfig = model.config
        defaults = MelSettings(16000, config.num_mel_bins, 400, 400, 160)
        settings = MelSettings.read(preprocessor_config, defaults)
        _forbid_layerdrop(model)
        self.model = model
        self.preprocessor = WhisperLogMel(settings, 2 * config.max_source_positions)
        self.hidden_size = config.d_model
        self.sampling_rate = settings.sampling_rate
        self.frame_seconds = settings.frame_seconds * 2

    @property
    def minimum_samples(self) -> int:
        """Four mel frames; windows are padded to their full length anyway."""
        return 4 * self.preprocessor.settings.hop_length

    def encode(self, mel: Tensor, mel_lens: Tensor) -> tuple[Tensor, Tensor]:
        """See `SpeechEncoder.encode`; each window is encoded by itself, as Whisper was trained."""
        window, pieces = self._window, segments.cut(mel_lens, self._window)
        # The padding of a window is silence at the clip's floor level, not zero: take it with the frames.
        whole = segments.Segments(
            pieces.row, pieces.start, torch.full_like(pieces.length, window), pieces.num_rows
        )
        windows = segments.take(mel, whole, window)
        hidden = self.model(windows.transpose(1, 2)).last_hidden_state
        return segments.join(hidden, (pieces.length + 1) // 2, pieces)

    @property
    def _window(self) -> int:
        """Mel frames of a window."""
        return 2 * int(self.model.config.max_source_positions)

    def window_seeds(self, seeds: Tensor, mel_lens: Tensor) -> Tensor:
        """See `SpeechEncoder.window_seeds`; one for each window."""
        pieces = segments.cut(mel_lens, self._window)
        return fold_in(seeds[pieces.row], pieces.ordinal)

    def output_lengths(self, audio_lens: Tensor) -> Tensor:
        """See `SpeechEncoder.output_lengths`."""
        return (self.preprocessor.num_frames(audio_lens) + 1) // 2

    def front_end(self) -> None:
        """None: two bare convolutions, which keep nothing for the backward pass but their input."""
        return None


def speech_encoder(model: PreTrainedModel, preprocessor_config: Mapping[str, Any] | None) -> SpeechEncoder:
    """Returns the interface to a transformers encoder; reads its configuration only, never its weights.

    Args:
        model: A ParakeetEncoder or WhisperEncoder, possibly on the meta device.
        preprocessor_config: The `preprocessor_config.json` saved with it, or None for the family's defaults.

    Raises:
        ValueError: Another class, or settings that do not fit the encoder.
    """
    if isinstance(model, ParakeetEncoder):
        return ParakeetSpeechEncoder(model, preprocessor_config)
    if isinstance(model, WhisperEncoder):
        return WhisperSpeechEncoder(model, preprocessor_config)
    raise ValueError(
        f"model.pretrained_asr: the encoder {type(model).__name__} is not supported; use Parakeet or Whisper"
    )
