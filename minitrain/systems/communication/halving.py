"""Recursive halving and doubling: partners at distances 1, 2, 4, ... exchange; log2 n steps and not n-1.

                                  steps      sent per rank
    halving_doubling_all_reduce   2 log2 n   2(n-1)/n S   exchanges halve: S/2, .., S/n, and back
    doubling_all_reduce           log2 n     log2 n · S   exchanges of everything, for small tensors

On equal links it beats the ring at every size. What equal links hide is distance: half of the tensor crosses
the first one. With `near_first` that is to the neighbour and only S/n goes farthest; with far first rank r
ends with chunk r, as a reduce-scatter promises. If n is no power of two, let m be the largest one below and e
= n-m: e ranks first send everything to a neighbour, m ranks run, and the e get the result back, in two more
steps.
Thakur, Rabenseifner and Gropp 2005, section 4.5 (MPICH, near first). Differs: Rabenseifner's detour has the
two neighbours swap halves, so that both add one half each; here one adds everything.
"""

from minitrain.systems.communication.chunk_schedule import (
    Schedule,
    Transfer,
    check_ranks,
    mirror,
    place,
    then,
)


def halving_reduce_scatter(n: int, near_first: bool = False) -> Schedule:
    """In each exchange a rank keeps the half with its chunk: r or, near first, r with its bits reversed."""
    power = _power_of_two_below(n)
    if power != n:
        raise ValueError(f"n={n} is not a power of two; use {power} or {2 * power} ranks, or the all-reduce")
    bits = [1 << s for s in range(n.bit_length() - 1)]
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
    bits = (1 << s for s in range(power.bit_length() - 1))
    steps = (tuple(Transfer(r, r ^ bit, range(1), reduce=True) for r in range(power)) for bit in bits)
    return _with_the_rest(n, Schedule(power, 1, tuple(steps)))


def _with_the_rest(n: int, inner: Schedule) -> Schedule:
    """`inner`, for a power of two, made to serve n ranks: of the first 2·rest the odd ones step aside."""
    rest, everything = n - inner.ranks, range(inner.chunks)
    if not rest:
        return inner
    aside = tuple(Transfer(2 * i + 1, 2 * i, everything, reduce=True) for i in range(rest))
    fold = Schedule(n, inner.chunks, (aside,))
    staying = [*range(0, 2 * rest, 2), *range(2 * rest, n)]
    return then(fold, place(inner, staying, everything, of=(n, inner.chunks)), mirror(fold))


def _power_of_two_below(n: int) -> int:
    check_ranks(n)
    return 1 << (n.bit_length() - 1)
