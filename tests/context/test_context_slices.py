"""Slices of a sequence on ranks that share it: tiles are the mask, every core, pipelines on real ranks."""

import math
from functools import partial
from itertools import accumulate, product

import pytest
import torch

from minitrain import collectives, launch
from minitrain.attention.kernel import PLAIN
from minitrain.attention.placed import Alibi, alibi_slopes
from minitrain.compose.attention_cores import core_of_slices, data_layout
from minitrain.context.core_names import CORES, slice_lengths
from minitrain.context.layout import contiguous, join, last, part, positions, sliced, split, tiles, zigzag
from minitrain.context.ring import last_attention
from minitrain.context.ulysses import dealt
from minitrain.model.layers import naive_attention
from minitrain.pipeline.schedule import F
from minitrain.ranks.mesh import Mesh
from minitrain.systems.pipeline.sliced_attention import SlicedAttention, SliceMemory, attend
from tests.context.cores import HEADS, LAYOUTS, MASK, in_one_process
from tests.context.runs import B, K, T, furthest, inputs, over
from tests.parallel import TOLERANCE, Traffic

SLOPES = torch.tensor(alibi_slopes(HEADS[0]), dtype=torch.float64)
EVEN, UNEVEN = (8, 8, 8, 8), (16, 8, 8)


