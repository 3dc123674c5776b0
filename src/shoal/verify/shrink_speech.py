"""Makes a speech encoder and what stands behind it small; see `shoal.verify.shrink`."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import replace
from typing import Any

from shoal.config.speech import PerceptionConfig, SpecAugmentConfig
from shoal.verify.shrink import Fields

WINDOW_SECONDS = 1.0
"""Length of the small Whisper's window."""

_WHISPER = {
    "d_model": 16,
    "encoder_layers": 2,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "decoder_layers": 1,
    "decoder_attention_heads": 2,
    "decoder_ffn_dim": 32,
    "max_source_positions": 50,
    "max_target_positions": 32,
    "init_std": 0.2,
}
_PARAKEET = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 32,
    "subsampling_conv_channels": 8,
    "initializer_range": 0.2,
}


def shrink_encoder(fields: Mapping[str, Any], overrides: Mapping[str, Any]) -> Fields:
    """The fields of a small speech model of the same kind: Whisper, Parakeet, or a model around Parakeet's encoder.

    Args:
        fields: Of its configuration.
        overrides: ``model.perception.encoder``, which then need not be applied any more.
    """
    small: Fields = deepcopy(dict(fields))
    inner = small.get("encoder_config")
    if isinstance(inner, dict):
        small["encoder_config"] = shrink_encoder(inner, overrides)
        return small
    small |= overrides
    sizes = _WHISPER if small.get("model_type") == "whisper" else _PARAKEET
    small |= {name: size for name, size in sizes.items() if small.get(name) is not None}
    return small


def shrink_perception(config: PerceptionConfig) -> PerceptionConfig:
    """The same adapter, narrower and shallower; checks of widths that no longer hold are left out."""
    adapter = config.modality_adapter
    small = replace(
        adapter,
        feat_in=None,
        d_model=None if adapter.d_model is None else 16,
        n_layers=min(adapter.n_layers, 2),
        n_heads=min(adapter.n_heads, 2),
        ff_expansion_factor=min(adapter.ff_expansion_factor, 2),
        conv_kernel_size=min(adapter.conv_kernel_size, 5),
    )
    augment = config.spec_augment
    if augment is not None:
        augment = SpecAugmentConfig(
            augment.freq_masks, augment.time_masks, min(augment.freq_width, 10), min(augment.time_width, 10)
        )
    return PerceptionConfig({}, small, augment, None)
