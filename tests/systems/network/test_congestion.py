"""Laws: each update against the paper's formula worked by hand, then an incast's steady state."""

from math import inf
from types import SimpleNamespace as Object

import pytest

from minitrain.systems.network import congestion as cc
from minitrain.systems.network.packets import US, Flow, Network, Port


def alone(law, gbps=100, **settings):
    """A law whose flow is as good as silent."""
    net = Network()
    Flow(net, (Port(net, gbps, 5),), 10**9, law, start_us=10**9, **settings)
    return law, net


def hear(law, **said):
    law.on_ack(Object(**{"rtt": 20 * US, "seq": 0, "size": 1000, "marked": False, "stamps": None} | said))


def arrived(port, flows, until_us):
    """Bytes of each flow from now on."""
    before = [flow.arrived for flow in flows]
    port.net.run(until_us)
    return [flow.arrived - then for flow, then in zip(flows, before)]


def queue(port, since_us):
    queued = [queued for us, queued, _ in port.history if us >= since_us]
    return sum(queued) / len(queued)


def test_dcqcn():
    law, net = alone(cc.Dcqcn(), 40)
    net.now = 60 * US
    hear(law, marked=True)
    assert (law.target, law.rate) == (40, 20) and law.alpha == 1
    net.now += 30 * US
    hear(law, marked=True)
    assert law.rate == 20, "a notification per 50 us"
    expected, target = 20, 40
    for step in range(1, 8):
        net.run(60 + 55 * step)
        target += 0.04 if step > 5 and target < 40 else 0
        expected = (expected + min(target, 40)) / 2
        assert law.rate == pytest.approx(expected) and law.alpha == pytest.approx((255 / 256) ** step)
    alpha = law.alpha
    hear(law, marked=True)
    assert law.rate == pytest.approx(expected * (1 - alpha / 2))
    assert law.alpha == pytest.approx(255 / 256 * alpha + 1 / 256)
    net.run(60 + 55 * 14 + 1)
    assert law.stage == 7 and law.target == pytest.approx(expected + 2 * 0.04), "additive from the sixth on"
    scene = dict(gbps=40, delay_us=2, mtu=2000, mark=(40_000, 200_000, 0.2), apart_us=2000)
    port, flows = cc.incast(cc.Dcqcn, 2, until_us=8000, **scene)
    got = arrived(port, flows, 15_000)
    assert abs(got[0] / sum(got) - 0.5) < 0.01 and cc.jain(got) > 0.999
    assert sum(got) / (7000 * US / port.byte_ps) > 0.94


def test_timely():
    law, _ = alone(cc.Timely(), 10)
    rate, smooth, last, falling = 1.0, 0.0, None, 0
    for rtt_us in (30, 60, 70, 90, 600, 550, 500, 490, 480, 470, 460, 450, 440, 430, 40):
        smooth = 0.125 * smooth + 0.875 * (rtt_us - (last or rtt_us))
        gradient, last = smooth * US / law.flow.base_rtt, rtt_us
        falling = falling + 1 if gradient <= 0 else 0
        if rtt_us < 50:
            rate += 0.01
        elif rtt_us > 500:
            rate *= 1 - 0.8 * (1 - 500 / rtt_us)
        elif gradient > 0:
            rate *= 1 - 0.8 * min(gradient, 1)
        else:
            rate += 0.05 if falling >= 5 else 0.01
        rate, before = max(rate, 0.01), law.rate
        for _ in range(15):
            hear(law, rtt=rtt_us * US)
            assert law.rate == before, "once per segment of 16 KB"
        hear(law, rtt=rtt_us * US)
        assert law.rate == pytest.approx(rate), rtt_us
    port, flows = cc.incast(cc.Timely, gbps=10, delay_us=4, until_us=10_000)
    assert port.most_queued * port.byte_ps < cc.Timely.low, "ten of a tenth of the line's rate each"
    assert cc.jain([flow.arrived for flow in flows]) > 0.9
    port, _ = cc.incast(lambda: cc.Timely(start=1.0), gbps=10, delay_us=4, until_us=3000)
    assert port.most_queued * port.byte_ps > 4 * cc.Timely.high, "from line rate the bound cannot be reached"


def test_swift_cc():
    law, net = alone(cc.Swift())
    law.packets = window = 10.0
    for now_us, rtt_us in ((100, 20), (101, 24), (102, 50), (110, 50), (152, 50), (704, 500), (900, 20)):
        net.now = now_us * US
        hear(law, rtt=rtt_us * US)
        if rtt_us < 25:
            window += 1 / window if window >= 1 else 1
        elif now_us in (102, 152, 704):  # an RTT since the last cut
            window *= max(1 - 0.8 * (rtt_us - 25) / rtt_us, 0.5)
        assert law.packets == pytest.approx(window) and law.window == max(window, 1) * 1000
    law.packets = 0.25
    hear(law, rtt=20 * US)
    assert law.packets == 1.25 and law.rate == inf
    law.packets, law.cut_at = 0.5, -inf
    hear(law, rtt=100 * US)
    assert law.packets == pytest.approx(0.25) and law.rate == pytest.approx(0.25 * 8000 / (100 * 1000))
    port, flows = cc.incast(cc.Swift, delay_us=2, until_us=2000)
    mean_us = flows[0].base_rtt / US + queue(port, 1000) * port.byte_ps / US
    assert abs(mean_us - 25) < 0.5 and cc.jain([flow.arrived for flow in flows]) > 0.99


