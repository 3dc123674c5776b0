"""The one stream of global micro-batches of a data set: sources, order, filters and batching put together.

It is a function of (configuration, order seed, epoch) alone. Neither the number of data-parallel ranks nor
the number of workers enters it, so any layout can deal it out and any run can replay it.
"""

from __future__ import annotations

import logging
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from itertools import islice

from shoal.config.seeds import derive_seed
from shoal.config.speech import DatasetConfig
from shoal.data.conversation import Conversation, PromptEncoder, token_count
from shoal.data.mixing import read_epoch
from shoal.data.sampling import Buckets, Budget, Filters, Sized, SkipLog, compose, estimate_bounds
from shoal.data.sources import Source, open_sources
from shoal.data.steps import EpochStream

logger = logging.getLogger(__name__)

# Further ones are only counted, so that a filter on a large corpus does not flood the log.
_NAMED_PER_REASON = 10

OPEN_PACKS = 16
"""Packs that are filled at once, in each bucket; more leave less room in each and mix neighbours further apart."""


class MicroBatchStream:
    """Composes the micro-batches of a data set, metadata only.

    Args:
        config: The data set.
        prompts: Measures text in tokens; only asked when the configuration counts tokens.
        shuffle: Overrides config.shuffle; validation passes False.
        key: Key path of the configuration, for messages.
        packed: Conversations are packed instead of padded: `batch_tokens` bounds the sum of their tokens, and packs
            are filled best-fit.
        report_skips: Whether this process names left-out examples in its log; one rank of a job is enough.
        allow_commands: True after the user said --allow-commands.

    Raises:
        ValueError: naming the key, if the configuration lacks a limit or a source, or its sources are
            refused.
    """

    def __init__(
        self,
        config: DatasetConfig,
        prompts: PromptEncoder,
        *,
        shuffle: bool,
        key: str = "data",
        packed: bool = False,
        report_skips: bool = True,
        allow_commands: bool = False,
    ) -> None:
        self.config = config
        self.key = key
        self.drop_last = config.drop_last
        self._prompts = prompts
        self._shuffle = shuffle
        self._report_skips = report_skips
        self._budget = _budget_of(config, key, packed)
        # Without a limit in tokens a pack has no room to be filled best, and holds what a padded batch would.
        self._num_open = OPEN_PACKS if packed and config.batch_tokens is not None else 1
        self._filters = Filters(
            config.min_duration, config.max_duration, config.min_tokens, config.max_tokens
        )
        self._sources: tuple[Source, ...] = open_sources(config, key=key, allow_commands=allow_commands)
        self._length_in_tokens = config.use_multimodal_sampling or config.batch_tokens is not None
        self._counts_tokens = self._length_in_tokens or bool(config.min_tokens or config.max_tokens)

    def epoch(self, epoch: int, order_seed: int) -> EpochStream:
        """Returns the micro-batches of one epoch in their order."""
        config = self.config
        skips = SkipLog(self._reporter(epoch))
        examples = read_epoch(
            self._sources,
            order_seed=order_seed,
            epoch=epoch,
            shuffle=self._shuffle,
            buffer_size=config.shuffle_buffer_size,
        )
        rng = random.Random(derive_seed("buckets", order_seed, epoch)) if self._shuffle else None
        batches = compose(
            self._kept(examples, skips),
            self._buckets,
            skips=skips,
            rng=rng,
            drop_last=config.drop_last,
            oversize_alone=config.oversize == "alone",
            num_open=self._num_open,
        )
        return EpochStream(batches, skips.counts)

    @cached_property
    def _buckets(self) -> Buckets:
        """The buckets, estimated once from the unshuffled head of the data: the same in every epoch."""
        config = self.config
        if not _wants_buckets(config):
            return Buckets.single(self._budget)
        bounds = config.bucket_duration_bins
        if bounds is None:
            head = islice(self._unshuffled(), config.num_cuts_for_bins_estimate)
            bounds = estimate_bounds((item.length for item in head), config.num_buckets)
            logger.info("%s: estimated bucket bounds %s", self.key, [round(bound, 3) for bound in bounds])
        return Buckets.of(bounds, self._bucket_budget, config.bucket_batch_size, config.bucket_buffer_size)

    def _bucket_budget(self, batch_size: int | None) -> Budget:
        return self._budget if batch_size is None else replace(self._budget, batch_size=batch_size)

    def _unshuffled(self) -> Iterator[Sized]:
        examples = read_epoch(self._sources, order_seed=0, epoch=0, shuffle=False, buffer_size=1)
        return self._kept(examples, SkipLog(lambda reason, name: None))

    def _kept(self, examples: Iterator[Conversation], skips: SkipLog) -> Iterator[Sized]:
        for conversation in examples:
            item = self._measure(conversation)
            if reason := self._filters.reason_against(item):
                skips.skip(reason, conversation)
            else:
                yield item

    def _measure(self, conversation: Conversation) -> Sized:
        tokens = 0
        if self._counts_tokens:
            tokens = token_count(conversation, self._prompts, self.config.token_equivalent_duration)
        rows = len(conversation.audio_turns)
        if rows == 0 and self._budget.batch_size is None and self._budget.batch_tokens is None:
            raise ValueError(
                f"{self.key}: conversation {conversation.id!r} has no audio, and batch_duration is the "
                "only limit, so a batch of such conversations would never be full; set batch_tokens or "
                "batch_size as well"
            )
        length = float(tokens) if self._length_in_tokens else conversation.duration
        return Sized(conversation, conversation.longest_audio, rows, tokens, length)

    def _reporter(self, epoch: int) -> SkipReporter:
        return SkipReporter(self.key, epoch, self._report_skips)


class SkipReporter:
    """Names the first examples left out for each reason in the log, once an epoch."""

    def __init__(self, key: str, epoch: int, enabled: bool) -> None:
        self._key = key
        self._epoch = epoch
        self._enabled = enabled
        self._named: Counter[str] = Counter()

    def __call__(self, reason: str, name: str) -> None:
        self._named[reason] += 1
        if not self._enabled or self._named[reason] > _NAMED_PER_REASON:
            return
        last = ", further ones are only counted" if self._named[reason] == _NAMED_PER_REASON else ""
        logger.warning("%s: epoch %d leaves out %r (%s)%s", self._key, self._epoch, name, reason, last)


def _wants_buckets(config: DatasetConfig) -> bool:
    return (
        config.use_bucketing
        or config.bucket_duration_bins is not None
        or config.bucket_batch_size is not None
    )


def _budget_of(config: DatasetConfig, key: str, packed: bool) -> Budget:
    if not config.measure_total_length:
        raise ValueError(
            f"{key}.measure_total_length: false is not supported, because a micro-batch is padded to its "
            "whole length, answers included; set it to true"
        )
    sizes = config.bucket_batch_size
    if (
        config.batch_size is None
        and config.batch_duration is None
        and config.batch_tokens is None
        and not sizes
    ):
        raise ValueError(
            f"{key}: batch_size, batch_duration, batch_tokens and bucket_batch_size are all unset; set at "
            "least one limit of a micro-batch"
        )
    return Budget(
        # Fixed sizes replace this one bucket by bucket.
        batch_size=config.batch_size if not sizes else max(sizes),
        batch_duration=config.batch_duration,
        batch_tokens=config.batch_tokens,
        quadratic_duration=config.quadratic_duration,
        quadratic_factor=config.quadratic_factor,
        packed=packed,
    )
