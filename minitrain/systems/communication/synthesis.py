"""Schedules that are written or searched: GC3's programs, SCCL's matching, TACCL's sketch, Blink's trees.

    program = Program(ranks=4, chunks=1)
    program.chunk(0, 0).reduce(1).copy(2)       rank 0's chunk 0 is added to rank 1's, and the sum goes to 2
    check(program.schedule())                   a Schedule: proved, priced and run like any other

A program says where chunks go; their order follows from the data: a transfer comes after what wrote the
chunks that it touches, never before one that still reads what it overwrites. Cowan et al. 2022,
arXiv:2201.11840 (GC3, MSCCLang); Cai et al. 2021, section 3 (SCCL); Shah et al. 2023, arXiv:2111.04867
(TACCL); Wang et al. 2020 (Blink). Differs: no channels, thread blocks or fused instructions; in place of
SCCL's solver two steps and a matching, in place of TACCL's integer program the least loaded relay.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from minitrain.ranks.checks import require_ints, require_nonempty, require_positive_ints
from minitrain.systems.communication.chunk_schedule import Schedule, Transfer
from minitrain.systems.network.graph import Graph


class Program:
    def __init__(self, ranks: int, chunks: int):
        require_positive_ints(ranks=ranks, chunks=chunks)
        self.ranks, self.chunks = ranks, chunks
        self._steps: dict[int, list[Transfer]] = defaultdict(list)
        self._ready: Counter[tuple[int, int]] = Counter()  # (rank, chunk) -> the first step that may touch it

    def chunk(self, rank: int, index: int) -> "Chunk":
        require_ints(0, self.ranks - 1, rank=rank)
        require_ints(0, self.chunks - 1, index=index)
        return Chunk(self, rank, index)

    def schedule(self) -> Schedule:
        steps = (tuple(self._steps[step]) for step in range(len(self._steps)))
        return Schedule(self.ranks, self.chunks, tuple(steps))


class Chunk(NamedTuple):
    program: Program
    rank: int
    index: int

    def copy(self, *ranks: int) -> "Chunk":
        """From rank to rank, in place of what is there; where it ends."""
        return self._along(ranks, reduce=False)

    def reduce(self, *ranks: int) -> "Chunk":
        """From rank to rank, added to what is there; where it ends."""
        return self._along(ranks, reduce=True)

    def _along(self, ranks: Sequence[int], reduce: bool) -> "Chunk":
        program, here, ready = self.program, self.rank, self.program._ready
        for to in ranks:
            source, target = (here, self.index), (to, self.index)
            step = max(ready[source], ready[target])
            program._steps[step].append(_moved(here, to, self.index, reduce))
            ready[target], ready[source], here = step + 1, step, to
        return program.chunk(here, self.index)


def _moved(source: int, to: int, chunk: int, reduce: bool = False) -> Transfer:
    return Transfer(source, to, range(chunk, chunk + 1), reduce)


def ring_program(n: int) -> Schedule:
    """An all-reduce, like the next two: 2(n-1) steps."""
    program = Program(n, n)
    for c in range(n):
        around = [(c + i) % n for i in range(1, n + 1)]
        program.chunk(around[0], c).reduce(*around[1:]).copy(*around[:-1])
    return program.schedule()


def tree_program(n: int) -> Schedule:
    program = Program(n, 1)
    for rank in reversed(range(1, n)):
        program.chunk(rank, 0).reduce((rank - 1) // 2)
    for rank in range(1, n):
        program.chunk((rank - 1) // 2, 0).copy(rank)
    return program.schedule()


def hierarchical_program(nodes: int, per_node: int) -> Schedule:
    """Chunk c is summed in each node to its card c, then over these cards, and handed out again."""
    program = Program(nodes * per_node, per_node)
    for c in range(per_node):
        inside = [[n * per_node + (c + 1 + i) % per_node for i in range(per_node)] for n in range(nodes)]
        cards = [ranks[-1] for ranks in inside]
        for ranks in inside:
            program.chunk(ranks[0], c).reduce(*ranks[1:])
        program.chunk(cards[0], c).reduce(*cards[1:]).copy(*cards[-2::-1])
        for ranks in inside:
            program.chunk(ranks[-1], c).copy(*ranks[:-1])
    return program.schedule()


def two_step_all_gather(graph: Graph) -> Schedule | None:
    """SCCL's (chunks, steps, rounds) = (1, 2, 2), or None where there is none. All send to their neighbours;
    then each rank gets every chunk that it misses from another neighbour that has it: a matching."""
    direct, relayed = [], []
    for to in graph.hosts:
        near = graph.next[to]
        direct += [_moved(source, to, source) for source in near]
        passes_on: dict[int, int] = {}  # neighbour -> chunk

        def placed(chunk: int, tried: set[int]) -> bool:
            for relay in [node for node in near if chunk in graph.next[node] and node not in tried]:
                tried.add(relay)
                if relay not in passes_on or placed(passes_on[relay], tried):
                    passes_on[relay] = chunk
                    return True
            return False

        if not all(placed(chunk, set()) for chunk in graph.hosts if chunk != to and chunk not in near):
            return None
        relayed += [_moved(relay, to, chunk) for relay, chunk in passes_on.items()]
    return Schedule(len(graph.hosts), len(graph.hosts), (tuple(direct), tuple(relayed)))


def relayed_all_gather(gates: Sequence[int]) -> Schedule:
    """Of two nodes, joined card by card: TACCL's sketch. Chunk c crosses once, from card gates[c] of its node
    to its like; the others get it from the card that has it first in their node."""
    require_nonempty(gates=gates)
    per_node = len(gates) // 2
    require_ints(0, per_node - 1, gates=list(gates))
    program = Program(2 * per_node, 2 * per_node)
    for c, gate in enumerate(gates):
        here, there, first = c // per_node * per_node, (1 - c // per_node) * per_node, program.chunk(c, c)
        crossing = first if here + gate == c else first.copy(here + gate)
        far = crossing.copy(there + gate)
        for i in range(per_node):
            first.copy(*{here + i} - {c, crossing.rank})
            far.copy(*{there + i} - {far.rank})
    return program.schedule()


def least_loaded_gates(per_node: int) -> list[int]:
    """For each chunk the card that the fewest of its node cross at so far; its own among equals."""
    require_positive_ints(1024, per_node=per_node)
    load, gates = Counter(), []
    for c in range(2 * per_node):
        node, card = divmod(c, per_node)
        gates.append(min(range(per_node), key=lambda gate: (load[node, gate], gate != card)))
        load[node, gates[-1]] += 1
    return gates


def packed_broadcast(trees: Sequence[Mapping[int, int]], ranks: int) -> Schedule:
    """Blink: each tree out of rank 0, {rank: parent} with parents first, carries a chunk of its own."""
    require_nonempty(trees=trees)
    program = Program(ranks, len(trees))
    for index, tree in enumerate(trees):
        for rank, parent in tree.items():
            program.chunk(parent, index).copy(rank)
    return program.schedule()
