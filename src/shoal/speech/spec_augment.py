"""SpecAugment: masks over frequency and time, seeded per clip, so that they never depend on the layout."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from shoal.config.speech import SpecAugmentConfig


class SpecAugment(nn.Module):
    """Sets random bands and spans of log-mel features to zero (Park et al. 2019, without warping).

    The masks of a clip are a function of its seed and length alone: recomputation repeats them, and no other
    random number generator is touched.
    """

    def __init__(self, config: SpecAugmentConfig) -> None:
        super().__init__()
        self.config = config

    def forward(self, mel: Tensor, mel_lens: Tensor, seeds: Tensor) -> Tensor:
        """Returns masked features [B, F, M] of mel [B, F, M], mel_lens [B] and seeds [B] int64."""
        masks = [
            self._keep(int(seed), int(length), mel.shape[1], mel.shape[2])
            for seed, length in zip(seeds.tolist(), mel_lens.tolist(), strict=True)
        ]
        return mel * torch.stack(masks).to(mel.device)

    def _keep(self, seed: int, length: int, num_frames: int, num_mels: int) -> Tensor:
        config = self.config
        generator = torch.Generator().manual_seed(seed)
        keep = torch.ones(num_frames, num_mels, dtype=torch.bool)
        for _ in range(config.freq_masks):
            start, end = _span(generator, num_mels, config.freq_width)
            keep[:, start:end] = False
        widest = config.time_width * length if config.time_width < 1 else config.time_width
        for _ in range(config.time_masks):
            start, end = _span(generator, length, int(widest))
            keep[start:end] = False
        return keep


def _span(generator: torch.Generator, size: int, widest: int) -> tuple[int, int]:
    width, place = torch.rand(2, generator=generator).tolist()
    length = int(width * (min(widest, size) + 1))
    start = int(place * (size - length + 1))
    return start, start + length
