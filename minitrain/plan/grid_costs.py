"""On which grid should the matrices of a layer be cut? Elements sent and stored in 1-D, 2-D, 2.5-D, 3-D and rotated.

A layer is a chain of products y[m, n] = x[m, k] · W[k, n] with m tokens. On p ranks each rank sends, for one product,

            grid       forward                          backward, dx and dW
    1-D     p          2(p-1)/p · mn of every second    2(p-1)/p · mk of every first
    2-D     q·q        (q-1)/q² · (mk + kn)             (q-1)/q² · 2(mk + kn)
    2.5-D   q·q·d      (q-1)/q² · (mk/d + kn)           (q-1)/q² · 2(mk/d + kn) + 2(d-1)/d · kn/q²
    3-D     l·l·l      (l-1)/l³ · (mk + kn + mn)        (l-1)/l³ · (2mk + 2kn + mn)
    RTP     p          (p-1)/p · kn                     (p-1)/p · 2kn

and holds of it (weights; the inputs kept for backward; what a product needs for a moment besides)

    1-D     kn/p       mk of the first, mk/p of the second     mn, a sum that is not complete
    2-D     kn/q²      mk/q²                                   2(mk + kn)/q², the next blocks on their way
    2.5-D   kn/q²      mk/(dq²)                                2(mk/d + kn)/q²
    3-D     kn/l³      mk/l³                                   (mk + kn + mn)/l²
    RTP     kn/p       mk/p                                    2kn/p with prefetch

2-D is SUMMA: in q steps blocks of x travel along the rows of the grid, of W along its columns, y stays. A rank that passes
them on in a binomial tree sends q-1 blocks in all, but the q steps come one after the other and each is as deep as the tree:
`path`, what passes one after the other, has q·log2 q blocks where `forward` has q-1. Each gradient needs q broadcasts again,
of one operand; its sums go round a ring in q-1 hops. Of a collective or a ring, path = sent. In 1-D and RTP that does not
fall with p; in 2-D it falls with 1/√p, in 3-D with p^(-2/3). RTP sends no activations, 1-D no weights, which is the choice
between them: many tokens, or few.

`seconds` takes one axis after the other. A collective flows through its group in chunks: a ring takes the elements it sends,
a broadcast its block, however deep the tree. In a node it runs at the link inside; if it leaves nodes and has m ranks in
each, these feed m rings, one for each rank's share of the network cards: min(inside, m · outside), the rule of
simulate/collectives.py. A hop (2-D's sums, RTP's weights) is one message: the one in the group that leaves the node goes at a
single share, and all wait for it. The innermost axis joins neighbours; the best order is taken. No latency: with large
matrices on 64 ranks within 15 % of a replay of the modules, on 64·64 far below it. No overlap, though SUMMA forward and RTP
hide some of it behind their products, and these take the same time on every grid, 1/p. No dropout, norms, biases.
Raises ValueError for a grid that is none, sizes, speeds or limits that are not positive, an odd number of products in
1-D, and a limit which no grid meets.

Shoeybi et al. 2019 (1-D), arXiv:1909.08053, section 3; Xu et al. 2021 (Optimus, 2-D), arXiv:2104.05343, table 1; Wang et al.
2021 (Tesseract, 2.5-D), arXiv:2105.14500, section 3; Bian et al. 2021 (3-D), arXiv:2105.14450, section 3.1; Luo et al. 2023
(RTP), arXiv:2311.01635. Differs: Optimus's forward of a layer, log(p)/(2√p) · (7mh + 12h²), is `path` summed over its four
products, for (log2 q)/q = log2(p)/(2√p): the time of trees, set beside the elements of 1-D, 4(p-1)/p · mh. With many tokens
2-D sends less than 1-D from p = 4, by that comparison from p = 64 (`crossover`). Their backward sums in trees, too, and has
one forward that is recomputed; ours neither. Tesseract counts transfers, 2p^(3/2) - 2√p for Cannon's algorithm on p ranks
beside 2p^(2/3), 31.5 times as much at p = 64; but 2p^(2/3) = 2q² is the number of broadcasts in one of the d layers, each to
q-1 others, and its blocks of W are d times as large. In elements 4·4·4 sends for square matrices 1.07 times what 8·8 does:
depth pays where activations are larger than weights. 3-D gathers dy once for both gradients: 5 terms, 6 if each were alone.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cache
from itertools import permutations


@dataclass(frozen=True)
class Layer:
    """Products one after the other: m tokens, and (k, n) of each."""

    tokens: int
    products: tuple[tuple[int, int], ...]

    def __post_init__(self):
        sizes = [self.tokens, *(size for product in self.products for size in product)]
        if not self.products or min(sizes) < 1:
            raise ValueError(
                f"a layer of {self.tokens} tokens and products {self.products}; give at least one (k, n), all of "
                f"them positive"
            )


def mlp(tokens: int, width: int, inner: int) -> Layer:
    """width -> inner -> width."""
    return Layer(tokens, ((width, inner), (inner, width)))


def transformer_layer(tokens: int, width: int) -> Layer:
    """Q, K and V in one, the projection after them, and an MLP of 4 · width; scores and softmax send nothing."""
    return Layer(tokens, ((width, 3 * width), (width, width), (width, 4 * width), (4 * width, width)))


@dataclass(frozen=True)
class Grid:
    """A kind, its side (p, q or l) and, in 2.5-D only, its depth d."""

    kind: str
    side: int
    depth: int = 1

    def __post_init__(self):
        if self.kind not in ("1-D", "2-D", "2.5-D", "3-D", "RTP"):
            raise ValueError(f"kind {self.kind!r}; use '1-D', '2-D', '2.5-D', '3-D' or 'RTP'")
        if (
            min(self.side, self.depth) < 1
            or (self.kind != "2.5-D" and self.depth > 1)
            or self.depth > self.side
        ):
            raise ValueError(
                f"{self.kind} grid of side {self.side} and depth {self.depth}; sides are positive, and only 2.5-D "
                f"has a depth, at most its side"
            )

    @property
    def axes(self) -> tuple[int, ...]:
        """Ranks along each axis."""
        return {
            "2-D": (self.side,) * 2,
            "2.5-D": (self.side, self.side, self.depth),
            "3-D": (self.side,) * 3,
        }.get(self.kind, (self.side,))

    @property
    def ranks(self) -> int:
        return math.prod(self.axes)

    def __str__(self) -> str:
        return f"{self.kind} {'x'.join(map(str, self.axes))}"


def grids(ranks: int) -> list[Grid]:
    """All that exist for so many ranks: 1-D and RTP for any, 2-D for squares, 3-D for cubes, 2.5-D for q·q·d, 1 < d <= q."""
    if ranks < 1:
        raise ValueError(f"{ranks} ranks; need at least 1")
    found = [Grid("1-D", ranks), Grid("RTP", ranks)]
    square, cube = math.isqrt(ranks), round(ranks ** (1 / 3))
    if square**2 == ranks:
        found.append(Grid("2-D", square))
    found += [
        Grid("2.5-D", side, ranks // side**2)
        for side in range(2, square + 1)
        if ranks % side**2 == 0 and 1 < ranks // side**2 <= side
    ]
    if cube**3 == ranks:
        found.append(Grid("3-D", cube))
    return found


# ---- what one rank sends and holds, in elements ----------------------------------------------------------------------


@dataclass(frozen=True)
class Sent:
    """Elements along each axis of the grid: sent; one after the other, whole blocks down a tree; through links that
    collectives keep busy with chunks; in hops."""

    elements: tuple[float, ...]
    path: tuple[float, ...]
    streamed: tuple[float, ...]
    hopped: tuple[float, ...]

    def __add__(self, other: "Sent") -> "Sent":
        return Sent(
            *(
                tuple(map(sum, zip(getattr(self, field.name), getattr(other, field.name))))
                for field in fields(self)
            )
        )


@dataclass(frozen=True)
class Cost:
    """One rank's part in a layer; `both` is forward and backward together, `working` the most that one product needs."""

    grid: Grid
    forward_sent: Sent
    backward_sent: Sent
    weights: float
    activations: float
    working: float

    @property
    def forward(self) -> float:
        return sum(self.forward_sent.elements)

    @property
    def both(self) -> float:
        return self.forward + sum(self.backward_sent.elements)

    @property
    def forward_path(self) -> float:
        return sum(self.forward_sent.path)

    @property
    def path(self) -> float:
        return self.forward_path + sum(self.backward_sent.path)


