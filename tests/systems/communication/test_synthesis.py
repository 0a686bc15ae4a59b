"""Programs, searches and sketches: proved by the check, run on ranks, compared with all choices there are."""

from itertools import combinations, product
from random import Random

import pytest
from communication_runs import check_on_real_ranks

from minitrain.systems.communication import synthesis
from minitrain.systems.communication.algorithms import ring_all_gather
from minitrain.systems.communication.chunk_schedule import Schedule, check
from minitrain.systems.communication.cost_model import racks, time_s
from minitrain.systems.communication.synthesis import Program
from minitrain.systems.network.graph import Graph
from minitrain.systems.network.topologies import cube_mesh


def ring(n: int) -> Schedule:
    program = Program(n, n)
    for c in range(n):
        around = [(c + i) % n for i in range(1, n + 1)]
        program.reduce(c, *around)
        program.copy(c, around[-1], *around[:-1])
    return program.schedule()


def tree(n: int) -> Schedule:
    program = Program(n, 1)
    for rank in reversed(range(1, n)):
        program.reduce(0, rank, (rank - 1) // 2)
    for rank in range(1, n):
        program.copy(0, (rank - 1) // 2, rank)
    return program.schedule()


def hierarchy(nodes: int, per_node: int) -> Schedule:
    """Chunk c is summed in each node to its card c, then over these cards, and handed out again."""
    program = Program(nodes * per_node, per_node)
    for c in range(per_node):
        inside = [[n * per_node + (c + 1 + i) % per_node for i in range(per_node)] for n in range(nodes)]
        for ranks in inside:
            program.reduce(c, *ranks)
        program.reduce(c, *(ranks[-1] for ranks in inside))
        program.copy(c, *(ranks[-1] for ranks in reversed(inside)))
        for ranks in inside:
            program.copy(c, ranks[-1], *ranks[:-1])
    return program.schedule()


def test_gc3():
    """Ring, tree and hierarchy in 6, 4 and 4 steps on four ranks: proved, and equal to torch's sum."""
    schedules = ring(4), tree(4), hierarchy(2, 2)
    assert [len(schedule.steps) for schedule in schedules] == [6, 4, 4]
    check_on_real_ranks(*schedules)
    for n, nodes, per_node in ((3, 3, 2), (5, 2, 4), (8, 1, 3)):
        for schedule in (ring(n), tree(n), hierarchy(nodes, per_node)):
            check(schedule)


def test_a_program_keeps_the_order_of_its_data():
    """A chunk is not overwritten before it was read, and not read before it was written."""
    program = Program(3, 1)
    program.reduce(0, 0, 1, 2)  # 1 gets 0's, 2 gets both
    program.copy(0, 2, 1, 0)
    check(program.schedule())
    late = Program(3, 1)
    late.copy(0, 0, 1)
    late.copy(0, 1, 2)
    late.copy(0, 2, 0)  # 2 has 0's by then
    assert [step[0][:2] for step in late.schedule().steps] == [(0, 1), (1, 2), (2, 0)]
    overwritten = Program(3, 1)
    overwritten.copy(0, 0, 1)
    overwritten.copy(0, 1, 2)  # in step 1
    overwritten.copy(0, 0, 1)  # not before 1 has sent
    assert [len(step) for step in overwritten.schedule().steps] == [1, 2]


def exists_by_brute_force(graph: Graph) -> bool:
    """Of every rank: some way to get each missing chunk over another of its links."""
    for to in graph.hosts:
        missing = [c for c in graph.hosts if c != to and c not in graph.next[to]]
        choices = product(graph.next[to], repeat=len(missing))
        fits = (all(c in graph.next[u] for c, u in zip(missing, p)) for p in choices if len(set(p)) == len(p))
        if not any(fits):
            return False
    return True


def test_sccl():
    """One chunk in two steps with a chunk a link and step: a DGX-1 has it, a ring of five too, of six not."""
    for graph in (cube_mesh(), cube_mesh(volta=True)):
        schedule = synthesis.two_step_all_gather(graph)
        check(schedule, "all_gather")
        links = [[(source, to) for source, to, *_ in step] for step in schedule.steps]
        assert all(len(set(step)) == len(step) and set(step) <= graph.rates.keys() for step in links)
        assert len(schedule.steps) == 2 == graph.diameter()
    draw, seen = Random(0), set()
    for n in (4, 5, 6):
        ring = [(i, (i + 1) % n) for i in range(n)]
        for _ in range(25):
            more = draw.sample(list(combinations(range(n), 2)), draw.randint(0, n))
            cables = {(min(pair), max(pair)) for pair in ring + more}
            graph = Graph(range(n), cables, forwards=True)
            schedule = synthesis.two_step_all_gather(graph)
            assert (schedule is not None) == exists_by_brute_force(graph)
            seen.add((n, schedule is not None))
            if schedule:
                check(schedule, "all_gather")
    assert {(4, True), (5, True), (6, True), (6, False)} <= seen


def test_taccl():
    """Two nodes of two: the least loaded relays are the best of all sixteen choices, and beat the ring."""
    fabric = racks([0, 0, 1, 1], (1e-6, 300e9), (4e-6, 25e9))
    seconds = {}
    for gates in product(range(2), repeat=4):
        check(schedule := synthesis.relayed_all_gather(gates), "all_gather")
        seconds[gates] = time_s(schedule, 1e6, fabric)
    found = seconds[tuple(synthesis.least_loaded_gates(2))]
    assert found == min(seconds.values()) == pytest.approx(15.83e-6, abs=0.01e-6)
    assert time_s(ring_all_gather(4), 1e6, fabric) == pytest.approx(42.0e-6, abs=0.1e-6)
    check(synthesis.relayed_all_gather(synthesis.least_loaded_gates(4)), "all_gather")