@pytest.mark.parametrize("layout", [*LAYOUTS, dealt(zigzag, 2)])
@pytest.mark.parametrize("ranks", [2, 4])
def test_every_token_once_and_tiles_are_the_mask(layout, ranks):
    lengths = [12 * ranks, 4 * ranks, 8 * ranks]
    held = [sliced(layout, lengths)(rank, ranks, sum(lengths)) for rank in range(ranks)]
    places = [[place for run in runs for place in run] for runs in held]
    assert sorted(sum(places, [])) == list(range(sum(lengths)))
    ends = [end // ranks for end in accumulate(lengths, initial=0)]
    for start, end in zip(ends, ends[1:]):
        cut = sliced(layout, lengths[: ends.index(end)])
        so_far = [cut(rank, ranks, end * ranks) for rank in range(ranks)]
        for mine in range(ranks):
            for other in range(ranks):
                seen = torch.zeros(end - start, end, dtype=torch.int)
                found = tiles(last(so_far[mine], end - start), so_far[other], causal=True)
                for tile in found:
                    here = seen[tile.queries, tile.keys]
                    here += torch.ones_like(here).tril() if tile.causal else 1
                mask = torch.tensor(places[mine][start:end]).unsqueeze(1) >= torch.tensor(places[other][:end])
                assert torch.equal(seen, mask.int())
                assert len(found) <= 2  # earlier slices in one product, the own one in another


def test_slices_are_what_a_pipeline_cuts():
    for tokens, count, ranks in ((16, 4, 2), (24, 5, 2), (28, 3, 4)):
        cut = [len(piece) * ranks for piece in torch.arange(tokens // ranks).tensor_split(count)]
        assert slice_lengths(tokens, count, ranks) == cut
        assert sliced(contiguous, count)(0, ranks, tokens) == sliced(contiguous, cut)(0, ranks, tokens)


# ---- cores -----------------------------------------------------------------------------------------------

TAKE_SLICES = [name for name, kind in CORES.items() if kind.slices]
SIZES = {name: dict.fromkeys(CORES[name].axes, 2) for name in TAKE_SLICES}


def by_slices(name, sizes, layout, lengths, bias=False, mask=0.0, width=K, keep_gradients=True, mesh=None):
    """Out, dq, dk, dv of a sequence computed slice after slice, put together from all ranks; bytes sent."""
    mesh = mesh or Mesh(**sizes)
    group, whole = mesh.group(*sizes), data_layout(name, sizes, layout, lengths)
    groups = {axis: mesh.group(axis) for axis in sizes}
    core = SlicedAttention(len(lengths), core_of_slices(name, groups, layout, lengths))
    memory, own = SliceMemory({0: [core]}), [length // group.size() for length in lengths]
    *qkv, dout = (
        [piece.clone().requires_grad_() for piece in split(x, whole, group, 2).split(own, 2)]
        for x in inputs(HEADS, width=width)
    )
    places, outs, sent = positions(whole, group, T).split(own), [], []
    for unit, (q, k, v) in enumerate(zip(*qkv)):
        more = dict(bias=Alibi(SLOPES, places[unit])) if bias else {}
        with Traffic() as ledger, memory.around(None, F(0, unit)):
            outs.append(core(q, 2 * k / 2, 2 * v / 2, **more, **(dict(dropout=mask) if mask else {})))
        sent.append(ledger.sent_bytes())
    for unit in reversed(range(len(lengths))):
        ends = memory.extra_roots(0, unit) if keep_gradients else []
        torch.autograd.backward(*map(list, zip((outs[unit], dout[unit].detach()), *ends)))
    parts = [torch.cat(x, 2) for x in (outs, *([x.grad for x in some] for some in qkv))]
    return [join(x, whole, group, 2) for x in parts], sent


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_every_core_that_takes_slices(ranks):
    """Every layout, even slices, uneven with ALiBi and dropout, values of another width; all gradients."""
    plain = in_one_process(width=3)
    biased = in_one_process(bias=Alibi(SLOPES, torch.arange(T)), mask=MASK, width=3)
    even, uneven = (EVEN, UNEVEN) if ranks < 8 else ((16, 16), (8, 24))
    ways = [(even, False, 0.0, plain), (uneven, True, MASK, biased)]

    def rank():
        found = {}
        for name in TAKE_SLICES:
            sizes = SIZES[name]
            if math.prod(sizes.values()) == ranks:
                mesh = Mesh(**sizes)
                for layout in CORES[name].layouts:
                    for lengths, bias, mask, expected in ways:
                        ours, _ = by_slices(name, sizes, layout, lengths, bias, mask, width=3, mesh=mesh)
                        found[name, layout, lengths] = furthest(ours, expected)
        return found

    for found in launch.run(rank, ranks=ranks):
        assert found and max(found.values()) < TOLERANCE, found


def test_a_whole_sequence_laid_out_in_slices():
    """Outside of a step, an evaluation say: nothing was announced, and tokens lie as batches do."""

    def rank():
        found, group, expected = {}, collectives.world(), in_one_process()
        names = "ring", "gathered", "ulysses", "ring_self_attention"
        for name, layout, slices in product(names, ("zigzag", "striped"), (2, UNEVEN)):
            whole, groups = data_layout(name, SIZES[name], layout, slices), dict.fromkeys(SIZES[name], group)
            core = SlicedAttention(2, core_of_slices(name, groups, layout, slices))
            found[name, layout, slices] = furthest(over(core, group, whole, HEADS)[0], expected)
        return found

    for found in launch.run(rank, ranks=2):
        assert max(found.values()) < TOLERANCE, found


def test_one_device():
    """The last queries of a text against all of it; plain blocks, too, and as many queries as keys."""
    *qkv, dout = inputs(HEADS)
    bias = Alibi(SLOPES, torch.arange(T))
    for count in (1, 7, T):
        for more in ({}, dict(bias=bias), dict(bias=bias, dropout=MASK)):
            q, k, v = (x.clone().requires_grad_() for x in qkv)
            expected = naive_attention(q, k, v, **more)[..., -count:, :]
            theirs = torch.autograd.grad(expected, (q, k, v), dout[..., -count:, :])
            for core in (last_attention, partial(last_attention, kernel=PLAIN), attend):
                out = core(q[..., -count:, :], k, v, **more)
                ours = torch.autograd.grad(out, (q, k, v), dout[..., -count:, :])
                assert furthest([out, *ours], [expected.detach(), *theirs]) < TOLERANCE


def test_without_it_it_does_not():
    """Controls: no gradients to earlier keys; queries taken for those of the first slice."""

    def rank():
        from minitrain.context import ring

        way, found = ("ring", dict(ring=2), "zigzag", EVEN), {}
        found["right"] = furthest(by_slices(*way)[0], in_one_process())
        found["gradients stay"] = furthest(by_slices(*way, keep_gradients=False)[0], in_one_process())
        there = ring.last
        ring.last = lambda runs, count: part(runs, 0, count)
        found["first queries"] = furthest(by_slices(*way)[0], in_one_process())
        ring.last = there
        return found

    for found in launch.run(rank, ranks=2):
        assert found.pop("right") < TOLERANCE
        assert len(found) == 2 and min(found.values()) > 1e-2, found


def test_what_a_ring_of_slices_sends():
    """(k+1)/2 times the keys of a whole sequence, each slice as it sees; Ulysses as well, of its keys."""

    def rank():
        sent = lambda name, slices: by_slices(name, SIZES[name], "striped", slices)[1]
        return {name: (sent(name, EVEN), sent(name, (T,))) for name in ("ring", "ulysses")}

    token = 8 * B * K  # bytes of a head's token; 8 heads, 4 K/V heads
    for found in launch.run(rank, ranks=2):
        slices, (whole,) = found["ring"]
        assert whole == 2 * 4 * T // 2 * token and slices == [whole * seen // 4 for seen in (1, 2, 3, 4)]
        slices, (whole,) = found["ulysses"]
        queries, keys = 2 * 8 * T // 2 * token // 2, 2 * 4 * T // 2 * token // 2
        assert whole == queries + keys
        assert slices == [queries // 4 + keys * seen // 4 for seen in (1, 2, 3, 4)]
