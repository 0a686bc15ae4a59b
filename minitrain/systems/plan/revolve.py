"""revolve: with c held inputs, the fewest forwards that differentiate a chain of n layers. No torch.

    t(n, c) = r·n - C(c + r, r - 1)       r: the smallest with n <= C(c + r, c)
    t(n, c) = min over k of k + t(n - k, c - 1) + t(k, c)        t(1, c) = 0     t(n, 1) = n(n-1)/2

c counts the x that are held at once, x_0 among them (an x on its way to the next held one comes on top); t
counts forwards without a graph, F. The forward with a graph in front of each backward, T, is not counted: a
step has t + n forwards, of which without recomputation n were needed. t is linear in n for a given r: no
layer runs more than r times without a graph. `fewest` is the recursion for layers of any cost.
Griewank and Walther 2000 (Algorithm 799, revolve), ACM TOMS 26(1), section 2. Differs: the last layer's graph
is made by the forward pass, as its output is wanted.
"""

from collections.abc import Sequence
from functools import cache
from itertools import accumulate
from math import comb

from minitrain.pipeline.partition import Number, check_costs
from minitrain.systems.memory.chain_plan import Action, advance, check_layers


def repetitions(layers: int, held: int) -> int:
    """r: the most often that a layer runs without a graph."""
    check_held(layers, held)
    r = 0
    while comb(held + r, held) < layers:
        r += 1
    return r


def fewest_forwards(layers: int, held: int) -> int:
    """t(n, c), by the formula."""
    r = repetitions(layers, held)
    return r * layers - comb(held + r, r - 1) if r else 0


def fewest(costs: Sequence[Number], held: int) -> tuple[Number, tuple[Action, ...]]:
    """(the least cost of forwards without a graph, the plan) for layers of these costs. O(n³·c) steps."""
    check_costs("revolve", costs=costs)
    check_held(len(costs), held)
    before = [0, *accumulate(costs)]

    @cache
    def best(start: int, end: int, held: int) -> tuple[Number, int]:
        """For x_start held, one of `held`: (cost, the next x to be held; start: none)."""
        if end - start <= 1:
            return 0, start
        if held == 1:
            return sum(before[i] - before[start] for i in range(start + 1, end)), start
        return min(
            (before[k] - before[start] + best(k, end, held - 1)[0] + best(start, k, held)[0], k)
            for k in range(start + 1, end)
        )

    def plan(start: int, end: int, held: int) -> list[Action]:
        if end - start <= 1 or held == 1:
            return [action for i in reversed(range(start, end)) for action in one_step(start, i)]
        k = best(start, end, held)[1]
        return [*advance(start, k), *plan(k, end, held - 1), *plan(start, k, held)]

    return best(0, len(costs), held)[0], tuple(plan(0, len(costs), held))


def revolve(layers: int, held: int) -> tuple[Action, ...]:
    """The plan for equal layers. Where to hold next is known from binomials, without a search: O(n·r)."""
    check_held(layers, held)
    plan = []

    def add(start: int, end: int, held: int) -> None:
        while end - start > 1 and held > 1:
            k = start + next_held(end - start, held)
            plan.extend(advance(start, k))
            add(k, end, held - 1)
            end = k
        plan.extend(action for i in reversed(range(start, end)) for action in one_step(start, i))

    add(0, layers, held)
    return tuple(plan)


def next_held(layers: int, held: int) -> int:
    """A k that the recursion may take: x_k splits the chain into parts that each need what is best for them,
    C(c+r-2, c) <= k <= C(c+r-1, c) in front and C(c+r-2, c-1) <= n-k <= C(c+r-1, c-1) behind."""
    r = repetitions(layers, held)
    return max(comb(held + r - 2, held), layers - comb(held + r - 1, held - 1), 1)


def one_step(start: int, layer: int) -> list[Action]:
    """From x_start, which stays, to the gradient of x_layer."""
    return [*advance(start, layer), Action("T", layer), Action("B", layer)]


def check_held(layers: int, held: int) -> None:
    check_layers("revolve", layers)
    if held < 1:
        raise ValueError(f"revolve: c = {held} held inputs; use 1 (the chain's own input) or more")
