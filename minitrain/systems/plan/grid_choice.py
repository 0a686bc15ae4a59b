"""The fastest grid for the matrices of a layer that fits into memory, from their elements and the links.

A collective flows in chunks: a ring takes the elements it sends, a broadcast its block, however deep the
tree. If it leaves nodes and has r ranks in each, these feed r rings: min(inside, r · outside), the rule of
collectives.py. A hop (2-D's sums, RTP's weights) is one message: all wait for the one that leaves
its node, at a single share. No latency: with large matrices on 64 ranks within 15 % of a replay of the
modules, on 64·64 far below it. No overlap, though SUMMA forward and RTP hide some behind their products.
"""

import math
from collections import Counter
from dataclasses import astuple, dataclass
from functools import cache
from itertools import permutations
from typing import NamedTuple

from minitrain.ranks.checks import require_positive
from minitrain.systems.plan.grid_costs import Cost, Grid, Layer, cost, grids


@dataclass(frozen=True)
class Links:
    """Bytes per second and direction: of a rank inside its node, and of its share of the network cards."""

    per_node: int
    intra_bytes_per_s: float
    inter_bytes_per_s: float

    def __post_init__(self):
        if min(astuple(self)) <= 0:
            raise ValueError(f"{self}: all three must be positive")


class Row(NamedTuple):
    grid: Grid
    cost: Cost
    memory_bytes: float  # of a rank
    seconds: float  # of its communication in forward and backward


def seconds(cost: Cost, links: Links, element_bytes: int = 2) -> float:
    """Forward and backward, axis after axis, in the best order from the innermost outwards."""
    sent = cost.forward_sent + cost.backward_sent
    axes = zip(cost.grid.axes, sent.streamed, sent.hopped)
    return min(_in_order(order, cost.grid.ranks, links) for order in permutations(axes)) * element_bytes


def _in_order(axes: tuple[tuple[int, float, float], ...], ranks: int, links: Links) -> float:
    total, stride = 0.0, 1  # neighbours on an axis are `stride` ranks apart
    for size, streamed, hopped in axes:
        inside = _ranks_inside(ranks, size, stride, links.per_node)
        stream_rate = hop_rate = links.intra_bytes_per_s
        if inside < size:
            stream_rate = min(links.intra_bytes_per_s, inside * links.inter_bytes_per_s)
            hop_rate = min(links.intra_bytes_per_s, links.inter_bytes_per_s)
        total += streamed / stream_rate + hopped / hop_rate
        stride *= size
    return total


@cache
def _ranks_inside(ranks: int, size: int, stride: int, per_node: int) -> int:
    """Ranks of a group of `size` in one node: the fewest in any node, in the axis' worst group."""
    places = ((rank // (stride * size), rank % stride, rank // per_node) for rank in range(ranks))
    return min(Counter(places).values())


def table(layer: Layer, ranks: int, links: Links, weight_bytes=16, element_bytes=2) -> list[Row]:
    """A row for every grid of so many ranks, the fastest first, of equally fast ones the smallest.

    A weight has 16 bytes with its gradient and AdamW's state; an element kept, worked on or sent has
    `element_bytes`."""
    require_positive(weight_bytes=weight_bytes, element_bytes=element_bytes)
    rows = []
    for grid in grids(ranks):
        if grid.kind != "1-D" or len(layer.products) % 2 == 0:
            price = cost(layer, grid)
            memory = weight_bytes * price.weights + element_bytes * (price.activations + price.working)
            rows.append(Row(grid, price, memory, seconds(price, links, element_bytes)))
    return sorted(rows, key=lambda row: (row.seconds, row.memory_bytes))


def cheapest(layer: Layer, ranks: int, links: Links, memory_bytes=math.inf, **bytes_each: int) -> Row:
    """The fastest grid that fits into `memory_bytes` a rank; ValueError if there is none."""
    if not memory_bytes > 0:
        raise ValueError(f"memory_bytes = {memory_bytes}; a limit is positive")
    rows = table(layer, ranks, links, **bytes_each)
    least = min(rows, key=lambda row: row.memory_bytes)
    if least.memory_bytes > memory_bytes:
        found = f"the least is {least.memory_bytes:,.0f} of {least.grid}: take more ranks or fewer tokens"
        raise ValueError(f"no grid of {ranks} ranks fits in {memory_bytes:,.0f} bytes; {found}")
    return next(row for row in rows if row.memory_bytes <= memory_bytes)
