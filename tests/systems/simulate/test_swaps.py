"""Swaps: simulated against formulas, counted against what the papers derive, and without the idea beside it."""

import random
from fractions import Fraction
from itertools import product

import pytest

from minitrain.systems.simulate import swaps
from minitrain.systems.simulate.links import play

LAYER_S = 4
SAME = [{0, 2, 4, 6}] * 2
DISJOINT = [{0, 2, 4, 6}, {1, 3, 5, 7}]


def forward(sets, copy_s):
    """8 layers whose tensors take copy_s seconds over a link that is not shared."""
    return play(swaps.swapping_forward(sets, [copy_s * 5] * 8, LAYER_S), {"to host": 5})


def at_once(run):
    """Copies that are on their way together, at most."""
    copies = [(run.start(name), run.end(name)) for name in run.tasks if name.startswith("out")]
    return max(sum(start <= at < end for start, end in copies) for at, _ in copies)


@pytest.mark.parametrize("copy_s", [1, 2, Fraction(5, 2), 3, 4])
def test_tmof(copy_s):
    """Two GPUs, one link: disjoint sets of tensors travel at full rate and nobody waits; the same tensors at
    the same time get half of it, and each of the three copies that a later layer waits for stalls both GPUs. The
    search finds sets as good as the disjoint ones; opposed directions do not share a way of the link either."""
    same, disjoint = forward(SAME, copy_s), forward(DISJOINT, copy_s)
    stall = 3 * max(0, 2 * copy_s - LAYER_S)
    assert [same.stall(f"device {d}") for d in (0, 1)] == [stall, stall]
    assert [disjoint.stall(f"device {d}") for d in (0, 1)] == [0, 0]
    copies = [name for name in same.tasks if name.startswith("out")]
    assert at_once(same) == 2 and at_once(disjoint) == 1 and all(same.is_slowed(name) for name in copies)
    assert not any(disjoint.is_slowed(name) for name in disjoint.tasks)
    assert same.carried("to host") == disjoint.carried("to host") == 8 * 5 * copy_s, "as many bytes leave"
    found = swaps.swap_sets(2, [copy_s * 5] * 8, LAYER_S, 5, enough=4 * 5 * copy_s)
    assert forward(found, copy_s).end_s <= disjoint.end_s and all(len(some) >= 4 for some in found)
    test_opposed_directions_use_both_ways_of_the_bus(2, 3)


def test_tmof_searches_its_sets():
    """On two devices as good as the best of all pairs of sets that free enough; up to so much better than if both
    swapped their largest tensors."""
    gains = []
    for seed in range(24):
        draw = random.Random(seed)
        sizes, rate = [draw.randint(1, 9) for _ in range(5)], draw.choice((1, 2, 3))
        enough = Fraction(2, 5) * sum(sizes)
        end = lambda sets: play(swaps.swapping_forward(sets, sizes, LAYER_S), {"to host": rate}).end_s
        every = [{i for i in range(5) if bits >> i & 1} for bits in range(32)]
        best = min(map(end, product([s for s in every if sum(sizes[i] for i in s) >= enough], repeat=2)))
        found = swaps.swap_sets(2, sizes, LAYER_S, rate, enough)
        assert all(sum(sizes[i] for i in some) >= enough for some in found) and end(found) == best
        order = sorted(range(5), key=lambda i: -sizes[i])
        take = next(n for n in range(6) if sum(sizes[i] for i in order[:n]) >= enough)
        gains.append(end([{*order[:take]}] * 2) / best)
    assert min(gains) >= 1 and max(gains) > 1.5
    with pytest.raises(ValueError, match="ask for as many at most"):
        swaps.swap_sets(2, [1, 2], LAYER_S, 1, 4)


@pytest.mark.parametrize("devices, rounds", [(2, 1), (4, 2), (6, 1)])
def test_opposed_directions_use_both_ways_of_the_bus(devices, rounds):
    size, rate = 12, 3
    links = {"to host": rate, "to device": rate}
    together = play(swaps.exchanges(devices, rounds, size, opposed=False), links)
    opposed = play(swaps.exchanges(devices, rounds, size, opposed=True), links)
    assert together.end_s == 2 * devices * rounds * Fraction(size, rate)
    assert opposed.end_s == devices * rounds * Fraction(size, rate), "half: no way is ever idle"
    carried = together.carried("to host"), opposed.carried("to host"), opposed.carried("to device")
    assert carried == (devices * rounds * size,) * 3


