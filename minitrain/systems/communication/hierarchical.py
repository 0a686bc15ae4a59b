"""All-reduce over several levels of network: fast links inside nodes, slow ones between. N nodes, n = N·g.

    sent to other nodes                            by each node   through
    flat ring, ranks in node order                 2(n-1)/n S     one card: that of the last rank of a node
    two_level, with leaders                        2(N-1)/N S     one card: the leader's
    within_and_across: torus2d, accl, blueconnect  2(N-1)/N S     all g cards, a g-th each

A leader collects whole tensors inside its node and moves S between the nodes; the others wait. In the second
family a shard is left to every rank of a node and all-reduced by its holders; the argument says how:

    torus2d(X, Y)         within_and_across(X, ring(Y))                        2(X-1) + 2(Y-1) steps
    accl(n, g)            within_and_across(g, halving_doubling(n/g))          2(g-1) + 2 log2(n/g) steps
    blueconnect((p,q,r))  within_and_across(p, within_and_across(q, ring(r)))  2(p-1) + 2(q-1) + 2(r-1) steps

BlueConnect's levels cost no byte: a rank sends 2(n-1)/n S. Jia et al. 2018, arXiv:1807.11205 (two-level);
Mikami et al. 2018, arXiv:1811.05233 (2D-torus); Dong et al. 2021 (ACCL); Cho et al. 2019 (BlueConnect).
Differs: two_level reduces over a binomial tree, not in pieces; accl's algorithm is `halving`'s.
"""

from collections.abc import Sequence
from math import prod
from random import Random

from minitrain.ranks.checks import require_ints, require_nonnegative, require_positive_ints
from minitrain.systems.communication import algorithms
from minitrain.systems.communication.chunk_schedule import (
    Schedule,
    Transfer,
    in_parallel,
    mirror,
    place,
    then,
)


def nodes_of(n: int, per_node: int) -> list[range]:
    """[node] -> its ranks, numbered node by node."""
    require_positive_ints(n=n, per_node=per_node)
    if n % per_node:
        raise ValueError(f"n={n} ranks do not fill nodes of {per_node}; choose a divisor of {n}")
    return [range(first, first + per_node) for first in range(0, n, per_node)]


def ranks_in(nodes: Sequence[Sequence[int]]) -> int:
    """n, when the nodes hold every rank of 0..n-1 exactly once."""
    n, listed = sum(map(len, nodes)), list(map(list, nodes))
    if not all(listed) or not n or sorted(sum(listed, [])) != list(range(n)):
        raise ValueError(f"nodes {listed} must hold every rank of 0..{n - 1} exactly once, and none be empty")
    return n


def two_level(nodes: Sequence[Sequence[int]]) -> Schedule:
    """Reduce to the first rank of each node (of any size), ring all-reduce among these leaders, broadcast."""
    size = (ranks_in(nodes), len(nodes))
    everything = range(len(nodes))
    inside = in_parallel(
        place(algorithms.binomial_reduce(len(node)), node, everything, of=size) for node in nodes
    )
    leaders = place(algorithms.ring_all_reduce(len(nodes)), [node[0] for node in nodes], everything, of=size)
    return then(inside, leaders, mirror(inside))


def within_and_across(per_node: int, across: Schedule) -> Schedule:
    """Ring reduce-scatter in nodes; `across` on each shard, by its holders; ring all-gather in nodes."""
    nodes = nodes_of(per_node * across.ranks, per_node)
    size = (per_node * across.ranks, per_node * across.chunks)
    everything = range(per_node * across.chunks)
    shards = [range(i * across.chunks, (i + 1) * across.chunks) for i in range(per_node)]
    columns = [[node[i] for node in nodes] for i in range(per_node)]
    inside = lambda ring: in_parallel(place(ring, node, everything, of=size) for node in nodes)
    return then(
        inside(algorithms.ring_reduce_scatter(per_node)),
        in_parallel(place(across, column, shard, of=size) for column, shard in zip(columns, shards)),
        inside(algorithms.ring_all_gather(per_node)),
    )


def torus2d_all_reduce(x: int, y: int) -> Schedule:
    """Rows of x ranks, columns of y: reduce-scatter in rows, all-reduce of S/x in columns, all-gather."""
    require_positive_ints(x=x, y=y)
    return within_and_across(x, algorithms.ring_all_reduce(y))


