"""Seeds of 31 bits, derived by a stable hash from names and numbers, never from a rank or a worker.

31 bits because NumPy and lhotse reject seeds at and above 2^32, also after adding a small offset.
"""

from __future__ import annotations

import hashlib

SEED_BITS = 31


def derive_seed(*parts: int | str) -> int:
    """Returns a seed in [0, 2^31), a function of `parts` alone on every machine.

    >>> derive_seed(1, "llm.lm_head") == derive_seed(1, "llm.lm_head") != derive_seed("1", "llm.lm_head")
    True
    """
    return _hashed(parts) >> (64 - SEED_BITS)


def derive_key(*parts: int | str) -> int:
    """Returns a key in [0, 2^63) for a hash of 64-bit integers; otherwise as `derive_seed`."""
    return _hashed(parts) >> 1


def _hashed(parts: tuple[int | str, ...]) -> int:
    # repr keeps ("1", 2) and (1, "2") apart.
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "big")
