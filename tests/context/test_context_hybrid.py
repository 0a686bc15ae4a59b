"""Heads with rings, rings in rings, teams: equal to one device, bytes and steps beside formulas, refusals."""

from functools import partial

import pytest
import torch

from minitrain import launch
from minitrain.attention.kernel import PLAIN
from minitrain.context.layout import contiguous, split, striped, zigzag
from minitrain.context.ring import Rings, double_ring_attention, ring_attention, ring_backward, ring_forward
from minitrain.context.ulysses import dealt, loongtrain_attention, usp_attention
from minitrain.plan.simulate.machines import machine
from minitrain.ranks.collectives import world
from minitrain.ranks.events import Issue
from minitrain.ranks.launch import dryrun
from minitrain.ranks.ledger import Ledger
from minitrain.ranks.mesh import Mesh
from minitrain.systems.context import wallfacer
from minitrain.systems.context.wallfacer import wallfacer_attention
from minitrain.systems.simulate.replay import replay
from tests.context.runs import B, K, distance, furthest, inputs, whole
from tests.parallel import TOLERANCE

HEADS = ((8, 8), (8, 2))
ALL_LAYOUTS = (contiguous, zigzag, striped)
EVERY = [(*heads, layout, causal) for heads in HEADS for layout in ALL_LAYOUTS for causal in (True, False)]


def traffic(core, layout, group, heads, kv_heads, length):
    """What this rank issues in forward, and in forward and backward."""
    *qkv, dout = (split(x, layout, group, 2) for x in inputs((heads, kv_heads), length))
    q, k, v = (x.requires_grad_() for x in qkv)
    with Ledger() as ledger:
        out = core(q, k, v)
        ahead = [event for event in ledger.events if isinstance(event, Issue)]
        out.backward(dout)
    return ahead, [event for event in ledger.events if isinstance(event, Issue)]


def measured(core, place, group, cases, length=16):
    """Of all cases: the distance from one device, and traffic. `place`: how tokens of a layout are held."""
    found = []
    for heads, kv_heads, layout, causal in cases:
        run, held = partial(core, layout=layout, causal=causal), place(layout)
        error = distance(run, held, group, heads, kv_heads, length, causal)
        found.append((error, traffic(run, held, group, heads, kv_heads, length)))
    return found


def as_said(layout):
    return layout


def by_axis(events, what=lambda event: event.sent_bytes):
    found = {}
    for event in events:
        if event.op != "receive":
            found[event.axis] = found.get(event.axis, 0) + what(event)
    return {axis: amount for axis, amount in found.items() if amount}


