"""Flows hashed to uplinks, and what is done about it: enumeration, draws, and a job's own traffic on its network."""

from collections import Counter
from dataclasses import replace
from fractions import Fraction
from functools import partial
from itertools import product

import numpy as np
import pytest

from minitrain.compose.parallelize import parallelize
from minitrain.model.config import GPTConfig
from minitrain.model.data.batches import Rows, random_tokens
from minitrain.model.training.optim import AdamW
from minitrain.plan.simulate.machines import machine
from minitrain.plan.strategy import Strategy
from minitrain.ranks.events import Issue
from minitrain.ranks.launch import dryrun
from minitrain.ranks.ledger import Ledger
from minitrain.systems.network.balancing import (
    ethereal,
    expected_max_load,
    mean_rate,
    no_collision,
    probed_ports,
)
from minitrain.systems.network.graph import ecmp, loads, spray
from minitrain.systems.network.topologies import leaf_spine, rails
from minitrain.systems.simulate.replay import replay
from minitrain.systems.simulate.traffic_matrix import every_rank, traffic


def placements(flows: int, uplinks: int) -> list[Counter]:
    return [Counter(place) for place in product(range(uplinks), repeat=flows)]


def across(seed=0, count=8):
    return [(i, count + i, seed) for i in range(count)]


def uplinks(graph, flows, route=ecmp) -> list:
    busy = loads(graph, flows, route)
    return [load for (a, b), load in busy.items() if isinstance(a, tuple) and isinstance(b, tuple)]


def test_ecmp():
    """Eight flows to eight uplinks: by enumeration where it can be, by 300 hashes of the network for eight."""
    for flows, links in ((3, 3), (4, 4), (4, 3), (5, 2)):
        every = placements(flows, links)
        assert expected_max_load(flows, links) == Fraction(
            sum(max(one.values()) for one in every), len(every)
        )
        alone = sum(max(one.values()) == 1 for one in every)
        assert no_collision(flows, links) == Fraction(alone, len(every))
        rates = [sum(Fraction(1) for each in one.values()) / flows for one in every]
        assert mean_rate(flows, links) == sum(rates) / len(every)
    graph = leaf_spine(2, 8, 8)
    up = lambda seed: [load for (a, _), load in loads(graph, across(seed), ecmp).items() if a == ("leaf", 0)]
    hashed = [max(up(seed)) for seed in range(400)]
    assert np.mean([float(load) for load in hashed]) == pytest.approx(float(expected_max_load(8, 8)), abs=0.1)
    assert float(no_collision(8, 8)) == pytest.approx(0.002403, abs=1e-6)
    assert float(expected_max_load(8, 8)) == pytest.approx(2.5972, abs=1e-4)
    assert float(1 / expected_max_load(8, 8)) == pytest.approx(0.385, abs=1e-3)


def test_e_ecmp_16flows():
    """128 parts on eight uplinks beside 20,000 draws; with one source port for all sixteen nothing is won."""
    draws = np.random.default_rng(0).integers(0, 8, (20_000, 128))
    drawn = np.max([(draws == uplink).sum(1) for uplink in range(8)], axis=0).mean() / 16
    exact = float(expected_max_load(8, 8, 16))
    assert exact == pytest.approx(drawn, abs=4e-3) and exact == pytest.approx(1.36935, abs=1e-5)
    graph = leaf_spine(2, 8, 8)
    sixteen = lambda port: [(i, 8 + i, port(part)) for i in range(8) for part in range(16)]
    same, apart = (max(uplinks(graph, sixteen(port))) / 16 for port in (lambda part: 3, lambda part: part))
    assert same == max(uplinks(graph, across(3))) and apart < 1.7 < same


def test_roce():
    """Version 2 goes through routers, over at most as many paths as there are source ports; version 1, which has
    no addresses for routers, ends at the first."""
    graph = leaf_spine(2, 4, 16)
    paths = [len({tuple(ecmp(graph, 0, 4, pair)) for pair in range(count)}) for count in (1, 4, 16)]
    assert paths[0] == 1 < paths[1] <= 4 < paths[2] <= 16
    one_segment = graph.without(*(node for node in graph.switches if node[0] == "spine"))
    assert list(ecmp(one_segment, 0, 1)) == [(0, ("leaf", 0)), (("leaf", 0), 1)]
    with pytest.raises(ValueError, match="no path leads"):
        ecmp(one_segment, 0, 4)


