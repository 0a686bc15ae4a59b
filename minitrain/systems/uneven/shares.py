"""How much of each product goes to which device, where devices differ: Whale, AccPar, HAP. No torch.

Whale    rows of a batch, or heads, by speed and within each memory: 12 rows at speeds 2, 1 are 8 and 4
AccPar   y = x·W on two devices, the first with a share a of a dimension, the other with the rest:
             cut by     x         y         a sum, whose terms both exchange
             rows       rows      rows      dW
             inputs     columns   whole     y
             outputs    whole     columns   dx
         From layer to layer a device fetches what it lacks: 1 - a of a tensor it needs whole, a·(1 - a) of
         one cut along the other dimension; gradients the other way round. a: both take equally long
HAP      the same on n devices, a program that A* finds: what is to come takes at least its arithmetic. Sums
         are all-reduced; the rest is gathered, padded to the largest share, or by n broadcasts of n times
         the latency. Then the shares in which that program is fastest, and so on in turns

Layers are those of search/problem.py, elements have 4 bytes. Jia et al. 2022, USENIX ATC (Whale); Song et al.
2020, HPCA (AccPar); Zhang et al. 2024, EuroSys (HAP). Differs: Whale's shares are the best whole ones; AccPar
takes the layer before as cut at the same share, by HAP's search; HAP has one share per device, no all-to-all.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from math import inf
from operator import truediv
from typing import NamedTuple

from minitrain.ranks import checks
from minitrain.systems.plan.search.problem import Layer, SearchResult

FINE = 1 << 50  # steps of a share
CUTS = {"rows": ("rows", "rows"), "inputs": ("columns", "whole"), "outputs": ("whole", "columns")}


class Device(NamedTuple):
    speed: float  # work, or FLOPs, per second
    link: float  # bytes per second and direction
    inside: float = inf  # to others of its node
    node: int = 0


def whale(total: int, speeds: Sequence[float], most: Sequence[int] | None = None) -> list[int]:
    """How many of `total` each device takes, at most most[i]: those that would be done first."""
    checks.require_positive_ints(total=total)
    checks.require_positive(speeds=speeds)
    most = [total] * len(speeds) if most is None else most
    checks.require_ints(most=most)
    if len(most) != len(speeds) or sum(most) < total:
        raise ValueError(f"at most {list(most)} of {total}; give a limit for each device, {total} in all")
    done = [(n / speed, i) for i, speed in enumerate(speeds) for n in range(1, min(most[i], total) + 1)]
    return [sum(at == i for _, at in sorted(done)[:total]) for i in range(len(speeds))]


def sizes(layer: Layer, rows: int, before: str | None, cut: str, share: float) -> tuple[int, list[float]]:
    """Elements that are summed; those that a device with this share lacks of x, and of dx for `before`."""
    part = lambda whole: 1 - share if whole == "whole" else share * (1 - share)
    lacks = lambda has, needs: 0.0 if has in ("whole", needs) else part(needs)
    terms = {"rows": layer.weights, "inputs": rows * layer.gives, "outputs": rows * layer.takes}[cut]
    x, y = CUTS[cut][0], CUTS[before][1] if before else CUTS[cut][0]
    return terms, [lacks(*pair) * rows * layer.takes for pair in ((y, x), (x, y))]


def accpar(layers: Sequence[Layer], rows: int, devices: Sequence[Device]) -> SearchResult:
    """(cut, share of the first device) of each layer; `cost`: seconds, forward and backward."""
    checks.require_nonempty(layers=layers)
    checks.require_positive_ints(rows=rows)
    checks.require_one_of([2], devices=len(devices))

    def solved(layer: Layer, before: str | None, cut: str) -> tuple[float, float]:  # seconds, share
        def seconds(device: Device, share: float) -> float:
            terms, lacking = sizes(layer, rows, before, cut, share)
            return 3 * layer.flops * rows * share / device.speed + 4 * (terms + sum(lacking)) / device.link

        first, second = devices
        behind = lambda i: seconds(first, i / FINE) - seconds(second, 1 - i / FINE)
        share = bisect_left(range(FINE), 0, key=behind) / FINE
        return max(seconds(first, share), seconds(second, 1 - share)), share

    found = synthesize(len(layers), lambda i, *cuts: (0.0, solved(layers[i], *cuts)[0]), guided=False)
    chosen = zip(layers, (None, *found.choice), found.choice)
    return found._replace(choice=[(at[-1], solved(*at)[1]) for at in chosen])


def priced(layer: Layer, rows: int, before: str | None, cut: str, devices, latency_s: float, shares) -> tuple:
    """(seconds of arithmetic, of communication, bytes that are gathered with padding)."""
    n, link = len(shares), min(device.link for device in devices)
    terms, lacking = sizes(layer, rows, before, cut, 0.5)
    sent, padding, size = latency_s + 8 * (n - 1) / n * terms / link, 0, 4 * rows * layer.takes
    padded, broadcasts = latency_s + (n - 1) * max(shares) * size / link, n * latency_s + size / link
    for _ in filter(None, lacking):
        sent, padding = sent + min(padded, broadcasts), padding + size * (padded < broadcasts)
    slowest = max(share / device.speed for share, device in zip(shares, devices))
    return 3 * layer.flops * rows * slowest, sent, padding


def synthesize(layers: int, price: Callable, guided: bool = True) -> SearchResult:
    """The cheapest cuts; price(layer, cut before, cut): (arithmetic, communication, ..). By A*, or Dijkstra's
    search if not `guided`. Looked at: states that were left."""
    ahead = [sum(price(i, None, "rows")[0] for i in range(at, layers)) * guided for at in range(layers + 1)]
    waiting, done = [(ahead[0], 0.0, ())], set()
    while True:
        _, cost, cuts = heappop(waiting)
        if len(cuts) == layers:
            return SearchResult(cuts, cost, len(done))
        if (state := (len(cuts), cuts[-1:])) not in done:
            done.add(state)
            for cut in CUTS:
                then = cost + sum(price(len(cuts), cuts[-1] if cuts else None, cut)[:2])
                heappush(waiting, (then + ahead[len(cuts) + 1], then, (*cuts, cut)))


def best_shares(work: float, padded_s: float, speeds: Sequence[float]) -> list[float]:
    """That make work·max(share / speed) + padded_s·max(share) least. The corners of this linear program are
    shares by speed of which none is larger than that of some device."""
    checks.require_positive(speeds=speeds)
    checks.require_nonnegative(work=work, padded_s=padded_s)
    cost = lambda shares: work * max(map(truediv, shares, speeds)) + padded_s * max(shares)
    corners = [[min(speed, most) for speed in speeds] for most in speeds]
    return min(([part / sum(corner) for part in corner] for corner in corners), key=cost)


def hap(layers: Sequence[Layer], rows: int, devices: Sequence[Device], latency_s=0.0, guided=True) -> tuple:
    """(program, shares): in turns, from shares by speed, until the program is no faster."""
    checks.require_nonempty(layers=layers, devices=devices)
    checks.require_positive_ints(rows=rows)
    checks.require_nonnegative(latency_s=latency_s)
    speeds, link = [device.speed for device in devices], min(device.link for device in devices)
    shares, found = [speed / sum(speeds) for speed in speeds], None
    while True:
        price = lambda i, before, cut: priced(layers[i], rows, before, cut, devices, latency_s, shares)
        better = synthesize(len(layers), price, guided)
        if found and better.cost >= found[0].cost * (1 - 1e-9):
            return found
        found, pairs = (better, shares), zip((None, *better.choice), better.choice)
        padded_s = sum(price(i, *pair)[2] for i, pair in enumerate(pairs)) * (len(devices) - 1) / link
        shares = best_shares(3 * rows * sum(layer.flops for layer in layers), padded_s, speeds)
