"""The state-space scan of Mamba-2 in chunks, in plain torch, with a backward that keeps nothing but its inputs.

Within a chunk the scan is a masked product like attention, between chunks a state is handed on (Dao and Gu,
arXiv 2405.21060, section 6). Chunks are taken a block at a time and backward computes a block again, so memory
grows with the number of tokens only by the inputs, their gradients, the result, and one state per block.

Documents are kept apart exactly: every sum of decays begins anew with its document, so that not even the rounding
in one document depends on another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

CHUNK_TOKENS = 64
"""Results do not depend on it. A small chunk computes less within chunks, a large one more between them."""
BLOCK_TOKENS = 512
"""How many tokens are computed at once."""


class ChunkedScan(torch.autograd.Function):
    """y_t = C_t . s_t with s_t = exp(a_t) s_{t-1} + dt_t x_t B_t^T, and s = 0 before every document.

    All floating-point arguments share one dtype: x [R, T, H, P], dt and a [R, T, H], b and c [R, T, G, N] with G a
    divisor of H; documents [R, T] int, not decreasing within a row, or None for one document a row. Returns y
    [R, T, H, P]; differentiable once, in everything but `documents`.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, documents: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(x, dt, a, b, c, documents)
        y = torch.empty_like(x, memory_format=torch.contiguous_format)
        state = _first_state(x, b)
        ctx.states = []
        for span in _spans(x.shape[1]):
            block = _Block.of(span, x, dt, a, b, c, documents)
            states = block.states(state)
            y[:, span] = block.outputs(states).flatten(1, 2)[:, : span.stop - span.start]
            ctx.states.append(state)
            state = states[-1]
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        *inputs, documents = ctx.saved_tensors
        with torch.autocast(dy.device.type, enabled=False):  # backward may run where autocast is on
            return (*_backward(dy, inputs, documents, ctx.states), None)


def _backward(
    dy: Tensor, inputs: Sequence[Tensor], documents: Tensor | None, states: Sequence[Tensor]
) -> list[Tensor]:
    """Gradients of the inputs x, dt, a, b, c, block by block from the last."""
    x, dt, a, b, c = inputs
    gradients = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in inputs]
    d_state = _first_state(x, b)
    for span, state in zip(reversed(_spans(x.shape[1])), reversed(states), strict=True):
        block = _Block.of(span, x, dt, a, b, c, documents)
        parts, d_state = block.gradients(_in_chunks(dy[:, span], block.x.shape[2]), state, d_state)
        for gradient, part in zip(gradients, parts, strict=True):
            gradient[:, span] = part.flatten(1, 2)[:, : span.stop - span.start]
    return gradients


@dataclass(frozen=True)
class _Part:
    """One way that tokens reach y, backward: what it adds to the gradients.

    Attributes:
        driven: Of dt * x, [R, K, Q, H, P].
        b: [R, K, G, Q, N].
        c: [R, K, G, Q, N].
        sums: Of the sums of a from the beginning of a token's document, or the chunk's, to it, [R, K, Q, H]. In
            float64: pairs of tokens cancel, exactly, in the gradient of the a that are not between them.
    """

    driven: Tensor
    b: Tensor
    c: Tensor
    sums: Tensor


