"""Eviction without tensors: rules by hand and by brute force, programs, addresses."""

import weakref
from bisect import bisect_left
from itertools import accumulate, pairwise
from math import inf
from random import Random

import pytest
import torch

from minitrain.model.gpt import GPT, GPTConfig, cross_entropy_sum
from minitrain.ranks.ledger.operators import operator_cost
from minitrain.systems.memory.dtr import Dynamic
from minitrain.systems.plan.rematerialize import Node, checkmate
from minitrain.systems.simulate.eviction import (
    RULES,
    BestFit,
    Coop,
    Evictor,
    MegTaiChi,
    chain,
    cheapest_window,
    neighbourhood,
    simulate,
)

PARTS = 0.9, 0.8, 0.7, 0.6, 0.55  # of a free run's peak


@pytest.fixture(scope="module")
def recorded():
    """What a training step of a GPT does: (trace, its peak bytes)."""
    model = GPT(GPTConfig(vocab_size=32, d_model=16, num_layers=4, num_heads=2), dtype=torch.float64)
    tokens = torch.arange(128).view(4, 32) % 32
    with Dynamic(evictor := Evictor(), operator_cost, [*model.parameters(), tokens]):
        cross_entropy_sum(model(tokens), tokens.roll(-1, 1)).backward()
    return evictor.trace, evictor.peak_bytes


def evicted_around(block):
    """Evicted blocks joined to it through evicted blocks, by search."""
    seen, waiting = set(), [block]
    while waiting:
        here = waiting.pop()
        for other in (*here.parents, *here.children.values()):
            if not other.resident and other.made_by and other not in seen and other is not block:
                seen.add(other)
                waiting.append(other)
    return seen


def random_graph(evictor, random, operators=30):
    blocks = [evictor.constant(4)]
    for number in range(operators):
        inputs = random.sample(blocks, min(len(blocks), random.randint(1, 3)))
        blocks += evictor.run(f"op{number}", inputs, [random.randint(1, 9)], random.randint(1, 50))
    return blocks


def test_the_neighbourhood_is_what_a_search_finds():
    """The union-find of the evicted, until something is made again: then it may only be too large."""
    for seed in range(20):
        random, evictor = Random(seed), Evictor()
        blocks = random_graph(evictor, random)
        for block in random.sample(blocks[1:], 12):
            evictor.evict(block)
        for block in filter(lambda block: block.resident, blocks):
            around = evicted_around(block)
            assert neighbourhood(block) == block.cost + sum(other.cost for other in around)
        gone = random.choice([block for block in blocks if not block.resident])
        evictor.restore(gone)
        assert gone.resident
        for block in filter(lambda block: block.resident, blocks):
            around = evicted_around(block)
            assert neighbourhood(block) >= block.cost + sum(other.cost for other in around)


def test_what_is_released_while_it_is_read_stays_and_who_is_gone_costs_nothing():
    evictor, found = Evictor(), []
    (read,) = evictor.run("read", [], [4], 1)
    evictor.run("reads", [read], [4], 1, lambda _: (evictor.release(read), found.append(read.resident)))
    assert found == [True]
    (parent,) = evictor.run("parent", [], [4], 10)
    one, other, near = (evictor.run(name, [parent], [4], cost)[0] for name, cost in zip("abc", (20, 30, 1)))
    for block in (parent, one, other):
        evictor.evict(block)
    assert neighbourhood(near) == 1 + 10 + 20 + 30
    del other, block
    assert neighbourhood(near) == 1 + 10 + 20


