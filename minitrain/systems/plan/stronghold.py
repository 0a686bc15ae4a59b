"""STRONGHOLD: a window of layers on the device, no larger than it takes to hide the transfers of the others.

    at the start of layer i      layers i .. i+m-1 are here; the copy of layer i+m may begin
    at the start of layer i+m    it is waited for: no stall if the m layers between took as long

The smallest such m is the paper's: the compute of any m layers in a row covers the transfer of the next. That
is enough where every transfer has a link of its own. One link carries one layer at a time, so what came
before must have left it too: any run of transfers must fit into the time from the start of the first to the
need of the last. `stalls` plays both. Layers come in the order of `compute`: forward, then backward, say,
where the last m need no transfer (0): they are still here. Times may be fractions; results are exact.
Sun et al. 2022, STRONGHOLD, SC22, section III-D. Differs: the link is a resource, m the same in all phases;
gradients leave over the other direction of a full-duplex link.
"""

from collections.abc import Sequence
from fractions import Fraction

from minitrain.ranks.checks import require_nonempty

Time = int | float | Fraction


def stalls(compute: Sequence[Time], transfer: Sequence[Time], window: int, one_link=True) -> list[Time]:
    """How long each layer waits. The first `window` are here at the start."""
    _check(compute, transfer, window)
    starts: list[Time] = []
    waits: list[Time] = []
    now: Time = 0
    free: Time = 0  # when the link is
    for i, duration in enumerate(compute):
        arrived = now
        if i >= window and transfer[i]:
            begin = starts[i - window]
            arrived = (max(begin, free) if one_link else begin) + transfer[i]
            free = arrived
        waits.append(max(0, arrived - now))
        starts.append(now + waits[i])
        now = starts[i] + duration
    return waits


def smallest_window(compute: Sequence[Time], transfer: Sequence[Time], one_link: bool = True) -> int:
    """The smallest window without a stall; all layers always do."""
    require_nonempty(compute=compute, transfer=transfer)
    layers = len(compute)
    return next(window for window in range(1, layers + 1) if hides(compute, transfer, window, one_link))


def hides(compute: Sequence[Time], transfer: Sequence[Time], window: int, one_link: bool = True) -> bool:
    """Whether a window hides every transfer, without playing it.

    Own links: sum of compute[i .. i+m-1] >= transfer[i+m] for all i. One link: the transfers i+m .. j+m, one
    after the other, begin with layer i and are needed when layer j+m begins."""
    _check(compute, transfer, window)
    for last in range(window, len(compute)):
        if not transfer[last]:
            continue
        needed, room = 0, sum(compute[last - window : last])
        for first in range(last, window - 1, -1) if one_link else (last,):
            needed += transfer[first]
            if first < last:
                room += compute[first - window]
            if needed > room:
                return False
    return True


def there_and_back(forward, backward, copies: Sequence[Time], window: int) -> tuple:
    """(compute, transfer) of a training step in order of use: layers 1 .. L, then L .. 1. The first `window`
    are left from the step before, the last are still here when backward begins."""
    layers = len(forward)
    _check(forward, copies, window)
    back = [0 if layers - i <= window else copies[i] for i in range(layers)][::-1]
    return [*forward, *backward[::-1]], [*copies, *back]


def _check(compute: Sequence[Time], transfer: Sequence[Time], window: int) -> None:
    if len(compute) != len(transfer):
        given = f"{len(compute)} compute times, {len(transfer)} transfers"
        raise ValueError(f"{given}: give a layer one of each")
    if not 1 <= window <= len(compute):
        raise ValueError(f"window={window}: use 1 to {len(compute)} layers")