def cost(layer: Layer, grid: Grid) -> Cost:
    """What a layer costs on a grid, per rank."""
    if grid.kind == "1-D":
        return _cost_1d(layer, grid)
    product = {"2-D": _product_25d, "2.5-D": _product_25d, "3-D": _product_3d, "RTP": _product_rotated}[
        grid.kind
    ]
    parts = [product(layer.tokens, k, n, grid, index) for index, (k, n) in enumerate(layer.products)]
    forward, backward, weights, activations, working = zip(*parts)
    return Cost(
        grid,
        sum(forward[1:], forward[0]),
        sum(backward[1:], backward[0]),
        sum(weights),
        sum(activations),
        max(working),
    )


def _cost_1d(layer: Layer, grid: Grid) -> Cost:
    """Column, row, column, row: one all-reduce after a pair forward, one before it backward."""
    if len(layer.products) % 2:
        raise ValueError(
            f"1-D cuts products in pairs, by columns and by rows; the layer has {len(layer.products)}: add one"
        )
    m, p, share = layer.tokens, grid.side, 2 * (grid.side - 1) / grid.side
    first, second = layer.products[::2], layer.products[1::2]
    forward = share * m * sum(n for _, n in second)
    backward = share * m * sum(k for k, _ in first)
    return Cost(
        grid,
        _ring(forward),
        _ring(backward),
        weights=sum(k * n for k, n in layer.products) / p,
        activations=m * sum(k for k, _ in first) + m * sum(k for k, _ in second) / p,
        working=m * max(n for _, n in second),
    )


