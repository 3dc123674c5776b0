"""AudioPerception: log-mel, speech encoder, modality adapter and projection to the LLM's hidden size."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from shoal.config.speech import PerceptionConfig
from shoal.models.dropout import DropoutState
from shoal.parallel.activation_checkpointing import checkpoint_module
from shoal.speech import segments
from shoal.speech.adapters import build_adapter, stack_frames, stacked_lengths
from shoal.speech.batch_norm import use_step_batch_norm
from shoal.speech.encoders import SpeechEncoder, speech_encoder
from shoal.speech.seeds import fold_in
from shoal.speech.spec_augment import SpecAugment


def is_frozen(module: nn.Module) -> bool:
    """Returns whether the module has parameters and none of them is trained."""
    flags = [parameter.requires_grad for parameter in module.parameters()]
    return bool(flags) and not any(flags)


class AudioPerception(nn.Module):
    """Turns audio into embeddings for an LLM.

    Building it reads configurations only, never weights, so parameters may stand on the meta device. Names
    follow NeMo's layout: `encoder.*` (as in transformers), `modality_adapter.*`, `proj.*`; the preprocessor
    has no parameters.

    A frozen encoder stays in eval mode and, as nothing below it trains, keeps no autograd graph.

    Args:
        encoder: A transformers speech encoder (Parakeet or Whisper).
        preprocessor_config: Content of the `preprocessor_config.json` saved with it, or None.
        config: The `model.perception` section.
        output_dim: Hidden size of the LLM.
        chunk_seconds: `model.encoder_chunk_size_seconds`: longer clips are encoded in chunks of this length.

    Raises:
        ValueError: Settings that do not fit the encoder or the LLM.
    """

    dropout_state: DropoutState | None = None
    """What dropout modules know about the clips, set by assembly."""

    def __init__(
        self,
        encoder: PreTrainedModel,
        preprocessor_config: Mapping[str, Any] | None,
        config: PerceptionConfig,
        output_dim: int,
        *,
        chunk_seconds: float | None = None,
    ) -> None:
        super().__init__()
        if config.output_dim not in (None, output_dim):
            raise ValueError(
                f"model.perception.output_dim = {config.output_dim}: the LLM's hidden size is {output_dim}; "
                "leave output_dim out"
            )
        self.speech_encoder: SpeechEncoder = speech_encoder(encoder, preprocessor_config)
        self.stack_factor = config.modality_adapter.stack_frames
        self.chunk_samples = self._chunk_samples(chunk_seconds)
        self.preprocessor = self.speech_encoder.preprocessor
        self.spec_augment = None if config.spec_augment is None else SpecAugment(config.spec_augment)
        self.encoder = encoder
        self.modality_adapter = build_adapter(
            config.modality_adapter, self.speech_encoder.hidden_size * self.stack_factor
        )
        self.proj = nn.Linear(self.modality_adapter.output_size, output_dim, dtype=encoder.dtype)
        self.modality_adapter.to(encoder.dtype)
        use_step_batch_norm(self)

    def _chunk_samples(self, seconds: float | None) -> int | None:
        if seconds is None:
            return None
        size = round(seconds * self.speech_encoder.sampling_rate)
        if size < self._shortest_chunk:
            limit = self._shortest_chunk / self.speech_encoder.sampling_rate
            raise ValueError(
                f"model.encoder_chunk_size_seconds = {seconds}: a chunk holds at least two feature frames "
                f"({limit:g} s); use 30.0, or leave it out to encode each clip whole"
            )
        return size

    @property
    def _shortest_chunk(self) -> int:
        return 2 * self.speech_encoder.preprocessor.settings.hop_length

    @property
    def sampling_rate(self) -> int:
        """Samples per second of the audio this module takes."""
        return self.speech_encoder.sampling_rate

    @property
    def token_equivalent_duration(self) -> float:
        """Seconds of audio per embedding."""
        return self.speech_encoder.frame_seconds * self.stack_factor

    @property
    def minimum_samples(self) -> int:
        """Samples of the shortest clip that gives embeddings; also the width of the stand-in for no audio."""
        return self.speech_encoder.minimum_samples

    def output_lengths(self, audio_lens: Tensor) -> Tensor:
        """Returns the embeddings [B] int64 that clips of audio_lens [B] samples give; arithmetic alone."""
        if self.chunk_samples is None:
            return self._plain_output_lengths(audio_lens)
        pieces = segments.cut(audio_lens, self.chunk_samples, self._shortest_chunk)
        totals = torch.zeros_like(audio_lens)
        return totals.index_add(0, pieces.row, self._plain_output_lengths(pieces.length))

    def _plain_output_lengths(self, audio_lens: Tensor) -> Tensor:
        return stacked_lengths(self.speech_encoder.output_lengths(audio_lens), self.stack_factor)

    def forward(
        self, audios: Tensor, audio_lens: Tensor, seeds: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Embeds a batch of clips.

        Args:
            audios: [B, T] float32, right-padded; B is at least 1.
            audio_lens: Samples of each clip, [B] int64; 0 is allowed and gives no embeddings.
            seeds: One seed per clip, [B] int64, for SpecAugment and dropout; needed in training when these are on.

        Returns:
            Embeddings [B, L, H], arbitrary after each clip's end, and lengths [B] int64.

        Raises:
            ValueError: SpecAugment is on and no seeds were given.
        """
        if self.chunk_samples is None:
            return self._embed(audios, audio_lens, seeds)
        pieces = segments.cut(audio_lens, self.chunk_samples, self._shortest_chunk)
        chunks = segments.take(audios, pieces, int(pieces.length.max()))
        chunk_seeds = None if seeds is None else fold_in(seeds[pieces.row], pieces.ordinal)
        embeddings, lengths = self._embed(chunks, pieces.length, chunk_seeds)
        return segments.join(embeddings, lengths, pieces)

    def _embed(self, audios: Tensor, audio_lens: Tensor, seeds: Tensor | None) -> tuple[Tensor, Tensor]:
        missing = max(0, self.minimum_samples - audios.shape[1])
        mel, mel_lens = self.speech_encoder.features(nn.functional.pad(audios, (0, missing)), audio_lens)
        if self.spec_augment is not None and self.training:
            if seeds is None:
                raise ValueError("model.perception.spec_augment is on: training needs one seed per clip")
            mel = self.spec_augment(mel, mel_lens, seeds)
        if self.dropout_state is not None and seeds is not None:
            self.dropout_state.publish_frames("encoder", self.speech_encoder.window_seeds(seeds, mel_lens))
            self.dropout_state.publish_frames("adapter", seeds)
        hidden, lengths = self._encode(mel.to(self.encoder.dtype), mel_lens)
        if self.stack_factor > 1:
            hidden, lengths = stack_frames(hidden, lengths, self.stack_factor)
        embeddings: Tensor = self.proj(self.modality_adapter(hidden, lengths))
        return embeddings, lengths

    def _encode(self, mel: Tensor, mel_lens: Tensor) -> tuple[Tensor, Tensor]:
        # Freezing may come after train(): a frozen encoder must not drop out or move its batch statistics.
        if self.encoder.training and is_frozen(self.encoder):
            self.encoder.train(False)
        return self.speech_encoder.encode(mel, mel_lens)

    def train(self, mode: bool = True) -> AudioPerception:
        """Sets the mode; frozen parts stay in eval mode."""
        super().train(mode)
        for part in (self.encoder, self.modality_adapter):
            if is_frozen(part):
                part.eval()
        return self

    def set_activation_checkpointing(self, enabled: bool) -> None:
        """Recomputes each encoder layer and the convolutional front end in the backward pass.

        Call before sharding, and once. A front end that is a bare linear layer is left alone: it keeps
        nothing but its input. Neither numbers nor parameter names change. False does nothing.
        """
        if not enabled:
            return
        replaying = None if self.dropout_state is None else self.dropout_state.replaying
        for layer in self.speech_encoder.layers():
            checkpoint_module(layer, replaying)
        front_end = self.speech_encoder.front_end()
        if front_end is not None and not isinstance(front_end, nn.Linear):
            checkpoint_module(front_end, replaying)