def test_megascale_network():
    """Uplinks twice as fast as downlinks: 64 flows of 400G, or 128 of 200G, on 64 uplinks of 400G."""
    for flows, links, ratio in ((4, 3, 2), (5, 2, 2), (3, 3, 1), (6, 2, 3)):
        every = placements(flows, links)
        rates = [sum(n * min(Fraction(1), Fraction(ratio, n)) for n in one.values()) for one in every]
        assert mean_rate(flows, links, ratio) == sum(rates) / len(every) / flows
    assert [round(float(rate), 3) for rate in (mean_rate(64, 64), mean_rate(128, 64, 2))] == [0.635, 0.731]


@pytest.mark.parametrize("flows, paths, parts", [(20, 8, 8), (7, 3, 3), (5, 8, 12), (16, 4, 0), (3, 6, 6)])
def test_ethereal(flows, paths, parts):
    """The load of spraying with few flows split: every path flows/paths."""
    shares, load = ethereal(flows, paths), Counter()
    for each in shares:
        assert sum(each.values()) == 1 and min(each.values()) > 0
        load.update(each)
    assert set(load.values()) == {Fraction(flows, paths)} and len(load) == paths
    assert sum(len(each) for each in shares if len(each) > 1) == parts
    graph = leaf_spine(4, flows, paths)
    sprayed = loads(graph, [(i, flows + i) for i in range(flows)], spray)
    assert {sprayed[("leaf", 0), ("spine", path)] for path in range(paths)} == set(load.values())


def test_hpn_lb():
    graph, pairs = leaf_spine(2, 8, 8), [(i, 8 + i) for i in range(8)]
    ports = probed_ports(graph, pairs)
    assert max(uplinks(graph, [(*pair, port) for pair, port in zip(pairs, ports)])) == 1
    assert max(uplinks(graph, pairs)) > 1  # without probing


def step(config, strategy):
    run = parallelize(config, strategy, partial(AdamW, lr=1e-2))
    batch = run.batch(Rows(partial(random_tokens, batch_size=16, length=64, vocab=1024), 16, 64), 0)
    with Ledger() as ledger:
        run.step(batch)
    return ledger.events


def test_elephant_flows():
    """A job of 32 ranks with tp 4 inside its nodes. What leaves them: to two or three others a rank, most of it
    in one call of data parallelism in the last third of the step. On rails none of it crosses a spine."""
    config = GPTConfig(vocab_size=1024, d_model=128, num_layers=2, num_heads=4, max_positions=64)
    strategy, sizes = Strategy(dp=4, pp=2, tp=4, microbatches=4), {"dp": 4, "pp": 2, "tp": 4}
    events = {rank: dryrun.run(step, config, strategy, rank=rank, ranks=32) for rank in (0, 4)}
    matrix = traffic(every_rank(events, sizes, ("dp", "tp")), 32)
    leaves = lambda *axes: {(a, b): n for (a, b), n in matrix.pairs(*axes).items() if a // 4 != b // 4}
    assert sum(leaves("dp").values()) > 0.6 * sum(leaves().values()) > 0
    assert {len({b for a, b in leaves() if a == rank}) for rank in range(32)} <= {2, 3}
    timeline = replay(events, replace(machine("h100"), devices_per_node=4, nics_per_node=4))
    for rank, ledger in events.items():
        calls = [event for event in ledger if isinstance(event, Issue) and event.axis == "dp"]
        big = max(timeline.transfers(rank, "dp"), key=lambda span: span.event.sent_bytes)
        assert big.event.sent_bytes > 0.99 * sum(call.sent_bytes for call in calls)
        assert big.start_s > 0.6 * timeline.step_s
    graph, busy = rails(8, 4, 2), Counter()
    for (a, b), sent in matrix.pairs().items():
        busy.update(loads(graph, [(graph.hosts[a], graph.hosts[b])], spray, sent))
    spine = sum(load for (a, b), load in busy.items() if {a[0], b[0]} == {"leaf", "spine"})
    assert spine == 0 < sum(load for (a, b), load in busy.items() if b[0] == "leaf")
