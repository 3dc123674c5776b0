"""Packing: every token once, no pack above its size, edge cases by their rule, the same packs for every layout."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.data.packing import fit_to_pack, pack_best_fit, pack_greedily
from shoal.data.text import Piece

Packer = Callable[..., Iterator[tuple[Piece, ...]]]
PACKERS: dict[str, Packer] = {"greedy": pack_greedily, "best_fit": partial(pack_best_fit, open_packs=3)}


def documents(lengths: Iterable[int]) -> list[Piece]:
    return [Piece(index, 0, length) for index, length in enumerate(lengths)]


def packs_of(packer: Packer, lengths: Iterable[int], size: int) -> list[list[int]]:
    return [[piece.length for piece in pack] for pack in packer(documents(lengths), size)]


@pytest.mark.parametrize("name", PACKERS)
@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 40), max_size=60),
    size=st.sampled_from([8, 12, 16]),
    long_documents=st.sampled_from(["split", "drop"]),
)
def test_every_token_is_in_one_pack_or_counted(
    name: str, lengths: list[int], size: int, long_documents: str
) -> None:
    counts: Counter[str] = Counter()
    pieces = fit_to_pack(
        documents(lengths),
        size,
        long_documents=long_documents,  # type: ignore[arg-type]
        counts=counts,
    )
    packs = list(PACKERS[name](pieces, size))
    assert all(packs)
    assert all(sum(piece.length for piece in pack) <= size for pack in packs)
    tokens = Counter(
        (piece.document, place)
        for pack in packs
        for piece in pack
        for place in range(piece.start, piece.start + piece.length)
    )
    long = [length for length in lengths if length > size]
    kept = {
        (index, place)
        for index, length in enumerate(lengths)
        for place in range(length)
        if long_documents == "split" or length not in long
    }
    assert set(tokens) == kept and set(tokens.values()) <= {1}
    assert counts["empty_document"] == lengths.count(0)
    key = "split_document" if long_documents == "split" else "longer_than_pack"
    assert counts[key] == len(long) and sum(counts.values()) == lengths.count(0) + len(long)


def test_greedy_keeps_the_order_of_the_data() -> None:
    assert packs_of(pack_greedily, [5, 4, 1, 9, 2, 10], 10) == [[5, 4, 1], [9], [2], [10]]


def test_best_fit_leaves_the_least_room() -> None:
    # 6 and 7 open two packs; 3 fits both and fills the second; 4 fills the first.
    assert packs_of(partial(pack_best_fit, open_packs=4), [6, 7, 3, 4, 5], 10) == [[7, 3], [6, 4], [5]]


def test_best_fit_gives_up_the_fullest_pack_when_too_many_are_open() -> None:
    assert packs_of(partial(pack_best_fit, open_packs=2), [6, 8, 5, 2], 10) == [[8], [6, 2], [5]]


def test_best_fit_wastes_less_than_greedy() -> None:
    lengths = [37 * index % 90 + 5 for index in range(400)]

    def efficiency(packs: list[list[int]]) -> float:
        return sum(lengths) / (100 * len(packs))

    greedy = efficiency(packs_of(pack_greedily, lengths, 100))
    best = efficiency(packs_of(partial(pack_best_fit, open_packs=64), lengths, 100))
    assert best > 0.95 > 0.85 > greedy


@pytest.mark.parametrize("name", PACKERS)
def test_edge_cases(name: str) -> None:
    packer = PACKERS[name]
    assert packs_of(packer, [], 8) == []
    assert packs_of(packer, [1, 1, 1], 2) == [[1, 1], [1]]
    assert packs_of(packer, [8, 8], 8) == [[8], [8]]  # exactly full


def test_a_piece_of_a_long_document_knows_where_it_stands() -> None:
    counts: Counter[str] = Counter()
    pieces = list(fit_to_pack([Piece(3, 2, 7)], 3, long_documents="split", counts=counts))
    assert pieces == [Piece(3, 2, 3), Piece(3, 5, 3), Piece(3, 8, 1)]
    assert counts == {"split_document": 1}
