"""Settings of the modality adapter that NeMo's files carry."""

from __future__ import annotations

import pytest
import torch

from shoal.config.speech import ModalityAdapterConfig
from shoal.speech.adapters import build_adapter


def _settings(**changes: object) -> ModalityAdapterConfig:
    return ModalityAdapterConfig(kind="conformer", d_model=16, n_layers=1, n_heads=2, **changes)  # type: ignore[arg-type]


def test_xscaling_multiplies_what_enters_the_layers() -> None:
    plain, scaled = build_adapter(_settings(), 8), build_adapter(_settings(xscaling=True), 8)
    scaled.load_state_dict(plain.state_dict())
    seen: list[torch.Tensor] = []
    for adapter in (plain, scaled):
        adapter.layers[0].register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
        adapter.eval()(torch.randn(1, 5, 8, generator=torch.Generator().manual_seed(0)), torch.tensor([5]))
    torch.testing.assert_close(seen[1], seen[0] * 4.0)


def test_feat_in_must_be_the_width_that_comes_in() -> None:
    assert build_adapter(_settings(feat_in=8), 8).output_size == 16
    with pytest.raises(ValueError, match=r"modality_adapter\.feat_in = 9: .*width 8"):
        build_adapter(_settings(feat_in=9), 8)
