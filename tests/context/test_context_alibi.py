"""ALiBi over a cut sequence: equal to one process in every core and layout, with dropout, in a model."""

from functools import partial

import pytest
import torch

from minitrain import collectives, launch
from minitrain.attention.flash import flash_attention
from minitrain.attention.kernel import FUSED, PLAIN, fused_backward
from minitrain.attention.placed import Alibi, Placed, alibi_slopes, placed
from minitrain.context.layout import Tile, contiguous, positions, zigzag
from minitrain.context.ring import ring_attention
from minitrain.context.ulysses import ulysses_attention
from minitrain.model.layers import Attention, causal_attention, naive_attention
from minitrain.plan.strategy import Strategy
from tests.context.cores import CORES, HEADS, MASK, in_one_process
from tests.context.runs import T, furthest, inputs, over
from tests.parallel import TOLERANCE, Problem, difference, one_process, small, train_parallel

SLOPES = torch.tensor(alibi_slopes(HEADS[0]), dtype=torch.float64)
ALIBI = Alibi(SLOPES, torch.arange(T))
BY_HAND = SLOPES[:, None, None] * (torch.arange(T) - torch.arange(T).unsqueeze(-1))


def over_ranks(core, group, layout, mask=0.0, slopes=SLOPES):
    """What `over` finds, each rank with the positions of its own tokens."""
    biased = partial(core, bias=Alibi(slopes, positions(layout, group, T)), dropout=mask)
    return over(biased, group, layout, HEADS)


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_every_core_biases_as_one_process_does(ranks):
    """Output and all gradients, grouped heads, with and without dropout; the reference adds a matrix."""
    expected = [(mask, in_one_process(bias=BY_HAND, mask=mask)) for mask in (0.0, MASK)]

    def rank():
        group, cores, found = collectives.world(), CORES[ranks](), {}
        for mask, theirs in expected:
            for name, (core, layout) in cores.items():
                found[name, bool(mask)] = furthest(over_ranks(core, group, layout, mask)[0], theirs)
        return found

    for found in launch.run(rank, ranks=ranks):
        assert max(found.values()) < TOLERANCE, found


def test_one_device():
    """Cores of one device take the positions that came with the tokens: later ones, others in each row."""
    *qkv, _ = inputs(HEADS)
    expected = in_one_process(bias=BY_HAND)[0]
    for core in (causal_attention, naive_attention, flash_attention, partial(flash_attention, kernel=PLAIN)):
        for places in (torch.arange(T), torch.arange(T) + 1000):
            assert (core(*qkv, bias=Alibi(SLOPES, places)) - expected).abs().max() < TOLERANCE
    rows = torch.stack((torch.arange(T), 3 * torch.arange(T)))
    for core in (causal_attention, naive_attention):
        out = core(*qkv, bias=Alibi(SLOPES, rows))
        assert (out[0] - expected[0]).abs().max() < TOLERANCE and (out[1] - expected[1]).abs().max() > 1e-2
        of_row = lambda row: core(*(x[row : row + 1] for x in qkv), bias=Alibi(SLOPES, rows[row]))
        assert (out - torch.cat([of_row(0), of_row(1)])).abs().max() < TOLERANCE


def test_a_tile_of_bfloat16_has_exact_distances():
    """1,001 · 2^-8 is no bfloat16: where scores are float32, so is the bias."""
    bias = Alibi(torch.tensor([2.0**-8], dtype=torch.bfloat16), torch.arange(1))
    assert bias.between(torch.tensor([1001]), torch.tensor([0])).item() == -1001 / 256
    *qkv, _ = inputs(HEADS, dtype=torch.bfloat16)
    ours = flash_attention(*qkv, bias=Alibi(SLOPES.bfloat16(), torch.arange(T)))
    apart = ours.double() - in_one_process(bias=BY_HAND)[0]
    assert ours.dtype == torch.bfloat16 and apart.abs().max() < 0.05


def test_without_it_it_does_not():
    """Controls: no bias, places on the rank, a backward that forgets, slopes not cut with the heads."""

    def rank():
        group, expected, found = collectives.world(), in_one_process(bias=BY_HAND), {}
        ring = partial(ring_attention, group=group, layout=zigzag)
        ulysses = partial(ulysses_attention, group=group, core=causal_attention)
        found["right"] = furthest(over_ranks(ring, group, zigzag)[0], expected)
        found["none"] = furthest(over(ring, group, zigzag, HEADS)[0], expected)
        there, at = Tile.places, Placed.at
        Tile.places = property(lambda tile: ([range(T)[tile.queries]], [range(T)[tile.keys]]))
        found["places on the rank"] = furthest(over_ranks(ring, group, zigzag)[0], expected)
        Tile.places = there
        Placed.at = lambda self, positions: at(self, positions)._replace(backward=fused_backward)
        found["no bias in backward"] = furthest(over_ranks(ring, group, zigzag)[0], expected)
        Placed.at = at
        ours, _ = over_ranks(ulysses, group, contiguous, slopes=SLOPES[:4].repeat(2))
        found["first slopes"] = furthest(ours, expected)
        return found

    for found in launch.run(rank, ranks=2):
        assert found.pop("right") < TOLERANCE
        assert len(found) == 4 and min(found.values()) > 1e-2, found


def test_sends_what_it_sent_and_keeps_no_bias():
    def rank():
        group, core = collectives.world(), partial(ring_attention, group=collectives.world(), layout=zigzag)
        bytes_with, bytes_without = over_ranks(core, group, zigzag)[1], over(core, group, zigzag, HEADS)[1]
        kept = []
        q, k, v, _ = inputs(HEADS, T // 2)
        with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.dim()) or x, lambda x: x):
            core(*(x.requires_grad_() for x in (q, k, v)), bias=Alibi(SLOPES, positions(zigzag, group, T)))
        return bytes_with == bytes_without, kept

    assert launch.run(rank, ranks=2) == [(True, [4, 4, 4, 4, 3])] * 2 and placed(FUSED) is FUSED


PROBLEM = Problem(config=small(vocab_size=32, positions="alibi", num_heads=8))


MODELS = {
    "cp2": [Strategy(cp=2, layout="striped"), Strategy(cp=2, core="ulysses"), Strategy(cp=2, zero=3)],
    "cp4": [Strategy(cp=4, layout="contiguous"), Strategy(cp=4, core="usp", ulysses=2)],
    "dp2 cp2": [Strategy(dp=2, cp=2)],
    "cp2 tp2": [
        Strategy(cp=2, tp=2),
        Strategy(cp=2, tp=2, sequence_parallel=True, overlap=True),
        Strategy(cp=2, tp=2, core="ulysses"),
    ],
}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_equals_one_process(name):
    """Two steps: loss, gradients, parameters; the heads of tp and of Ulysses have their own slopes."""
    ways, expected = MODELS[name], one_process(PROBLEM)
    rank = lambda: [train_parallel(PROBLEM, strategy) for strategy in ways]
    for outcomes in launch.run(rank, ranks=ways[0].ranks):
        for strategy, outcome in zip(ways, outcomes):
            assert difference(outcome, expected) < TOLERANCE, strategy


def test_a_core_is_given_slopes_and_positions():
    given, config = {}, small(positions="alibi")
    layer = Attention(config, lambda q, k, v, bias: given.update(bias=bias) or q)
    layer(torch.ones(1, 3, 16), torch.tensor([4, 5, 6]))
    assert given["bias"].slopes.tolist() == alibi_slopes(4) and given["bias"].positions.tolist() == [4, 5, 6]