def test_counts_by_hand():
    """What has no bytes is never evicted; an operand that is read twice is one; a limit may be full."""
    evictor = Evictor(10, "lru")
    x = evictor.constant(2)
    (a,) = evictor.run("a", [x], [5], 3)
    (empty,) = evictor.run("empty", [x], [0], 1)
    (b,) = evictor.run("b", [x], [4], 1)  # 2 + 5 + 4 are too many: a goes
    assert (evictor.evictions, evictor.evicted_bytes, evictor.peak_bytes, a.resident) == (1, 5, 7, False)
    (twice,) = evictor.run("twice", [a, a], [1], 1)  # b goes for a
    assert (evictor.evictions, evictor.evicted_bytes, evictor.peak_bytes) == (2, 9, 8)
    assert (evictor.recomputed, evictor.recomputed_cost, evictor.operators, evictor.clock) == (1, 3, 5, 9)
    assert a.resident and empty.resident and not evictor.waiting and twice.parents == (a,)
    evictor.run("full", [twice], [2], 1)
    assert (evictor.evictions, evictor.peak_bytes) == (2, 10)
    for rule in RULES:
        tight = Evictor(3, rule)
        x = tight.constant(1)
        kept = [tight.run(name, [x], [size], 1)[0] for name, size in (("empty", 0), ("y", 2), ("z", 2))]
        assert [block.resident for block in kept] == [True, False, True], rule


def test_a_limit_that_is_too_small_says_what_would_do():
    evictor = Evictor(4)
    kept = evictor.constant(3)
    with pytest.raises(ValueError) as error:
        evictor.constant(2)
    assert str(error.value) == (
        "a constant of 2 bytes asks for 2 bytes beside 3 that cannot go (pinned, or read by it or what "
        "waits for it); raise limit_bytes, 4, to 5 or more"
    )
    (a,) = evictor.run("a", [kept], [1], 1)
    with pytest.raises(ValueError, match="^b asks for 1 bytes beside 4 that cannot go .* to 5 or more$"):
        evictor.run("b", [a], [1], 1)
    assert a.resident and not evictor.waiting, "after an error nothing is locked"


def test_rules_by_hand():
    """Four results of operators that take so long: who goes first."""
    victims = {}
    for rule in RULES:
        evictor = Evictor(limit_bytes=24, rule=rule)
        x = evictor.constant(1)
        (old,) = evictor.run("old", [x], [2], 30)
        (large,) = evictor.run("large", [x], [10], 60)
        (cheap,) = evictor.run("cheap", [x], [2], 5)
        (late,) = evictor.run("late", [x], [9], 58)
        blocks = {"old": old, "large": large, "cheap": cheap, "late": late}
        _ = evictor.run("next", [x], [1], 1)
        victims[rule] = [name for name, block in blocks.items() if not block.resident]
    # clock 153, used at 30, 90, 95, 153: cost / (bytes * staleness) = .12, .094, .042, 6.4
    assert victims == {
        "dtr": ["cheap"], "local": ["cheap"], "neighbourhood": ["cheap"], "lru": ["old"], "size": ["large"],
    }  # fmt: skip


def test_the_neighbourhood_protects_what_much_depends_on():
    """Two equal results, one between evicted ones: evicting it too would make a long chain to run again."""
    victims = {}
    for rule in ("dtr", "local"):
        evictor = Evictor(limit_bytes=7, rule=rule)
        x = evictor.constant(1)
        (a,) = evictor.run("a", [x], [1], 10)
        (b,) = evictor.run("b", [a], [1], 10)
        (c,) = evictor.run("c", [b], [1], 10)
        (d,) = evictor.run("d", [x], [1], 10)
        for block in (a, c):
            evictor.evict(block)
        b.used = d.used = 0
        (e,) = evictor.run("e", [x], [5], 1)
        victims[rule] = [name for name, block in (("b", b), ("d", d)) if not block.resident]
    assert victims == {"dtr": ["d"], "local": ["b"]}, "of equals the older goes"


def test_a_chain_by_hand():
    """Three layers: with room for all 6 operators; results x1 x2 x3 and two gradients at the same time."""
    evictor = simulate(chain(3), Evictor())
    assert (evictor.operators, evictor.recomputed, evictor.peak_bytes) == (6, 0, 5)
    assert simulate(chain(3), Evictor(4)).recomputed > 0
    with pytest.raises(ValueError, match="backward 2 asks for 1 bytes beside 3 that cannot go"):
        simulate(chain(3), Evictor(3))


