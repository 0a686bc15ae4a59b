"""Algorithms as schedules: ring, direct exchange, trees, halving and doubling, and several levels of network.

    all-reduce            steps           sent per rank                   good for
    ring                  2(n-1)          2(n-1)/n S                      large tensors; only neighbours
    direct exchange       2               2(n-1)/n S                      one switch: all at once
    binomial tree         2 ceil(log2 n)  root ceil(log2 n) S, leaves S   small tensors
    halving and doubling  2 log2 n        2(n-1)/n S                      exchanges of S/2, .., S/n, and back
    doubling              log2 n          log2 n · S                      small tensors: everything each time
    double binary tree    2(h-1+pieces)   at most 2S      h = ceil(log2 n); n = 24,576: 30 (a ring: 49,150)

Where only ranks add, all of them together send at least 2(n-1) S: ring and direct exchange send that, evenly.
On equal links halving beats the ring at every size. On others distance counts: half of the tensor makes the
first hop. With `near_first` that is to the neighbour and only S/n goes farthest; with far first rank r ends
with chunk r, as a reduce-scatter promises. If n exceeds a power of two by e, e ranks first send all to a
neighbour and get the result in the end, in two more steps. Patarasuk and Yuan 2009 (the ring, and the lower
bound); Gibiansky 2017, Baidu (the ring in training); Thakur, Rabenseifner and Gropp 2005, sections 4 and 4.5
(binomial tree; halving, near first). Differs: of two neighbours one adds everything, not a half each.
"""

from collections.abc import Sequence
from math import prod
from random import Random

from minitrain.ranks.checks import require_ints, require_nonnegative, require_positive_ints
from minitrain.systems.communication.chunk_schedule import (
    Schedule,
    Transfer,
    in_parallel,
    mirror,
    place,
    then,
)


def ring_reduce_scatter(n: int) -> Schedule:
    """Rank r passes chunk r-1-s on to r+1 in step s: a chunk visits every rank and ends at its owner."""
    return _ring(n, first=-1, reduce=True)


def ring_all_gather(n: int) -> Schedule:
    """Rank r passes chunk r-s on to r+1 in step s. (The mirror of the reduce-scatter turns left.)"""
    return _ring(n, first=0, reduce=False)


def _ring(n: int, first: int, reduce: bool) -> Schedule:
    require_positive_ints(n=n)
    step = lambda s: tuple(Transfer(r, (r + 1) % n, _one((r + first - s) % n), reduce) for r in range(n))
    return Schedule(n, n, tuple(map(step, range(n - 1))))


def ring_all_reduce(n: int) -> Schedule:
    return then(ring_reduce_scatter(n), ring_all_gather(n))


def direct_reduce_scatter(n: int) -> Schedule:
    """Everyone sends chunk c straight to its owner c, in one step."""
    require_positive_ints(n=n)
    pairs = ((r, (r + d) % n) for d in range(1, n) for r in range(n))
    step = tuple(Transfer(r, owner, _one(owner), reduce=True) for r, owner in pairs)
    return Schedule(n, n, (step,) if step else ())


def direct_all_reduce(n: int) -> Schedule:
    return then(direct_reduce_scatter(n), mirror(direct_reduce_scatter(n)))


def binomial_reduce(n: int) -> Schedule:
    """To rank 0: in step s the ranks whose lowest set bit is 2^s send all to the rank without that bit."""
    require_positive_ints(n=n)
    step = lambda bit: tuple(Transfer(r, r - bit, _one(0), reduce=True) for r in range(bit, n, 2 * bit))
    return Schedule(n, 1, tuple(map(step, _bits_below(n))))


def binomial_all_reduce(n: int) -> Schedule:
    return then(binomial_reduce(n), mirror(binomial_reduce(n)))


