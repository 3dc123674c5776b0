"""The order of an epoch: shards shuffled, sources interleaved by weight, then a shuffle buffer.

Every example of every source comes exactly once an epoch. All randomness is a function of the order seed and
the epoch, so each rank computes the same order.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import TypeVar

from shoal.config.seeds import derive_seed
from shoal.data.conversation import Conversation
from shoal.data.sources import Source

T = TypeVar("T")


def read_epoch(
    sources: Sequence[Source], *, order_seed: int, epoch: int, shuffle: bool, buffer_size: int
) -> Iterator[Conversation]:
    """Yields every example of every source once.

    Args:
        sources: What `open_sources` returned.
        order_seed: Decides the order together with `epoch`.
        epoch: Number of the pass over the data.
        shuffle: False keeps the order inside each source; the interleaving of several is still drawn.
        buffer_size: Number of examples in the shuffle buffer; one as large as the corpus shuffles fully.
    """
    streams = []
    for index, source in enumerate(sources):
        shards = list(source.shards)
        if shuffle:
            random.Random(derive_seed("shards", order_seed, epoch, index)).shuffle(shards)
        streams.append(chain.from_iterable(shard.read() for shard in shards))
    rng = random.Random(derive_seed("mix", order_seed, epoch))
    mixed = interleave(streams, [source.share for source in sources], rng)
    if not shuffle:
        return mixed
    return shuffled(mixed, buffer_size, random.Random(derive_seed("shuffle", order_seed, epoch)))


def interleave(streams: Sequence[Iterator[T]], weights: Sequence[float], rng: random.Random) -> Iterator[T]:
    """Draws from the streams in proportion to `weights` until all are exhausted; each item comes once."""
    if len(streams) == 1:
        yield from streams[0]
        return
    live, live_weights = list(streams), list(weights)
    while live:
        (index,) = rng.choices(range(len(live)), live_weights)
        try:
            yield next(live[index])
        except StopIteration:
            del live[index], live_weights[index]


def shuffled(items: Iterable[T], buffer_size: int, rng: random.Random) -> Iterator[T]:
    """Yields the items in a random order, holding at most `buffer_size` of them."""
    buffer: list[T] = []
    for item in items:
        if len(buffer) < buffer_size:
            buffer.append(item)
            continue
        index = rng.randrange(buffer_size)
        buffer[index], item = item, buffer[index]
        yield item
    rng.shuffle(buffer)
    yield from buffer
