"""Loads that run ahead of products: a kernel with several buffers (ALCOP). No torch.

    stages 1       n (load + compute)                      20 tiles, 3 and 5 long: 160
    stages >= 2    load + (n-1) max(load, compute) + compute                       103

A load waits for the buffer of the tile `stages` before it, a product for its load; both kinds follow each
other in order. Two buffers suffice where a load always takes `load`; where most are short and one in a while
is long, more of them carry over it. Each buffer is a tile of fast memory, which larger tiles could use.
Huang et al. 2023 (ALCOP), MLSys, sections 2 and 3. Differs: one level of memory; times are given.
"""

from collections.abc import Sequence

from minitrain.ranks.checks import require_nonempty, require_nonnegative, require_positive_ints


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
