"""The flat algorithms as schedules: ring, direct exchange, binomial tree. Every link is taken to be equal.

    all-reduce        steps           sent per rank                   good for
    ring              2(n-1)          2(n-1)/n S                      large tensors; only neighbours
    direct exchange   2               2(n-1)/n S                      one switch: all at once
    binomial tree     2 ceil(log2 n)  root ceil(log2 n) S, leaves S   small tensors

Where only ranks add, all of them together send at least 2(n-1) S: ring and direct exchange send that, evenly.
Patarasuk and Yuan 2009 (the ring, and the lower bound); Gibiansky 2017, Baidu (the ring in training); Thakur,
Rabenseifner and Gropp 2005, section 4 (binomial tree). `ring.py` is the same ring as a plain loop.
"""

from minitrain.systems.communication.chunk_schedule import Schedule, Transfer, check_ranks, mirror, then


def ring_reduce_scatter(n: int) -> Schedule:
    """Rank r passes chunk r-1-s on to r+1 in step s: a chunk visits everyone and ends at its owner."""
    check_ranks(n)
    step = lambda s: tuple(Transfer(r, (r + 1) % n, _one((r - 1 - s) % n), reduce=True) for r in range(n))
    return Schedule(n, n, tuple(map(step, range(n - 1))))


def ring_all_gather(n: int) -> Schedule:
    """Rank r passes chunk r-s on to r+1 in step s. (The mirror of the reduce-scatter turns left.)"""
    check_ranks(n)
    step = lambda s: tuple(Transfer(r, (r + 1) % n, _one((r - s) % n), reduce=False) for r in range(n))
    return Schedule(n, n, tuple(map(step, range(n - 1))))


def ring_all_reduce(n: int) -> Schedule:
    return then(ring_reduce_scatter(n), ring_all_gather(n))


def direct_reduce_scatter(n: int) -> Schedule:
    """Everyone sends chunk c straight to its owner c, in one step."""
    check_ranks(n)
    pairs = ((r, (r + d) % n) for d in range(1, n) for r in range(n))
    step = tuple(Transfer(r, owner, _one(owner), reduce=True) for r, owner in pairs)
    return Schedule(n, n, (step,) if step else ())


def direct_all_reduce(n: int) -> Schedule:
    return then(direct_reduce_scatter(n), mirror(direct_reduce_scatter(n)))


def binomial_reduce(n: int) -> Schedule:
    """To rank 0: in step s the ranks whose lowest set bit is 2^s send all to the rank without that bit."""
    check_ranks(n)
    bits = [1 << s for s in range((n - 1).bit_length())]
    step = lambda bit: tuple(Transfer(r, r - bit, _one(0), reduce=True) for r in range(bit, n, 2 * bit))
    return Schedule(n, 1, tuple(map(step, bits)))


def binomial_broadcast(n: int) -> Schedule:
    return mirror(binomial_reduce(n))


def binomial_all_reduce(n: int) -> Schedule:
    return then(binomial_reduce(n), binomial_broadcast(n))


def _one(chunk: int) -> range:
    return range(chunk, chunk + 1)
