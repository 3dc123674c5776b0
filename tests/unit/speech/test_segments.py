"""Cutting rows into segments and joining them again."""

import pytest
import torch

from shoal.speech import segments


def slow_cut(length: int, size: int, shortest: int) -> list[tuple[int, int]]:
    pieces = []
    start = 0
    while length - start > size:
        pieces.append((start, size))
        start += size
    if pieces and length - start < shortest:
        start, _ = pieces.pop()
    return [*pieces, (start, length - start)]


@pytest.mark.parametrize(("size", "shortest"), [(5, 1), (5, 2), (7, 7), (3, 3), (100, 1)])
def test_cut_equals_the_slow_rule(size: int, shortest: int) -> None:
    lengths = [0, 1, 4, 5, 6, 7, 10, 11, 12, 23, 0]
    cut = segments.cut(torch.tensor(lengths), size, shortest)
    expected = [
        (row, start, count)
        for row, length in enumerate(lengths)
        for start, count in slow_cut(length, size, shortest)
    ]
    assert list(zip(cut.row.tolist(), cut.start.tolist(), cut.length.tolist(), strict=True)) == expected
    ordinals = [i for length in lengths for i in range(len(slow_cut(length, size, shortest)))]
    assert cut.ordinal.tolist() == ordinals


def test_join_undoes_cut_and_take() -> None:
    lengths = torch.tensor([7, 0, 12, 5])
    values = torch.randn(4, 12, 3) * (torch.arange(12) < lengths[:, None])[..., None]
    pieces = segments.cut(lengths, 5, 3)
    taken = segments.take(values, pieces, int(pieces.length.max()))
    joined, joined_lengths = segments.join(taken, pieces.length, pieces)
    assert joined_lengths.tolist() == lengths.tolist()
    torch.testing.assert_close(joined, values, rtol=0, atol=0)


def test_join_ignores_padding_and_passes_its_gradient_to_the_right_place() -> None:
    pieces = segments.cut(torch.tensor([3, 2]), 2, 1)
    encoded = torch.randn(3, 4, 2, requires_grad=True)
    joined, lengths = segments.join(encoded, torch.tensor([2, 1, 4]), pieces)
    assert lengths.tolist() == [3, 4]
    weights = torch.arange(8.0).view(2, 4)
    (joined.sum(-1) * weights).sum().backward()
    expected = torch.tensor([[0.0, 1, 0, 0], [2, 0, 0, 0], [4, 5, 6, 7]])
    torch.testing.assert_close(encoded.grad, expected[..., None].expand(3, 4, 2))
