"""Packing: several documents in one sequence of a fixed number of tokens.

Packs are composed from the lengths of the documents alone, before they are dealt over ranks, so they do not
depend on the layout. Documents in a pack do not see each other: their labels are shifted inside each document,
positions restart, and attention gets the borders.

- A document of no token is left out and counted. A document of one token supervises nothing and is kept: it
  would be wrong to let a document vanish because of its neighbour's length.
- A document longer than a pack is split into pieces of a whole pack and a rest, or dropped; both are counted. A
  piece is a document of its own: its first token is not supervised and sees nothing before it.
- What context parallelism adds to a document, so that every rank gets as much of it, comes later and takes no room
  here (`shoal.parallel.context.split`): packs are the same for every cp_size.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Literal

from shoal.data.text import Piece


def fit_to_pack(
    pieces: Iterable[Piece],
    size: int,
    *,
    long_documents: Literal["split", "drop"],
    counts: Counter[str],
) -> Iterator[Piece]:
    """Yields pieces that fit a pack, in order.

    Args:
        pieces: Documents, or pieces of them, in order.
        size: Tokens of a pack.
        long_documents: What happens to a document longer than a pack.
        counts: Counts ``empty_document``, ``split_document`` and ``longer_than_pack``.
    """
    for piece in pieces:
        if piece.length == 0:
            counts["empty_document"] += 1
        elif piece.length <= size:
            yield piece
        elif long_documents == "drop":
            counts["longer_than_pack"] += 1
        else:
            counts["split_document"] += 1
            yield from split(piece, size)


def split(piece: Piece, size: int) -> Iterator[Piece]:
    """Yields consecutive pieces of at most `size` tokens.

    >>> [part.length for part in split(Piece(0, 0, 7), 3)]
    [3, 3, 1]
    """
    for start in range(0, piece.length, size):
        yield Piece(piece.document, piece.start + start, min(size, piece.length - start))


def pack_greedily(pieces: Iterable[Piece], size: int) -> Iterator[tuple[Piece, ...]]:
    """Fills one pack after the other in the order of the pieces; each piece must fit a pack."""
    pack: list[Piece] = []
    room = size
    for piece in pieces:
        if piece.length > room:
            yield tuple(pack)
            pack, room = [], size
        pack.append(piece)
        room -= piece.length
    if pack:
        yield tuple(pack)


def pack_best_fit(pieces: Iterable[Piece], size: int, *, open_packs: int) -> Iterator[tuple[Piece, ...]]:
    """Puts each piece into the open pack where it leaves the least room.

    A full pack is yielded at once. When no open pack has room and `open_packs` are open, the fullest is yielded
    as it is; at the end the rest is, the fullest first. Ties go to the pack that was opened first, so the result
    is a function of the lengths in their order.

    Args:
        pieces: In order; each must fit a pack.
        size: Tokens of a pack.
        open_packs: Packs held at once.
    """
    packs: dict[int, list[Piece]] = {}
    rooms: list[tuple[int, int]] = []  # (room left, number of the pack), ascending
    number = 0
    for piece in pieces:
        place = bisect_left(rooms, (piece.length, -1))
        if place == len(rooms):
            if len(rooms) == open_packs:
                yield tuple(packs.pop(rooms.pop(0)[1]))
            room, chosen = size, number
            packs[chosen] = []
            number += 1
        else:
            room, chosen = rooms.pop(place)
        packs[chosen].append(piece)
        if room > piece.length:
            insort(rooms, (room - piece.length, chosen))
        else:
            yield tuple(packs.pop(chosen))
    for _, chosen in rooms:
        yield tuple(packs.pop(chosen))
