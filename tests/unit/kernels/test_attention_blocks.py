"""Blocks show every query exactly the keys that the definition shows it."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from shoal.kernels.attention_blocks import MASKED_ROWS, blocks

LENS = [0, 1, 2, 5, 13]


def seen_by_definition(
    num_queries: int, num_keys: int, causal: bool, window: int | None, position: int | None = None
) -> set[tuple[int, int]]:
    pairs = set()
    position = num_keys - num_queries if position is None else position
    for query, key in product(range(num_queries), range(num_keys)):
        distance = query + position - key
        if (not causal or distance >= 0) and (window is None or abs(distance) < window):
            pairs.add((query, key))
    return pairs


def seen_in_blocks(
    cu_q: tuple[int, ...],
    cu_k: tuple[int, ...],
    causal: bool,
    window: int | None,
    max_rows: int | None,
    positions: tuple[int, ...] | None = None,
) -> set[tuple[int, int]]:
    pairs: set[tuple[int, int]] = set()
    covered: list[int] = []
    for block in blocks(cu_q, cu_k, causal, window, max_rows, positions):
        rows, columns = block.q_stop - block.q_start, block.k_stop - block.k_start
        assert max_rows is None or rows <= max_rows
        covered += range(block.q_start, block.q_stop)
        seen = torch.ones(rows, columns, dtype=torch.bool)
        if block.lower_triangle:
            assert rows == columns
            seen = seen.tril()
        elif block.mask is not None:
            seen = block.mask.additive(torch.float32, torch.device("cpu")) == 0
        assert seen.shape == (rows, columns) and seen.any(1).all(), "a row without a key would be NaN"
        pairs |= {(block.q_start + row, block.k_start + column) for row, column in seen.nonzero().tolist()}
    assert len(covered) == len(set(covered)), "a query stands in two blocks"
    return pairs


@pytest.mark.parametrize("max_rows", [None, 1, 3])
@pytest.mark.parametrize("window", [None, 1, 2, 4, 100])
@pytest.mark.parametrize("causal", [True, False])
def test_blocks_show_what_the_definition_shows(
    causal: bool, window: int | None, max_rows: int | None
) -> None:
    for num_queries, num_keys in product(LENS, LENS):
        expected = seen_by_definition(num_queries, num_keys, causal, window)
        found = seen_in_blocks((0, num_queries), (0, num_keys), causal, window, max_rows)
        assert found == expected, (num_queries, num_keys)


@pytest.mark.parametrize("max_rows", [None, 3])
@pytest.mark.parametrize("window", [None, 1, 4, 100])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("position", [-14, -3, -1, 0, 1, 4, 12, 17])
def test_queries_may_stand_anywhere_relative_to_the_keys(
    position: int, causal: bool, window: int | None, max_rows: int | None
) -> None:
    for num_queries, num_keys in product(LENS, LENS):
        expected = seen_by_definition(num_queries, num_keys, causal, window, position)
        found = seen_in_blocks((0, num_queries), (0, num_keys), causal, window, max_rows, (position,))
        assert found == expected, (num_queries, num_keys)


def test_what_is_seen_whole_needs_no_mask() -> None:
    (block,) = blocks((0, 700), (0, 300), True, None, positions=(300,))
    assert block.mask is None and not block.lower_triangle
    assert all(b.mask is None for b in blocks((0, 700), (0, 300), True, None, 512, (300,)))


def test_documents_follow_each_other() -> None:
    expected = {(q + 3, k + 2) for q, k in seen_by_definition(4, 5, True, 2)} | seen_by_definition(
        3, 2, True, 2
    )
    assert seen_in_blocks((0, 3, 7), (0, 2, 7), True, 2, None) == expected


def test_a_document_without_mask_is_one_block() -> None:
    (block,) = blocks((0, 10_000), (0, 10_000), True, None)
    assert block.lower_triangle and block.mask is None
    (block,) = blocks((0, 10_000), (0, 10_000), True, 10_000)
    assert block.lower_triangle, "a window as long as the document is none"
    assert all(b.q_stop - b.q_start <= MASKED_ROWS for b in blocks((0, 10_000), (0, 20_000), True, None))
