"""The comparisons of `shoal.kernels.check` for Mamba-2's convolution and scan."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from shoal.kernels.ssd import causal_convolution, document_ids, state_space_scan

Run = Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]]
"""Inputs by name to outputs by name; those that require gradients are differentiated."""

Shapes = Mapping[str, tuple[int, ...]]

CONVOLUTIONS = ("torch", "causal_conv1d")
SCANS = ("torch", "mamba_ssm")
_LENS = (19, 0, 1, 45, 12)
_TOKENS = sum(_LENS)
_HEADS, _WIDTH, _GROUPS, _STATES, _TAPS = 4, 16, 2, 16, 4


def convolution_problem(device: torch.device, backend: str) -> tuple[Shapes, Run, Run]:
    """Returns shapes of the inputs, the convolution of a backend over them, and the reference's."""
    channels = _HEADS * _WIDTH
    shapes = {"x": (1, _TOKENS, channels), "weight": (channels, _TAPS), "bias": (channels,)}

    def run(name: str) -> Run:
        def convolve(leaves: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
            documents = _documents(device)
            return {"y": causal_convolution(**leaves, documents=documents, backend=name)}  # type: ignore[arg-type]

        return convolve

    return shapes, run(backend), run("reference")


def scan_problem(device: torch.device, backend: str) -> tuple[Shapes, Run, Run]:
    """Returns shapes of the inputs, the scan of a backend over them, and the reference's."""
    shapes = {
        "x": (1, _TOKENS, _HEADS, _WIDTH),
        "dt": (1, _TOKENS, _HEADS),
        "a": (_HEADS,),
        "b": (1, _TOKENS, _GROUPS, _STATES),
        "c": (1, _TOKENS, _GROUPS, _STATES),
        "d": (_HEADS,),
        "dt_bias": (_HEADS,),
    }

    def run(name: str) -> Run:
        def scan(leaves: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
            inputs = {**leaves, "a": -leaves["a"].exp()}  # as the models have it: a decay for any parameter
            documents = _documents(device)
            y = state_space_scan(**inputs, dt_softplus=True, documents=documents, backend=name)  # type: ignore[arg-type]
            return {"y": y}

        return scan

    return shapes, run(backend), run("reference")


def _documents(device: torch.device) -> Tensor:
    borders = torch.tensor([0, *_LENS], device=device).cumsum(0)
    return document_ids(borders, _TOKENS)
