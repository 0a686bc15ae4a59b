"""Schedules that are written or searched: GC3's programs, SCCL's matching, TACCL's sketch.

    program = Program(ranks=4, chunks=1)
    program.reduce(0, 3, 2, 1, 0)      chunk 0 of rank 3 is added to rank 2's, the sum to rank 1's, ..
    program.copy(0, 0, 1, 2, 3)        and goes back the same way
    check(program.schedule())          a Schedule: proved, priced and run like any other

A program says where chunks go; their order follows from the data: a transfer comes after what wrote the
chunks that it touches, never before one that still reads what it overwrites. Cowan et al. 2022,
arXiv:2201.11840 (GC3, MSCCLang); Cai et al. 2021, section 3 (SCCL); Shah et al. 2023, arXiv:2111.04867
(TACCL). Differs: no channels, thread blocks or fused instructions; in place of SCCL's solver two steps and a
matching, in place of TACCL's integer program the least loaded relay.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import pairwise

from minitrain.ranks.checks import require_ints, require_nonempty, require_positive_ints
from minitrain.systems.communication.chunk_schedule import Schedule, Transfer
from minitrain.systems.network.graph import Graph


class Program:
    def __init__(self, ranks: int, chunks: int):
        require_positive_ints(ranks=ranks, chunks=chunks)
        self.ranks, self.chunks = ranks, chunks
        self._steps: dict[int, list[Transfer]] = defaultdict(list)
        self._ready: Counter[tuple[int, int]] = Counter()  # (rank, chunk) -> the first step that may touch it

    def copy(self, chunk: int, *ranks: int) -> None:
        """From rank to rank, in place of what is there."""
        self._along(chunk, ranks, reduce=False)

    def reduce(self, chunk: int, *ranks: int) -> None:
        """From rank to rank, added to what is there."""
        self._along(chunk, ranks, reduce=True)

    def _along(self, chunk: int, ranks: Sequence[int], reduce: bool) -> None:
        require_ints(0, self.chunks - 1, chunk=chunk)
        require_ints(0, self.ranks - 1, ranks=list(ranks))
        for source, to in pairwise((rank, chunk) for rank in ranks):
            step = max(self._ready[source], self._ready[to])
            self._steps[step].append(_moved(source[0], to[0], chunk, reduce))
            self._ready[to], self._ready[source] = step + 1, step

    def schedule(self) -> Schedule:
        steps = (tuple(self._steps[step]) for step in range(len(self._steps)))
        return Schedule(self.ranks, self.chunks, tuple(steps))


def _moved(source: int, to: int, chunk: int, reduce: bool = False) -> Transfer:
    return Transfer(source, to, range(chunk, chunk + 1), reduce)


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
        here, there = c // per_node * per_node, (1 - c // per_node) * per_node
        near, far = here + gate, there + gate
        program.copy(c, *dict.fromkeys((c, near, far)))  # itself the gate, or over it
        for i in range(per_node):
            if here + i not in (c, near):
                program.copy(c, c, here + i)
            if there + i != far:
                program.copy(c, far, there + i)
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
