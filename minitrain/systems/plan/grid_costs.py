"""What the matrices of a layer cost on five kinds of grid, and the fastest grid that fits into memory.

A layer is a chain of products y[m, n] = x[m, k] · W[k, n] with m tokens. For one product each rank sends

           grid     forward                         backward, dx and dW
    1-D    p        2(p-1)/p · mn of every second   2(p-1)/p · mk of every first
    2.5-D  q·q·d    (q-1)/q² · (mk/d + kn)          (q-1)/q² · 2(mk/d + kn) + 2(d-1)/d · kn/q²   2-D: d = 1
    3-D    l·l·l    (l-1)/l³ · (mk + kn + mn)       (l-1)/l³ · (2mk + 2kn + mn)
    RTP    p        (p-1)/p · kn                    (p-1)/p · 2kn

Norms, dropout and biases are left out. Time: rings and broadcasts flow in chunks, r ranks of a node feed r
rings, min(inside, r · outside); a hop waits for the message that leaves its node. No latency, no overlap:
with large matrices on 64 ranks within 15 % of a replay of the modules, on 64·64 far below it.
1-D: arXiv:1909.08053, section 3. 2-D: Xu et al. 2021 (Optimus), arXiv:2104.05343, table 1. 2.5-D: Wang et al.
2021 (Tesseract), arXiv:2105.14500, section 3. 3-D: Bian et al. 2021, arXiv:2105.14450, section 3.1. RTP: Luo
et al. 2023, arXiv:2311.01635. Differs: Optimus compares the time of trees, our `path`, with the elements of
1-D, and sums in trees backward; Tesseract compares 2p^(2/3) broadcasts, each to q-1 ranks, with Cannon's
2p^(3/2) - 2√p messages.
"""

import math
from collections import Counter
from dataclasses import dataclass
from functools import cache
from itertools import permutations
from typing import NamedTuple

from minitrain.ranks.checks import require_ints, require_one_of, require_positive, require_positive_ints


@dataclass(frozen=True)
class Layer:
    """Products one after the other: m tokens, and (k, n) of each."""

    tokens: int
    products: tuple[tuple[int, int], ...]

    def __post_init__(self):
        require_ints(1, tokens=self.tokens, products=self.products)


def mlp(tokens: int, width: int, inner: int) -> Layer:
    return Layer(tokens, ((width, inner), (inner, width)))


@dataclass(frozen=True)
class Grid:
    """A kind, its side (p, q or l) and, in 2.5-D only, its depth d."""

    kind: str
    side: int
    depth: int = 1

    def __post_init__(self):
        require_one_of(("1-D", "2-D", "2.5-D", "3-D", "RTP"), kind=self.kind)
        require_positive_ints(side=self.side)
        require_positive_ints(self.side if self.kind == "2.5-D" else 1, depth=self.depth)

    @property
    def axes(self) -> tuple[int, ...]:
        """Ranks along each axis."""
        q = self.side
        return {"2-D": (q, q), "2.5-D": (q, q, self.depth), "3-D": (q, q, q)}.get(self.kind, (q,))

    @property
    def ranks(self) -> int:
        return math.prod(self.axes)

    def __str__(self) -> str:
        return f"{self.kind} {'x'.join(map(str, self.axes))}"


