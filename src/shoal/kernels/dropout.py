"""Dropout whose mask is a function of what an element is, never of where or when it is computed.

An element is named by (module and step, sample, token position, feature index). An integer hash of that name says
whether it is dropped, so any rank can compute its own part of the mask: a slice of the features or of the tokens,
another batch, a pack, or the same layer recomputed in backward, all see the same mask.

The hash has two stages, so that almost no work is left per element. A token's name is mixed to 64 bits by the
finaliser of SplitMix64 (public domain, S. Vigna; constants by D. Stafford). Its halves `a` and `b`, and a hash of
half the feature's index, enter the finaliser of MurmurHash3 (public domain, A. Appleby) at two places::

    h = fmix32 of (a + hash(feature // 2)), with b added between its two rounds

and each of the two 16-bit halves of `h` decides on one feature. The probability is therefore a multiple of 2^-16.
"""

from __future__ import annotations

import torch
from torch import Tensor

LEVELS = 1 << 16
"""A probability is rounded to a multiple of 1 / LEVELS."""

_GOLDEN = 0x9E3779B97F4A7C15
_MIX64 = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_MIX32 = (0x85EBCA6B, 0xC2B2AE35)


def counter_dropout(x: Tensor, p: float, key: int | Tensor, tokens: Tensor, feature_start: int = 0) -> Tensor:
    """Drops elements of `x` with probability `p` and scales the others so that the expectation stays.

    Args:
        x: [..., F] in any floating dtype, the last dimension features.
        p: Probability in [0, 1], rounded to a multiple of 2^-16; the scale is that of the rounded one.
        key: Names the module and the step: 64 bits, a Python integer or an int64 scalar on the device of `x`.
        tokens: From `token_keys`, int64, of a shape that broadcasts to that of `x` without its last dimension.
        feature_start: Index of the first feature of `x` among those of the whole, unsharded tensor.

    Returns:
        A tensor like `x`. Its gradient is that of the kept elements, scaled alike; one byte per element is kept
        for it.
    """
    threshold = round(p * LEVELS)
    if threshold == 0:
        return x
    if threshold == LEVELS:
        return x * 0.0
    keep = keep_mask(tokens, x.shape[-1], p, key, feature_start)
    return x * keep * (LEVELS / (LEVELS - threshold))


def token_keys(samples: Tensor, positions: Tensor) -> Tensor:
    """Hashes (sample, position) of each token to 64 bits.

    Args:
        samples: Keys of samples, int64, of a shape that broadcasts with `positions`.
        positions: Positions of tokens in their sample, int64.
    """
    rows = _mix64(samples * _signed64(_GOLDEN) + 1)
    return _mix64(rows + positions * _signed64(_GOLDEN))


def keep_mask(
    tokens: Tensor, num_features: int, p: float, key: int | Tensor, feature_start: int = 0
) -> Tensor:
    """Returns which elements stay, bool [..., num_features]; arguments as in `counter_dropout`.

    `reference_keep` is the same function of one element.
    """
    mixed = _mix64(tokens ^ (key if isinstance(key, Tensor) else _signed64(key)))
    a, b = mixed.unsqueeze(-1).view(torch.int32).unsqueeze(-2).unbind(-1)  # each [..., 1]: low and high half
    first = feature_start // 2
    pairs = torch.arange(
        first, (feature_start + num_features + 1) // 2, dtype=torch.int32, device=tokens.device
    )
    hashed = a + _mix32(pairs + 1)
    hashed = hashed.bitwise_xor_(_shifted(hashed, 16)).mul_(_signed32(_MIX32[0])).add_(b)
    hashed = hashed.bitwise_xor_(_shifted(hashed, 13)).mul_(_signed32(_MIX32[1]))
    hashed = hashed.bitwise_xor_(_shifted(hashed, 16))
    lanes = hashed.view(torch.int16)  # the low half of each pair first
    start = feature_start - 2 * first
    return lanes[..., start : start + num_features] >= round(p * LEVELS) - LEVELS // 2


def reference_keep(sample: int, position: int, feature: int, p: float, key: int) -> bool:
    """Returns whether one element stays; the definition of the mask, in Python's unbounded integers."""
    row = _reference_mix64((sample * _GOLDEN + 1) % 2**64)
    token = _reference_mix64((row + position * _GOLDEN) % 2**64)
    mixed = _reference_mix64(token ^ key % 2**64)
    a, b = mixed % 2**32, mixed >> 32
    pair, lane = divmod(feature, 2)
    h = (a + _reference_mix32(pair + 1)) % 2**32
    h = ((h ^ h >> 16) * _MIX32[0] + b) % 2**32
    h = (h ^ h >> 13) * _MIX32[1] % 2**32
    h ^= h >> 16
    half = h >> 16 if lane else h % 2**16
    signed = half - 2**16 if half >= 2**15 else half
    return signed >= round(p * LEVELS) - LEVELS // 2


def _reference_mix64(x: int) -> int:
    x = (x ^ x >> 30) * _MIX64[0] % 2**64
    x = (x ^ x >> 27) * _MIX64[1] % 2**64
    return x ^ x >> 31


def _reference_mix32(x: int) -> int:
    x = (x ^ x >> 16) * _MIX32[0] % 2**32
    x = (x ^ x >> 13) * _MIX32[1] % 2**32
    return x ^ x >> 16


def _mix64(x: Tensor) -> Tensor:
    """SplitMix64's finaliser of int64 values, whose products wrap."""
    x = (x ^ _shifted(x, 30)) * _signed64(_MIX64[0])
    x = (x ^ _shifted(x, 27)) * _signed64(_MIX64[1])
    return x ^ _shifted(x, 31)


def _mix32(x: Tensor) -> Tensor:
    """MurmurHash3's finaliser of int32 values, whose products wrap."""
    x = (x ^ _shifted(x, 16)) * _signed32(_MIX32[0])
    x = (x ^ _shifted(x, 13)) * _signed32(_MIX32[1])
    return x ^ _shifted(x, 16)


def _shifted(x: Tensor, bits: int) -> Tensor:
    """A logical right shift: torch shifts signed integers arithmetically, and has no shift of unsigned ones."""
    width = 64 if x.dtype == torch.int64 else 32
    return (x >> bits).bitwise_and_((1 << (width - bits)) - 1)


def _signed64(value: int) -> int:
    return (value + 2**63) % 2**64 - 2**63


def _signed32(value: int) -> int:
    return (value + 2**31) % 2**32 - 2**31
