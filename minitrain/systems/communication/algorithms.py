"""The flat algorithms as schedules: ring, direct exchange, trees, halving and doubling.

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
neighbour and get the result in the end, in two more steps.
Patarasuk and Yuan 2009 (the ring, and the lower bound); Gibiansky 2017, Baidu (the ring in training); Thakur,
Rabenseifner and Gropp 2005, sections 4 and 4.5 (binomial tree; halving, near first). Differs: Rabenseifner's
detour has the two neighbours swap halves, so that both add one half each; here one adds everything.
"""

from minitrain.ranks.checks import require_ints, require_positive_ints
from minitrain.systems.communication.chunk_schedule import (
    Schedule,
    Transfer,
    in_parallel,
    mirror,
    place,
    then,
)


def ring_reduce_scatter(n: int) -> Schedule:
    """Rank r passes chunk r-1-s on to r+1 in step s: a chunk visits everyone and ends at its owner."""
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


def binomial_broadcast(n: int) -> Schedule:
    return mirror(binomial_reduce(n))


def binomial_all_reduce(n: int) -> Schedule:
    return then(binomial_reduce(n), binomial_broadcast(n))


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
# while others still come up, which hides one filling of the pipe; here the broadcast mirrors the whole
# reduce.


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

    def rank_at(position: int) -> int:
        return n - 1 - position if n % 2 == 0 else (position + 1) % n

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
