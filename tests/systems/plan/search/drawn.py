"""Random instances whose sums are exact: all sizes and rates are powers of two, or small multiples."""

import random

from minitrain.systems.plan.search.problem import Level, Problem, block, linear


def chain(seed: int, layers: int = 4, levels: int = 2, **changes) -> Problem:
    draw = random.Random(seed)
    widths = [2 ** draw.randint(5, 10) * draw.choice((1, 3)) for _ in range(layers + 1)]
    products = tuple(linear(f"{i}", *shape) for i, shape in enumerate(zip(widths, widths[1:])))
    return Problem(products, **sizes(draw, levels) | changes)


def blocks(seed: int, layers: int = 4, levels: int = 2, **changes) -> Problem:
    draw = random.Random(seed)
    some = tuple(block(f"{i}", 256, 2 ** draw.randint(7, 11)) for i in range(layers))
    return Problem(some, **sizes(draw, levels) | dict(shardings=("dp", "sdp", "tp")) | changes)


def sizes(draw: random.Random, levels: int) -> dict:
    rates = sorted(2.0 ** draw.randint(28, 36) for _ in range(levels))
    rows, microbatches = 2 ** draw.randint(6, 11), draw.choice((2, 4, 8))
    levels = tuple(Level(2, rate) for rate in rates)
    return dict(rows=rows, microbatches=microbatches, levels=levels, flops_per_s=2.0**42)
