"""Tiers: what layers wait against closed forms and a recursion of their own, caches against what popularity
allows, bytes over the host's link against a count by hand."""

import random
from bisect import bisect
from fractions import Fraction
from itertools import accumulate

import pytest

from minitrain.systems.simulate import swaps
from minitrain.systems.simulate.links import play
from minitrain.systems.simulate.swaps import DecayingLFU, Sizes
from minitrain.systems.simulate.swaps import TierLayer as Layer

LINKS = {"net": 4, "bus": 2, "disk": 1}


def fetch_s(layer):
    """Seconds until all of a layer is there, if nothing else is on its way."""
    host, disk = Fraction(layer.host_bytes, 2), Fraction(layer.disk_bytes)
    return max(Fraction(layer.dense_bytes, 4), max(host, disk) + Fraction(layer.disk_bytes, 2))


def drawn(draw, count):
    return [Layer(*(draw.randint(0, 12) for _ in range(4))) for _ in range(count)]


def waits(run, count):
    ends = [0] + [run.end(f"layer {i}") for i in range(count)]
    return [run.start(f"layer {i}") - ends[i] for i in range(count)]


def test_moesys():
    """One layer ahead, experts known: layer i waits max(0, t_fetch(i) - t_layer(i-1)), the first t_fetch(0).
    Dense and sparse parameters come on two lanes at once: t_fetch is the longer, not the sum."""
    draw = random.Random(0)
    hidden = exposed = 0
    for _ in range(100):
        layers = drawn(draw, 8)
        found = waits(play(swaps.prefetching(layers, 1), LINKS), 8)
        behind = [0, *(layer.seconds for layer in layers)]
        assert found == [max(0, fetch_s(layer) - t) for layer, t in zip(layers, behind)]
        hidden, exposed = hidden + found[1:].count(0), exposed + sum(wait > 0 for wait in found[1:])
    assert hidden > 50 and exposed > 50
    test_the_cache_by_hand()
    test_fading_counts_follow_popularity_that_moves()


@pytest.mark.parametrize("depth", [1, 2, 3, 9])
def test_deeper_prefetch_is_the_recursion_of_its_lanes(depth):
    draw = random.Random(depth)
    for _ in range(50):
        layers, begins, end = drawn(draw, 9), [], 0
        net = bus = disk = 0
        for i, layer in enumerate(layers):
            asked = begins[i - depth] if i >= depth else 0
            net = max(net, asked) + Fraction(layer.dense_bytes, 4)
            disk = max(disk, asked) + layer.disk_bytes
            bus = max(max(bus, asked) + Fraction(layer.host_bytes, 2), disk) + Fraction(layer.disk_bytes, 2)
            begins.append(max(end, net, bus))
            end = begins[-1] + layer.seconds
        assert play(swaps.prefetching(layers, depth), LINKS).end_s == end


def test_without_prefetch_or_without_knowing_the_experts_all_of_it_is_waited_for():
    draw = random.Random(3)
    layers = drawn(draw, 8)
    none = waits(play(swaps.prefetching(layers, 0), LINKS), 8)
    assert none == [fetch_s(layer) for layer in layers]
    unknown = waits(play(swaps.prefetching(layers, 2, known=False), LINKS), 8)
    sparse = [fetch_s(layer._replace(dense_bytes=0)) for layer in layers]
    assert all(wait >= alone for wait, alone in zip(unknown, sparse)) and sum(unknown) <= sum(none)
    known = waits(play(swaps.prefetching(layers, 2), LINKS), 8)
    assert sum(known) < sum(unknown)


def zipf(experts, seed, reads, first=0):
    """Experts in the order they are asked for; the k-th most popular is first + k, with weight 1/(k + 1)."""
    draw, steps = random.Random(seed), [*accumulate(1 / (k + 1) for k in range(experts))]
    return [(first + bisect(steps, draw.random() * steps[-1])) % experts for _ in range(reads)]


def hit_rate(cache, order):
    return sum(map(cache.read, order)) / len(order)


def test_fading_counts_follow_popularity_that_moves():
    before, after = zipf(64, 0, 10_000), zipf(64, 1, 3_000, first=32)
    rates = {}
    for decay in (1, 0.5):
        cache = DecayingLFU(8, decay, every=200)
        hit_rate(cache, before)
        rates[decay] = hit_rate(cache, after)
    assert rates[0.5] > rates[1] + 0.2


def test_the_cache_by_hand():
    cache = DecayingLFU(2, decay=0.5, every=100)
    assert [cache.read(e) for e in (0, 0, 1, 2, 2, 0, 1)] == [False, True, False, False, True, True, False]
    assert sorted(cache.samples) == [0, 1], "of 1 and 2, with two reads each, 2 was read longer ago"
    cache = DecayingLFU(2)
    assert [cache.read(e) for e in (0, 1, 1, 0, 2, 2)] == [False, False, True, True, False, False]
    assert sorted(cache.samples) == [0, 2], "1 came after 0, and was read longer ago"
    forgetting = DecayingLFU(1, decay=0, every=2)
    assert [forgetting.read(e) for e in (0, 0, 1, 1)] == [False, True, False, True]
    keeping = DecayingLFU(1, decay=1, every=2)
    assert [keeping.read(e) for e in (0, 0, 1, 1, 1)] == [False, True, False, False, True]


# ---- Smart-Infinity ----------------------------------------------------------------------------------------

HOST, DEVICE = 16, 2  # bytes per second each way, of the host's link and of each storage device


def played(devices, near, sizes=Sizes(), chunks=1, per_device=960):
    tasks = swaps.updating(per_device * devices, devices, sizes, near=near, chunks=chunks)
    inside = {f"{way} {d}": DEVICE for d in range(devices) for way in ("read", "write")}
    return play(tasks, {"to host": HOST, "to disks": HOST, **inside})


def test_smart_infinity():
    """Over the host's link, bytes of a parameter and step. On the CPU: 12 B of states both ways are 24, and the
    gradient goes both ways, the new parameter one; near the storage: the gradient in, the parameter out."""
    n = 960 * 3
    cpu, near = (played(3, near) for near in (False, True))
    assert cpu.carried("to host") + cpu.carried("to disks") == n * (24 + 2 * 4 + 2)
    assert near.carried("to disks") == n * 4 and near.carried("to host") == n * 2
    assert swaps.host_bytes(Sizes(), near=True) == {"written": 4, "read": 2}
    assert swaps.host_bytes(Sizes(), near=False) == {"written": 18, "read": 16}
    inside = [
        sum(run.carried(f"{w} {d}") for d in range(3)) for run in (cpu, near) for w in ("read", "write")
    ]
    assert inside == [n * 16, n * 18, n * 18, n * 16], "as much for the disks themselves"
    ratio = [update_s(devices, False) / update_s(devices, True) for devices in (1, 2, 4, 8, 16, 32, 64)]
    assert ratio[:4] == [1, 1, 1, 1] and ratio[4:] == [2, 4, Fraction(18, 4)]


def update_s(devices, near, sizes=Sizes()):
    """Seconds at least: the busiest link, of the host's and those of the storage devices."""
    run = played(devices, near, sizes, per_device=960 // devices)
    return max(Fraction(run.carried(link), rate) for link, rate in run.bytes_per_s.items())


@pytest.mark.parametrize("devices", [1, 4, 12, 40])
@pytest.mark.parametrize("near", [True, False])
def test_chunks_that_overlap_come_close_to_the_busiest_link(devices, near):
    least = devices * update_s(devices, near)
    one, many = (played(devices, near, chunks=chunks).end_s for chunks in (1, 24))
    assert least <= many < 1.1 * least < one
