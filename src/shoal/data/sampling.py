"""Micro-batches from a stream of conversations: limits that count padding, filters, and buckets of like
length.

A limit in tokens counts padding too, unless conversations are packed, where it is the sum of their lengths.

This reads metadata only and is the same on every rank. lhotse's samplers close a batch after the example that
broke its limit, and count a batch by its examples' sum in places; here a limit is never exceeded, so the
batcher is our own.
"""

from __future__ import annotations

import random
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from shoal.data.conversation import Conversation


@dataclass(frozen=True)
class Sized:
    """A conversation with what a padded batch of it costs.

    Args:
        conversation: The example.
        longest_audio: Seconds of its longest audio turn.
        audio_rows: Number of its audio turns.
        tokens: Text plus audio positions; 0 where nothing in the configuration counts tokens.
        length: What buckets compare: seconds of audio, or tokens.
    """

    conversation: Conversation
    longest_audio: float
    audio_rows: int
    tokens: int
    length: float


@dataclass(frozen=True)
class Shape:
    """What the size of a batch follows from: rows and the longest row, of the text and of the audio, and sums."""

    examples: int = 0
    longest_tokens: int = 0
    tokens: int = 0
    squared_tokens: int = 0
    audio_rows: int = 0
    longest_audio: float = 0.0

    def plus(self, item: Sized) -> Shape:
        """Returns the shape after one more example."""
        return Shape(
            self.examples + 1,
            max(self.longest_tokens, item.tokens),
            self.tokens + item.tokens,
            self.squared_tokens + item.tokens**2,
            self.audio_rows + item.audio_rows,
            max(self.longest_audio, item.longest_audio),
        )


@dataclass(frozen=True)
class Budget:
    """Limits of one micro-batch; None is no limit.

    Audio costs rows x (longest + longest^2 / quadratic_duration) seconds, tokens cost examples x (longest +
    longest^2 / quadratic_factor). The quadratic term, where set, charges long rows for attention. `packed`
    conversations cost the sum of their tokens, each with its quadratic term; the audio is padded all the same.
    """

    batch_size: int | None = None
    batch_duration: float | None = None
    batch_tokens: int | None = None
    quadratic_duration: float | None = None
    quadratic_factor: float | None = None
    packed: bool = False

    def __post_init__(self) -> None:
        if self.batch_size is None and self.batch_duration is None and self.batch_tokens is None:
            raise ValueError(
                "batch_size, batch_duration, batch_tokens: all are unset; set at least one limit"
            )

    def allows(self, shape: Shape) -> bool:
        """Returns whether a batch of this shape is within every limit."""
        return self.filled(shape) <= 1.0

    def filled(self, shape: Shape) -> float:
        """Returns which share of the nearest limit a batch of this shape takes; above 1 it breaks it."""
        shares = [0.0]
        if self.batch_size is not None:
            shares.append(shape.examples / self.batch_size)
        if self.batch_duration is not None:  # durations are sums of rounded numbers
            shares.append(self._seconds(shape) / (self.batch_duration * (1 + 1e-9)))
        if self.batch_tokens is not None:
            shares.append(self._tokens(shape) / self.batch_tokens)
        return max(shares)

    def full(self, shape: Shape) -> bool:
        """Returns whether not even an example of one token and no audio could be added."""
        if self.packed and self.batch_tokens is not None and self._tokens(shape) >= self.batch_tokens:
            return True
        return self.batch_size is not None and shape.examples >= self.batch_size

    def _seconds(self, shape: Shape) -> float:
        penalty = shape.longest_audio**2 / self.quadratic_duration if self.quadratic_duration else 0.0
        return shape.audio_rows * (shape.longest_audio + penalty)

    def _tokens(self, shape: Shape) -> float:
        factor = self.quadratic_factor
        if self.packed:
            return shape.tokens + (shape.squared_tokens / factor if factor else 0.0)
        penalty = shape.longest_tokens**2 / factor if factor else 0.0
        return shape.examples * (shape.longest_tokens + penalty)