def _product_25d(m: int, k: int, n: int, grid: Grid, _) -> tuple:
    """SUMMA on each of d layers, which have 1/d of the tokens each and the same weights. One layer: 2-D."""
    q, d = grid.side, grid.depth
    x, w = m * k / (d * q * q), k * n / (q * q)  # a block
    depth = [2 * (d - 1) / d * w] * (len(grid.axes) - 2)  # the layers' weight gradients are added up
    forward = _broadcasts(q, x, w, *(0 for _ in depth))
    backward = forward + _hops((q - 1) * x, (q - 1) * w, *(0 for _ in depth)) + _ring(0, 0, *depth)
    return forward, backward, w, x, min(2, q) * (x + w)


def _product_3d(m: int, k: int, n: int, grid: Grid, index: int) -> tuple:
    """cube.py: x, W and y have an axis each; in every second product x and y change places."""
    l = grid.side
    share, turn = (l - 1) / l**3, -1 if index % 2 else 1
    x, w, y = m * k, k * n, m * n
    forward = (share * x, share * w, share * y)
    backward = (share * 2 * x, share * 2 * w, share * y)
    return _ring(*forward[::turn]), _ring(*backward[::turn]), w / l**3, x / l**3, (x + w + y) / l**2


def _product_rotated(m: int, k: int, n: int, grid: Grid, _) -> tuple:
    """rotated.py: the weights pass by, forward and backward, and their gradients once."""
    p, w = grid.side, k * n
    once = (p - 1) / p * w
    return _hops(once), _hops(2 * once), w / p, m * k / p, min(2, p - 1) * w / p


def _ring(*elements: float) -> Sent:
    return Sent(elements, elements, elements, (0,) * len(elements))


def _hops(*elements: float) -> Sent:
    return Sent(elements, elements, (0,) * len(elements), elements)


def _broadcasts(q: int, *blocks: float) -> Sent:
    """Each of the q ranks of an axis broadcasts its block."""

    def times(number):
        return tuple(number * block for block in blocks)

    return Sent(times(q - 1), times(q * math.ceil(math.log2(q))), times(q if q > 1 else 0), times(0))


