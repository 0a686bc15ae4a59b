"""Casts chosen by cost: exact against every choice, never slower than one format, pairs that go."""

import itertools
import random
from fractions import Fraction

import pytest

from minitrain.systems.plan.casts import (
    Cast,
    Device,
    Op,
    all_half,
    block_graph,
    casts,
    cheapest,
    predicted,
    time,
    wrapped,
)


def random_graph(chance: random.Random, ops: int) -> list[Op]:
    graph = []
    for n in range(ops):
        inputs = tuple(f"op{i}" for i in range(n) if chance.random() < 0.4)
        full = Fraction(chance.randrange(20), chance.randrange(1, 4))
        half = None if chance.random() < 0.2 else full * chance.randrange(1, 6) / 4
        graph.append(Op(f"op{n}", inputs, full, half, Fraction(chance.randrange(8), 2)))
    return graph


def by_hand(graph, halves):
    """The time, tensor by tensor and reader by reader."""
    total = 0
    for op in graph:
        total += op.half if op.name in halves else op.full
        readers = [one.name in halves for one in graph if op.name in one.inputs]
        total += op.cast if (op.name not in halves) in readers else 0
    return total


def choices(graph):
    free = sorted(all_half(graph))
    return (set(some) for size in range(len(free) + 1) for some in itertools.combinations(free, size))


def test_campo():
    """Exact on small graphs; on all of them no more than all in 32 or all in 16 bits; pairs of casts go; times predicted
    from a few runs choose as well."""
    test_a_few_runs_of_each_kind_predict_what_is_as_good_as_the_best()
    chance, better = random.Random(0), 0
    for number in range(300):
        graph = random_graph(chance, 1 + number % 8)
        found = cheapest(graph)
        least = min(by_hand(graph, halves) for halves in choices(graph))
        assert time(graph, found) == by_hand(graph, found) == least, graph
        assert least <= time(graph, ()) == sum(op.full for op in graph)
        halves = all_half(graph)
        assert least <= time(graph, halves) <= time(graph, halves, wrapped(graph, halves))
        better += least < min(time(graph, ()), time(graph, all_half(graph)))
    assert better > 5, "graphs for which neither is best"
    chain = [Op("x", (), 0, None, 1)]
    for n in range(4):
        chain.append(Op(f"matmul{n}", (chain[-1].name,), 10, 5, 1))
    chain.append(Op("loss", ("matmul3",), 1, None, 1))
    halves = cheapest(chain)
    assert halves == {"matmul0", "matmul1", "matmul2", "matmul3"}
    assert len(wrapped(chain, halves)) == 8 and len(casts(chain, halves)) == 2, "three pairs undo themselves"
    assert casts(chain, halves) == [Cast("x", "half"), Cast("matmul3", "full")]
    assert (time(chain, halves, wrapped(chain, halves)), time(chain, halves), time(chain, ())) == (29, 23, 41)


def test_a_few_runs_of_each_kind_predict_what_is_as_good_as_the_best():
    draw, mixed = random.Random(0), 0
    slope = {("matmul", 32): 4, ("matmul", 16): 1, ("norm", 32): 2, ("cast", 16): 1.5}
    true = lambda key, size: 30 + slope[key] * size
    measured = {key: [(n, true(key, n) * draw.uniform(0.98, 1.02)) for n in (10, 300, 1000)] for key in slope}
    for _ in range(40):
        kinds = [(draw.choice(("matmul", "matmul", "norm")), draw.randint(5, 2000)) for _ in range(8)]
        parts = [(f"{i}", (f"{i - 1}",) * (i > 0), *one) for i, one in enumerate(kinds)]
        half = lambda kind, n: true((kind, 16), n) if kind == "matmul" else None
        graph = [Op(x, of, true((k, 32), n), half(k, n), true(("cast", 16), n)) for x, of, k, n in parts]
        best, chosen = (time(graph, cheapest(g)) for g in (graph, predicted(parts, measured)))
        mixed += best < min(time(graph, ()), time(graph, all_half(graph)))
        assert chosen <= 1.02 * best
    assert mixed > 10
    exact = {key: [(n, true(key, n)) for n in (10, 1000)] for key in slope}
    assert [op.full for op in predicted(parts, exact)] == pytest.approx([op.full for op in graph])


