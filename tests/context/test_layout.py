"""Layouts: every token once, tiles are the mask, the work of each rank and step as in the papers."""

from fractions import Fraction

import pytest
import torch

from minitrain import collectives, launch
from minitrain.context.layout import (
    Tile,
    contiguous,
    efficiency,
    entries,
    join,
    positions,
    split,
    striped,
    tiles,
    zigzag,
)

LAYOUTS = [contiguous, zigzag, striped]
HALF = Fraction(1, 2)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_every_token_once_and_tiles_are_the_mask(layout, ranks):
    length = 6 * ranks
    held = [[place for run in layout(rank, ranks, length) for place in run] for rank in range(ranks)]
    assert sorted(sum(held, [])) == list(range(length))
    for mine in range(ranks):
        for other in range(ranks):
            for causal in (True, False):
                seen = torch.zeros(6, 6, dtype=torch.int)
                found = tiles(layout(mine, ranks, length), layout(other, ranks, length), causal)
                for tile in found:
                    part = seen[tile.queries, tile.keys]
                    part += torch.ones_like(part).tril() if tile.causal else 1
                mask = torch.tensor(held[mine]).unsqueeze(1) >= torch.tensor(held[other])
                assert torch.equal(seen, mask.int() if causal else torch.ones_like(seen))
                # one product a step, or none
                assert sum(tile.entries for tile in found) == seen.sum() and len(found) <= 1


def test_split_and_join_are_inverse():
    def rank():
        group, x = collectives.world(), torch.arange(2 * 8 * 3).view(2, 8, 3)
        whole = [join(split(x, layout, group), layout, group) for layout in LAYOUTS]
        own = {layout.__name__: positions(layout, group, 8).tolist() for layout in LAYOUTS}
        cut = split(x.movedim(1, -1), zigzag, group, dim=-1)
        return all(torch.equal(x, y) for y in whole), cut.shape, own

    first = dict(contiguous=[0, 1, 2, 3], zigzag=[0, 1, 6, 7], striped=[0, 2, 4, 6])
    second = dict(contiguous=[4, 5, 6, 7], zigzag=[2, 3, 4, 5], striped=[1, 3, 5, 7])
    assert launch.run(rank, ranks=2) == [(True, (2, 3, 4), own) for own in (first, second)]


def test_work_is_what_the_papers_say():
    for n in (1, 2, 3, 4, 8):
        for c in (2, 8, 64):
            length = n * c
            assert efficiency(contiguous, n, length, diagonal=HALF) == Fraction(n, 2 * n - 1)
            assert efficiency(contiguous, n, length) == Fraction(n * c + 1, (2 * n - 1) * c + 1)
            assert efficiency(striped, n, length) == Fraction(n * c + 1, n * c + n)
            assert efficiency(striped, n, length, diagonal=HALF) == Fraction(n * c, n * c + n - 1)
            assert efficiency(zigzag, n, length) == efficiency(zigzag, n, length, diagonal=HALF) == 1
            assert entries(zigzag, n, length, diagonal=HALF) == [[Fraction(c * c, 2)] * n] * n
            for layout in LAYOUTS:
                assert sum(map(sum, entries(layout, n, length))) == length * (length + 1) // 2


def test_refusals_are_one_line():
    for layout, length, padded in ((contiguous, 10, 12), (zigzag, 12, 16), (striped, 10, 12), (zigzag, 0, 8)):
        words = f"{layout.__name__}: T={length} .* pad the sequence to {padded}$"
        with pytest.raises(ValueError, match=words):
            layout(0, 4, length)
    with pytest.raises(ValueError, match="is no triangle; lay queries and keys out alike"):
        tiles(striped(0, 2, 8), contiguous(0, 2, 8), causal=True)
    for later, earlier in (([range(5, 9)], [range(4, 8)]), ([range(4, 8)], [range(5, 9)])):  # one token on
        with pytest.raises(ValueError, match="is no triangle; lay queries and keys out alike"):
            tiles(later, earlier, causal=True)
    assert Tile(slice(0, 4), slice(0, 4), causal=True).entries == 10
