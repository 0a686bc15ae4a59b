"""FLOPs of attention over a cut sequence: the ledger of fused kernels against sums of tile.entries, tile by
tile, on real ranks."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from minitrain import collectives, launch
from minitrain.attention.kernel import FUSED, PLAIN
from minitrain.context.double_ring import double_ring_attention
from minitrain.context.layout import contiguous, split, striped, tiles, zigzag
from minitrain.context.ring import ring_attention
from minitrain.context.ulysses import ulysses_attention
from minitrain.ranks.events import Compute
from minitrain.ranks.ledger import Ledger
from minitrain.ranks.mesh import Mesh
from minitrain.systems.context.balanced import balanced_attention

B, H, T, K, RANKS = 2, 4, 64, 8, 4
FORWARD, BACKWARD = (
    2 * B * H * 2 * K,
    2 * B * H * 5 * K,
)  # FLOPs of a score: 2 products, and 5 that compute it anew
LAYOUTS = {"contiguous": contiguous, "zigzag": zigzag, "striped": striped}


def products(core, layout=contiguous, **settings):
    """FLOPs of every product of this rank's attention, in order: forward, backward."""
    group = collectives.world()
    q, k, v = (
        split(torch.randn(B, H, T, K, dtype=torch.float64), layout, group, 2).requires_grad_()
        for _ in range(3)
    )
    with Ledger(**settings) as ledger:
        with ledger.phase("forward"):
            out = core(q, k, v)
        with ledger.phase("backward"):
            out.sum().backward()
    events = [event for event in ledger.events if isinstance(event, Compute) and event.flops]
    return tuple(
        [event.flops for event in events if event.phase == phase] for phase in ("forward", "backward")
    )


def all_layouts(**settings):
    group = collectives.world()
    return {
        name: products(partial(ring_attention, group=group, layout=layout), layout, **settings)
        for name, layout in LAYOUTS.items()
    }


def met(layout, rank, causal="triangle"):
    """Scores of every tile that the ring gives to this rank, in the order of its steps, as the layout
    says."""
    held = [layout(other, RANKS, T) for other in range(RANKS)]
    seen = [
        tile for step in range(RANKS) for tile in tiles(held[rank], held[(rank - step) % RANKS], causal=True)
    ]
    return [
        tile.entries
        if causal == "triangle"
        else (tile.queries.stop - tile.queries.start) * (tile.keys.stop - tile.keys.start)
        for tile in seen
    ]


def one_process(**settings):
    q, k, v = (torch.randn(B, H, T, K, dtype=torch.float64, requires_grad=True) for _ in range(3))
    with Ledger(**settings) as ledger:
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
            scores = met(layout, rank)
            assert forward == [FORWARD * count for count in scores], (name, rank)
            assert sorted(backward) == sorted(BACKWARD * count for count in scores), (name, rank)
        wanted = triangle if name != "documents" else 24 * 25 // 2 + 40 * 41 // 2
        assert sum(sum(found[name][0]) for found in ranks) == FORWARD * wanted
        assert sum(sum(found[name][1]) for found in ranks) == BACKWARD * wanted


def test_the_square_misjudges_layouts():
    """Charged with squares, a striped ring seems to do 53 % more than the same attention cut otherwise."""
    ranks = launch.run(partial(all_layouts, causal="square"), ranks=RANKS)
    total = {name: sum(sum(found[name][0]) for found in ranks) for name in LAYOUTS}
    for name, layout in LAYOUTS.items():
        assert total[name] == FORWARD * sum(sum(met(layout, rank, "square")) for rank in range(RANKS))
    assert one_process(causal="square") == (FORWARD + BACKWARD) * T * T
    assert (
        total["contiguous"] == total["zigzag"] == FORWARD * T * T * 5 // 8
        and round(total["striped"] / total["zigzag"], 2) == 1.53
    )


def other_ways():
    world, mesh = collectives.world(), Mesh(outer=2, inner=2)
    rings = dict(outer=mesh.group("outer"), inner=mesh.group("inner"))
    return {
        "ulysses": products(
            partial(
                ulysses_attention, group=world, core=partial(F.scaled_dot_product_attention, is_causal=True)
            )
        ),
        "balanced": products(partial(balanced_attention, group=world)),
        "double ring": products(partial(double_ring_attention, **rings), zigzag),
        "plain": products(partial(ring_attention, group=world, layout=zigzag, kernel=PLAIN), zigzag),
    }


def test_other_ways_to_cut_attention_do_the_same_work():
    """Heads dealt out, helpers, rings in rings: the same triangle. Blocks in matmuls make whole tiles, and
    four products in backward beside the scores: the ledger says what operators do."""
    ranks = launch.run(other_ways, ranks=RANKS)
    sums = {name: tuple(sum(sum(found[name][i]) for found in ranks) for i in (0, 1)) for name in ranks[0]}
    plain = sums.pop("plain")
    triangle = T * (T + 1) // 2
    assert set(sums.values()) == {(FORWARD * triangle, BACKWARD * triangle)}
    squares = sum(sum(met(zigzag, rank, "square")) for rank in range(RANKS))
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