@dataclass(frozen=True)
class Filters:
    """Which examples are left out, by name of the reason."""

    min_duration: float | None = None
    max_duration: float | None = None
    min_tokens: int | None = None
    max_tokens: int | None = None

    def reason_against(self, item: Sized) -> str | None:
        """Returns why an example is left out, or None."""
        duration = item.conversation.duration
        if not item.conversation.has_target:
            return "no_assistant_text"
        if any(turn.cut.duration <= 0 for turn in item.conversation.audio_turns):
            return "zero_duration"
        if self.min_duration is not None and duration < self.min_duration:
            return "min_duration"
        if self.max_duration is not None and duration > self.max_duration:
            return "max_duration"
        if self.min_tokens is not None and item.tokens < self.min_tokens:
            return "min_tokens"
        if self.max_tokens is not None and item.tokens > self.max_tokens:
            return "max_tokens"
        return None


@dataclass(frozen=True)
class Buckets:
    """Examples of like length are batched together; bucket i holds lengths up to ``bounds[i]``.

    Args:
        bounds: Upper bounds, ascending, in seconds or tokens; lengths above the last one form one more
            bucket.
        budgets: One budget for each of the ``len(bounds) + 1`` buckets; None for the last one leaves its
            examples out.
        buffer_size: Number of examples that may wait in complete batches, to mix the order of buckets.
    """

    bounds: tuple[float, ...]
    budgets: tuple[Budget | None, ...]
    buffer_size: int = 0

    def __post_init__(self) -> None:
        if list(self.bounds) != sorted(set(self.bounds)):
            raise ValueError(f"bucket_duration_bins: {list(self.bounds)} must ascend")

    @staticmethod
    def single(budget: Budget) -> Buckets:
        """Returns one bucket for all lengths: no bucketing."""
        return Buckets((), (budget,))

    @staticmethod
    def of(
        bounds: Sequence[float],
        budget: Callable[[int | None], Budget],
        sizes: Sequence[int] | None,
        buffer_size: int,
    ) -> Buckets:
        """Builds buckets from configuration values.

        Args:
            bounds: Upper bounds of the buckets.
            budget: Gives the budget for a fixed batch size of a bucket, or for None.
            sizes: Batch sizes, one for each bound (longer examples are left out) or one more; None for none.
            buffer_size: See the class.

        Raises:
            ValueError: if the number of sizes does not fit.
        """
        if sizes is None:
            return Buckets(tuple(bounds), (budget(None),) * (len(bounds) + 1), buffer_size)
        if len(sizes) not in (len(bounds), len(bounds) + 1):
            raise ValueError(
                f"bucket_batch_size: has {len(sizes)} entries for {len(bounds)} bounds; give one per "
                "bound, or one more for what is longer than the last"
            )
        budgets: list[Budget | None] = [budget(size) for size in sizes]
        return Buckets(tuple(bounds), tuple(budgets + [None] * (len(bounds) + 1 - len(sizes))), buffer_size)


def estimate_bounds(lengths: Iterable[float], num_buckets: int) -> tuple[float, ...]:
    """Returns num_buckets - 1 bounds or fewer, so that the buckets hold about the same sum of lengths."""
    ordered = sorted(lengths)
    share = sum(ordered) / num_buckets
    bounds: list[float] = []
    running = 0.0
    for length in ordered:
        running += length
        if running >= share * (len(bounds) + 1) and len(bounds) < num_buckets - 1:
            bounds.append(length)
    return tuple(sorted(set(bounds)))


class SkipLog:
    """Counts what was left out, by reason, and hands each example's name to `report`."""

    def __init__(self, report: Callable[[str, str], None]) -> None:
        self.counts: Counter[str] = Counter()
        self._report = report

    def skip(self, reason: str, conversation: Conversation) -> None:
        """Counts one example."""
        self.counts[reason] += 1
        self._report(reason, conversation.id)


