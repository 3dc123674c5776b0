"""The global generators of a process and of its data workers; what else is random is seeded by its name."""

from __future__ import annotations

import random
import secrets

import numpy as np
import torch

from shoal.config.seeds import SEED_BITS, derive_seed


def draw_entropy() -> int:
    """Returns 31 bits from the operating system, for ``shard_seed: trng``; draw on one rank and broadcast."""
    return secrets.randbits(SEED_BITS)


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