def halving_reduce_scatter(n: int, near_first: bool = False) -> Schedule:
    """In each exchange a rank keeps the half with its chunk: r or, near first, r with its bits reversed."""
    power = _power_of_two_below(n)
    if power != n:
        raise ValueError(f"n={n} is not a power of two; use {power} or {2 * power} ranks, or the all-reduce")
    bits = _bits_below(n)
    windows = [range(n)] * n  # [rank] -> the chunks it still gathers
    steps = []
    for bit in bits if near_first else reversed(bits):
        step = []
        for rank, window in enumerate(windows):
            lower, upper = window[: len(window) // 2], window[len(window) // 2 :]
            windows[rank], give = (upper, lower) if rank & bit else (lower, upper)
            step.append(Transfer(rank, rank ^ bit, give, reduce=True))
        steps.append(tuple(step))
    return Schedule(n, n, tuple(steps))


def halving_doubling_all_reduce(n: int, near_first: bool = True) -> Schedule:
    half = halving_reduce_scatter(_power_of_two_below(n), near_first)
    return _with_the_rest(n, then(half, mirror(half)))


def doubling_all_reduce(n: int) -> Schedule:
    """Partners swap all they have and both add: a + b is b + a, so all ranks get equal bits."""
    power = _power_of_two_below(n)
    step = lambda bit: tuple(Transfer(r, r ^ bit, _one(0), reduce=True) for r in range(power))
    return _with_the_rest(n, Schedule(power, 1, tuple(map(step, _bits_below(power)))))


def _with_the_rest(n: int, inner: Schedule) -> Schedule:
    """`inner`, for a power of two, made to serve n ranks: of the first 2·rest the odd ones step aside."""
    rest, everything = n - inner.ranks, range(inner.chunks)
    if not rest:
        return inner
    aside = tuple(Transfer(2 * i + 1, 2 * i, everything, reduce=True) for i in range(rest))
    fold = Schedule(n, inner.chunks, (aside,))
    staying = [*range(0, 2 * rest, 2), *range(2 * rest, n)]
    return then(fold, place(inner, staying, everything, of=(n, inner.chunks)), mirror(fold))


def _one(chunk: int) -> range:
    return range(chunk, chunk + 1)


def _bits_below(n: int) -> list[int]:
    return [1 << s for s in range((n - 1).bit_length())]


def _power_of_two_below(n: int) -> int:
    require_positive_ints(n=n)
    return 1 << (n.bit_length() - 1)


# ---- the double binary tree --------------------------------------------------------------------------------
#
# In one binary tree an inner rank receives 2S and sends S, and again on the way down, a leaf half of that. A
# second tree, each with half of the tensor, makes the leaves of the first its inner ranks: no rank moves more
# than S in either direction on the way up, nor on the way down.
#     tree 1   rank r at position r; to find a parent move the lowest set bit up by one: 5 -> 6 -> 4 -> 8 -> 0
#     tree 2   n even: mirrored, rank r at position n-1-r; n odd: shifted, at position r-1
# Sanders, Speck and Träff 2009; Jeaugey 2019, NVIDIA's blog on NCCL 2.4. Differs: in NCCL pieces go down
# while others still come up, which hides a filling of the pipe; here all of the reduce comes first.

Tree = list[int | None]  # [rank] -> parent; the root has none


def binary_tree(n: int) -> Tree:
    """Positions 0..n-1 from left to right: odd ones are leaves; 0 is the root, with one child."""
    require_positive_ints(n=n)
    tree: Tree = [None]
    for position in range(1, n):
        lowest = position & -position
        without = position - lowest
        up = without | 2 * lowest
        tree.append(up if up < n else without)  # beyond the end of n: one branch further down
    return tree


def double_binary_tree(n: int) -> tuple[Tree, Tree]:
    first = binary_tree(n)
    rank_at = lambda position: n - 1 - position if n % 2 == 0 else (position + 1) % n
    second: Tree = [None] * n
    for position, parent in enumerate(first):
        second[rank_at(position)] = None if parent is None else rank_at(parent)
    return first, second


def inner(tree: Tree) -> set[int]:
    """The ranks that have a child."""
    require_ints(parents=[parent or 0 for parent in tree])
    return {parent for parent in tree if parent is not None}


def depths(tree: Tree) -> list[int]:
    """[rank] -> hops to the root."""
    require_ints(0, len(tree) - 1, parents=[parent or 0 for parent in tree])

    def hops(rank: int) -> int:
        count = 0
        while (rank := tree[rank]) is not None:
            count += 1
            if count == len(tree):
                raise ValueError(f"tree {tree} goes round in a circle; give its root the parent None")
        return count

    return [hops(rank) for rank in range(len(tree))]


def tree_reduce(tree: Tree, pieces: int = 1) -> Schedule:
    """Towards the root, a piece per step: a rank starts when its slowest child's first piece has arrived."""
    level, n = depths(tree), len(tree)
    start = [0] * n  # [rank] -> the step of its first message: its height above the leaves
    for rank in sorted(range(n), key=level.__getitem__, reverse=True):
        if tree[rank] is not None:
            start[tree[rank]] = max(start[tree[rank]], start[rank] + 1)
    steps: list[list[Transfer]] = [[] for _ in range(max(start) - 1 + pieces)] if n > 1 else []
    for rank, parent in enumerate(tree):
        for piece in range(pieces if parent is not None else 0):
            steps[start[rank] + piece].append(Transfer(rank, parent, range(piece, piece + 1), reduce=True))
    return Schedule(n, pieces, tuple(map(tuple, steps)))


def tree_all_reduce(tree: Tree, pieces: int = 1) -> Schedule:
    up = tree_reduce(tree, pieces)
    return then(up, mirror(up))


def double_tree_all_reduce(n: int, pieces: int = 1) -> Schedule:
    """Each tree carries half of the tensor, in `pieces` pieces of S / (2 · pieces)."""
    require_positive_ints(n=n, pieces=pieces)
    halves = (range(pieces), range(pieces, 2 * pieces))
    return in_parallel(
        place(tree_all_reduce(tree, pieces), range(n), half, of=(n, 2 * pieces))
        for tree, half in zip(double_binary_tree(n), halves)
    )


# ---- several levels of network: fast links inside nodes, slow ones between; N nodes, n = N·g ---------------
#
#     sent to other nodes                            by each node   through
#     flat ring, ranks in node order                 2(n-1)/n S     one card: that of the last rank of a node
#     two_level, with leaders                        2(N-1)/N S     one card: the leader's
#     within_and_across: torus2d, accl, blueconnect  2(N-1)/N S     all g cards, a g-th each
#
# A leader collects whole tensors inside its node and moves S between the nodes; the others wait. In the
# second family every rank of a node is left a shard, which its holders all-reduce; the argument says how.
# Steps: torus2d(X, Y) 2(X-1 + Y-1); accl(n, g) 2(g-1 + log2(n/g)); blueconnect((p,q,r)) 2(p-1 + q-1 + r-1).
# BlueConnect's levels cost no byte: a rank sends 2(n-1)/n S. Jia et al. 2018, arXiv:1807.11205 (two-level);
# Mikami et al. 2018, arXiv:1811.05233 (2D-torus); Dong et al. 2021 (ACCL); Cho et al. 2019 (BlueConnect).
# Differs: two_level reduces over a binomial tree, not in pieces; accl's algorithm is `halving`'s.


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
    inside = in_parallel(place(binomial_reduce(len(node)), node, everything, of=size) for node in nodes)
    leaders = place(ring_all_reduce(len(nodes)), [node[0] for node in nodes], everything, of=size)
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
        inside(ring_reduce_scatter(per_node)),
        in_parallel(place(across, column, shard, of=size) for column, shard in zip(columns, shards)),
        inside(ring_all_gather(per_node)),
    )


def torus2d_all_reduce(x: int, y: int) -> Schedule:
    """Rows of x ranks, columns of y: reduce-scatter in rows, all-reduce of S/x in columns, all-gather."""
    require_positive_ints(x=x, y=y)
    return within_and_across(x, ring_all_reduce(y))


def accl_all_reduce(n: int, per_node: int) -> Schedule:
    """Few steps between the nodes, where a step costs more than inside; any number of nodes."""
    return within_and_across(per_node, halving_doubling_all_reduce(len(nodes_of(n, per_node))))


def blueconnect_all_reduce(n: int, factors: Sequence[int]) -> Schedule:
    """One factor of n for each level of the fabric, the innermost (fastest) first."""
    if not factors or prod(factors) != n or min(factors) < 1:
        raise ValueError(f"factors {tuple(factors)} do not multiply to n={n}; give a positive factor a level")
    *levels, outermost = factors
    schedule = ring_all_reduce(outermost)
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
    mean_s = lambda one, two: sum(rtt[a][b] + rtt[b][a] for a in one for b in two) / (2 * len(one) * len(two))
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
    n, across, num_columns = ranks_in(racks), ring_all_reduce(len(racks)), max(map(len, racks))
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