def test_casts_that_cost_more_than_they_gain_are_not_made():
    graph = [Op("x", (), 0, None, 3), Op("a", ("x",), 10, 5, 3), Op("norm", ("a",), 1, None, 3)]
    assert cheapest(graph) == frozenset() and time(graph, {"a"}) == 12 > time(graph, ()) == 11
    three = [graph[0], *(Op(name, ("x",), 10, 5, 0) for name in "qkv"), Op("y", ("q", "k", "v"), 0, None, 0)]
    assert cheapest(three) == {"q", "k", "v"} and casts(three, "qkv")[0] == Cast("x", "half"), "cast once"
    assert sum(cast.tensor == "x" for cast in casts(three, "qkv")) == 1
    assert sum(cast.tensor == "x" for cast in wrapped(three, "qkv")) == 3
    idle = [Op("a", (), 4, 2, 1), Op("b", ("a",), 1, 1, 1), Op("c", ("b",), 4, 2, 1)]
    assert "b" in cheapest(idle), "what gains nothing itself is cheaper than two casts around it"


def test_a_block():
    """On a device whose 16 bits are 16 times as fast: a wide block takes them, casts and all; of a narrow one
    with few tokens the casts of the weights cost more than products of 16 bits save."""
    device = Device(full=19.5e12, half=312e12, bandwidth=1.5e12)  # A100, dense, without TF32
    wide, narrow = block_graph(2048, 4096, device, heads=32), block_graph(4, 256, device, heads=4)
    products = {"q", "k", "v", "scores", "attended", "out", "up", "down"}
    halves = cheapest(wide)
    assert products <= halves and time(wide, halves) < 0.2 * time(wide, ())
    every = all_half(wide)
    assert time(wide, halves) <= time(wide, every) < time(wide, every, wrapped(wide, every))
    middle = block_graph(64, 512, device, heads=8)
    every = all_half(middle)
    assert time(middle, every) < time(middle, ()) < time(middle, every, wrapped(middle, every)), "casts cost"
    assert (len(wrapped(middle, every)), len(casts(middle, every))) == (26, 12)
    assert not cheapest(narrow) & {"q", "k", "v", "out", "up", "down"}
    assert time(narrow, cheapest(narrow)) <= time(narrow, ()) < time(narrow, all_half(narrow))


def test_a_block_by_hand():
    """Two tokens, width 3, five heads: FLOPs alone, and bytes alone, of 4 or 2 per element; a cast moves 6."""
    inf = float("inf")
    flops = {op.name: (op.full, op.half) for op in block_graph(2, 3, Device(1, 2, inf), heads=5)}
    moved = {op.name: (op.full, op.half, op.cast) for op in block_graph(2, 3, Device(inf, inf, 1), heads=5)}
    weights = {f"weight of {name}" for name in ("q", "k", "v", "out", "up", "down")}
    assert flops.keys() == moved.keys() and weights < moved.keys()
    products = {"q": 36, "k": 36, "v": 36, "scores": 24, "attended": 24, "out": 36, "up": 144, "down": 144}
    assert {name: full for name, (full, _) in flops.items() if full} == products
    assert all(flops[name][1] == full / 2 for name, full in products.items())
    bytes_of = {"q": 84, "scores": 128, "attended": 128, "out": 84, "up": 264, "gelu": 192, "down": 264}
    assert {name: moved[name][0] for name in bytes_of} == bytes_of
    assert all(moved[name][1] == full / 2 for name, full in bytes_of.items())
    whole = {"norm1": 48, "softmax": 160, "sum1": 72, "norm2": 48, "sum2": 72, "x": 0}
    assert {name: moved[name][:2] for name in whole} == {name: (full, None) for name, full in whole.items()}
    sizes = {"x": 6, "scores": 20, "up": 24, "down": 6}
    sizes |= {"weight of q": 9, "weight of up": 36, "weight of down": 36}
    assert {name: moved[name][2] / 6 for name in sizes} == sizes
    reads = {op.name: op.inputs for op in block_graph(2, 3, Device(1, 1, 1))}
    assert reads["sum1"] == ("x", "out") and reads["sum2"] == ("sum1", "down") and reads["norm2"] == ("sum1",)
    square = [Op("x", (), 0, None, 1), Op("square", ("x", "x"), 4, 1, 1)]
    assert wrapped(square, {"square"}) == [Cast("x", "half", "square")] * 2 + [Cast("square", "full")]


def test_refusals():
    a, b = Op("a", (), 1, 1, 1), Op("b", (), 1, 1, 1)
    for graph in ([a, a], [a._replace(inputs=("b",))], [a._replace(half=-1)]):
        with pytest.raises(ValueError, match="use a new name, inputs made before, and times of 0 or more"):
            cheapest(graph)
    with pytest.raises(ValueError, match=r"\['a'\] cannot be in 16 bits; use some of \['b'\]"):
        time([a._replace(half=None), b], "a")