@pytest.mark.parametrize(
    "devices, layers, m, room", [(1, 4, 1, 1), (2, 6, 3, 1), (2, 8, 3, 2), (4, 12, 2, 2)]
)
def test_harmony(devices, layers, m, room):
    """Weights swapped in a step. Quoted of the papers, not checked against their print: (4m+2)N|W| and 3|W|;
    3N|W| follows in the same way, if nothing is left from one use to the next. Counted here is a memory with
    room for some layers: where the order of layers turns round (twice per microbatch and device, or once in
    Harmony) as many are still there, and that is all the difference. One layer counts 1, so |W| = layers."""
    one = swaps.swap_volume(swaps.virtualized(devices, layers, m), room, writes_all=True)
    assert one.weights == (4 * m + 2) * devices * layers - 4 * m * devices * room
    dp = swaps.swap_volume(swaps.harmony_dp(devices, layers, m), room)
    assert dp.weights == 3 * devices * layers - devices * room
    pp = swaps.swap_volume(swaps.harmony_pp(devices, layers, m * devices), room)
    assert pp.weights == 3 * layers - devices * room
    assert (dp.fetched, dp.written) == (2 * devices * layers - devices * room, devices * layers)


def test_each_of_harmonys_ideas_is_needed():
    """Without groups, or with a memory that writes back what nobody changed, the volume is another."""
    devices, layers, m = 2, 10, 3
    alone = swaps.harmony_dp(devices, layers, m)
    assert swaps.swap_volume(alone, 1).weights == 3 * 20 - 2
    assert swaps.swap_volume(alone, 1, writes_all=True).weights == 4 * 20 - 2 * 2
    by_microbatch = swaps.virtualized(devices, layers, m)
    assert swaps.swap_volume(by_microbatch, 1).weights == (2 * m + 2) * 20 - 2 * m * 2


def test_the_least_recently_used_layer_leaves_and_is_written_if_it_was_ever_updated():
    steps = [swaps.Step(0, layer, "F") for layer in (0, 1, 0, 2, 0)]
    assert swaps.swap_volume(steps, 2) == (3, 0), "layer 1 left, 0 did not"
    steps = [swaps.Step(0, 0, "U"), swaps.Step(0, 0, "F"), swaps.Step(0, 1, "F")]
    assert swaps.swap_volume(steps, 1) == (2, 1)


def stall(free, dynamic, layers=6, layer_s=2, layer_bytes=10, rate=2):
    stay = swaps.resident(free, layer_bytes, layers, dynamic=dynamic)
    for number, room in zip(stay, free):
        assert number == layers <= room // layer_bytes or number * layer_bytes <= room - 2 * layer_bytes
    run = play(swaps.offloading(stay, layers, layer_s, layer_bytes), {"to device": rate})
    return run.stall("device"), stay


def test_static_and_dynamic_offload():
    """A copy takes 5 and hides behind 2: what stays saves time, so what follows the free memory waits less than
    what fits at the worst moment; with constant memory both are the same."""
    varying = [60, 20, 40, 50, 20, 60]
    (static, kept), (dynamic, follows) = (stall(varying, dynamic) for dynamic in (False, True))
    assert kept == [0] * 6 and follows == [6, 0, 2, 3, 0, 6] and 0 < dynamic < static
    run = play(swaps.offloading(follows, 6, 2, 10), {"to device": 2})
    fetched = [sum(f"fetch {6 * t + i}" in run.tasks for i in range(6)) for t in range(6)]
    assert fetched == [6, 6, 6, 4, 6, 6], "what was dropped is fetched again, what newly stays for once"
    for room in (20, 30, 45, 60):
        assert stall([room] * 5, True) == stall([room] * 5, False)
    draw = random.Random(0)
    for _ in range(200):
        free = [draw.randint(20, 80) for _ in range(draw.randint(1, 6))]
        rate = draw.choice([1, 2, 5, 10])
        (static, _), (dynamic, _) = (stall(free, dynamic, rate=rate) for dynamic in (False, True))
        assert dynamic <= static
