"""Rectangles of flat ranges, of cuts and of shares: every element once, whatever the numbers."""

import math
from collections import Counter
from dataclasses import replace
from itertools import product

import torch
from hypothesis import given
from hypothesis import strategies as st

from minitrain.ranks.pieces import Piece, overlap, part_of, pieces_of, rectangles, share_out, whole_piece
from minitrain.ranks.sharding import Placement, Shard, local_shard


class Group:
    """As much of a process group as cuts and holders ask for."""

    def __init__(self, rank: int, size: int):
        self._rank, self._size = rank, size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size


shapes = st.lists(st.integers(1, 6), max_size=4).map(tuple)


def elements(start: tuple, shape: tuple, whole: tuple) -> list[int]:
    """Numbers, along the rows of the whole, of a rectangle's elements."""
    numbers = torch.arange(math.prod(whole)).view(whole)
    return part_of(whole_piece("", numbers), start, shape).reshape(-1).tolist()


@given(shape=shapes, data=st.data())
def test_a_flat_range_is_a_few_rectangles_in_its_order(shape, data):
    size = math.prod(shape)
    first = data.draw(st.integers(0, size))
    last = data.draw(st.integers(first, size))
    found = rectangles(shape, first, last)
    assert sum((elements(start, part, shape) for start, part in found), []) == list(range(first, last))
    assert len(found) <= max(1, 2 * len(shape) - 1) and all(math.prod(part) for _, part in found)


def whole_and_cuts(data) -> tuple[torch.Tensor, list[tuple[int, int]]]:
    shape = data.draw(st.lists(st.integers(1, 7), min_size=1, max_size=3).map(tuple))
    cuts = data.draw(st.lists(st.tuples(st.integers(0, len(shape) - 1), st.integers(1, 4)), max_size=3))
    return torch.arange(math.prod(shape), dtype=torch.float64).add(1).view(shape), cuts


def cut_by(whole: torch.Tensor, cuts: list[tuple[int, int]], ranks: tuple[int, ...]) -> torch.Tensor:
    """As sharding.shard(.., pad=True) does, without groups."""
    shards, lengths = [], list(whole.shape)
    for (dim, size), rank in zip(cuts, ranks):
        padded = lengths[dim] if lengths[dim] % size else None
        shards.append(Shard(dim, Group(rank, size), padded))
        lengths[dim] = math.ceil(lengths[dim] / size)
    like = torch.empty(whole.shape)
    like.placement = Placement(tuple(shards))
    part = local_shard(whole, like).clone()
    part.placement = like.placement
    return part


@given(st.data())
def test_cuts_and_flat_ranges_on_top_of_them_cover_every_element_once(data):
    """Any number of cuts along any dims, several along one, padded where they do not divide; each rank's part
    again cut as a flat buffer."""
    whole, cuts = whole_and_cuts(data)
    flat_ranks = data.draw(st.integers(1, 3))
    times, found = torch.zeros(whole.shape, dtype=torch.int), torch.zeros_like(whole)
    for ranks in product(*(range(size) for _, size in cuts)):
        part = cut_by(whole, cuts, ranks)
        size = math.ceil(part.numel() / flat_ranks)
        for rank in range(flat_ranks):
            first, last = (min(end * size, part.numel()) for end in (rank, rank + 1))
            for piece in pieces_of("W", part.reshape(-1)[first:last], part, first, last):
                assert piece.whole == tuple(whole.shape)
                part_of(whole_piece("", times), piece.start, piece.shape).add_(1)
                part_of(whole_piece("", found), piece.start, piece.shape).copy_(piece.values)
    assert torch.all(times == 1) and torch.equal(found, whole)


