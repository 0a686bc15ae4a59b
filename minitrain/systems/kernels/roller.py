"""Tiles that fit the hardware, made instead of searched (Roller), and loads that run ahead (ALCOP). No torch.

    roller(1024, 1024, 1024, A100)       Built(seconds, tile=(80, 128, 16), tried=187)

A product C [m, n] in tiles: a core computes a tile of C over all of k and loads for each step a tile of A and
one of B, while it computes the step before. So it takes, with sizes rounded up to the unit of the arithmetic,

    rounds of tiles over all cores · steps · max(2·m·n·k / peak, bytes of A and B tiles / bandwidth)

Only aligned tiles are looked at: multiples of the unit that cut an axis into q parts, for some q, so little
is padded. From one unit on they grow along each axis, and those `alive` that make one core fastest go on
until fast memory is full (scale up); of all that were seen the best on all cores is chosen (scale out).
With several buffers loads run ahead (`pipelined`): of n tiles one buffer takes n (load + compute), two load +
(n-1) max(load, compute) + compute; more of them carry over a load that is long once in a while.
Zhu et al. 2022 (Roller), OSDI, sections 3, 4; Huang et al. 2023 (ALCOP), MLSys. Differs: one level of memory;
no banks and transactions; tiles chosen by time, not by the reuse score; times of loads are given.
"""

from collections import namedtuple
from collections.abc import Sequence
from typing import NamedTuple

from minitrain.ranks import checks


class Core(NamedTuple):
    """One of `cores` equal ones: FLOP/s, bytes/s and bytes of fast memory, and its unit of a product."""

    peak: float
    bandwidth: float
    fast_bytes: float
    unit: int
    cores: int
    element_bytes: int = 2


Built = namedtuple("Built", "seconds tile tried")
A100 = Core(312e12 / 108, 2039e9 / 108, 160 * 1024, 16, 108)


def tile_seconds(sizes: tuple[int, int, int], tile: tuple[int, int, int], core: Core) -> float:
    """Of the product m, n, k in such tiles; infinite where two pairs of A and B tiles and C's do not fit."""
    checks.require_positive_ints(1 << 20, sizes=sizes, tile=tile)
    tiles, columns, steps = (-(-size // part) for size, part in zip(sizes, tile))
    rounds = -(-tiles * columns // core.cores)
    m, n, k = (-(-part // core.unit) * core.unit for part in tile)
    loaded = core.element_bytes * k * (m + n)
    if 2 * loaded + 4 * m * n > core.fast_bytes:
        return float("inf")
    return rounds * steps * max(2 * m * n * k / core.peak, loaded / core.bandwidth)


def aligned_sizes(size: int, unit: int) -> list[int]:
    """Multiples of the unit that cut an axis into some number of equal parts, but for padding."""
    parts = {-(-size // sized) for sized in range(unit, size + unit, unit)}
    return sorted({-(-size // (unit * count)) * unit for count in parts})


def roller(m: int, n: int, k: int, core: Core, alive: int = 8) -> Built:
    """The tile that grew, its seconds, and how many were tried. Raises ValueError if none fits."""
    checks.require_positive_ints(1 << 20, m=m, n=n, k=k, unit=core.unit, cores=core.cores, alive=alive)
    checks.require_positive(peak=core.peak, bandwidth=core.bandwidth, fast_bytes=core.fast_bytes)
    axes = [aligned_sizes(size, core.unit) for size in (m, n, k)]
    tile = lambda at: tuple(axis[place] for axis, place in zip(axes, at))
    time = lambda at, core: tile_seconds((m, n, k), tile(at), core)
    alone, growing = core._replace(cores=1), {(0, 0, 0)}
    tried = [at for at in growing if time(at, core) < float("inf")]
    while growing:
        places = [(at, i, place) for at in growing for i in range(3) for place in (at[i] + 1, 2 * at[i] + 1)]
        larger = {(*at[:i], place, *at[i + 1 :]) for at, i, place in places if place < len(axes[i])}
        fits = {at: time(at, alone) for at in larger if time(at, alone) < float("inf")}
        tried += fits
        growing = set(sorted(fits, key=lambda at: (fits[at], at))[:alive])
    if not tried:
        raise ValueError(f"no tile of {core.unit}^3 fits {core.fast_bytes:,} bytes; give more")
    best = min(tried, key=lambda at: (time(at, core), at))
    return Built(time(best, core), tile(best), len(tried))


def pipelined(loads: Sequence[float], compute: float, stages: int) -> list[tuple[float, float, float]]:
    """[tile] -> when its load begins, when it ends, when its product ends; `loads` in seconds."""
    checks.require_nonempty(loads=loads)
    checks.require_nonnegative(loads=loads, compute=compute)
    checks.require_positive_ints(stages=stages)
    spans: list[tuple[float, float, float]] = []
    for load in loads:
        free = spans[-stages][2] if len(spans) >= stages else 0.0
        begin = max(free, spans[-1][1] if spans else 0.0)
        ready = max(begin + load, spans[-1][2] if spans else 0.0)
        spans.append((begin, begin + load, ready + compute))
    return spans
