"""What a Mamba-2 layer does between its projections: convolution, scan and skip, with the layer's own parameters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from shoal.kernels.ssd import bounded_steps, causal_convolution, state_space_scan


@dataclass(frozen=True)
class MambaMixing:
    """Parameters and sizes of a layer with H heads of width P in G groups with N states each.

    Attributes:
        weight: Of the convolution, [H * P + 2 * G * N, K].
        bias: [H * P + 2 * G * N] or None.
        a: Negative rates of decay, [H].
        d: Skip from input to output, [H] or None.
        dt_bias: [H] or None.
        groups: G, a divisor of H.
        states: N.
        dt_limit: Bounds of the time steps.
        activation: After the convolution; None is SiLU.
    """

    weight: Tensor
    bias: Tensor | None
    a: Tensor
    d: Tensor | None
    dt_bias: Tensor | None
    groups: int
    states: int
    dt_limit: tuple[float, float] = (0.0, float("inf"))
    activation: Callable[[Tensor], Tensor] | None = None

    @property
    def heads(self) -> int:
        return len(self.a)

    @property
    def inner(self) -> int:
        """H * P."""
        return self.weight.shape[0] - 2 * self.groups * self.states

    def convolve(self, xbc: Tensor, documents: Tensor | None) -> Tensor:
        """xbc [R, T, H * P + 2 * G * N] after convolution and activation."""
        silu = self.activation is None
        xbc = causal_convolution(xbc, self.weight, self.bias, silu=silu, documents=documents)
        return xbc if self.activation is None else self.activation(xbc)

    def parts(self, xbc: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [R, T, H, P], b and c [R, T, G, N] of xbc."""
        of_groups = self.groups * self.states
        x, b, c = torch.split(xbc, [self.inner, of_groups, of_groups], -1)
        rows, tokens, _ = xbc.shape
        shape = (rows, tokens, self.groups, self.states)
        return (
            x.reshape(rows, tokens, self.heads, self.inner // self.heads),
            b.reshape(shape),
            c.reshape(shape),
        )

    def scan(self, xbc: Tensor, dt: Tensor, documents: Tensor | None) -> Tensor:
        """xbc after the convolution, and raw time steps dt [R, T, H], to y [R, T, H * P] in float32 (or float64)."""
        x, b, c = self.parts(xbc)
        y = state_space_scan(
            x,
            dt,
            self.a,
            b,
            c,
            d=self.d,
            dt_bias=self.dt_bias,
            dt_softplus=True,
            dt_limit=self.dt_limit,
            documents=documents,
        )
        return y.flatten(2)

    def steps(self, dt: Tensor) -> Tensor:
        """The time steps that the scan uses, in dt's dtype."""
        return bounded_steps(dt, self.dt_bias, softplus=True, limit=self.dt_limit)

    def of_heads(self, rank: int, size: int, copies: int) -> MambaMixing:
        """The layer of the rank-th of `size` equal parts of the heads, when every group is there `copies` times."""
        of_groups = self.groups * self.states

        def cut(channels: Tensor) -> Tensor:
            x, b, c = torch.split(channels, [self.inner, of_groups, of_groups])
            b, c = (
                part.unflatten(0, (self.groups, self.states)).repeat_interleave(copies, 0).flatten(0, 1)  # type: ignore[no-untyped-call]
                for part in (b, c)
            )
            return torch.cat([part.chunk(size)[rank] for part in (x, b, c)])

        def own(per_head: Tensor | None) -> Tensor | None:
            return None if per_head is None else per_head.chunk(size)[rank]

        return replace(
            self,
            weight=cut(self.weight),
            bias=None if self.bias is None else cut(self.bias),
            a=self.a.chunk(size)[rank],
            d=own(self.d),
            dt_bias=own(self.dt_bias),
            groups=self.groups * copies // size,
        )