def test_static_vs_dynamic_eviction():
    """On a chain the optimum, known beforehand, recomputes no more than DTR; if the depth is in the data, a plan
    for the mean depth needs more than the budget, and DTR does not."""
    gaps = []
    for layers, budgets in ((6, (4, 5, 6, 7)), (8, (5, 6, 7)), (9, (6,))):
        reads = [(i - 1,) for i in range(layers)]  # x_i of the x before
        reads += [
            (layers - 2 - i, layers - 1 + i) for i in range(layers)
        ]  # a gradient of an x and a gradient
        nodes = [Node(1, 1, tuple(node for node in read if node >= 0)) for read in reads]
        for budget in budgets:
            static = checkmate(nodes, budget - 1)  # beside x_0
            found = simulate(chain(layers), Evictor(budget))
            assert static.recomputed <= found.recomputed and found.peak_bytes <= budget
            gaps.append(found.recomputed - static.recomputed)
    assert min(gaps) == 0 < max(gaps) <= 3, "DTR is near, not equal"

    mean, static = 32, lambda layers, every: simulate(chain(layers, every=every), Evictor())
    plans = {every: static(mean, every).peak_bytes for every in range(1, mean + 1)}
    best = min(plans, key=plans.get)
    budget, depths = plans[best], (8, 20, 32, 44, 56)
    assert (best, budget) == (5, 12)
    statics = {depth: static(depth, best).peak_bytes for depth in depths}
    dynamics = {depth: simulate(chain(depth), Evictor(budget)) for depth in depths}
    assert [depth for depth in depths if statics[depth] > budget] == [44, 56]
    assert all(evictor.peak_bytes <= budget for evictor in dynamics.values())
    assert dynamics[mean].operators < static(mean, best).operators, "and keeps what there is room for"
    assert dynamics[8].recomputed == 0 < static(8, best).operators - 16


def every_window(parts, bytes):
    """The least cost of a run of parts that is large enough, by trying all."""
    least = inf
    for start in range(len(parts)):
        sizes, costs = (list(accumulate(column)) for column in zip(*parts[start:]))
        first = bisect_left(sizes, bytes)  # more parts cost no less
        least = min(least, costs[first] if first < len(sizes) else inf)
    return least


def window_cost(parts, bytes):
    found = cheapest_window(parts, bytes)
    return inf if found is None else sum(cost for _, cost in parts[slice(*found)])


def watched(base):
    """An evictor that is looked at whenever something is put somewhere."""

    class Watched(base):
        looked = 0

        def settle(self, block, place):
            super().settle(block, place)
            blocks = [b for b in self.blocks.values() if b.resident and b.bytes]
            spans = sorted((b.place, b.place + b.bytes) for b in blocks)
            assert all(end <= start for (_, end), (start, _) in pairwise(spans))
            assert spans[-1][1] <= self.limit_bytes and spans[0][0] >= 0
            assert sum(b.bytes for b in blocks) == self.resident_bytes <= self.peak_bytes
            self.looked += 1

        def victims(self, bytes):
            found = super().victims(bytes)
            if base is Coop:
                parts = [(size, cost) for size, cost, _ in self.parts()]
                assert sum(size for size, _ in parts) == self.limit_bytes
                chosen = sum(neighbourhood(b) / (self.clock - b.used + 1) for b in found)
                assert chosen == pytest.approx(every_window(parts, bytes), rel=1e-12)
                spans = sorted((b.place, b.place + b.bytes) for b in found)
                assert spans[-1][1] - spans[0][0] <= self.limit_bytes
            return found

    return Watched


