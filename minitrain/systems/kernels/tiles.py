"""A kernel as the tiles that it touches, and a cache that counts what it loads of them. No torch.

    traffic(matmul_tiles(9, 9, 9, group_rows=3), 60)     C of 9 x 9 blocks in Triton's grouped order
    traffic(lines(points(64, "ijk"), 64, 8), 128 * 8)    element by element: 33,280 lines of 8

For the first 9 blocks of C the row-major order touches 9 + 81 blocks of A and B, three rows of a group 27 +
27: the program id alone decides (`grouped`). All orders of the three loops and all tilings have the same
result, and a cache of 128 lines loads for 64^3

    ijk  64² / 8 + 64³ / 8 = 33,280        jki  2 · 64³ + 64² - 64² / 8 = 527,872        in tiles of 16  4,768

Sizes are in any unit that tiles and cache share. The cache is fully associative and forgets what was used
longest ago; a first write loads nothing, what was written is stored when it is forgotten or at the end.
Tillet et al. 2019 (Triton), MAPL, and its tutorial on products; Ragan-Kelley et al. 2013 (Halide), PLDI;
Chen et al. 2018, arXiv:1802.04799 (TVM), section 4. Differs: schedules are given, not searched; one level of
cache, no prefetching.
"""

from collections import OrderedDict, namedtuple
from collections.abc import Iterable, Iterator
from itertools import product
from typing import NamedTuple

from minitrain.ranks.checks import require_ints, require_one_of, require_positive, require_positive_ints

# Sizes that went between cache and slow memory, and touches that found their tile in the cache.
Moved = namedtuple("Moved", "loaded stored hits")
ORDERS = ("ijk", "ikj", "jik", "jki", "kij", "kji")


class Touch(NamedTuple):
    array: str
    tile: tuple[int, ...] | int
    size: int = 1
    writes: bool = False


def traffic(touches: Iterable[Touch], cache: float) -> Moved:
    """What a cache of that size moves."""
    require_positive(cache=cache)
    lines: OrderedDict[tuple, tuple[int, bool]] = OrderedDict()  # (array, tile) -> (size, to be stored)
    known, used, loaded, stored, hits = set(), 0, 0, 0, 0
    for array, tile, size, writes in touches:
        at = array, tile
        if at in lines:
            hits += 1
            lines[at] = size, lines.pop(at)[1] or writes  # at the end now
            continue
        if at in known or not writes:
            loaded += size
        known.add(at)
        lines[at], used = (size, writes), used + size
        while used > cache:
            _, (old, changed) = lines.popitem(last=False)
            used, stored = used - old, stored + old * changed
    return Moved(loaded, stored + sum(size for size, changed in lines.values() if changed), hits)


def grouped(program: int, rows: int, columns: int, group_rows: int) -> tuple[int, int]:
    """The block of C (row, column) of a program id: `group_rows` rows go through all columns together."""
    require_positive_ints(rows=rows, columns=columns, group_rows=group_rows)
    require_ints(0, rows * columns - 1, program=program)
    first = program // (group_rows * columns) * group_rows
    height = min(rows - first, group_rows)
    inside = program % (group_rows * columns)
    return first + inside % height, inside // height


def matmul_tiles(rows: int, columns: int, depth: int, group_rows: int = 1) -> Iterator[Touch]:
    """C [rows, columns] = A [rows, depth] B [depth, columns] in blocks of size 1, program after program."""
    require_positive_ints(1 << 12, rows=rows, columns=columns, depth=depth, group_rows=group_rows)
    for program in range(rows * columns):
        i, j = grouped(program, rows, columns, group_rows)
        for k in range(depth):
            yield Touch("A", (i, k))
            yield Touch("B", (k, j))
        yield Touch("C", (i, j), writes=True)


def points(size: int, order: str, tile: int | None = None) -> Iterator[tuple[int, int, int]]:
    """(i, j, k) of every multiply-add of a product of size^3; with `tile` the loops over tiles stand outside
    of those within one, both in the same order."""
    require_positive_ints(1 << 8, size=size, tile=tile or size)
    require_one_of(ORDERS, order=order)
    tile, places = min(tile or size, size), [order.index(loop) for loop in "ijk"]
    for starts in product(range(0, size, tile), repeat=3):
        for at in product(*(range(start, min(start + tile, size)) for start in starts)):
            yield at[places[0]], at[places[1]], at[places[2]]


def lines(at: Iterable[tuple[int, int, int]], size: int, per_line: int) -> Iterator[Touch]:
    """The cache lines that those multiply-adds touch; arrays lie row by row."""
    require_positive_ints(size=size, per_line=per_line)
    for i, j, k in at:
        yield Touch("A", (i * size + k) // per_line, per_line)
        yield Touch("B", (k * size + j) // per_line, per_line)
        yield Touch("C", (i * size + j) // per_line, per_line, writes=True)
