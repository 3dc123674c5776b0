"""Log-mel spectrograms in float32, equal to those of transformers' feature extractors.

Both modules map audio [B, T] with lengths [B] to features [B, F, M] with frame counts [B], on any device, in
one batch, without parameters. Filter banks and windows are functions of the settings alone and are kept per
device outside the module, so that building on the meta device or casting the module never touches them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers.audio_utils import mel_filter_bank


@dataclass(frozen=True)
class MelSettings:
    """What a log-mel front end needs to know; lengths are in samples."""

    sampling_rate: int
    num_mels: int
    n_fft: int
    win_length: int
    hop_length: int
    preemphasis: float = 0.0

    @property
    def frame_seconds(self) -> float:
        """The time between two frames, in seconds."""
        return self.hop_length / self.sampling_rate

    @classmethod
    def read(cls, config: Mapping[str, Any] | None, defaults: MelSettings) -> MelSettings:
        """Returns the settings of a feature extractor's configuration (`preprocessor_config.json`).

        Args:
            config: The mapping, or None to take the defaults of the encoder family.
            defaults: Used for each key that the mapping does not hold.

        Raises:
            ValueError: The number of mel bins differs from what the encoder expects, or dither is asked for.
        """
        if config is None:
            return defaults
        if config.get("dither"):
            raise ValueError(
                f"preprocessor_config.dither = {config['dither']}: noise on the waveform is not supported; "
                "set it to 0"
            )
        n_fft = config.get("n_fft", defaults.n_fft)
        settings = cls(
            sampling_rate=config.get("sampling_rate", defaults.sampling_rate),
            num_mels=config.get("feature_size", defaults.num_mels),
            n_fft=n_fft,
            win_length=config.get("win_length", min(n_fft, defaults.win_length)),
            hop_length=config.get("hop_length", defaults.hop_length),
            preemphasis=config.get("preemphasis", defaults.preemphasis) or 0.0,
        )
        if settings.num_mels != defaults.num_mels:
            raise ValueError(
                f"preprocessor_config.feature_size = {settings.num_mels}: the encoder takes num_mel_bins = "
                f"{defaults.num_mels}; use the preprocessor_config.json that was saved with the encoder"
            )
        return settings


@lru_cache(maxsize=16)
def _mel_filters(settings: MelSettings, device: torch.device) -> Tensor:
    """Slaney mel filters [M, n_fft // 2 + 1], float32."""
    filters = mel_filter_bank(
        num_frequency_bins=settings.n_fft // 2 + 1,
        num_mel_filters=settings.num_mels,
        min_frequency=0.0,
        max_frequency=settings.sampling_rate / 2,
        sampling_rate=settings.sampling_rate,
        norm="slaney",
        mel_scale="slaney",
    )
    return torch.from_numpy(np.ascontiguousarray(filters.T, dtype=np.float32)).to(device)


@lru_cache(maxsize=16)
def _hann_window(length: int, periodic: bool, device: torch.device) -> Tensor:
    return torch.hann_window(length, periodic=periodic, dtype=torch.float32, device=device)


def frame_mask(lengths: Tensor, num_frames: int) -> Tensor:
    """Returns a bool mask [B, num_frames], True where frame < lengths[row]."""
    return torch.arange(num_frames, device=lengths.device) < lengths[:, None]


def _mel_power(spectrum: Tensor, settings: MelSettings) -> Tensor:
    """Mel energies [B, F, M] of a complex spectrum [B, n_fft // 2 + 1, F]."""
    power = torch.view_as_real(spectrum).square().sum(-1)
    return (_mel_filters(settings, spectrum.device) @ power).transpose(1, 2)


class ParakeetLogMel(nn.Module):
    """Log-mel of the FastConformer family: pre-emphasis, natural logarithm, normalised per clip and mel bin.

    Equal to `ParakeetFeatureExtractor`; a clip of one frame, where that one divides by zero, gives zeros.
    """

    _LOG_GUARD = 2.0**-24
    _STD_GUARD = 1e-5

    def __init__(self, settings: MelSettings) -> None:
        super().__init__()
        self.settings = settings

    def num_frames(self, audio_lens: Tensor) -> Tensor:
        """Returns the frames [B] int64 of clips of the given lengths in samples."""
        return audio_lens // self.settings.hop_length

    @torch.no_grad()
    def forward(self, audios: Tensor, audio_lens: Tensor) -> tuple[Tensor, Tensor]:
        """Returns features [B, F, M] float32, zero after each clip's end, and frame counts [B] int64."""
        settings = self.settings
        audios = audios.float()
        emphasised = torch.cat([audios[:, :1], audios[:, 1:] - settings.preemphasis * audios[:, :-1]], dim=1)
        emphasised = emphasised * frame_mask(audio_lens, audios.shape[1])
        spectrum = torch.stft(
            emphasised,
            settings.n_fft,
            hop_length=settings.hop_length,
            win_length=settings.win_length,
            window=_hann_window(settings.win_length, False, audios.device),
            pad_mode="constant",
            return_complex=True,
        )
        mel = torch.log(_mel_power(spectrum, settings) + self._LOG_GUARD)
        mel_lens = self.num_frames(audio_lens)
        return self._normalise(mel, mel_lens), mel_lens

    def _normalise(self, mel: Tensor, mel_lens: Tensor) -> Tensor:
        mask = frame_mask(mel_lens, mel.shape[1])[..., None]
        count = mel_lens[:, None, None]
        mean = (mel * mask).sum(1, keepdim=True) / count.clamp(min=1)
        variance = ((mel - mean).square() * mask).sum(1, keepdim=True) / (count - 1).clamp(min=1)
        return (mel - mean) / (variance.sqrt() + self._STD_GUARD) * mask


class WhisperLogMel(nn.Module):
    """Log-mel of the Whisper family: base-10 logarithm, floored 8 below the clip's maximum, on whole windows.

    Equal to `WhisperFeatureExtractor` padding each clip to a whole number of windows. The result for a clip
    does not depend on the others in its batch.

    Args:
        settings: Of the feature extractor.
        window_frames: Frames of one encoder window; each clip is padded with silence to a multiple of it.
    """

    def __init__(self, settings: MelSettings, window_frames: int) -> None:
        super().__init__()
        self.settings = settings
        self.window_frames = window_frames

    def num_frames(self, audio_lens: Tensor) -> Tensor:
        """Returns the frames [B] int64 of clips of the given lengths in samples, without padding."""
        return audio_lens // self.settings.hop_length

    def num_windows(self, mel_lens: Tensor) -> Tensor:
        """Returns the encoder windows [B] int64 that hold mel_lens frames; a clip has at least one."""
        return ((mel_lens + self.window_frames - 1) // self.window_frames).clamp(min=1)

    @torch.no_grad()
    def forward(self, audios: Tensor, audio_lens: Tensor) -> tuple[Tensor, Tensor]:
        """Returns features [B, windows * window_frames, M] float32 and true frame counts [B] int64."""
        settings = self.settings
        mel_lens = self.num_frames(audio_lens)
        ends = self.num_windows(mel_lens) * self.window_frames
        spectrum = torch.stft(
            self._centred(audios.float(), audio_lens, ends * settings.hop_length),
            settings.n_fft,
            settings.hop_length,
            window=_hann_window(settings.n_fft, True, audios.device),
            center=False,
            return_complex=True,
        )[..., :-1]
        mel = _mel_power(spectrum, settings).clamp(min=1e-10).log10()
        padded = ~frame_mask(ends, mel.shape[1])[..., None]
        loudest = mel.masked_fill(padded, -torch.inf).amax((1, 2), keepdim=True)
        return (torch.maximum(mel, loudest - 8.0) + 4.0) / 4.0, mel_lens

    def _centred(self, audios: Tensor, audio_lens: Tensor, ends: Tensor) -> Tensor:
        """Pads each clip with silence to its own end and mirrors half a frame at both sides.

        `torch.stft(center=True)` mirrors at the end of the tensor, which depends on the longest clip.
        """
        half = self.settings.n_fft // 2
        position = torch.arange(-half, int(ends.max()) + half, device=audios.device)
        last = ends[:, None] - 1
        source = torch.where(position > last, 2 * last - position, position.abs())
        heard = (source >= 0) & (source < audio_lens[:, None])
        return audios.gather(1, source.clamp(0, audios.shape[1] - 1)) * heard
