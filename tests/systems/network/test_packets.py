"""Ports, flows and pauses against times and queues worked out by hand."""

from collections import Counter
from fractions import Fraction

from minitrain.systems.network.congestion import head_of_line
from minitrain.systems.network.packets import US, Flow, Law, Network, Port, spray


def test_times_by_hand():
    """Two senders of three packets at 100 and 10 Gb/s into 40 Gb/s: arrivals by a recurrence on fractions."""
    net = Network()
    last = Port(net, 40, 3)
    flows = [Flow(net, (Port(net, gbps, 1), last), 2500, Law()) for gbps in (100, 10)]
    net.run()
    free, ends, sizes = Fraction(0), {}, ((1000, 1000), (2000, 1000), (2500, 500))
    for at_ns, gbps, size in sorted(
        (sent * Fraction(8, r) + 1000, r, n) for r in (100, 10) for sent, n in sizes
    ):
        free = max(free, at_ns) + Fraction(size * 8, 40)
        ends[gbps] = free + 3000 + 1000 + 3000  # and the ack
    assert [Fraction(flow.end_ps, 1000) for flow in flows] == [ends[100], ends[10]]
    assert last.sent == 5000 and last.queued == 0
    port = Port(net)
    twins = [Flow(net, (port,), 10_000, kind=kind, start_us=100) for kind in "ab"]
    net.run()
    assert twins[1].end_ps - twins[0].end_ps == 80_000, "kinds take turns, who asks first is first"
    net = Network()
    flow = Flow(net, (Port(net),), 1000, Law(rate=1), mtu=500)
    net.run()
    assert flow.end_ps == 500 * 8000 + 500 * 80 + 2 * US, "paced by the first one's size"


def test_windows_bound_what_is_out_and_nothing_is_sent_through_a_window_of_nothing():
    for window, per_rtt in ((0, 0), (400, 1), (3000, 3)):
        net = Network()
        flow = Flow(net, (Port(net),), 6000, Law(window=window))
        net.run(2.0)  # one round trip is 2 us and a packet's 80 ns
        assert flow.path(0)[0].sent == 1000 * per_rtt
        net.run()
        assert (flow.end_ps is None) == (window == 0)


def test_losses_are_sent_again_and_equal_runs_are_equal():
    def play(seed):
        net, seen = Network(seed), Counter()
        port = Port(net, loss=0.3)
        tail = Port(net, 40, buffer_bytes=5000)
        flow = Flow(net, (port, tail), 50_000, data=lambda seq: seen.update([seq]))
        net.run()
        assert flow.arrived == flow.acked == 50_000 and flow.expected == 50 and seen[0] >= 1
        assert sum(seen.values()) == 50 + port.lost + tail.lost and port.lost and tail.lost
        assert tail.most_queued <= 5000
        return flow.end_ps, port.lost, net.events

    assert play(1) == play(1) != play(2)


def test_marks_follow_the_line_between_two_thresholds():
    """A queue that grows by nine packets in ten: none marked below `low`, all above `high`, a rising share between."""
    marked = Counter()

    class Seen(Law):
        def on_ack(self, ack):
            marked[ack.seq % 100] += ack.marked

    for seed in range(80):
        net = Network(seed)
        Flow(net, (Port(net, 1000, 0), Port(net, mark=(20_000, 60_000, 0.5))), 80_000, Seen())
        net.run()
    queues = [1000 * (seq - (seq - 1) // 10) for seq in range(80)]  # one leaves per ten that come
    chances = [1 if queue > 60_000 else max(0, (queue - 20_000) / 80_000) for queue in queues]
    for low, high in ((0, 22), (22, 44), (44, 66), (68, 80)):
        share = sum(marked[seq] for seq in range(low, high)) / 80 / (high - low)
        assert abs(share - sum(chances[low:high]) / (high - low)) < (0.03 if 0 < low < 68 else 1e-9)


def test_pfc():
    """Nothing is lost in a buffer of five thresholds and their headroom; the victim of one class loses three fifths."""
    bound = 5 * (100_000 + 2 * 12_500 + 2 * 1000)
    share, (shared, hot, cold) = head_of_line(buffer_bytes=bound)
    assert shared.lost == hot.lost == cold.lost == 0 < shared.pauses and hot.most_queued <= bound
    assert shared.pauses < 400 / (2 * 2 + 20_000 / 2500), "20 KB apart, which leave at a fifth of the line"
    assert abs(share - 100 / 5 / 50) < 0.02, "five feed the port; behind the first of two, equal packets"
    apart, ports = head_of_line(buffer_bytes=bound, per_flow=True, until_us=200)
    assert apart > 0.98 and not any(port.lost for port in ports) and ports[0].pauses
    free, ports = head_of_line(None, buffer_bytes=bound, until_us=200)
    assert free > 0.98 and ports[1].lost > 7_000 and ports[1].most_queued == 635_000
    assert head_of_line(buffer_bytes=500_000, until_us=100)[1][1].lost, "no headroom: a pause comes too late"
    assert head_of_line(hosts=0, until_us=50)[0] > 0.93, "nobody crowds the port"


def test_packet_spraying():
    """In turn over unequal paths: loads equal to the packet, and the order of arrival sorted by hand."""
    for delays_ns, fewest, peak in (((1000, 1320, 1640, 1960), 700, 6), ((1100, 1000), 400, 1)):
        net = Network()
        uplinks = [Port(net, delay_us=delay / 1000) for delay in delays_ns]
        flow = Flow(net, spray(Port(net), uplinks, Port(net)), 1000 * 1000)
        net.run()
        assert {port.sent for port in uplinks} == {1_000_000 // len(delays_ns)}
        order = sorted(range(1000), key=lambda seq: (80 * (seq + 1) + delays_ns[seq % len(delays_ns)], seq))
        came = [min(set(range(1001)) - set(order[:at])) for at in range(1001)]  # the first that is missing
        late = sum(seq != missing for seq, missing in zip(order, came))
        most = max(at - missing for at, missing in enumerate(came))
        assert (flow.out_of_order, flow.most_early) == (late, most) and late > fewest and most == peak
    net = Network(1)
    uplinks = [Port(net) for _ in range(8)]
    flows = [Flow(net, spray(Port(net), uplinks, Port(net), net.random), 500_000) for _ in range(8)]
    net.run()
    loads = [port.sent for port in uplinks]
    assert sum(loads) == 4_000_000 and 1 < max(loads) / 500_000 < 1.1
    assert all(flow.expected == 500 and flow.out_of_order for flow in flows)
    assert max(flow.end_ps for flow in flows) < 1.1 * (500 * 80_000 + 6 * US)
