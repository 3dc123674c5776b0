"""Micro-batches stay within every limit, lose nothing, and mix short and long."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.data.conversation import Conversation
from shoal.data.sampling import Buckets, Budget, Filters, Shape, Sized, SkipLog, compose, estimate_bounds


def item(number, seconds=1.0, rows=1, tokens=1, length=None):
    return Sized(Conversation(str(number), ()), seconds, rows, tokens, seconds if length is None else length)


def run(items, buckets, *, rng=None, drop_last=False, oversize_alone=False, num_open=1):
    """Returns the batches as lists of items, and what was skipped by reason."""
    by_id = {one.conversation.id: one for one in items}
    skipped: list[tuple[str, str]] = []
    log = SkipLog(lambda reason, name: skipped.append((reason, name)))
    batches = compose(
        items,
        buckets,
        skips=log,
        rng=rng,
        drop_last=drop_last,
        oversize_alone=oversize_alone,
        num_open=num_open,
    )
    return [[by_id[conversation.id] for conversation in batch] for batch in batches], skipped


def padded_seconds(batch):
    return sum(one.audio_rows for one in batch) * max(one.longest_audio for one in batch)


def padded_tokens(batch):
    return len(batch) * max(one.tokens for one in batch)


sized = st.builds(
    lambda seconds, rows, tokens: (seconds, rows, tokens),
    st.floats(0.01, 12.0),
    st.integers(1, 3),
    st.integers(1, 60),
)


@settings(max_examples=60, deadline=None)
@given(
    shapes=st.lists(sized, max_size=40),
    size=st.sampled_from([None, 1, 3]),
    seconds=st.sampled_from([None, 5.0, 20.0]),
    tokens=st.sampled_from([40, 200]),
    bounds=st.sampled_from([(), (2.0,), (1.0, 4.0, 8.0)]),
    seed=st.sampled_from([None, 0, 1]),
    alone=st.booleans(),
    pool=st.sampled_from([0, 7]),
)
def test_no_batch_exceeds_a_limit_and_nothing_is_lost(
    shapes, size, seconds, tokens, bounds, seed, alone, pool
):
    items = [item(number, *shape) for number, shape in enumerate(shapes)]
    budget = Budget(size, seconds, tokens)
    buckets = Buckets(bounds, (budget,) * (len(bounds) + 1), pool)
    rng = None if seed is None else random.Random(seed)
    batches, skipped = run(items, buckets, rng=rng, oversize_alone=alone)
    for batch in batches:
        if alone and len(batch) == 1:
            continue
        assert size is None or len(batch) <= size
        assert seconds is None or padded_seconds(batch) <= seconds * (1 + 1e-9)
        assert padded_tokens(batch) <= tokens
        edges = [sum(one.length > bound for bound in bounds) for one in batch]
        assert len(set(edges)) == 1, "a batch mixes buckets"
    seen = [one.conversation.id for batch in batches for one in batch] + [name for _, name in skipped]
    assert Counter(seen) == Counter(one.conversation.id for one in items)
    assert not (alone and skipped)
    assert {reason for reason, _ in skipped} <= {"above_batch_budget"}
    for _, name in skipped:
        assert not budget.allows(Shape().plus(items[int(name)]))


def test_a_batch_is_filled_to_the_limit():
    batches, _ = run([item(n, 2.0) for n in range(10)], Buckets.single(Budget(batch_duration=6.0)))
    assert [len(batch) for batch in batches] == [3, 3, 3, 1]


def test_padding_counts():
    # By sum all three fit into 10 s; padded to the longest they are 3 x 6 s.
    items = [item(0, 6.0), item(1, 1.0), item(2, 1.0)]
    batches, _ = run(items, Buckets.single(Budget(batch_duration=10.0)))
    assert [len(batch) for batch in batches] == [1, 2]


def test_every_audio_turn_is_a_row():
    items = [item(0, 2.0, rows=3), item(1, 2.0, rows=2)]
    batches, _ = run(items, Buckets.single(Budget(batch_duration=8.0)))
    assert [len(batch) for batch in batches] == [1, 1]


@pytest.mark.parametrize(("quadratic", "sizes"), [(None, [4]), (10.0, [2, 2]), (5.0, [1, 1, 1, 1])])
def test_the_quadratic_terms_charge_long_rows(quadratic, sizes):
    items = [item(n, 10.0, tokens=10) for n in range(4)]
    seconds = Budget(batch_duration=40.0, quadratic_duration=quadratic)
    tokens = Budget(batch_tokens=40, quadratic_factor=quadratic)
    for budget in (seconds, tokens):
        batches, _ = run(items, Buckets.single(budget))
        assert [len(batch) for batch in batches] == sizes


def test_fixed_batch_sizes_per_bucket():
    def budget(size):
        return Budget(batch_size=size)

    items = [item(n, seconds) for n, seconds in enumerate([0.5] * 6 + [1.5] * 4 + [3.0] * 3)]
    one_more = Buckets.of((1.0, 2.0), budget, (3, 2, 1), 0)
    assert [len(batch) for batch in run(items, one_more)[0]] == [3, 3, 2, 2, 1, 1, 1]
    only_bounds = Buckets.of((1.0, 2.0), budget, (3, 2), 0)
    batches, skipped = run(items, only_bounds)
    assert [len(batch) for batch in batches] == [3, 3, 2, 2]
    assert skipped == [("longer_than_last_bucket", str(number)) for number in (10, 11, 12)]
    with pytest.raises(ValueError, match="bucket_batch_size: has 4 entries for 2 bounds"):
        Buckets.of((1.0, 2.0), budget, (1, 2, 3, 4), 0)
    with pytest.raises(ValueError, match="must ascend"):
        Buckets.of((2.0, 1.0), budget, (1, 1), 0)


def test_the_edge_of_a_bucket_belongs_to_it():
    buckets = Buckets.of((1.0,), lambda size: Budget(batch_size=8), None, 0)
    batches, _ = run([item(0, 1.0), item(1, 1.0001)], buckets)
    assert [len(batch) for batch in batches] == [1, 1]


def test_drop_last_leaves_out_unfinished_batches_and_counts_them():
    items = [item(n) for n in range(7)]
    batches, skipped = run(items, Buckets.single(Budget(batch_size=3)), drop_last=True)
    assert [len(batch) for batch in batches] == [3, 3]
    assert skipped == [("drop_last", "6")]
    batches, skipped = run(items[:6], Buckets.single(Budget(batch_size=3)), drop_last=True)
    assert [len(batch) for batch in batches] == [3, 3]
    assert not skipped


def test_the_pool_mixes_the_order_of_batches():
    items = [item(n, 0.5 if n < 50 else 5.0) for n in range(100)]
    buckets = Buckets((1.0,), (Budget(batch_size=5),) * 2, 40)
    batches, _ = run(items, buckets, rng=random.Random(0))
    long = [batch[0].longest_audio > 1 for batch in batches]
    assert long != sorted(long)
    assert len(batches) == 20
    unmixed, _ = run(items, buckets)
    assert [one.conversation.id for batch in unmixed for one in batch] == [str(n) for n in range(100)]


def test_estimated_bounds_balance_the_sum_of_lengths():
    rng = random.Random(0)
    lengths = [rng.uniform(0.5, 20) for _ in range(5000)]
    bounds = estimate_bounds(lengths, 4)
    assert len(bounds) == 3
    edges = [0.0, *bounds, float("inf")]
    sums = [sum(x for x in lengths if low < x <= high) for low, high in zip(edges, edges[1:], strict=False)]
    assert max(sums) / min(sums) < 1.02
    assert estimate_bounds([1.0] * 10, 4) == (1.0,)
    assert estimate_bounds([], 4) == ()


def test_no_limit_at_all_is_refused():
    with pytest.raises(ValueError, match="set at least one limit"):
        Budget()


def test_filters_have_edges_inside():
    class Fake:
        has_target = True
        audio_turns = ()
        duration = 0.0

    def reason(seconds=1.0, tokens=5, **limits):
        fake = Fake()
        fake.duration = seconds
        return Filters(**limits).reason_against(Sized(fake, seconds, 1, tokens, seconds))

    assert reason(seconds=1.0, min_duration=1.0, max_duration=1.0, min_tokens=5, max_tokens=5) is None
    assert reason(seconds=0.9, min_duration=1.0) == "min_duration"
    assert reason(seconds=1.1, max_duration=1.0) == "max_duration"
    assert reason(tokens=4, min_tokens=5) == "min_tokens"
    assert reason(tokens=6, max_tokens=5) == "max_tokens"


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 60), max_size=60),
    size=st.sampled_from([None, 4]),
    num_open=st.sampled_from([1, 2, 16]),
    bounds=st.sampled_from([(), (20.0,)]),
    alone=st.booleans(),
)
def test_packs_stay_within_their_tokens_and_lose_nothing(lengths, size, num_open, bounds, alone):
    items = [item(number, tokens=length, length=float(length)) for number, length in enumerate(lengths)]
    budget = Budget(size, batch_tokens=50, packed=True)
    buckets = Buckets(bounds, (budget,) * (len(bounds) + 1), 0)
    packs, skipped = run(items, buckets, oversize_alone=alone, num_open=num_open)
    for pack in packs:
        assert size is None or len(pack) <= size
        assert sum(one.tokens for one in pack) <= 50 or (alone and len(pack) == 1)
        assert len({sum(one.length > bound for bound in bounds) for one in pack}) == 1
    seen = [one.conversation.id for pack in packs for one in pack] + [name for _, name in skipped]
    assert Counter(seen) == Counter(one.conversation.id for one in items)
    assert {reason for reason, _ in skipped} <= {"above_batch_budget"}


def lengths_of(packs):
    return [[one.tokens for one in pack] for pack in packs]


def test_packs_are_filled_best_fit():
    items = [item(number, tokens=length) for number, length in enumerate([6, 5, 4, 3, 2, 7])]
    buckets = Buckets.single(Budget(batch_tokens=10, packed=True))
    packs, _ = run(items, buckets, num_open=8)
    assert lengths_of(packs) == [[6, 4], [5, 3, 2], [7]]  # 3 would leave less room with 7, which comes later
    packs, _ = run(items, buckets, num_open=1)
    assert lengths_of(packs) == [[6], [5, 4], [3, 2], [7]]
    padded, _ = run(items, Buckets.single(Budget(batch_tokens=10)))
    assert lengths_of(padded) == [[6], [5, 4], [3, 2], [7]]


def test_the_fullest_pack_is_closed_when_nothing_fits():
    items = [item(number, tokens=length) for number, length in enumerate([6, 7, 8, 4])]
    packs, _ = run(items, Buckets.single(Budget(batch_tokens=10, packed=True)), num_open=2)
    assert lengths_of(packs) == [[7], [6, 4], [8]]  # 7 was the fuller one when 8 came


def test_packed_tokens_carry_their_own_quadratic_terms():
    items = [item(number, tokens=10) for number in range(4)]
    budget = Budget(batch_tokens=40, quadratic_factor=10.0, packed=True)
    packs, _ = run(items, Buckets.single(budget), num_open=4)
    assert lengths_of(packs) == [[10, 10], [10, 10]]


def test_drop_last_leaves_out_packs_that_were_not_full():
    items = [item(number, tokens=length) for number, length in enumerate([6, 7, 4, 2])]
    buckets = Buckets.single(Budget(batch_tokens=10, packed=True))
    packs, skipped = run(items, buckets, num_open=4, drop_last=True)
    assert lengths_of(packs) == [[6, 4]]
    assert sorted(skipped) == [("drop_last", "1"), ("drop_last", "3")]