def test_hpcc():
    law, _ = alone(cc.Hpcc())
    base, bdp = law.flow.base_rtt, 100 * law.flow.base_rtt / 8000
    more = bdp * 0.05 / 100
    law.flow.seq = 8
    hear(law, stamps=[(0, 0, 0, 100), (5000, 0, 0, 40)])
    assert law.window == bdp, "one stamp says no rate"
    gap = base // 4
    hear(law, stamps=[(0, 1000, gap, 100), (9000, 12_000, gap, 40)])
    busiest = 5000 / (bdp * 0.4) + 12_000 * 8000 / gap / 40
    u = 0.75 * 1 + 0.25 * busiest
    assert law.u == pytest.approx(u) and law.window == pytest.approx(bdp / (u / 0.95) + more)
    assert law.rate == pytest.approx(law.window * 8000 / base) and law.update_at == 8
    reference, sent = law.window, 12_000
    for step in range(
        1, 8
    ):  # a link that sends 1,000 bytes per RTT: five times W_AI more, then in proportion
        for seq in (8 * step - 1, 8 * step):  # the first left before the last update
            then, sent, law.flow.seq = law.last[0][2] + base, sent + 1000, 8 * step + 8
            hear(law, seq=seq, stamps=[(0, 1000, then, 100), (0, sent, then, 40)])
            scale = 1 if step <= 5 else 0.95 / (1000 * 8000 / base / 40)
            assert law.window == pytest.approx(min(reference * scale + more, bdp))
        reference = law.window
        assert law.reference == reference and law.stage == (step if step <= 5 else step - 6)
    for senders in (2, 5, 10):
        port, flows = cc.incast(cc.Hpcc, senders, delay_us=3, until_us=600)
        (first_us, _, first), (last_us, _, last) = port.history[150], port.history[-1]
        used = (last - first) * port.byte_ps / ((last_us - first_us) * US)
        waiting, said = queue(port, 300), 0.95 + senders * 0.05 / 100
        assert abs(used - said) < 0.011 and waiting < 3000 and cc.jain([f.arrived for f in flows]) > 0.99
        assert abs(used + waiting / flows[0].law.bdp - said) < 0.005


def test_eqds():
    port, flows = cc.incast(cc.Eqds, size=2_000_000, until_us=200)
    assert port.most_queued <= 2000, "two packets"
    sent = [(us, sent) for us, _, sent in port.history if us > 50]
    assert (sent[-1][1] - sent[0][1]) * port.byte_ps == (sent[-1][0] - sent[0][0]) * US, "the line is full"
    assert max(flow.arrived for flow in flows) - min(flow.arrived for flow in flows) <= 2000
    port, flows = cc.incast(cc.Eqds, size=20_500, until_us=10**4)
    assert all(flow.end_ps for flow in flows) and port.sent == 10 * 20_500
    blind, _ = cc.incast(lambda: cc.Eqds(window=5000), size=2_000_000, until_us=200)
    assert blind.most_queued > 40_000, "what needs no credit meets in the port"


def test_rocc():
    net = Network()
    port = Port(net, 40)
    control = cc.FairRate(port)
    rate, before = 40.0, 0
    for number, queued in enumerate((100_000, 120_000, 60_000, 300_001, 0, 0), 1):
        port.queued = queued
        net.run(40 * number)
        level = max(level for level in (1, 2, 4, 8, 16, 32) if level == 1 or rate < 40 / level)
        change = 0.01 * (0.3 * (queued - 75_000) + 1.5 * (queued - before)) / 600 / level
        rate, before = min(max(rate / 2 if queued > 300_000 else rate - change, 0.1), 40), queued
        assert control.rate == pytest.approx(rate)
    port, flows = cc.incast(cc.Rocc, gbps=40, delay_us=2, mtu=2000, until_us=12_000)
    got = arrived(port, flows, 14_000)
    assert cc.jain(got) > 0.9999 and sum(got) == pytest.approx(2000 * US / port.byte_ps, rel=0.001)
    assert abs(queue(port, 10_000) - 75_000) < 5000


def test_mltcp():
    """Two jobs that send half of the time: Reno leaves them on each other, MLTCP's gain slides them apart."""

    def times(ends):
        return [[after - before for before, after in zip(job, job[1:])] for job in ends]

    (single,) = times(cc.jobs(count=1, iterations=4))
    reno, mltcp = times(cc.jobs(iterations=10)), times(cc.jobs(cc.mltcp_gain, iterations=14))
    assert all(1.45 < time / single[-1] < 1.55 for job in reno for time in job), "(2 + 1) / (1 + 1)"
    assert all(time / single[-1] < 1.05 for job in mltcp for time in job[7:])
    assert [cc.mltcp_gain(x) for x in (0, 0.5, 1)] == [0.25, 1.125, 2]
    law, net = alone(cc.Reno(gain=cc.mltcp_gain))
    law.flow.acked = law.flow.size * 3 // 4
    hear(law)
    assert law.packets == 10 + (1.75 * 0.75 + 0.25) / 10 and law.window == law.packets * 1000
    net.now = 50 * US
    for _ in range(2):
        hear(law, marked=True)
        assert law.packets == pytest.approx((10 + 0.15625) / 2), "once an RTT"
    net.now += 50 * US
    for _ in range(3):
        law.on_loss()
        net.now += law.flow.base_rtt + 1
    assert law.packets == 2
    assert cc.jain([3, 0, 0]) == pytest.approx(1 / 3) and cc.jain([2, 2]) == 1 and cc.jain([0, 0]) == 0
