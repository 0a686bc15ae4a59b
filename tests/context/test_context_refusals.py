"""What cores over ranks cannot be given: one line on every rank, before anybody sends."""

import pytest
import torch

from minitrain.attention.flash import flash_2, flash_attention
from minitrain.attention.placed import Alibi, DropMask
from minitrain.context.core_names import CORES, check_choice
from minitrain.context.layout import sliced, zigzag
from minitrain.context.ring import burst_attention, double_ring_attention, last_attention, ring_attention
from minitrain.context.ulysses import dealt, loongtrain_attention, switch, ulysses_attention, usp_attention
from minitrain.model.layers import causal_attention
from minitrain.ranks.collectives import world
from minitrain.ranks.mesh import Mesh
from minitrain.systems.attention.packed import packed_attention
from minitrain.systems.context.balanced import balanced_attention
from minitrain.systems.context.dynamic_sequence import run_stages
from minitrain.systems.context.wallfacer import wallfacer_attention
from minitrain.systems.pipeline.sliced_attention import attend
from tests.parallel import check_refusals

AXES = {
    usp_attention: dict(ring=2, ulysses=2), double_ring_attention: dict(outer=2, inner=2),
    burst_attention: dict(across=2, inside=2), wallfacer_attention: dict(ring=2, team=2),
}  # fmt: skip
SLOPES, PLACES = torch.ones(4), torch.arange(8)


def call(what, heads=4, kv_heads=4, queries=8, keys=8, width=4, dtype=torch.float32, axes=None, **settings):
    """what(q, k, v) on 4 ranks, by its own axes or those given."""

    def run():
        shapes = (heads, queries, 4), (kv_heads, keys, 4), (kv_heads, keys, width)
        q, k, v = (torch.ones(1, *shape) for shape in shapes)
        groups = {}
        if what not in (flash_attention, packed_attention, last_attention, causal_attention, attend):
            sizes = axes or AXES.get(what, dict(group=4))
            mesh = Mesh(**sizes)
            groups = {axis: mesh.group(axis) for axis in sizes}
        what(q, k.to(dtype), v, **groups, **settings)

    return run


def on_two_rings():
    """Ulysses over one of the two rings, where it should cross both."""
    mesh, q = Mesh(outer=2, inner=2), torch.ones(1, 4, 4, 4)
    rings = {name: mesh.group(name) for name in mesh.shape}
    loongtrain_attention(q, q, q, ulysses=rings["inner"], **rings)