def grids(ranks: int) -> list[Grid]:
    """All of so many ranks: 2-D for squares, 3-D for cubes, 2.5-D for q·q·d with 1 < d <= q."""
    require_positive_ints(ranks=ranks)
    square, cube = math.isqrt(ranks), round(ranks ** (1 / 3))
    deep = [Grid("2.5-D", q, ranks // q**2) for q in range(2, square + 1) if 1 < ranks // q**2 <= q]
    candidates = [Grid("1-D", ranks), Grid("RTP", ranks), Grid("2-D", square), *deep, Grid("3-D", cube)]
    return [grid for grid in candidates if grid.ranks == ranks]


class Sent(NamedTuple):
    """Elements along each axis of the grid."""

    elements: tuple[float, ...]  # sent in all
    path: tuple[float, ...]  # of these, or of whole blocks down a tree, what passes one after the other
    streamed: tuple[float, ...]  # through links that a collective keeps busy with chunks
    hopped: tuple[float, ...]  # as single messages to a neighbour


_RING, _HOPS = (1, 1, 1, 0), (1, 1, 0, 1)  # elements, path, streamed, hopped


def _sent(factors: tuple[float, ...], *blocks: float) -> Sent:
    """The four numbers of Sent as multiples of a block on each axis."""
    return Sent(*(tuple(factor * block for block in blocks) for factor in factors))


def _sum(*several: Sent) -> Sent:
    return Sent(*(tuple(map(sum, zip(*numbers))) for numbers in zip(*several)))


class Cost(NamedTuple):
    """One rank's part in a layer, in elements; `both` and `path` are of forward and backward together.

             weights   activations: inputs kept              working: the most that one product needs besides
    1-D      kn/p      mk of the first, mk/p of the second   mn, a sum that is not complete
    2.5-D    kn/q²     mk/(dq²)                              2(mk/d + kn)/q², the next blocks on their way
    3-D      kn/l³     mk/l³                                 (mk + kn + mn)/l²
    RTP      kn/p      mk/p                                  2kn/p with prefetch"""

    grid: Grid
    forward_sent: Sent
    backward_sent: Sent
    forward: float
    both: float
    forward_path: float
    path: float
    weights: float
    activations: float
    working: float


def cost(layer: Layer, grid: Grid) -> Cost:
    if grid.kind == "1-D" and len(layer.products) % 2:
        raise ValueError(f"1-D cuts products in pairs, by columns and by rows; not {len(layer.products)}")
    product = {"1-D": _product_1d, "3-D": _product_3d, "RTP": _product_rotated}.get(grid.kind, _product_25d)
    parts = [product(layer.tokens, k, n, grid, index) for index, (k, n) in enumerate(layer.products)]
    forward_parts, backward_parts, weights, activations, working = zip(*parts)
    forward, backward = _sum(*forward_parts), _sum(*backward_parts)
    elements, path = sum(forward.elements), sum(forward.path)
    sent = elements, elements + sum(backward.elements), path, path + sum(backward.path)
    return Cost(grid, forward, backward, *sent, sum(weights), sum(activations), max(working))


def _product_1d(m: int, k: int, n: int, grid: Grid, index: int) -> tuple:
    """By columns, then by rows: one all-reduce after such a pair forward, one before it backward."""
    p, share = grid.side, 2 * (grid.side - 1) / grid.side
    if index % 2:
        return _sent(_RING, share * m * n), _sent(_RING, 0), k * n / p, m * k / p, m * n
    return _sent(_RING, 0), _sent(_RING, share * m * k), k * n / p, m * k, 0


def _product_25d(m: int, k: int, n: int, grid: Grid, index: int) -> tuple:
    """SUMMA on d layers, 1/d of the tokens each: in q steps blocks of x pass along rows, of W along columns.

    Backward each gradient needs q broadcasts of one operand, and its sums go round a ring in q-1 hops."""
    q, d = grid.side, grid.depth
    x, w = m * k / (d * q * q), k * n / (q * q)  # a block
    none = (0,) * len(grid.axes[2:])
    in_turn = q - 1, q * math.ceil(math.log2(q)), q if q > 1 else 0, 0  # q broadcasts, each down a tree
    forward = _sent(in_turn, x, w, *none)
    backward = _sum(forward, _sent(_HOPS, (q - 1) * x, (q - 1) * w, *none))
    if none:  # the layers' weight gradients are added up
        backward = _sum(backward, _sent(_RING, 0, 0, 2 * (d - 1) / d * w))
    return forward, backward, w, x, min(2, q) * (x + w)


def _product_3d(m: int, k: int, n: int, grid: Grid, index: int) -> tuple:
    """cube.py: x, W and y have an axis each, x and y swapped in every second product."""
    l = grid.side
    share, turn = (l - 1) / l**3, -1 if index % 2 else 1
    x, w, y = m * k, k * n, m * n
    forward, backward = (share * x, share * w, share * y), (share * 2 * x, share * 2 * w, share * y)
    sent = (_sent(_RING, *elements[::turn]) for elements in (forward, backward))
    return *sent, w / l**3, x / l**3, (x + w + y) / l**2


def _product_rotated(m: int, k: int, n: int, grid: Grid, index: int) -> tuple:
    """rotated.py: the weights pass by, forward and backward, and their gradients once."""
    p, w = grid.side, k * n
    once = (p - 1) / p * w
    return _sent(_HOPS, once), _sent(_HOPS, 2 * once), w / p, m * k / p, min(2, p - 1) * w / p


def crossover(layer: Layer, *, path=False, backward=False, most: int = 2**20) -> int | None:
    """The smallest square 1 < p <= most at which 2-D sends less than 1-D (or its path is shorter)."""
    what = ("path" if backward else "forward_path") if path else ("both" if backward else "forward")
    for side in range(2, math.isqrt(most) + 1):
        flat, square = cost(layer, Grid("1-D", side**2)), cost(layer, Grid("2-D", side))
        if getattr(square, what) < getattr(flat, what):
            return side**2
    return None


@dataclass(frozen=True)
class Links:
    """Bytes per second and direction: of a rank inside its node, and of its share of the network cards."""

    per_node: int
    intra_bytes_per_s: float
    inter_bytes_per_s: float

    def __post_init__(self):
        require_positive_ints(per_node=self.per_node)


def seconds(cost: Cost, links: Links, element_bytes: int = 2) -> float:
    """Forward and backward, axis after axis, in the best order from the innermost outwards."""
    sent = _sum(cost.forward_sent, cost.backward_sent)
    axes = zip(cost.grid.axes, sent.streamed, sent.hopped)
    near, far = links.intra_bytes_per_s, links.inter_bytes_per_s

    def in_order(axes: tuple[tuple[int, float, float], ...]) -> float:
        total, stride = 0.0, 1  # neighbours on an axis are `stride` ranks apart
        for size, streamed, hopped in axes:
            inside = _ranks_inside(cost.grid.ranks, size, stride, links.per_node)
            if inside < size:
                total += streamed / min(near, inside * far) + hopped / min(near, far)
            else:
                total += (streamed + hopped) / near
            stride *= size
        return total

    return min(map(in_order, permutations(axes))) * element_bytes


@cache
def _ranks_inside(ranks: int, size: int, stride: int, per_node: int) -> int:
    """Ranks of a group of `size` in one node: the fewest in any node, in the axis' worst group."""
    places = ((rank // (stride * size), rank % stride, rank // per_node) for rank in range(ranks))
    return min(Counter(places).values())


class Row(NamedTuple):
    grid: Grid
    cost: Cost
    memory_bytes: float  # of a rank
    seconds: float  # of its communication in forward and backward


def table(layer: Layer, ranks: int, links: Links, weight_bytes=16, element_bytes=2) -> list[Row]:
    """A row for every grid of so many ranks, the fastest first, of equally fast ones the smallest.
    `weight_bytes`: with gradient and AdamW's state; one that is kept or sent `element_bytes`."""
    require_positive(weight_bytes=weight_bytes, element_bytes=element_bytes)
    rows = []
    for grid in grids(ranks):
        if grid.kind != "1-D" or len(layer.products) % 2 == 0:
            price = cost(layer, grid)
            memory = weight_bytes * price.weights + element_bytes * (price.activations + price.working)
            rows.append(Row(grid, price, memory, seconds(price, links, element_bytes)))
    return sorted(rows, key=lambda row: (row.seconds, row.memory_bytes))