def accl_all_reduce(n: int, per_node: int) -> Schedule:
    """Few steps between the nodes, where a step costs more than inside; any number of nodes."""
    return within_and_across(per_node, algorithms.halving_doubling_all_reduce(len(nodes_of(n, per_node))))


def blueconnect_all_reduce(n: int, factors: Sequence[int]) -> Schedule:
    """One factor of n for each level of the fabric, the innermost (fastest) first."""
    if not factors or prod(factors) != n or min(factors) < 1:
        raise ValueError(f"factors {tuple(factors)} do not multiply to n={n}; give a positive factor a level")
    *levels, outermost = factors
    schedule = algorithms.ring_all_reduce(outermost)
    for per_node in reversed(levels):
        schedule = within_and_across(per_node, schedule)
    return schedule


# ---- PLink -------------------------------------------------------------------------------------------------
#
# A cloud does not say in which rack a machine stands. Round trips are probed (noise only adds, so the least
# of a few samples comes near the truth; n(n-1)/2 times `samples`), near groups joined again and again (about
# n^3 sums), racks end at the largest relative jump from one join to the next. Every member of a rack sums one
# column; a column's owners all-reduce it across the racks: each of R racks sends 2(R-1)/R S upwards, all
# share in it. Luo et al. 2020, MLSys. Differs: the probe is simulated, groups come from average linkage,
# racks may differ in size, the plan does not adapt while training runs; a job without structure is one group.


NOISE_RATIO = 1.5  # inside one level of network the time grows by less than this from join to join

Matrix = Sequence[Sequence[float]]


def probe(rack_of: Sequence[int], near_s: float, far_s: float, *, noise: float, samples: int, seed: int):
    """Simulated round trips [n][n]: the least of `samples`, each longer by a share of mean `noise`."""
    require_nonnegative(near_s=near_s, far_s=far_s, noise=noise)
    require_positive_ints(samples=samples)
    require_ints(seed=seed)
    random, n = Random(seed), len(rack_of)
    rtt = [[0.0] * n for _ in range(n)]
    for a in range(n):
        for b in range(a):
            undisturbed_s = near_s if rack_of[a] == rack_of[b] else far_s
            delays = (random.expovariate(1.0) * noise for _ in range(samples))
            rtt[a][b] = rtt[b][a] = undisturbed_s * (1 + min(delays))
    return rtt


def clusters(rtt: Matrix) -> list[list[int]]:
    """Ranks grouped by nearness, in order."""
    n = len(rtt)
    if any(len(row) != n for row in rtt):
        raise ValueError(f"{n} rows of {sorted({len(row) for row in rtt})} entries; a probe matrix is square")
    groups = [[rank] for rank in range(n)]
    joined_at_s, largest_jump, racks = 0.0, NOISE_RATIO, None

    def mean_s(group: list[int], other: list[int]) -> float:
        return sum(rtt[a][b] + rtt[b][a] for a in group for b in other) / (2 * len(group) * len(other))

    while len(groups) > 1:
        pairs = [(a, b) for a in range(len(groups)) for b in range(a)]
        time_s, a, b = min((mean_s(groups[a], groups[b]), a, b) for a, b in pairs)
        if joined_at_s and time_s / joined_at_s > largest_jump:
            largest_jump, racks = time_s / joined_at_s, groups
        groups = [group for i, group in enumerate(groups) if i not in (a, b)] + [groups[a] + groups[b]]
        joined_at_s = time_s
    return sorted(map(sorted, racks or groups))


def aggregate(racks: Sequence[Sequence[int]]) -> Schedule:
    """Two-level all-reduce: column c of the tensor belongs to member c, modulo its size, of every rack."""
    n, across, num_columns = ranks_in(racks), algorithms.ring_all_reduce(len(racks)), max(map(len, racks))
    columns = [range(c * across.chunks, (c + 1) * across.chunks) for c in range(num_columns)]
    owners = [[rack[c % len(rack)] for rack in racks] for c in range(num_columns)]
    size = (n, num_columns * across.chunks)
    gather = tuple(
        Transfer(member, owner, column, reduce=True)
        for column, owners_of_column in zip(columns, owners)
        for rack, owner in zip(racks, owners_of_column)
        for member in rack
        if member != owner
    )
    inside = Schedule(*size, (gather,) if gather else ())
    middle = in_parallel(place(across, ranks, column, of=size) for ranks, column in zip(owners, columns))
    return then(inside, middle, mirror(inside))
