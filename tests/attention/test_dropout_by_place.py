"""Masks that are functions of places: their rate, what they depend on, and that parts are parts of the whole."""

import pytest
import torch

from minitrain.attention import placed
from minitrain.attention.placed import DropMask, DropRows, Places, draws_by_place, drop_scores

P, SEED = 0.3, 11
WHOLE = DropMask(P, SEED).keep(4, 6, torch.arange(20), torch.arange(30))  # [B, H, Tq, Tk]


def test_those_that_are_kept_are_scaled():
    scores = torch.rand(1, 2, 8, 8) + 1
    kept = DropMask(P, 5).keep(1, 2, *[torch.arange(8)] * 2)
    assert torch.equal(DropMask(P, 5)(scores), torch.where(kept, scores / (1 - P), 0))
    factors = DropMask(P, 5).factors(scores, lambda device: (torch.arange(8), torch.arange(8)))
    assert set(factors.unique().tolist()) == {0.0, torch.tensor(1.0).div(1 - P).item()}
    numbers = placed.uniform(3, torch.arange(50), torch.arange(50).expand(50, 50))
    assert 0 <= numbers.min() < 0.01 and 0.99 < numbers.max() < 1 and abs(numbers.mean() - 0.5) < 0.03


def test_a_part_is_that_of_the_whole():
    """Of rows, of heads, of tokens that begin later: those who compute it draw the same."""
    part = DropMask(P, SEED, first_row=1, first_head=2).keep(2, 3, torch.arange(4, 9), torch.tensor([7, 3]))
    assert torch.equal(part, WHOLE[1:3, 2:5, 4:9][..., [7, 3]])
    later = DropMask(P, SEED, first_token=10).keep(4, 6, torch.arange(5), torch.arange(3))
    assert torch.equal(later, WHOLE[:, :, 10:15, 10:13])
    places, seen = Places(3), []
    core = drop_scores(
        lambda q, *others, **more: seen.append(more.get("dropout")), places, "layers.1.scores", 2
    )
    places.at(4, 6)
    core(torch.ones(1, 3, 2, 2), dropout=P), core(torch.ones(1, 3, 2, 2))
    assert seen == [DropMask(P, places.seed_of("layers.1.scores"), 6, 6), None]
    whole = draws_by_place(Places(3), "router", torch.arange(5).expand(4, 5))
    places.at(0, 2)
    assert torch.equal(draws_by_place(places, "router", torch.arange(5).expand(2, 5)), whole[2:])


def test_places_are_what_they_were_behind_what_is_computed_again():
    places = Places(1)
    places.at(3, 8)
    again = places.again()
    places.at(4, 16)
    with pytest.raises(KeyError), again():
        assert (places.step, places.first_row) == (3, 8)
        raise KeyError
    assert (places.step, places.first_row) == (4, 16)
    found = set()
    for seed, step in ((1, 11), (11, 1), (1, 1), (111, 0)):
        places = Places(seed)
        places.at(step, 0)
        found |= {places.seed_of("a"), places.seed_of("b")}
    assert len(found) == 8 and all(0 <= seed < 2**63 for seed in found)


def test_rows_are_dropped_in_training_alone():
    places, x = Places(2), torch.ones(3, 4, 50)
    rows = DropRows(P, places, "layers.1.dropout1")
    places.at(0, 5)
    y = rows(x, torch.arange(4))
    mask = DropMask(P, places.seed_of("layers.1.dropout1"), first_row=5)
    kept = mask.keep(3, 1, torch.arange(4), torch.arange(50)).squeeze(1)
    assert torch.equal(y, torch.where(kept, x / (1 - P), 0)) and 0 < kept.double().mean() < 1
    places.at(1, 5)
    assert not torch.equal(rows(x, torch.arange(4)), y), "another step"
    later = DropRows(P, Places(2), "layers.1.dropout1", local_positions=lambda positions: positions[2:])
    places.at(0, 0)
    assert torch.equal(later(x[:, 2:], torch.arange(4)), rows(x, torch.arange(4))[:, 2:])
    assert rows.eval()(x, torch.arange(4)) is x and DropRows(0.0, places, "a")(x, torch.arange(4)) is x