REFUSED = {
    "expected [B, H, T/n, K] and twice [B, H_kv, T/n, K]": call(ring_attention, queries=9),
    "ring_attention: 4 query heads are not a multiple of 3 K/V heads": call(ring_attention, kv_heads=3),
    "q torch.float32, k torch.bfloat16": call(ulysses_attention, core=0, dtype=torch.bfloat16),
    "balanced_attention: 2 queries for 8 keys: it takes whole sequences": call(balanced_attention, queries=2),
    "wallfacer: values are 7 wide, keys 4": call(wallfacer_attention, width=7),
    "C=4 on P=4 ranks; use a C": call(wallfacer_attention, axes=dict(ring=1, team=4)),
    "backward_sends='values'; choose from queries, keys": call(burst_attention, backward_sends="values"),
    "each takes whole ones; take 1 or 2 ranks, and": call(ulysses_attention, heads=2, kv_heads=2, core=0),
    "take 1 or 2 or 3 ranks, and a ring over the others": call(
        ulysses_attention, heads=6, kv_heads=6, core=0
    ),
    "Ulysses: the last 2 of 8 tokens of each rank": call(ulysses_attention, queries=2, core=last_attention),
    "must cross in this rank only; on Mesh(inner=, ulysses=)": on_two_rings,
    "zigzag: T=12 is no multiple of 8 pieces; pad": call(double_ring_attention, queries=3, keys=3),
    "dealt: T=10 over 4 ranks, 2 of them to a ring rank": lambda: dealt(zigzag, 2)(0, 4, 10),
    "dealt: T=12 over 4 ranks, 3 of them to a ring rank": lambda: dealt(zigzag, 3)(0, 4, 12),
    "slice 1 of 2, T=14: zigzag: T=6 is no multiple of 4 pieces": lambda: sliced(zigzag, (8, 6))(0, 2, 14),
    "slices [8, 8] add up to 16, not to T=24": lambda: sliced(zigzag, (8, 8))(0, 2, 24),
    "5 slices of T=8 over 2 ranks": lambda: sliced(zigzag, 5)(0, 2, 8),
    "last_attention: 9 queries end where 8 keys do": call(last_attention, queries=9),
    "causal_attention: 2 queries, 8 keys": call(causal_attention, queries=2),
    "has 6 along dim 1, not a multiple of the 4": lambda: switch(torch.ones(2, 6, 2), world(), cut=1, join=2),
    "cut and join are both dim 1": lambda: switch(torch.ones(2, 4, 2), world(), cut=1, join=-2),
    "one to work along and one to cut": lambda: run_stages(
        torch.ones(2, 4, 8), [(1, torch.relu)], world(), cut=1
    ),
    # ---- bias and dropout
    "a bias [4, 8, 8] is about the keys that are here": call(ring_attention, bias=torch.ones(4, 8, 8)),
    "ALiBi has 8 slopes for 4 heads": call(ulysses_attention, core=0, bias=Alibi(torch.ones(8), PLACES)),
    "sliced attention: ALiBi with positions [2, 8]": call(attend, bias=Alibi(SLOPES, PLACES.expand(2, -1))),
    "dropout p=1.0; must be in [0, 1)": call(ring_attention, dropout=DropMask(1.0, 0)),
    "use FUSED or PLAIN": call(usp_attention, dropout=DropMask(0.3, 11), kernel=flash_2()),
    "ring_attention: dropout=0.1 is a rate without a seed": call(ring_attention, dropout=0.1),
    "flash_attention: dropout=0.1 is a rate without a seed": call(flash_attention, dropout=0.1),
    "packed_attention: dropout=0.1 is a rate": call(packed_attention, dropout=0.1, cu_seqlens=[0, 8]),
}


def test_refusals_are_one_line_on_every_rank():
    check_refusals(REFUSED, ranks=4)


CHOICES = {
    "core='rings': use ring, ring_self_attention": ("rings", dict(ring=2), "zigzag"),
    "balanced: layout 'zigzag'; it is written for contiguous": ("balanced", dict(ring=2), "zigzag"),
    "usp: groups ring; its groups of cp are ring, ulysses, in this order": ("usp", dict(ring=2), "zigzag"),
    "usp: 3 heads of a rank cannot be dealt": ("usp", dict(ring=2, ulysses=2), "zigzag"),
    "wallfacer: teams of 4 on 8 ranks": ("wallfacer", dict(ring=2, team=4), "zigzag"),
    "wallfacer: values 8 wide, keys 4": ("wallfacer", dict(ring=2, team=2), "zigzag"),
    "balanced: 2 slices of a sequence": ("balanced", dict(ring=2), "contiguous"),
}


@pytest.mark.parametrize("words", CHOICES)
def test_a_choice_is_refused_before_any_rank_starts(words):
    name, sizes, layout = CHOICES[words]
    widths = dict(key_width=4, value_width=8) if "values" in words else {}
    with pytest.raises(ValueError) as error:
        check_choice(name, sizes, layout, heads=3, slices=2 if "slices" in words else 1, **widths)
    assert words in str(error.value) and "\n" not in str(error.value)


def test_every_name_is_a_choice():
    for name, kind in CORES.items():
        check_choice(name, dict.fromkeys(kind.axes, 1), kind.layouts[0], heads=4, slices=1 + kind.slices)