def test_a_piece_is_a_view():
    whole = torch.zeros(4, 6)
    (head, middle, tail) = pieces_of("W", whole.view(-1)[4:20], whole, 4, 20)
    for number, piece in enumerate((head, middle, tail), 1):
        piece.values.fill_(number)
    assert whole.view(-1).tolist() == [0.0] * 4 + [1.0] * 2 + [2.0] * 12 + [3.0] * 2 + [0.0] * 4
    turned = torch.zeros(6, 4).t()
    (piece,) = pieces_of("W", turned, turned, 0, 24)  # does not lie in rows: whole, or not at all
    piece.values.fill_(1.0)
    assert torch.all(turned == 1)


@given(st.data())
def test_what_two_rectangles_have_in_common(data):
    dims, numbers = data.draw(st.integers(0, 3)), st.integers(0, 4)
    (a, b), (m, n) = (
        [tuple(data.draw(st.lists(kind, min_size=dims, max_size=dims))) for _ in range(2)]
        for kind in (numbers, st.integers(1, 4))
    )
    common = overlap(a, m, b, n)
    indices = lambda start, shape: set(product(*(range(x, x + k) for x, k in zip(start, shape))))
    inside = [indices(a, m), indices(b, n)]
    expected = set.intersection(*inside)
    assert (common is None) == (not expected)
    if common:
        assert set(product(*(range(x, x + k) for x, k in zip(*common)))) == expected


@given(st.data())
def test_shares_of_what_ranks_hold_alike(data):
    """Over all ranks every element once, and each rank's share is a k-th of what k hold, to an element, in
    every dtype; whatever the order in which a rank lists what it has."""
    outer, inner = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
    sizes = data.draw(st.lists(shapes, min_size=1, max_size=4))
    kinds = [data.draw(st.sampled_from(["both", "outer", "own"])) for _ in sizes]
    dtypes = [data.draw(st.sampled_from([torch.float32, torch.float64])) for _ in sizes]
    groups = {(o, i): (Group(o, outer), Group(i, inner)) for o in range(outer) for i in range(inner)}
    times = {}
    for (o, i), (first, second) in groups.items():
        holders = dict(both=(first, second), outer=(first,), own=())
        own = []
        for number, (shape, kind, dtype) in enumerate(zip(sizes, kinds, dtypes)):
            name = f"{number}/{i if kind == 'outer' else (o, i) if kind == 'own' else ''}"
            own.append(whole_piece(name, torch.zeros(shape, dtype=dtype), holders[kind]))
        mine = share_out(reversed(own) if (o + i) % 2 else own)
        few = Counter()  # of the first two of those that hold the same; who is alone writes all
        for piece in share_out(own, writers=2):
            few[piece.name] += piece.values.numel()
        assert all(not few[piece.name] for piece in own if piece.holders and piece.replica > 1)
        assert all(few[piece.name] == piece.values.numel() for piece in own if piece.replicas == 1)
        for kind, dtype in product(set(kinds), set(dtypes)):
            alike = [x for x, k, d in zip(own, kinds, dtypes) if (k, d) == (kind, dtype)]
            names = {piece.name for piece in alike}
            written = sum(p.values.numel() for p in mine if p.name in names and p.values.dtype == dtype)
            held = sum(p.values.numel() for p in alike)
            ranks = dict(both=outer * inner, outer=outer, own=1)[kind]
            assert abs(written - held / ranks) < 1
        for piece in mine:
            assert piece.replicas == 1
            count = times.setdefault(piece.name, torch.zeros(piece.whole, dtype=torch.int))
            part_of(whole_piece("", count), piece.start, piece.shape).add_(1)
    assert len(times) == sum(dict(both=1, outer=inner, own=outer * inner)[kind] for kind in kinds)
    assert all(torch.all(count == 1) for count in times.values())


def test_the_number_of_a_replica_is_that_of_its_rank_in_the_groups():
    piece = whole_piece("W", torch.zeros(3), (Group(1, 2), Group(2, 3)))
    assert (piece.replica, piece.replicas) == (5, 6) and replace(piece, holders=()).replicas == 1
    assert isinstance(piece, Piece) and piece.start == (0,) and whole_piece("n", torch.zeros(())).start == ()