@dataclass(frozen=True)
class _Block:
    """Tokens of a block in chunks: R rows, K chunks of Q tokens, H heads of width P, G groups, N states.

    Attributes:
        x: [R, K, Q, H, P].
        dt: [R, K, Q, H].
        b: [R, K, G, Q, N].
        c: [R, K, G, Q, N].
        same: [R or 1, K or 1, Q, Q] in x's dtype: 1 where the column's token is of the row's document and not later.
        within: [R, K, H, Q, Q], the decay from the column's token to the row's, 0 where `same` is.
        read: [R, K, Q, H], the decay from before the chunk to a token, 0 unless its document reaches back there.
        write: [R, K, Q, H], the decay from a token to the end of the chunk, 0 unless its document reaches there.
    """

    x: Tensor
    dt: Tensor
    b: Tensor
    c: Tensor
    same: Tensor
    within: Tensor
    read: Tensor
    write: Tensor

    @staticmethod
    def of(
        span: slice, x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, documents: Tensor | None
    ) -> _Block:
        """Cuts a span of tokens into chunks; tokens that fill up the last chunk write and decay nothing."""
        size = min(CHUNK_TOKENS, span.stop - span.start)
        same, opens, ends = _masks(span, size, documents, x)
        # Small differences of large sums would lose float32's digits; these few numbers are added up in float64.
        sums = same.double() @ _in_chunks(a[:, span], size).double()
        return _Block(
            _in_chunks(x[:, span], size),
            _in_chunks(dt[:, span], size),
            _in_chunks(b[:, span], size).transpose(2, 3).contiguous(),
            _in_chunks(c[:, span], size).transpose(2, 3).contiguous(),
            same,
            _decays(sums, same),
            sums.exp().to(x.dtype) * opens,
            # Masked before the exponential, which could be infinite, and after it.
            ((sums[:, :, -1:] - sums) * ends).exp().to(x.dtype) * ends,
        )

    def states(self, state: Tensor) -> list[Tensor]:
        """States [R, G, N, H / G * P] before each chunk and after the last, from the one before the block."""
        written = self.b.transpose(-1, -2) @ self._grouped(self.x * (self.dt * self.write)[..., None])
        found = [state]
        for chunk, decay in enumerate(self._carry()):
            state = torch.addcmul(written[:, chunk], state, decay)
            found.append(state)
        return found

    def outputs(self, states: list[Tensor]) -> Tensor:
        """What tokens read of the state before their chunk, and of their chunk; y [R, K, Q, H, P]."""
        inside = self._weights(self.c @ self.b.transpose(-1, -2)) @ self._heads(self.x * self.dt[..., None])
        return self._read(states).mul_(self.read[..., None]).add_(inside.transpose(2, 3))

    def gradients(self, dy: Tensor, state: Tensor, d_state: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
        """Gradients of x, dt, a, b, c, in chunks, and of the state before the block.

        Args:
            dy: Gradient of y, [R, K, Q, H, P].
            state: The state before the block.
            d_state: Gradient of the state after the block.
        """
        driven = self.x * self.dt[..., None]
        between, d_state = self._through_states(dy, driven, state, d_state)
        inside = self._through_chunks(dy, driven)
        d_driven = between.driven.add_(inside.driven)
        d_b, d_c = (between.b.add_(inside.b), between.c.add_(inside.c))
        return (
            d_driven * self.dt[..., None],
            (d_driven * self.x).sum(-1),
            (self.same.transpose(-1, -2).double() @ between.sums.add_(inside.sums)).to(driven.dtype),
            d_b.transpose(2, 3),
            d_c.transpose(2, 3),
        ), d_state

    def _through_states(
        self, dy: Tensor, driven: Tensor, state: Tensor, d_state: Tensor
    ) -> tuple[_Part, Tensor]:
        """Backward of writing to states, carrying them from chunk to chunk, and reading them."""
        states = self.states(state)
        before = torch.stack(states[:-1], 1)
        d_read = self._grouped(dy * self.read[..., None])
        d_sums = (self._read(states).mul_(dy)).sum(-1).mul_(self.read).double()
        d_before = self.c.transpose(-1, -2) @ d_read
        d_after = torch.empty_like(d_before)
        for chunk, decay in reversed(list(enumerate(self._carry()))):
            d_after[:, chunk] = d_state
            d_state = torch.addcmul(d_before[:, chunk], d_state, decay)
        carried = (d_after * before).sum(-2).view(*dy.shape[:2], *dy.shape[3:]).sum(-1)
        d_driven = self._ungrouped(self.b @ d_after).mul_(self.write[..., None])
        d_write = (d_driven * driven).sum(-1).double()
        d_sums -= d_write
        d_sums[:, :, -1] += d_write.sum(2) + carried * self.read[:, :, -1]
        d_b = self._grouped(driven * self.write[..., None]) @ d_after.transpose(-1, -2)
        return _Part(d_driven, d_b, d_read @ before.transpose(-1, -2), d_sums), d_state

    def _through_chunks(self, dy: Tensor, driven: Tensor) -> _Part:
        """Backward of reading earlier tokens of the same chunk."""
        dy, driven = self._heads(dy), self._heads(driven)
        scores = self.c @ self.b.transpose(-1, -2)
        d_driven = self._weights(scores).transpose(-1, -2) @ dy
        pairs = (dy @ driven.transpose(-1, -2)).mul_(self.within)
        pairs = pairs.view(*self._by_group(), *pairs.shape[3:])
        d_scores = pairs.sum(3)
        pairs = pairs.mul_(scores[:, :, :, None]).flatten(2, 3)
        pairs.diagonal(dim1=-2, dim2=-1).zero_()  # from a token to itself nothing decays
        d_sums = (pairs.sum(-1, dtype=torch.float64) - pairs.sum(-2, dtype=torch.float64)).transpose(2, 3)
        return _Part(d_driven.transpose(2, 3), d_scores.transpose(-1, -2) @ self.c, d_scores @ self.b, d_sums)

    def _weights(self, scores: Tensor) -> Tensor:
        """Scores [R, K, G, Q, Q] of tokens, decayed for each head; [R, K, H, Q, Q]."""
        within = self.within.view(*self._by_group(), *self.within.shape[3:])
        return (within * scores[:, :, :, None]).flatten(2, 3)

    def _by_group(self) -> tuple[int, int, int, int]:
        """R, K, G, H / G."""
        rows, chunks, _, heads, _ = self.x.shape
        groups = self.b.shape[2]
        return rows, chunks, groups, heads // groups

    def _read(self, states: list[Tensor]) -> Tensor:
        """C times the state before the chunk, not yet decayed; [R, K, Q, H, P]."""
        return self._ungrouped(self.c @ torch.stack(states[:-1], 1))

    def _carry(self) -> list[Tensor]:
        """For each chunk the decay of states over it, to multiply [R, G, N, H / G * P]."""
        rows, chunks, *_, width = self.x.shape
        decay = self.read[:, :, -1, :, None].expand(-1, -1, -1, width)
        return list(decay.reshape(rows, chunks, self.b.shape[2], 1, -1).unbind(1))

    def _grouped(self, x: Tensor) -> Tensor:
        """[R, K, Q, H, P] to [R, K, G, Q, H / G * P], the heads of a group side by side."""
        return x.reshape(*x.shape[:3], self.b.shape[2], -1).transpose(2, 3).contiguous()

    def _ungrouped(self, x: Tensor) -> Tensor:
        return x.transpose(2, 3).reshape(self.x.shape)

    @staticmethod
    def _heads(x: Tensor) -> Tensor:
        """[R, K, Q, H, P] to [R, K, H, Q, P]."""
        return x.transpose(2, 3).contiguous()


def _decays(sums: Tensor, same: Tensor) -> Tensor:
    """exp(sums_i - sums_j) where `same` is 1, else 0; sums [R, K, Q, H] in float64 to [R, K, H, Q, Q] in same's dtype.

    float32 is subtracted in two parts, the number rounded and what was rounded away.
    """
    sums = sums.transpose(2, 3)
    rounded = sums.to(same.dtype)
    exponents = rounded[..., :, None] - rounded[..., None, :]
    if same.dtype != torch.float64:
        rest = (sums - rounded).to(same.dtype)
        exponents.add_(rest[..., :, None]).sub_(rest[..., None, :])
    apart = torch.zeros_like(same).masked_fill_(same == 0, -torch.inf)
    return exponents.add_(apart[:, :, None]).exp_()


def _spans(num_tokens: int) -> list[slice]:
    return [
        slice(start, min(start + BLOCK_TOKENS, num_tokens)) for start in range(0, num_tokens, BLOCK_TOKENS)
    ]


def _first_state(x: Tensor, b: Tensor) -> Tensor:
    """Zeros [R, G, N, H / G * P]: states of a group's heads side by side, so that one product serves them all."""
    groups, size = b.shape[2:]
    return x.new_zeros(len(x), groups, size, x.shape[2] // groups * x.shape[3])


def _in_chunks(x: Tensor, size: int) -> Tensor:
    """[R, tokens, ...] to [R, K, size, ...], filled up with zeros."""
    if missing := -x.shape[1] % size:
        x = F.pad(x, (0, 0) * (x.dim() - 2) + (0, missing))
    return x.reshape(len(x), -1, size, *x.shape[2:])


def _masks(
    span: slice, size: int, documents: Tensor | None, like: Tensor
) -> tuple[Tensor, Tensor | float, Tensor | float]:
    """`same` of a block, and 1 where a token's document reaches back before its chunk, and to its end."""
    causal = like.new_ones(size, size).tril()
    if documents is None:
        return causal[None, None], 1.0, 1.0
    before = documents[:, max(span.start - 1, 0)]
    documents = documents[:, span]
    if missing := -documents.shape[1] % size:
        documents = torch.cat([documents, documents[:, -1:].expand(-1, missing)], 1)
    documents = documents.reshape(len(documents), -1, size)
    last = documents[:, :, -1]
    before = torch.cat([before[:, None], last[:, :-1]], 1)
    same = (documents[..., :, None] == documents[..., None, :]) * causal
    opens, ends = documents == before[..., None], documents == last[..., None]
    return same, opens[..., None].to(like.dtype), ends[..., None].to(like.dtype)
