"""What the kernels of Mamba-2 compute, token by token: the twin that they are compared with."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def reference_convolution(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, documents: Tensor | None = None
) -> Tensor:
    """Causal depthwise convolution; arguments as of `shoal.kernels.ssd.causal_convolution`, without activation."""
    taps = weight.shape[1]
    rows = []
    for row in range(x.shape[0]):
        tokens = []
        for t in range(x.shape[1]):
            y = torch.zeros_like(x[row, t]) if bias is None else bias
            for back in range(min(taps, t + 1)):
                if documents is None or documents[row, t - back] == documents[row, t]:
                    y = y + weight[:, taps - 1 - back] * x[row, t - back]
            tokens.append(y)
        rows.append(torch.stack(tokens) if tokens else x[row])
    return torch.stack(rows)


def reference_scan(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    *,
    d: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    documents: Tensor | None = None,
) -> Tensor:
    """State-space scan, one token after the other; arguments as of `shoal.kernels.ssd.state_space_scan`."""
    heads_per_group = x.shape[2] // b.shape[2]
    b, c = (part.repeat_interleave(heads_per_group, 2) for part in (b, c))  # [R, T, H, N]
    dt = dt if dt_bias is None else dt + dt_bias
    dt = (F.softplus(dt) if dt_softplus else dt).clamp(*dt_limit)
    rows = []
    for row in range(x.shape[0]):
        state = x.new_zeros(*x.shape[2:], b.shape[3])  # [H, P, N]
        tokens = []
        for t in range(x.shape[1]):
            if documents is not None and t and documents[row, t] != documents[row, t - 1]:
                state = torch.zeros_like(state)
            step = dt[row, t, :, None]
            state = (step * a[:, None]).exp()[..., None] * state
            state = state + (step * x[row, t])[..., None] * b[row, t, :, None]
            tokens.append((state * c[row, t, :, None]).sum(-1))
        rows.append(torch.stack(tokens) if tokens else x[row])
    y = torch.stack(rows)
    return y if d is None else y + d[:, None] * x
