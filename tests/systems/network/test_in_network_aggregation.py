"""Switches that add: sums against numpy's, their costs against counting."""

import struct
from math import inf
from random import Random

import numpy as np
import pytest

from minitrain.systems.network import aggregation as ina
from minitrain.systems.network.congestion import Reno, jain
from minitrain.systems.network.packets import Network, Port


def vectors(n=4, m=2048, seed=0):
    return np.random.default_rng(seed).integers(-1000, 1000, (n, m))


def exact(run, values):
    return all(got is not None and (got == values.sum(0)).all() for got in run.results)


def test_switchml():
    """Slots of a bandwidth-delay product fill the link; with two copies every loss is made good, with one none."""
    values = vectors(m=16_384)
    product = 2 + 2 * 1_000_000 / (192 * 80)  # packets of 192 bytes at 80 ps in 2 links of 1 us and 2 ports
    runs = {slots: ina.switchml(values, slots) for slots in (33, 66, 132, 264)}
    assert all(exact(run, values) for run in runs.values()) and 132 < product < 133
    packet_us, round_us = 192 * 80 / 1e6, product * 192 * 80 / 1e6
    for slots, run in runs.items():  # chunk 511: rounds before it, packets of its round, its own way
        waits_us = max(511 // slots * round_us + 511 % slots * packet_us, 511 * packet_us)
        assert run.end_us == pytest.approx(waits_us + round_us, rel=0.002)
        assert run.sums == min(2 * slots, 512) and run.resent == 0
    for copies, right in ((2, 8), (1, 0)):
        values = vectors()
        tries = [ina.switchml(values, 16, copies=copies, loss=0.05, seed=seed) for seed in range(8)]
        assert sum(exact(run, values) for run in tries) == right
        assert all(run.resent > 0 and (run.end_us == inf) == (copies == 1) for run in tries)
    x = np.random.default_rng(1).normal(size=(8, 500))
    largest = np.abs(x).max()
    for scale in (1e3, 1e6, (2**31 - 8) / (8 * largest) * 0.999):
        (total, *_), *_ = ina.switchml(ina.quantized(x, scale), 16)
        assert np.abs(total / scale - x.sum(0)).max() <= 8 / scale
    for times, wraps in ((0.999, False), (1.02, True)):
        scale = (2**31 - 8) / (8 * largest) * times
        (total, *_), *_ = ina.switchml(ina.quantized(np.full((8, 10), largest), scale), 4)
        assert (total[0] < 0) == wraps


def test_iswitch_rl():
    """A late worker keeps a sum of every packet open; SwitchML's pool stays what it is."""
    values, game, language = vectors(m=4096), 6.41e6, 4 * 7e9
    run = ina.iswitch(values, late_us=100)
    assert exact(run, values) and run.sums * 32 * 4 == values[0].size * 4
    assert ina.switchml(values, 16, late_us=100).sums == 32
    assert exact(ina.iswitch(values), values) and game < 50e6 < language / 100


def test_netreduce():
    """Numbers of packets stay, sums are exact, also where packets are lost; a forgotten sum is waited for."""
    values = vectors()
    for loss in (0, 0.02, 0.2):
        run = ina.netreduce(values, loss=loss)
        assert exact(run, values) and (run.resent > 0) == (loss > 0)
    assert ina.netreduce(values, loss=0.02, memory=0).end_us == inf
    once = ina.netreduce(values[:, :32])  # four ports with a link each
    assert once.end_us == pytest.approx(4 + 4 * 192 * 80 / 1e6) and once.resent == 0


def test_allreduce_switch():
    """The same packets and sums as NetReduce's, without the two links to the FPGA and their ports."""
    values = vectors(m=32)
    inside, beside = ina.netreduce(values, inside=True), ina.netreduce(values)
    assert exact(inside, values) and exact(beside, values)
    assert beside.end_us - inside.end_us == pytest.approx(2 * 1 + 2 * 192 * 80 / 1e6)
    values = vectors()
    assert exact(ina.netreduce(values, inside=True, loss=0.05, seed=3), values)


def test_panama():
    """Jobs of 4 and 8 workers, and a plain flow, get equal shares; two trees carry twice; a short flow gets through."""
    goodputs, short_us = ina.panama((4, 8), plain=1, until_us=900)
    assert jain(goodputs) > 0.99 and 0.9 < sum(goodputs) <= 1 and short_us < 3 * (4 + 20_000 * 80 / 1e6)
    (single,), _ = ina.panama((2,), until_us=600)
    heard, net, tree = {}, Network(), ina.Adder(2, merges=True)
    for law in (Reno(), Reno()):
        law.on_ack = lambda ack, law=law: heard.setdefault(ack.seq, []).append(ack.marked)
        path = Port(net, 40 + 10 * len(net.due)), tree, Port(net, 10, mark=(0, 1, 1))
        ina._Member(net, path, 20_000, law)
    net.run()
    assert all(len(set(b)) == 1 for b in heard.values()) and [True] * 2 in heard.values(), "told to both"
    doubled, _ = ina.panama((2, 3), trees=2, until_us=600)
    assert single > 0.95 and jain(doubled) > 0.99 and 1.9 < sum(doubled) <= 2


def test_atp_ina():
    """Any order and any collision: the sum is exact; hits are the slots that balls in bins fill."""
    for slots in (16, 64, 128):
        shares = []
        for seed in range(133):
            values = vectors(2, 4 * 32, seed).reshape(2, 4, 32)
            sums, share = ina.atp(values, slots, seed=seed)
            assert (sums == values.sum(1)).all()
            shares.append(share)
        filled = sum((1 - 1 / slots) ** packet for packet in range(64))  # each finds a slot that is free
        assert abs(np.mean(shares) - filled / 64) < 0.012


def pattern(x, code="f"):
    return int.from_bytes(struct.pack(f"<{code}", x), "little")


def apart(a, b, sign=1 << 31):
    """Units in the last place between two patterns."""
    line = [x if x < sign else sign - x for x in (a, b)]
    return abs(line[0] - line[1])


def test_fpisa():
    """Against IEEE sums: a unit for equal signs; 128 where numbers cancel, a unit again with two guard bits."""
    draw, worst = Random(0), {}
    for _ in range(6000):
        a, b = (np.float32(draw.uniform(-1, 1) * 2.0 ** draw.randint(-8, 8)) for _ in "ab")
        for guard in (0, 2):
            off = apart(ina.fpisa([pattern(a), pattern(b)], guard=guard), pattern(a + b))
            worst[guard, a * b > 0] = max(off, worst.get((guard, a * b > 0), 0))
            assert off <= 1 or not guard and a * b < 0
        a, b = (np.float16(x) for x in (a, b))
        half = ina.fpisa([pattern(a, "e"), pattern(b, "e")], 5, 10, guard=3)
        assert apart(half, pattern(a + b, "e"), 1 << 15) <= 1
    assert worst[0, True] == worst[2, True] == worst[2, False] == 1 < 64 <= worst[0, False]
    whole = [draw.randint(-(2**15), 2**15) for _ in range(100)]
    assert ina.fpisa([pattern(x) for x in whole]) == pattern(sum(whole)), "a hundred, exact: nothing was cut"
    assert ina.fpisa([pattern(3e38)] * 2) == pattern(inf) and ina.fpisa([pattern(-3e38)] * 2) == pattern(-inf)
    assert ina.fpisa([pattern(1e-44)] * 2) == pattern(2e-44), "numbers without a leading one"
    assert ina.fpisa([pattern(1.0)] * 128) == pattern(128.0)


def test_libra_sparse():
    """Zipf's law: 1 % of a million keys has 68 % of the updates, of a trace and by the harmonic numbers."""
    keys = 10**6
    chances = 1 / np.arange(1, keys + 1)
    trace = np.random.default_rng(0).choice(keys, 100_000, p=chances / chances.sum())
    values = np.random.default_rng(1).integers(-9, 9, len(trace))
    switch, server, share = ina.libra(trace, values, np.arange(keys // 100))
    assert (switch + server == np.bincount(trace, values, len(switch)).astype(int)).all()
    assert not switch[keys // 100 :].any() and not server[: keys // 100].any()
    harmonic = [np.log(k) + 0.5772156649 + 1 / (2 * k) for k in (keys // 100, keys)]
    assert abs(harmonic[0] / harmonic[1] - 0.68) < 1e-3 and abs(share - harmonic[0] / harmonic[1]) < 0.005
