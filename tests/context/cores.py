"""Every core over ranks, its layout of tokens, and what one process finds with a bias and a mask."""

from functools import partial

from minitrain import collectives
from minitrain.attention.flash import flash_attention
from minitrain.attention.kernel import PLAIN
from minitrain.attention.placed import DropMask
from minitrain.context.layout import contiguous, striped, zigzag
from minitrain.context.ring import burst_attention, double_ring_attention, gathered_attention, ring_attention
from minitrain.context.ulysses import dealt, loongtrain_attention, ulysses_attention, usp_attention
from minitrain.model.layers import causal_attention, naive_attention
from minitrain.ranks.mesh import Mesh
from minitrain.systems.context.balanced import balanced_attention, unbalanced
from minitrain.systems.context.ring_self_attention import ring_self_attention
from minitrain.systems.context.wallfacer import wallfacer_attention
from tests.context.runs import K, inputs

LAYOUTS = (contiguous, zigzag, striped)
MASK = DropMask(0.3, seed=11, first_row=2, first_head=5)
HEADS = (8, 4)


def in_one_process(heads=HEADS, bias=None, mask=0.0, width=K):
    """Out, dq, dk, dv: scores, bias, softmax, mask, product, and autograd."""
    *qkv, dout = inputs(heads, width=width)
    qkv = [x.requires_grad_() for x in qkv]
    out = naive_attention(*qkv, bias=bias, dropout=mask)
    out.backward(dout)
    return [out.detach(), *(x.grad for x in qkv)]


def in_one_axis(group):
    """name -> (core, layout)."""
    found = {}
    for layout in LAYOUTS:
        name, where = layout.__name__, dict(group=group, layout=layout)
        found[f"ring {name}"] = partial(ring_attention, **where), layout
        found[f"rows {name}"] = partial(ring_self_attention, **where), layout
        found[f"gathered {name}"] = partial(gathered_attention, **where, keep=layout is not striped), layout
        found[f"Ulysses {name}"] = partial(ulysses_attention, **where, core=flash_attention), layout
    found["Ulysses, torch's"] = partial(ulysses_attention, group=group, core=causal_attention), contiguous
    found["ring of PLAIN"] = partial(ring_attention, group=group, kernel=PLAIN), contiguous
    found["balanced"] = partial(balanced_attention, group=group), contiguous
    found["unbalanced"] = partial(balanced_attention, group=group, schedule=unbalanced), contiguous
    return found


def in_two_axes(a, b):
    mesh, found = Mesh(a=a, b=b), {}
    outer, inner = mesh.group("a"), mesh.group("b")
    burst = partial(burst_attention, across=outer, inside=inner, layout=striped)
    for sends in ("queries", "keys"):
        found[f"burst, {sends}"] = partial(burst, backward_sends=sends), striped
    found["double ring"] = partial(double_ring_attention, outer=outer, inner=inner), zigzag
    found["USP"] = partial(usp_attention, ring=outer, ulysses=inner), dealt(zigzag, b)
    if a % b == 0:
        teams = partial(wallfacer_attention, ring=outer, team=inner)
        for layout in LAYOUTS:
            found[f"teams {layout.__name__}"] = partial(teams, layout=layout), layout
    return {f"{name}, {a} x {b}": way for name, way in found.items()}


def in_three_axes():
    mesh = Mesh(outer=2, inner=2, ulysses=2)
    core = partial(loongtrain_attention, **{axis: mesh.group(axis) for axis in mesh.shape})
    return {"LoongTrain": (core, dealt(zigzag, 2))}


CORES = {
    2: lambda: in_one_axis(collectives.world()) | in_two_axes(2, 1) | in_two_axes(1, 2),
    4: lambda: (
        some("ring", "gathered", "Ulysses striped", "balanced", **in_one_axis(collectives.world()))
        | in_two_axes(2, 2)
    ),
    8: lambda: (
        some("USP", "teams zigzag", **in_two_axes(4, 2)) | some("USP", **in_two_axes(2, 4)) | in_three_axes()
    ),
}


def some(*names, **ways):
    return {name: way for name, way in ways.items() if name.startswith(names)}
