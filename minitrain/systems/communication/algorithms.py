"""The flat algorithms as schedules: ring, direct exchange, binomial tree, halving and doubling.

    all-reduce            steps           sent per rank                   good for
    ring                  2(n-1)          2(n-1)/n S                      large tensors; only neighbours
    direct exchange       2               2(n-1)/n S                      one switch: all at once
    binomial tree         2 ceil(log2 n)  root ceil(log2 n) S, leaves S   small tensors
    halving and doubling  2 log2 n        2(n-1)/n S                      exchanges of S/2, .., S/n, and back
    doubling              log2 n          log2 n · S                      small tensors: everything each time

Where only ranks add, all of them together send at least 2(n-1) S: ring and direct exchange send that, evenly.
On equal links halving beats the ring at every size. What equal links hide is distance: half of the tensor
crosses the first one. With `near_first` that is to the neighbour and only S/n goes farthest; with far first
rank r ends with chunk r, as a reduce-scatter promises. If n is no power of two, let m be the largest one
below and e = n-m: e ranks first send all to a neighbour, m run, and the e get the result, in two more steps.

Patarasuk and Yuan 2009 (the ring, and the lower bound); Gibiansky 2017, Baidu (the ring in training); Thakur,
Rabenseifner and Gropp 2005, sections 4 and 4.5 (binomial tree; halving, near first). Differs: Rabenseifner's
detour has the two neighbours swap halves, so that both add one half each; here one adds everything.
"""

from minitrain.ranks.checks import require_positive_ints
from minitrain.systems.communication.chunk_schedule import Schedule, Transfer, mirror, place, then


def ring_reduce_scatter(n: int) -> Schedule:
    """Rank r passes chunk r-1-s on to r+1 in step s: a chunk visits everyone and ends at its owner."""
    return _ring(n, first=-1, reduce=True)


def ring_all_gather(n: int) -> Schedule:
    """Rank r passes chunk r-s on to r+1 in step s. (The mirror of the reduce-scatter turns left.)"""
    return _ring(n, first=0, reduce=False)


def _ring(n: int, first: int, reduce: bool) -> Schedule:
    require_positive_ints(n=n)
    step = lambda s: tuple(Transfer(r, (r + 1) % n, _one((r + first - s) % n), reduce) for r in range(n))
    return Schedule(n, n, tuple(map(step, range(n - 1))))


def ring_all_reduce(n: int) -> Schedule:
    return then(ring_reduce_scatter(n), ring_all_gather(n))


def direct_reduce_scatter(n: int) -> Schedule:
    """Everyone sends chunk c straight to its owner c, in one step."""
    require_positive_ints(n=n)
    pairs = ((r, (r + d) % n) for d in range(1, n) for r in range(n))
    step = tuple(Transfer(r, owner, _one(owner), reduce=True) for r, owner in pairs)
    return Schedule(n, n, (step,) if step else ())


def direct_all_reduce(n: int) -> Schedule:
    return then(direct_reduce_scatter(n), mirror(direct_reduce_scatter(n)))


def binomial_reduce(n: int) -> Schedule:
    """To rank 0: in step s the ranks whose lowest set bit is 2^s send all to the rank without that bit."""
    require_positive_ints(n=n)
    step = lambda bit: tuple(Transfer(r, r - bit, _one(0), reduce=True) for r in range(bit, n, 2 * bit))
    return Schedule(n, 1, tuple(map(step, _bits_below(n))))


def binomial_broadcast(n: int) -> Schedule:
    return mirror(binomial_reduce(n))


def binomial_all_reduce(n: int) -> Schedule:
    return then(binomial_reduce(n), binomial_broadcast(n))


def halving_reduce_scatter(n: int, near_first: bool = False) -> Schedule:
    """In each exchange a rank keeps the half with its chunk: r or, near first, r with its bits reversed."""
    power = _power_of_two_below(n)
    if power != n:
        raise ValueError(f"n={n} is not a power of two; use {power} or {2 * power} ranks, or the all-reduce")
    bits = _bits_below(n)
    windows = [range(n)] * n  # [rank] -> the chunks it still gathers
    steps = []
    for bit in bits if near_first else reversed(bits):
        step = []
        for rank, window in enumerate(windows):
            lower, upper = window[: len(window) // 2], window[len(window) // 2 :]
            windows[rank], give = (upper, lower) if rank & bit else (lower, upper)
            step.append(Transfer(rank, rank ^ bit, give, reduce=True))
        steps.append(tuple(step))
    return Schedule(n, n, tuple(steps))


def halving_doubling_all_reduce(n: int, near_first: bool = True) -> Schedule:
    half = halving_reduce_scatter(_power_of_two_below(n), near_first)
    return _with_the_rest(n, then(half, mirror(half)))


def doubling_all_reduce(n: int) -> Schedule:
    """Partners swap all they have and both add: a + b is b + a, so all ranks get equal bits."""
    power = _power_of_two_below(n)
    step = lambda bit: tuple(Transfer(r, r ^ bit, _one(0), reduce=True) for r in range(power))
    return _with_the_rest(n, Schedule(power, 1, tuple(map(step, _bits_below(power)))))


def _with_the_rest(n: int, inner: Schedule) -> Schedule:
    """`inner`, for a power of two, made to serve n ranks: of the first 2·rest the odd ones step aside."""
    rest, everything = n - inner.ranks, range(inner.chunks)
    if not rest:
        return inner
    aside = tuple(Transfer(2 * i + 1, 2 * i, everything, reduce=True) for i in range(rest))
    fold = Schedule(n, inner.chunks, (aside,))
    staying = [*range(0, 2 * rest, 2), *range(2 * rest, n)]
    return then(fold, place(inner, staying, everything, of=(n, inner.chunks)), mirror(fold))


def _one(chunk: int) -> range:
    return range(chunk, chunk + 1)


def _bits_below(n: int) -> list[int]:
    return [1 << s for s in range((n - 1).bit_length())]


def _power_of_two_below(n: int) -> int:
    require_positive_ints(n=n)
    return 1 << (n.bit_length() - 1)