def compose(
    items: Iterable[Sized],
    buckets: Buckets,
    *,
    skips: SkipLog,
    rng: random.Random | None,
    drop_last: bool,
    oversize_alone: bool,
    num_open: int = 1,
) -> Iterator[tuple[Conversation, ...]]:
    """Groups examples into micro-batches, none above its budget.

    Each bucket fills its open batches in the order of arrival: an example goes to the one that it fills most (best
    fit, the oldest on ties). When it fits none and `num_open` are open, the fullest is closed.
    With `rng`, closed batches wait in a pool until they hold more than ``buckets.buffer_size`` examples, and
    are taken from it at random: that mixes short and long batches. Without, they come as they close.

    Args:
        items: Examples in order.
        buckets: Bounds and budgets.
        skips: Where left-out examples are counted.
        rng: Draws from the pool; None keeps the order in which batches close.
        drop_last: Leaves out batches that the end of the data left unfinished.
        oversize_alone: An example above its whole budget is a batch of its own; else it is left out and
            counted.
        num_open: Batches that each bucket holds open; 1 closes a batch when the next example does not fit.
    """
    closed = _closed(
        items,
        buckets,
        skips=skips,
        drop_last=drop_last,
        oversize_alone=oversize_alone,
        num_open=num_open,
    )
    return pooled(closed, buckets.buffer_size, rng)


@dataclass(eq=False)
class _Open:
    """A batch that may still grow."""

    conversations: list[Conversation]
    shape: Shape


def _closed(
    items: Iterable[Sized],
    buckets: Buckets,
    *,
    skips: SkipLog,
    drop_last: bool,
    oversize_alone: bool,
    num_open: int,
) -> Iterator[tuple[Conversation, ...]]:
    """Yields batches in the order in which they close."""
    opened: list[list[_Open]] = [[] for _ in buckets.budgets]
    for item in items:
        index = bisect_left(buckets.bounds, item.length)
        budget, batches = buckets.budgets[index], opened[index]
        if budget is None:
            skips.skip("longer_than_last_bucket", item.conversation)
        elif budget.allows(Shape().plus(item)):
            yield from _placed(item, batches, budget, num_open)
        elif oversize_alone:
            yield (item.conversation,)
        else:
            skips.skip("above_batch_budget", item.conversation)
    for budget, batches in zip(buckets.budgets, opened, strict=True):
        while batches and budget is not None:
            batch = _take_fullest(batches, budget)
            for conversation in batch if drop_last else ():
                skips.skip("drop_last", conversation)
            if not drop_last:
                yield batch


def _placed(
    item: Sized, batches: list[_Open], budget: Budget, num_open: int
) -> Iterator[tuple[Conversation, ...]]:
    """Puts an item into one of the open batches; yields batches that this closes."""
    grown = [(budget.filled(batch.shape.plus(item)), batch) for batch in batches]
    fitting = [(filled, batch) for filled, batch in grown if filled <= 1.0]
    if fitting:
        _, chosen = max(fitting, key=lambda pair: pair[0])
    else:
        if len(batches) == num_open:
            yield _take_fullest(batches, budget)
        chosen = _Open([], Shape())
        batches.append(chosen)
    chosen.conversations.append(item.conversation)
    chosen.shape = chosen.shape.plus(item)
    if budget.full(chosen.shape):
        batches.remove(chosen)
        yield tuple(chosen.conversations)


def _take_fullest(batches: list[_Open], budget: Budget) -> tuple[Conversation, ...]:
    fullest = max(batches, key=lambda batch: budget.filled(batch.shape))
    batches.remove(fullest)
    return tuple(fullest.conversations)


def pooled(
    batches: Iterable[tuple[Conversation, ...]], buffer_size: int, rng: random.Random | None
) -> Iterator[tuple[Conversation, ...]]:
    """Yields the batches at random from a pool of about `buffer_size` examples; in order without `rng`."""
    if rng is None:
        yield from batches
        return
    pool: list[tuple[Conversation, ...]] = []
    held = 0
    for batch in batches:
        pool.append(batch)
        held += len(batch)
        while held > buffer_size:
            chosen = _take(pool, rng)
            held -= len(chosen)
            yield chosen
    while pool:
        yield _take(pool, rng)


def _take(pool: list[tuple[Conversation, ...]], rng: random.Random) -> tuple[Conversation, ...]:
    index = rng.randrange(len(pool))
    pool[index], pool[-1] = pool[-1], pool[index]
    return pool.pop()
