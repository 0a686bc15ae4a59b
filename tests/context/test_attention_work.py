"""FLOPs of attention over a cut sequence: the ledger of fused kernels on real ranks against tile.entries."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from minitrain import collectives, launch
from minitrain.attention.kernel import FUSED, PLAIN
from minitrain.context.layout import contiguous, split, striped, tiles, zigzag
from minitrain.context.ring import double_ring_attention, ring_attention
from minitrain.context.ulysses import ulysses_attention
from minitrain.ranks.events import Compute
from minitrain.ranks.ledger import Ledger
from minitrain.ranks.mesh import Mesh
from minitrain.systems.context.balanced import balanced_attention

B, H, T, K, RANKS = 2, 4, 64, 8, 4
# FLOPs of a score: 2 products, and 5 that compute it anew
FORWARD, BACKWARD = 2 * B * H * 2 * K, 2 * B * H * 5 * K
LAYOUTS = {"contiguous": contiguous, "zigzag": zigzag, "striped": striped}


def products(core, layout=contiguous):
    """FLOPs of every product of this rank's attention, in order: forward, backward."""
    group = collectives.world()
    whole = torch.randn(3, B, H, T, K, dtype=torch.float64)
    q, k, v = (split(x, layout, group, 2).requires_grad_() for x in whole)
    with Ledger() as ledger:
        with ledger.phase("forward"):
            out = core(q, k, v)
        with ledger.phase("backward"):
            out.sum().backward()
    events = [event for event in ledger.events if isinstance(event, Compute) and event.flops]
    phases = "forward", "backward"
    return tuple([event.flops for event in events if event.phase == phase] for phase in phases)


def all_layouts():
    run = partial(ring_attention, group=collectives.world())
    return {name: products(partial(run, layout=layout), layout) for name, layout in LAYOUTS.items()}


def met(layout, rank):
    """The tiles that the ring gives to this rank, in the order of its steps, as the layout says."""
    held = [layout(other, RANKS, T) for other in range(RANKS)]
    steps = (held[(rank - step) % RANKS] for step in range(RANKS))
    return [tile for keys in steps for tile in tiles(held[rank], keys, causal=True)]


def one_process():
    q, k, v = (torch.randn(B, H, T, K, dtype=torch.float64, requires_grad=True) for _ in range(3))
    with Ledger() as ledger:
        F.scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward()
    return ledger.flops


def test_every_layout_counts_the_entries_of_its_tiles_and_all_sum_to_one_process():
    """The diagonal needs no excuse: a striped rank whose keys come later leaves its own out, tile by tile,
    and the tiles of all ranks are the triangle of one process, T(T+1)/2 scores, however the sequence is laid
    out."""
    ranks = launch.run(all_layouts, ranks=RANKS)
    triangle = T * (T + 1) // 2
    assert one_process() == (FORWARD + BACKWARD) * triangle
    for name, layout in LAYOUTS.items():
        for rank, found in enumerate(ranks):
            forward, backward = found[name]
            scores = [tile.entries for tile in met(layout, rank)]
            assert forward == [FORWARD * count for count in scores], (name, rank)
            assert sorted(backward) == sorted(BACKWARD * count for count in scores), (name, rank)
        assert sum(sum(found[name][0]) for found in ranks) == FORWARD * triangle
        assert sum(sum(found[name][1]) for found in ranks) == BACKWARD * triangle


def other_ways():
    world, mesh = collectives.world(), Mesh(outer=2, inner=2)
    causal = partial(F.scaled_dot_product_attention, is_causal=True)
    rings = dict(outer=mesh.group("outer"), inner=mesh.group("inner"))
    return {
        "ulysses": products(partial(ulysses_attention, group=world, core=causal)),
        "balanced": products(partial(balanced_attention, group=world)),
        "double ring": products(partial(double_ring_attention, **rings), zigzag),
        "plain": products(partial(ring_attention, group=world, layout=zigzag, kernel=PLAIN), zigzag),
    }


def test_other_ways_to_cut_attention_do_the_same_work():
    """Heads dealt out, helpers, rings in rings: the same triangle. Blocks in matmuls make whole tiles, and
    four products in backward beside the scores: the ledger says what operators do."""
    ranks = launch.run(other_ways, ranks=RANKS)
    sums = {name: tuple(sum(sum(found[name][i]) for found in ranks) for i in (0, 1)) for name in ranks[0]}
    plain, triangle = sums.pop("plain"), T * (T + 1) // 2
    assert set(sums.values()) == {(FORWARD * triangle, BACKWARD * triangle)}
    seen = [tile for rank in range(RANKS) for tile in met(zigzag, rank)]
    size = lambda places: places.stop - places.start
    squares = sum(size(tile.queries) * size(tile.keys) for tile in seen)
    assert plain == (FORWARD * squares, BACKWARD * squares) and squares > triangle


@pytest.mark.parametrize("causal", [True, False])
def test_one_block(causal):
    """The pure functions a reader calls by hand."""
    q, k, v = (torch.randn(B, H, T, K, dtype=torch.float64) for _ in range(3))
    for kernel, scores in ((FUSED, T * (T + 1) // 2 if causal else T * T), (PLAIN, T * T)):
        with Ledger() as ledger:
            out, lse = kernel.forward(q, k, v, causal)
            forward = ledger.flops
            kernel.backward(out, q, k, v, out, lse, causal)
        assert (forward, ledger.flops - forward) == (FORWARD * scores, BACKWARD * scores)