def test_coop(recorded):
    """Evicts the cheapest run, and by bytes the fewest; nothing in vain, where DTR on best fit strands bytes. What is
    cheap lies at one end of a hole, what is dear at the other."""
    coop = Coop(30)
    assert [coop.run("op", [], [4], cost)[0].place for cost in (1, 25, 24)] == [0, 26, 0]
    random = Random(0)
    for _ in range(300):
        sizes = [random.randint(1, 9) for _ in range(random.randint(1, 14))]
        costs = [random.choice([0, 0, inf, random.randint(1, 20)]) for _ in sizes]
        needed = random.randint(1, 30)
        parts = list(zip(sizes, costs))
        assert window_cost(parts, needed) == every_window(parts, needed)
        evicted = [(size, inf if cost == inf else size if cost else 0) for size, cost in parts]
        assert window_cost(evicted, needed) == every_window(evicted, needed)

    trace, peak_bytes = recorded
    stranded, costs = {}, {}
    for part in PARTS:
        dtr, coop = (simulate(trace, watched(kind)(int(part * peak_bytes))) for kind in (BestFit, Coop))
        assert coop.stranded_bytes == 0 < dtr.stranded_bytes
        stranded[part], costs[part] = dtr.stranded_bytes, (coop.recomputed_cost, dtr.recomputed_cost)
        assert coop.looked > 500 and coop.evictions > 0
    assert max(stranded.values()) > 0.2 * peak_bytes
    assert sum(coop for coop, _ in costs.values()) < sum(dtr for _, dtr in costs.values())


def test_megtaichi(recorded):
    """Evicts and strands no more than DTR on best fit."""
    trace, peak_bytes = recorded
    fewer = 0
    for part in (*PARTS, 0.5, 0.45):
        dtr, ours = (simulate(trace, watched(kind)(int(part * peak_bytes))) for kind in (BestFit, MegTaiChi))
        assert ours.evictions <= dtr.evictions and ours.stranded_bytes <= dtr.stranded_bytes
        fewer += ours.evictions < dtr.evictions and ours.stranded_bytes < dtr.stranded_bytes
    assert fewer > 4
    ours = MegTaiChi(20)  # a hole of 4 between two of 4: with either it is the 8 that are asked for
    blocks = [ours.run("op", [], [size], cost)[0] for size, cost in ((4, 9), (4, 9), (4, 1), (8, 9))]
    ours.release(blocks[1])
    assert ours.victims(8) == [blocks[2]]


def test_best_fit_takes_the_smallest_hole():
    evictor = BestFit(100)
    blocks = [evictor.run(f"op{i}", [], [size], 1)[0] for i, size in enumerate((10, 30, 5, 20, 7))]
    assert [block.place for block in blocks] == [0, 10, 40, 45, 65]
    evictor.release(blocks[1])
    evictor.release(blocks[3])
    assert evictor.holes() == [(10, 40), (45, 65), (72, 100)]
    (new,) = evictor.run("new", [], [20], 1)
    assert new.place == 45
    (again,) = evictor.run("again", [], [28], 1)
    assert again.place == 72
    (pinned,) = evictor.run("pinned", [], [30], 1)
    constant = evictor.pin(pinned)
    assert (constant.place, pinned.resident, evictor.holes()) == (10, False, [])


def test_what_was_evicted_beside_the_hole_is_stranded_and_held_by_nobody():
    """On both sides of it; and of equally cheap runs the first goes."""
    for order in ((5, 20), (20, 5)):
        evictor = BestFit(50, rule="lru")
        first = evictor.run("first", [], order[:1], 1)
        kept = [evictor.constant(5)]
        found = dict(zip(order, first + evictor.run("second", [], order[1:], 1)))
        kept.append(evictor.constant(20))
        evictor.run("use", [found[20]], [], 1)  # so that the small one goes first
        (new,) = evictor.run("new", [], [15], 1)
        assert evictor.stranded_bytes == 5 and new.place == (0 if order[0] == 20 else 10)
        seen = weakref.ref(new)
        evictor.release(new)
        del new
        assert seen() is None and all(block.resident for block in kept)
    assert cheapest_window([(5, 1), (5, 1), (9, 1)], 5) == (0, 1)