def across(events, rank, node):
    """Bytes of this rank that leave its node of `node` neighbours."""
    total = 0
    for event in events:
        others = [event.members[1]] if event.op == "send" else [m for m in event.members if m != rank]
        total += event.sent_bytes * sum(m // node != rank // node for m in others) // max(len(others), 1)
    return total


# ---- heads and a ring ------------------------------------------------------------------------------------

T = 16


def usp_bytes(ulysses, ring, heads, kv_heads, length=T):
    """(forward, with backward) by axis, of one rank: the sum of both formulas."""
    sent_kv = kv_heads if kv_heads % ulysses == 0 else max(ulysses, kv_heads)
    all_to_all = (2 * heads + 2 * sent_kv) * B * length // (ulysses * ring) * K * (ulysses - 1) // ulysses
    around = (ring - 1) * 2 * sent_kv // ulysses * B * length // ring * K
    return [
        {axis: 8 * n for axis, n in (("ulysses", a), ("ring", r)) if n}
        for a, r in ((all_to_all, around), (2 * all_to_all, 3 * around))
    ]


def usp(sizes, cases, length=T):
    mesh = Mesh(**sizes)
    core = partial(usp_attention, **{axis: mesh.group(axis) for axis in sizes})
    inner = list(sizes)[-1] == "ulysses"
    place = partial(dealt, ulysses=mesh.size("ulysses"), ulysses_inner=inner)
    return measured(core, place, mesh.group("ulysses", "ring"), cases, length)


@pytest.mark.parametrize("ulysses", [1, 2, pytest.param(4, marks=pytest.mark.slow), 8])
def test_usp(ulysses):
    """Every factorization of 8 gives what one device gives, and sends the sum of both formulas."""
    ring = 8 // ulysses
    cases = [(*heads, zigzag, True) for heads in HEADS] + [(8, 1, contiguous, False), (8, 4, striped, True)]
    for found in launch.run(usp, dict(ring=ring, ulysses=ulysses), cases, ranks=8):
        for (error, (forward, both)), (heads, kv_heads, *_) in zip(found, cases):
            assert error < TOLERANCE
            assert [by_axis(forward), by_axis(both)] == usp_bytes(ulysses, ring, heads, kv_heads)


@pytest.mark.parametrize("sizes", [dict(ring=2), dict(ulysses=2), dict(ring=2, ulysses=2)], ids=str)
def test_usp_on_fewer_ranks(sizes):
    for found in launch.run(usp, dict(ring=1, ulysses=1) | sizes, EVERY, ranks=2 * len(sizes)):
        assert max(error for error, _ in found) < TOLERANCE


def test_three_heads_on_six_ranks():
    """The ring is free: any number of ranks, and a piece of a rank's tokens may be of both its halves."""
    cases = [(3, 3, zigzag, True), (6, 2, zigzag, True)]
    for found in launch.run(usp, dict(ring=2, ulysses=3), cases, 12, ranks=6):
        assert max(error for error, _ in found) < TOLERANCE


def test_placement_decides_what_leaves_the_node():
    """2 nodes of 2: each axis sends the same in both orders, but the ring or the all-to-alls cross nodes."""
    case = [(8, 2, zigzag, True)]
    placements = dict(ring=2, ulysses=2), dict(ulysses=2, ring=2)
    for rank, found in enumerate(launch.run(lambda: [usp(sizes, case)[0] for sizes in placements], ranks=4)):
        for inner, outer, (error, (forward, both)) in zip(("ulysses", "ring"), ("ring", "ulysses"), found):
            assert error < TOLERANCE
            for events, formula in zip((forward, both), usp_bytes(2, 2, 8, 2)):
                assert by_axis(events) == formula and across(events, rank, node=2) == formula[outer]
                assert across(events, rank, node=1) == formula[inner] + formula[outer]


def test_tokens_must_be_dealt():
    """Zig-zag over all ranks is not what the ring gets after the all-to-all: mask and result are wrong."""

    def rank():
        mesh = Mesh(ring=2, ulysses=2)
        core = partial(usp_attention, ring=mesh.group("ring"), ulysses=mesh.group("ulysses"))
        return distance(core, zigzag, mesh.group("ring", "ulysses")), dealt(zigzag, 2)(world().rank(), 4, 8)

    runs = launch.run(rank, ranks=4)
    assert max(error for error, _ in runs) > 1e-2
    assert [tokens for _, tokens in runs] == [[range(0, 2)], [range(6, 8)], [range(2, 4)], [range(4, 6)]]


# ---- rings within rings ----------------------------------------------------------------------------------


def loongtrain(ulysses, outer, inner, cases):
    mesh = Mesh(outer=outer, inner=inner, ulysses=ulysses)
    core = partial(loongtrain_attention, **{axis: mesh.group(axis) for axis in mesh.shape})
    return measured(core, partial(dealt, ulysses=ulysses), mesh.group(*mesh.shape), cases)


def single_ring(cases):
    return measured(partial(ring_attention, group=world()), as_said, world(), cases)


def test_loongtrain():
    """Heads x context of 4x1, 2x2, 1x4 give one output; on 2 nodes of w=2 a double ring takes cp/w - 1 steps
    across, not cp - 1: a card's bytes are cut by about w, a node's from cp - 1 to cp - w blocks."""
    grids = (4, 1, 1), (2, 2, 1), (1, 2, 2)
    program = lambda: [*(loongtrain(*grid, EVERY) for grid in grids), single_ring(EVERY[:1])]
    runs = launch.run(program, ranks=4)
    for by_grid in runs:
        assert max(error for found in by_grid for error, _ in found) < TOLERANCE

    block = 8 * 2 * 8 * B * T // 4 * K  # 8 K/V heads, one rank's keys and values
    for times, which in ((1, 0), (3, 1)):  # forward; with backward, where gradients travel too
        of_ring = lambda n: [across(run[n][0][1][which], rank, node=2) for rank, run in enumerate(runs)]
        single, double = of_ring(3), of_ring(2)
        assert single == [0, 3 * times * block] * 2  # one card of each node sends all: cp - 1 blocks
        assert double == [times * block] * 4  # each card cp/w - 1
        nodes = [[sum(bytes_of[first : first + 2]) for first in (0, 2)] for bytes_of in (single, double)]
        assert nodes == [[3 * times * block] * 2, [2 * times * block] * 2]  # of a node cp - 1, and cp - w
    for run in runs:
        forward, _ = run[2][0][1]
        assert by_axis(forward) == {"outer": block, "inner": 2 * block}
        assert by_axis(forward, lambda event: event.op == "send") == {"outer": 2 * 1, "inner": 2 * 2}


def in_a_dry_run(attention, **sizes):
    """Bytes forward, bytes with backward, messages forward, by axis."""
    mesh = Mesh(**sizes)
    core = partial(attention, **{axis: mesh.group(axis) for axis in sizes}, causal=False)
    forward, both = traffic(core, zigzag, mesh.group(*sizes), 4, 2, 128)
    return by_axis(forward), by_axis(both), by_axis(forward, lambda event: event.op == "send")


def test_bytes_of_long_double_rings():
    """m - 1 steps across and m (w - 1) inside; m · w - 1 blocks; in backward gradients as often as keys."""
    block = 8 * 2 * 2 * B * 128 // 16 * K
    for m, w in ((4, 4), (2, 8)):
        run = partial(in_a_dry_run, double_ring_attention, outer=m, inner=w)
        forward, both, steps = dryrun.run(run, rank=5, ranks=16)
        steps = {axis: messages // 2 for axis, messages in steps.items()}  # one of K and one of V
        assert steps == {"outer": m - 1, "inner": m * (w - 1)}
        assert forward == {axis: n * block for axis, n in steps.items()}
        assert both == {axis: 3 * n * block for axis, n in steps.items()}


def attention_of_two_nodes(length, outer, inner):
    mesh = Mesh(outer=outer, inner=inner)
    core = partial(double_ring_attention, outer=mesh.group("outer"), inner=mesh.group("inner"))
    made = dict(dtype=torch.bfloat16, requires_grad=True)
    q, k, v = (torch.empty(1, heads, length // 16, 128, **made) for heads in (32, 8, 8))
    with Ledger() as ledger:
        out = core(q, k, v)
        out.backward(torch.empty_like(out))
    return ledger.events


@pytest.mark.parametrize("length, single_ms, double_ms", [(16384, 4.1, 1.62), (131072, 40.0, 40.1)])
def test_replay_of_a_double_ring(length, single_ms, double_ms):
    """The table in ring.py: two nodes of 8 H100, by the rank that sends across the border."""
    times = []
    for grid in ((16, 1), (2, 8)):
        events = {7: dryrun.run(attention_of_two_nodes, length, *grid, rank=7, ranks=16)}
        times.append(1e3 * replay(events, machine("h100"), dtype="bf16").step_s)
    assert times == pytest.approx([single_ms, double_ms], rel=0.02)


def test_three_rings():
    """Cards in a node, nodes in a rack, racks: 2 x 2 x 2, by the pure functions."""

    def rank():
        mesh = Mesh(rack=2, node=2, card=2)
        rings = Rings([mesh.group(axis) for axis in mesh.shape], zigzag, True)
        everyone = mesh.group("rack", "node", "card")
        q, k, v, dout = (split(x, zigzag, everyone, 2) for x in inputs((8, 2), 16))
        with Ledger() as ledger:
            out, lse = ring_forward(q, k, v, rings, PLAIN)
        issued = [event for event in ledger.events if isinstance(event, Issue)]
        steps = by_axis(issued, lambda event: event.op == "send")
        ours = out, *ring_backward(dout, q, k, v, out, lse, rings, PLAIN)
        theirs = [split(x, zigzag, everyone, 2) for x in whole((8, 2), True, 16)]
        return steps, furthest(ours, theirs)

    for steps, error in launch.run(rank, ranks=8):
        assert error < TOLERANCE and steps == {"rack": 2 * 1, "node": 2 * 2, "card": 2 * 4}  # K and V


def test_rings_must_be_named_right():
    """Outer and inner exchanged: blocks come in another order than the layout says."""

    def rank():
        mesh = Mesh(outer=2, inner=2)
        core = partial(double_ring_attention, outer=mesh.group("inner"), inner=mesh.group("outer"))
        return distance(partial(core, layout=contiguous), contiguous, mesh.group("outer", "inner"))

    assert max(launch.run(rank, ranks=4)) > 1e-2


# ---- teams -----------------------------------------------------------------------------------------------


def teams(count, cases):
    mesh = Mesh(ring=world().size() // count, team=count)
    core = partial(wallfacer_attention, ring=mesh.group("ring"), team=mesh.group("team"))
    return measured(core, as_said, mesh.group("ring", "team"), cases)


def wallfacer_bytes(ranks, count, member, heads, kv_heads, length=T):
    """(forward, with backward) by axis, messages in forward, of member c of a team, as wallfacer.py says."""
    u, v, per_key = (B * h * length // ranks * K for h in (heads, kv_heads, heads))
    steps, row = ranks // count**2, per_key // K
    messages = steps - 1 + (member > 0)
    home = steps - 1 + (member > 0 or steps > 1)  # dK and dV: S - 1 steps and the skip home
    forward = {"team": (count - 1) * (2 * u + 2 * v + row), "ring": messages * 2 * count * v}
    backward = {"team": (count - 1) * (4 * u + 4 * v + row), "ring": (messages + home) * 2 * count * v}
    both = {axis: forward[axis] + backward[axis] for axis in forward}
    return [{axis: 8 * n for axis, n in found.items() if n} for found in (forward, both)], messages


@pytest.mark.parametrize("ranks, count", [(2, 1), (4, 2), (8, 2)])
def test_wallfacer(ranks, count):
    """As one device; at most P/C² messages around the ring in the place of P - 1; bytes as derived."""
    cases = EVERY[:: 1 if ranks == 4 else 2]
    for rank, found in enumerate(launch.run(teams, count, cases, ranks=ranks)):
        for (error, (forward, both)), (heads, kv_heads, *_) in zip(found, cases):
            assert error < TOLERANCE
            formula, messages = wallfacer_bytes(ranks, count, rank % count, heads, kv_heads)
            assert [by_axis(forward), by_axis(both)] == formula
            sent = by_axis(forward, lambda event: event.op == "send").get("ring", 0)
            assert sent == 2 * messages <= 2 * min(ranks // count**2, ranks - 1)


def test_bytes_of_teams_on_64_ranks():
    """Larger teams: shorter rings, more inside the team."""
    for count, most in ((1, 63), (2, 16), (4, 4), (8, 1)):
        formula, messages = wallfacer_bytes(64, count, 7 % count, 4, 2, length=128)
        run = partial(in_a_dry_run, wallfacer_attention, ring=64 // count, team=count)
        *found, steps = dryrun.run(run, rank=7, ranks=64)
        assert found == formula and steps.get("ring", 0) == 2 * messages and messages == most


def test_shares_of_a_team_are_merged_by_their_lse():
    def rank():
        def mean(out, lse, team, merged=wallfacer.merged_scatter):
            return merged(out, torch.zeros_like(lse), team)

        wallfacer.merged_scatter = mean
        return teams(2, [(8, 8, zigzag, False)])[0][0]

    assert min(launch.run(rank, ranks=4)) > 1e-2


def peak(attention, **sizes):
    """Peak memory of the core in forward and in backward, in units of q's bytes."""
    mesh = Mesh(**sizes)
    core = partial(attention, **{axis: mesh.group(axis) for axis in sizes})
    q, k, v = (torch.ones(1, 8, 64, 32).requires_grad_() for _ in range(3))
    with Ledger() as ledger:
        out = core(q, k, v, causal=False)
        forward = ledger.peak_bytes
        out.backward(torch.ones_like(out))
    return forward / q.nbytes, ledger.peak_bytes / q.nbytes


def test_memory_of_rings_and_teams():
    forward, backward = dryrun.run(partial(peak, ring_attention, group=16), rank=1, ranks=16)
    double = dryrun.run(partial(peak, double_ring_attention, outer=4, inner=4), rank=1, ranks=16)
    assert double == (forward + 2 * 2, backward + 5 * 2)
    for count, factors in ((2, (2.3, 2.1)), (4, (3.6, 3.4))):
        run = partial(peak, wallfacer_attention, ring=16 // count, team=count)
        found = dryrun.run(run, rank=1, ranks=16)
        assert [round(ours / ring, 1) for ours, ring in zip(found, (forward, backward))] == list(factors)
