"""Integer hashing of seeds."""

from __future__ import annotations

from torch import Tensor

_MASK = 0xFFFFFFFF


def fold_in(seeds: Tensor, values: Tensor) -> Tensor:
    """Returns 31-bit seeds that depend on `seeds` and `values`, elementwise; both are int64.

    The finaliser of MurmurHash3 (public domain, A. Appleby) over 32 bits, the same on every device.
    """
    mixed = (seeds ^ (values * 0x9E3779B1 & _MASK)) & _MASK
    mixed = ((mixed ^ (mixed >> 16)) * 0x85EBCA6B) & _MASK
    mixed = ((mixed ^ (mixed >> 13)) * 0xC2B2AE35) & _MASK
    return (mixed ^ (mixed >> 16)) & 0x7FFFFFFF
