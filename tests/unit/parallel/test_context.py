"""Which rank holds which token, and which pairs of query and key each step of the ring computes: without processes."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from shoal.kernels.attention_blocks import blocks
from shoal.parallel.context.ring import Pass, ring_passes, score_counts
from shoal.parallel.context.share import _digest_of_all
from shoal.parallel.context.split import (
    DualChunks,
    Places,
    borders_of,
    gathered_places,
    local_index,
    local_places,
)
from shoal.parallel.context.ulysses import kv_copies

CPU = torch.device("cpu")
RAGGED = [(7, 3, 1), (0,), (1,), (), (0, 1, 0), (5, 0, 17, 2, 33), (64, 8)]
LAYOUTS = [(lengths, size) for lengths in RAGGED for size in (1, 2, 3, 4)]


def of_ranks(lengths: tuple[int, ...], size: int) -> list[DualChunks]:
    return [DualChunks(lengths, size, rank) for rank in range(size)]


def positions(places: Places, total: int) -> list[int]:
    return list(range(total))[places] if isinstance(places, slice) else places.tolist()


@pytest.mark.parametrize(("lengths", "size"), LAYOUTS)
def test_every_token_lies_on_one_rank_and_gathering_restores_the_order(
    lengths: tuple[int, ...], size: int
) -> None:
    starts = borders_of(lengths)[:-1]
    held = [local_index(layout, starts, CPU) for layout in of_ranks(lengths, size)]
    assert len({len(index) for index, _ in held}) == 1, "all ranks hold equally many"
    joined = torch.cat([torch.where(is_real, index, -1) for index, is_real in held])
    assert sorted(joined[joined >= 0].tolist()) == list(range(sum(lengths)))
    for layout in of_ranks(lengths, size):
        assert torch.equal(joined[gathered_places(layout, CPU)], torch.arange(sum(lengths)))
    for layout, (index, is_real) in zip(of_ranks(lengths, size), held, strict=True):
        both = positions(local_places(layout, layout.rank, None, CPU), layout.num_local)
        assert both == is_real.nonzero()[:, 0].tolist()
        halves = [
            positions(local_places(layout, layout.rank, half, CPU), layout.num_local) for half in (0, 1)
        ]
        assert sorted(halves[0] + halves[1]) == both
        assert index.max() < max(1, sum(lengths)) and index.min() >= 0, (
            "padding points at a token that exists"
        )


def test_chunks_are_dealt_from_both_ends() -> None:
    held = [local_index(layout, (0,), CPU)[0].tolist() for layout in of_ranks((16,), 4)]
    assert held == [[0, 1, 14, 15], [2, 3, 12, 13], [4, 5, 10, 11], [6, 7, 8, 9]]
    # Three tokens on two ranks: chunks of one, the last of them padding, which repeats the last token.
    assert [local_index(layout, (10,), CPU)[0].tolist() for layout in of_ranks((3,), 2)] == [
        [10, 12],
        [11, 12],
    ]


def pairs_of(layout: DualChunks, causal: bool, window: int | None) -> Counter[tuple[int, int]]:
    """The pairs of global tokens that a rank computes with, from the blocks that its kernel would run."""
    starts = borders_of(layout.lengths)[:-1]
    found: Counter[tuple[int, int]] = Counter()
    for step, calls in enumerate(ring_passes(layout, causal, window, CPU)):
        source = replace(layout, rank=(layout.rank - step) % layout.size)
        for call in calls:
            queries = _tokens(layout, starts, call.queries)
            keys = _tokens(source, starts, call.keys)
            found.update(_seen(call, queries, keys, window))
    return found


def _tokens(layout: DualChunks, starts: tuple[int, ...], places: Places) -> Tensor:
    return local_index(layout, starts, CPU)[0][places]


def _seen(call: Pass, queries: Tensor, keys: Tensor, window: int | None) -> list[tuple[int, int]]:
    pairs = []
    for block in blocks(call.part.cu_q, call.part.cu_k, call.causal, window, None, call.part.positions):
        shape = (block.q_stop - block.q_start, block.k_stop - block.k_start)
        seen = torch.ones(shape, dtype=torch.bool)
        if block.lower_triangle:
            seen = seen.tril()
        elif block.mask is not None:
            seen = block.mask.additive(torch.float32, CPU) == 0
        for row, column in seen.nonzero().tolist():
            pairs.append((int(queries[block.q_start + row]), int(keys[block.k_start + column])))
    return pairs


def pairs_by_definition(
    lengths: tuple[int, ...], causal: bool, window: int | None
) -> Counter[tuple[int, int]]:
    return Counter(
        (start + query, start + key)
        for start, length in zip(borders_of(lengths), lengths, strict=False)
        for query in range(length)
        for key in range(query + 1 if causal else length)
        if window is None or abs(query - key) < window
    )


@pytest.mark.parametrize("window", [None, 1, 3, 9])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("lengths", "size"), LAYOUTS)
def test_the_ring_computes_every_pair_once(
    lengths: tuple[int, ...], size: int, causal: bool, window: int | None
) -> None:
    ranks = [pairs_of(layout, causal, window) for layout in of_ranks(lengths, size)]
    assert sum(ranks, Counter()) == pairs_by_definition(lengths, causal, window)
    counts = score_counts(DualChunks(lengths, size, 0), causal, window)
    assert counts == [rank.total() for rank in ranks]


def test_causal_work_is_balanced_on_ragged_packs_of_long_documents() -> None:
    generator = random.Random(0)
    for _ in range(20):
        size = generator.choice([2, 4, 8])
        lengths = tuple(generator.randrange(50 * size, 1000 * size) for _ in range(generator.randrange(1, 9)))
        counts = score_counts(DualChunks(lengths, size, 0))
        assert max(counts) / (sum(counts) / size) - 1 < 0.05
    exact = score_counts(DualChunks((1024, 64), 4, 0))
    assert len(set(exact)) == 1, "what 2 * size divides is the same work everywhere"


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "copies"), [(12, 3, 4, 4), (12, 3, 2, 2), (8, 8, 4, 1), (6, 1, 6, 6)]
)
def test_key_heads_are_repeated_no_more_than_needed(
    heads: int, kv_heads: int, size: int, copies: int
) -> None:
    assert kv_copies(heads, kv_heads, size) == copies


@pytest.mark.parametrize("name", ["input_ids", "sample_seeds", "audios"])
def test_the_digest_of_a_micro_batch_covers_all_that_it_is_computed_from(name: str) -> None:
    batch = {
        "input_ids": torch.arange(6)[None],
        "sample_seeds": torch.arange(2),
        "audios": torch.randn(2, 5, generator=torch.Generator().manual_seed(0)),
        "audio_lens": torch.tensor([5, 3]),
        "is_empty": False,
    }
    other = {**batch, name: batch[name] + (torch.arange(batch[name].shape[-1]) == 1)}  # type: ignore[operator]
    same = {key: value.clone() if isinstance(value, Tensor) else value for key, value in batch.items()}
    assert _digest_of_all(same) == _digest_of_all(batch) != _digest_of_all(other)
    nothing = {"audios": torch.zeros(0, 0), "audio_lens": torch.zeros(0, dtype=torch.int64)}
    assert 0 <= _digest_of_all(nothing) < 2**63
