"""Seeds of 31 bits, derived by a stable hash from names and numbers, never from a rank or a worker.

31 bits because NumPy and lhotse reject seeds at and above 2^32, also after adding a small offset.
"""

from __future__ import annotations

import hashlib
import random
import secrets

import numpy as np
import torch

_BITS = 31


def derive_seed(*parts: int | str) -> int:
    """Returns a seed in [0, 2^31), a function of `parts` alone on every machine."""
    # repr keeps ("1", 2) and (1, "2") apart.
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> (64 - _BITS)


def draw_entropy() -> int:
    """Returns 31 bits from the operating system, for ``shard_seed: trng``; draw on one rank and broadcast."""
    return secrets.randbits(_BITS)


def seed_everything(seed: int) -> None:
    """Seeds the global generators of random, NumPy and torch in this process."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def worker_init(worker_id: int) -> None:
    """Makes a data worker independent of how many there are.

    Whatever is random about a sample is seeded from the sample, so the global generators of a worker should
    not matter; they are set alike in all workers, which makes a use of them show up as repetition in a test
    rather than as a result that changes with ``num_workers``.
    """
    seed_everything(derive_seed("worker"))
