"""What the matrices of a layer cost on five kinds of grid: elements sent, and held.

A layer is a chain of products y[m, n] = x[m, k] · W[k, n] with m tokens. For one product each rank sends

           grid     forward                         backward, dx and dW
    1-D    p        2(p-1)/p · mn of every second   2(p-1)/p · mk of every first
    2.5-D  q·q·d    (q-1)/q² · (mk/d + kn)          (q-1)/q² · 2(mk/d + kn) + 2(d-1)/d · kn/q²   2-D: d = 1
    3-D    l·l·l    (l-1)/l³ · (mk + kn + mn)       (l-1)/l³ · (2mk + 2kn + mn)
    RTP    p        (p-1)/p · kn                    (p-1)/p · 2kn

Norms, dropout and biases are left out. Times are a replay's of the modules (systems/tensor_parallel).
1-D: arXiv:1909.08053, section 3. 2-D: Xu et al. 2021 (Optimus), arXiv:2104.05343, table 1. 2.5-D: Wang et al.
2021 (Tesseract), arXiv:2105.14500, section 3. 3-D: Bian et al. 2021, arXiv:2105.14450, section 3.1. RTP: Luo
et al. 2023, arXiv:2311.01635. Differs: Optimus compares the time of trees, our `forward_path`, with the
elements of 1-D, and sums in trees backward; Tesseract compares 2p^(2/3) broadcasts, each to q-1 ranks, with
Cannon's 2p^(3/2) - 2√p messages.
"""

import math
from dataclasses import dataclass
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

    ranks = property(lambda self: math.prod(self.axes))

    def __str__(self) -> str:
        return f"{self.kind} {'x'.join(map(str, self.axes))}"


def grids(ranks: int) -> list[Grid]:
    """All of so many ranks: 2-D for squares, 3-D for cubes, 2.5-D for q·q·d with 1 < d <= q."""
    require_positive_ints(ranks=ranks)
    square, cube = math.isqrt(ranks), round(ranks ** (1 / 3))
    deep = [Grid("2.5-D", q, ranks // q**2) for q in range(2, square + 1) if 1 < ranks // q**2 <= q]
    candidates = [Grid("1-D", ranks), Grid("RTP", ranks), Grid("2-D", square), *deep, Grid("3-D", cube)]
    return [grid for grid in candidates if grid.ranks == ranks]


class Cost(NamedTuple):
    """One rank's part in a layer, in elements; `both` is forward and backward together.

             weights   activations: inputs kept              working: the most that one product needs besides
    1-D      kn/p      mk of the first, mk/p of the second   mn, a sum that is not complete
    2.5-D    kn/q²     mk/(dq²)                              2(mk/d + kn)/q², the next blocks on their way
    3-D      kn/l³     mk/l³                                 (mk + kn + mn)/l²
    RTP      kn/p      mk/p                                  2kn/p with prefetch"""

    grid: Grid
    forward_by_axis: tuple[float, ...]  # sent along each axis of the grid
    backward_by_axis: tuple[float, ...]
    forward_path: float  # of what is sent, or of whole blocks down a tree, what passes one after the other
    weights: float
    activations: float
    working: float

    forward = property(lambda self: sum(self.forward_by_axis))
    both = property(lambda self: self.forward + sum(self.backward_by_axis))

    def memory_bytes(self, weight_bytes: int = 16, element_bytes: int = 2) -> float:
        """A weight has 16 bytes with its gradient and AdamW's state."""
        require_positive(weight_bytes=weight_bytes, element_bytes=element_bytes)
        return weight_bytes * self.weights + element_bytes * (self.activations + self.working)


def cost(layer: Layer, grid: Grid) -> Cost:
    if grid.kind == "1-D" and len(layer.products) % 2:
        raise ValueError(f"1-D cuts products in pairs, by columns and by rows; not {len(layer.products)}")
    product = {"1-D": _product_1d, "3-D": _product_3d, "RTP": _product_rotated}.get(grid.kind, _product_25d)
    parts = [product(layer.tokens, k, n, grid, index) for index, (k, n) in enumerate(layer.products)]
    forward, backward, path, weights, activations, working = zip(*parts)
    sent = (tuple(map(sum, zip(*by_axis))) for by_axis in (forward, backward))
    return Cost(grid, *sent, sum(path), sum(weights), sum(activations), max(working))


def _product_1d(m: int, k: int, n: int, grid: Grid, index: int) -> tuple:
    """By columns, then by rows: one all-reduce after such a pair forward, one before it backward."""
    p, share = grid.side, 2 * (grid.side - 1) / grid.side
    if index % 2:
        return (share * m * n,), (0,), share * m * n, k * n / p, m * k / p, m * n
    return (0,), (share * m * k,), 0, k * n / p, m * k, 0


def _product_25d(m: int, k: int, n: int, grid: Grid, index: int) -> tuple:
    """SUMMA on d layers, 1/d of the tokens each: in q steps blocks of x pass along rows, of W along columns,
    each down a tree. Backward each gradient needs q broadcasts of one operand, and its sums go round a ring;
    the layers' weight gradients are added up."""
    q, d = grid.side, grid.depth
    x, w = m * k / (d * q * q), k * n / (q * q)  # a block
    depth = (2 * (d - 1) / d * w,) * len(grid.axes[2:])
    forward, backward = ((q - 1) * x, (q - 1) * w), (2 * (q - 1) * x, 2 * (q - 1) * w)
    path = q * math.ceil(math.log2(q)) * (x + w)
    return (*forward, *(0 for _ in depth)), (*backward, *depth), path, w, x, min(2, q) * (x + w)


def _product_3d(m: int, k: int, n: int, grid: Grid, index: int) -> tuple:
    """cube.py: x, W and y have an axis each, x and y swapped in every second product."""
    l, turn = grid.side, -1 if index % 2 else 1
    share, x, w, y = (l - 1) / l**3, m * k, k * n, m * n
    forward, backward = (share * x, share * w, share * y), (share * 2 * x, share * 2 * w, share * y)
    return forward[::turn], backward[::turn], sum(forward), w / l**3, x / l**3, (x + w + y) / l**2


def _product_rotated(m: int, k: int, n: int, grid: Grid, index: int) -> tuple:
    """rotated.py: the weights pass by, forward and backward, and their gradients once."""
    p, w = grid.side, k * n
    once = (p - 1) / p * w
    return (once,), (2 * once,), once, w / p, m * k / p, min(2, p - 1) * w / p


def crossover(layer: Layer, what: str = "forward", most: int = 2**20) -> int | None:
    """The smallest square 1 < p <= most at which 2-D has less of `what`, an attribute of Cost, than 1-D."""
    of = lambda kind, side: getattr(cost(layer, Grid(kind, side)), what)
    for side in range(2, math.isqrt(most) + 1):
        if of("2-D", side) < of("1-D", side**2):
            return side**2
    return None
