"""Loads that run ahead of products: a kernel with several buffers (ALCOP). No torch.

    stages 1       n (load + compute)                      20 tiles, 3 and 5 long: 160
    stages >= 2    load + (n-1) max(load, compute) + compute                       103

A load waits for the buffer of the tile `stages` before it, a product for its load; both kinds follow each
other in order. Two buffers suffice where a load always takes `load`; where most are short and one in a while
is long, more of them carry over it. Each is a tile of fast memory: `best_stages` weighs that.
Huang et al. 2023 (ALCOP), MLSys, sections 2 and 3. Differs: one level of memory; times are given.
"""

from collections.abc import Sequence

from minitrain.ranks.checks import (
    require_nonempty,
    require_nonnegative,
    require_positive,
    require_positive_ints,
)


def pipelined(loads: Sequence[float], compute: float, stages: int) -> list[tuple[float, float, float]]:
    """[tile] -> when its load begins, when it ends, when its product ends; `loads` in seconds."""
    require_nonempty(loads=loads)
    require_nonnegative(loads=loads, compute=compute)
    require_positive_ints(stages=stages)
    spans: list[tuple[float, float, float]] = []
    for load in loads:
        free = spans[-stages][2] if len(spans) >= stages else 0.0
        begin = max(free, spans[-1][1] if spans else 0.0)
        ready = max(begin + load, spans[-1][2] if spans else 0.0)
        spans.append((begin, begin + load, ready + compute))
    return spans


def best_stages(loads: Sequence[float], compute: float, tile_bytes: float, fast_bytes: float) -> int:
    """The fewest buffers with which no more are of use, of those that fit. Raises ValueError if none does."""
    require_positive(tile_bytes=tile_bytes, fast_bytes=fast_bytes)
    fit = min(int(fast_bytes // tile_bytes), len(loads))
    if fit < 1:
        raise ValueError(
            f"a tile of {tile_bytes:,} bytes does not fit {fast_bytes:,} bytes; use smaller ones"
        )
    return min(range(1, fit + 1), key=lambda stages: (pipelined(loads, compute, stages)[-1][2], stages))
