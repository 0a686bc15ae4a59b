"""ROAM: orders against all orders of small graphs, the layout against the bound, and what a training step gains."""

import random

import pytest

from minitrain.systems.plan import memory_layout
from minitrain.systems.plan.memory_layout import (
    Graph,
    Operator,
    best_fit,
    height,
    laid_out,
    least_memory,
    lifetimes_in,
    memory,
    most_live,
    training,
)


def counted(graph, order):
    """The peak by a count of its own: at every step all tensors are asked whether they live."""
    place = {number: step for step, number in enumerate(order)}
    if sorted(place) != list(range(len(graph.operators))):
        return None
    peaks = []
    for step in range(len(order)):
        total = 0
        for name, size in graph.sizes.items():
            writers = [place[n] for n, one in enumerate(graph.operators) if name in one.writes]
            readers = [place[n] for n, one in enumerate(graph.operators) if name in one.reads]
            if any(reader < writer for writer in writers for reader in readers):
                return None
            if not writers and not readers and name not in graph.results:
                continue
            last = len(order) if name in graph.results else max(writers + readers)
            total += size * ((writers or [0])[0] <= step <= last)
        peaks.append(total)
    return max(peaks)


def drawn(seed, count):
    """A graph of operators that read up to three of the tensors there are."""
    draw = random.Random(seed)
    sizes, operators = {"in": draw.randint(1, 9)}, []
    for number in range(count):
        reads = tuple(draw.sample(sorted(sizes), min(len(sizes), draw.randint(1, 3))))
        writes = tuple(f"t{number}.{i}" for i in range(draw.randint(0, 2)))
        sizes |= {name: draw.randint(0, 9) for name in writes}
        operators.append(Operator(f"op{number}", reads, writes))
    kept = draw.sample(sorted(sizes), draw.randint(0, 2))
    return Graph(sizes, operators, kept)


def orders(graph, begun=()):
    """All that the graph allows."""
    writer = {name: n for n, one in enumerate(graph.operators) for name in one.writes}
    if len(begun) == len(graph.operators):
        yield begun
    for number, one in enumerate(graph.operators):
        if number not in begun and {writer[name] for name in one.reads if name in writer} <= set(begun):
            yield from orders(graph, (*begun, number))


def least(graph):
    """The lowest peak of all orders, from sets of operators done to larger ones."""
    count = len(graph.operators)
    written = {name: n for n, one in enumerate(graph.operators) for name in one.writes}
    readers = {x: {n for n, one in enumerate(graph.operators) if x in one.reads} for x in graph.sizes}

    def alive(name, done, now):
        if name in written and written[name] != now and written[name] not in done:
            return False
        used = name in written or readers[name] or name in graph.results
        return used and (name in graph.results or written.get(name) == now or bool(readers[name] - done))

    best = {frozenset(): 0}
    for _ in range(count):
        after = {}
        for done, peak in best.items():
            for now in set(range(count)) - done:
                if {written[name] for name in graph.operators[now].reads if name in written} <= done:
                    bytes = sum(size for name, size in graph.sizes.items() if alive(name, done, now))
                    new = done | {now}
                    after[new] = min(after.get(new, 10**9), max(peak, bytes))
        best = after
    return best[frozenset(range(count))]


def test_no_graph_has_a_lower_peak():
    found = 0
    for seed in range(150):
        graph = drawn(1000 + seed, count=8)
        order = least_memory(graph)
        assert max(memory(graph, order)) == least(graph), seed
        every = lifetimes_in(graph, order)
        assert height(every, laid_out(graph, order, steps=0)) <= height(every, best_fit(every))
        found += max(memory(graph, order)) < max(memory(graph, range(8)))
    assert found > 50  # the program's order is often a bad one


@pytest.mark.parametrize("seed", range(25))
def test_roam(seed):
    """The peak is the lowest of all orders, at most the program's; the tree changes nothing, and nothing overlaps.
    A training step is laid out without a hole."""
    if not seed:
        test_a_training_step(5)
    graph = drawn(seed, count=random.Random(seed).randint(3, 7))
    order, program = least_memory(graph), range(len(graph.operators))
    assert max(memory(graph, order)) == counted(graph, order) <= counted(graph, program)
    assert max(memory(graph, program)) == counted(graph, program)
    assert counted(graph, order) == min(counted(graph, one) for one in orders(graph))
    assert most_live(lifetimes_in(graph, order)) == counted(graph, order)
    every, addresses = lifetimes_in(graph, order), laid_out(graph, order)
    for one in every:
        for other in every:
            if one.block < other.block and one.born < other.dies and other.born < one.dies:
                a, b = addresses[one.block], addresses[other.block]
                assert a + one.bytes <= b or b + other.bytes <= a
    assert counted(graph, order) <= height(every, addresses) <= height(every, best_fit(every))


def waiting(graph, order):
    """How many gradients of weights live at once, at most."""
    weights = {number for number, name in enumerate(graph.sizes) if name.startswith("w")}
    return most_live([life._replace(bytes=1) for life in lifetimes_in(graph, order) if life.block in weights])


@pytest.mark.parametrize("layers", [2, 5, 24])
def test_a_training_step(layers):
    """The program keeps all gradients of weights for the updates at its end, the order found one; without a
    hole.

    While the first backward runs, the program holds n kept activations, the gradients of input and output,
    and the first weight gradient; at its end all n of these."""
    A, W = 10, 40
    graph = training(layers, A, W)
    program, order = range(len(graph.operators)), least_memory(graph)
    assert max(memory(graph, program)) == max(layers * W + 3 * A, layers * A + W + A + A)
    assert max(memory(graph, order)) == layers * A + W + A
    assert [waiting(graph, program), waiting(graph, order)] == [layers, 1]
    every = lifetimes_in(graph, order)
    assert height(every, laid_out(graph, order)) == most_live(every)  # fragmentation 0
    in_program = lifetimes_in(graph, program)
    assert height(in_program, best_fit(in_program)) > max(memory(graph, program))


def test_what_cannot_be_searched_is_refused():
    with pytest.raises(ValueError, match="more than 3 sets"):
        least_memory(drawn(3, count=12), most_states=3)
    # two operators whose results stay: nothing done, the one, the other; then all is done
    pair = Graph(
        {"x": 1, "y": 1, "z": 1}, [Operator("f", ("x",), ("y",)), Operator("g", ("x",), ("z",))], ("y", "z")
    )
    assert sorted(least_memory(pair, most_states=3)) == [0, 1]
    with pytest.raises(ValueError, match="more than 2 sets to look at"):
        least_memory(pair, most_states=2)


def test_input():
    ok = Operator("f", ("x",), ("y",))
    graph = Graph({"x": 1, "y": 1, "z": 1}, [ok, Operator("g", ("y",), ("z",))])
    with pytest.raises(ValueError, match="g runs before what it reads"):
        memory(graph, [1, 0])
    assert memory_layout.least_memory(Graph({}, [])) == []