# ---- time, and the choice --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Links:
    """Bytes per second, per direction, of a rank's link inside a node of `per_node` ranks, and of its share of the node's
    network cards."""

    per_node: int
    intra_bytes_per_s: float
    inter_bytes_per_s: float

    def __post_init__(self):
        if min(self.per_node, self.intra_bytes_per_s, self.inter_bytes_per_s) <= 0:
            raise ValueError(f"{self}: all three must be positive")


@dataclass(frozen=True)
class Row:
    """A grid, what it costs, the bytes a rank holds and the seconds it communicates in forward and backward."""

    cost: Cost
    memory_bytes: float
    seconds: float

    @property
    def grid(self) -> Grid:
        return self.cost.grid


def seconds(cost: Cost, links: Links, element_bytes: int = 2) -> float:
    """Forward and backward, the axes of the grid in the best order from the innermost outwards."""
    sent = cost.forward_sent + cost.backward_sent
    axes = zip(cost.grid.axes, sent.streamed, sent.hopped)
    return (
        min(_seconds_in_order(order, cost.grid.ranks, links) for order in permutations(axes)) * element_bytes
    )


def _seconds_in_order(order: Sequence[tuple[int, float, float]], ranks: int, links: Links) -> float:
    total, stride = 0.0, 1  # neighbours on an axis are `stride` ranks apart
    for size, streamed, hopped in order:
        inside = _ranks_inside(ranks, size, stride, links.per_node)
        stream = hop = links.intra_bytes_per_s
        if inside < size:
            stream, hop = (
                min(links.intra_bytes_per_s, rings * links.inter_bytes_per_s) for rings in (inside, 1)
            )
        total += streamed / stream + hopped / hop
        stride *= size
    return total


@cache
def _ranks_inside(ranks: int, size: int, stride: int, per_node: int) -> int:
    """How many ranks of a group of `size` share a node: the fewest in any of its nodes, in the axis' worst group."""
    return min(
        Counter((rank // (stride * size), rank % stride, rank // per_node) for rank in range(ranks)).values()
    )


def table(
    layer: Layer, ranks: int, links: Links, weight_bytes: int = 16, element_bytes: int = 2
) -> list[Row]:
    """A row for every grid of so many ranks, the fastest first. A weight has 16 bytes with its gradient and AdamW's state
    in mixed precision; an element kept, worked on or sent has `element_bytes`."""
    rows = []
    for grid in grids(ranks):
        if grid.kind == "1-D" and len(layer.products) % 2:
            continue
        price = cost(layer, grid)
        memory = weight_bytes * price.weights + element_bytes * (price.activations + price.working)
        rows.append(Row(price, memory, seconds(price, links, element_bytes)))
    return sorted(rows, key=lambda row: (row.seconds, row.memory_bytes))


def cheapest(
    layer: Layer, ranks: int, links: Links, memory_bytes: float = math.inf, **bytes_each: int
) -> Row:
    """The fastest grid that fits into `memory_bytes` a rank."""
    if memory_bytes <= 0:
        raise ValueError(f"memory_bytes = {memory_bytes}; a limit is positive")
    rows = table(layer, ranks, links, **bytes_each)
    fits = [row for row in rows if row.memory_bytes <= memory_bytes]
    if not fits:
        least = min(rows, key=lambda row: row.memory_bytes)
        raise ValueError(
            f"no grid of {ranks} ranks fits in {memory_bytes:,.0f} bytes; the least is {least.memory_bytes:,.0f} of "
            f"{least.grid}: take more ranks or fewer tokens"
        )
    return fits[0]


def crossover(layer: Layer, *, path: bool = False, most: int = 2**20) -> int | None:
    """The smallest p > 1, a square up to `most`, at which 2-D sends less in forward than 1-D; with `path`, one after the other."""
    for side in range(2, math.isqrt(most) + 1):
        flat, square = cost(layer, Grid("1-D", side**2)), cost(layer, Grid("2-D", side))
        if (square.forward_path < flat.forward_path) if path else (square.forward < flat.forward):
            return side**2
    return None
