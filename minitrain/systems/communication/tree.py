"""The double binary tree: two trees over the same ranks, and leaves of one are inner in the other.

In one binary tree a leaf sends S up and gets S back, while an inner rank receives 2S and sends S, and again
on the way down. The second tree makes the leaves of the first its inner ranks: then no rank moves more than S
in either direction on the way up, nor on the way down: the bytes of a ring, in steps that grow with log2 n.

    tree 1   rank r at position r; to find a parent move the lowest set bit up by one: 5 -> 6 -> 4 -> 8 -> 0
    tree 2   n even: mirrored, rank r at position n-1-r; n odd: shifted, at position r-1
    steps    2(h-1 + pieces), h = ceil(log2 n), one level apart; n = 24,576: 30 (a ring: 49,150)
    bytes    a rank sends at most 2S, all ranks 2(n-1) S

A tree is n integers, so the depth at 24,576 ranks is measured on the tree itself. Sanders, Speck and Träff
2009; Jeaugey 2019, NVIDIA's blog on NCCL 2.4. Differs: in NCCL pieces go down while others still come up,
which hides one of the two fillings of the pipe; here the tensor is reduced first, so the broadcast mirrors
the reduce.
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
