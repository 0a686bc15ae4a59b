"""The cheapest plan for a chain of layers within a budget of bytes, held graphs included. Exact. No torch.

    plan = cheapest(costs, layers, budget)     a list for chain.py; peak_bytes(plan, layers) <= budget

Checkmate's question for the actions of chain_plan.py: which x to hold, which graphs to make at once, which
layers to run again. Everything from "keep all" (no layer runs twice) over segments to a single held x is a
way through these states:

    (x that are held, graphs that are held, the gradients still to come)        one action: F i, T i, B i

Searched from the cheapest on; an x is let go only for want of room, so what is reached first is optimal. Up
to 4^n states: for some 10 layers.
Jain et al. 2020 (Checkmate), arXiv:1910.02653; Beaumont et al. 2019 (rotor), arXiv:1911.13214. Differs: rotor
has these actions and a dynamic program in which what is held is held until it is used.
"""

from collections.abc import Iterator, Sequence
from heapq import heappop, heappush
from itertools import count
from typing import NamedTuple

from minitrain.pipeline.partition import Number, check_costs
from minitrain.systems.memory.chain_plan import Action, LayerBytes, check_layers


class _State(NamedTuple):
    held: int  # a bit for each x, x_0 always
    taped: int  # a bit for each layer with a graph
    left: int  # B of this and later layers is done


def cheapest(costs: Sequence[Number], layers: Sequence[LayerBytes], budget: Number) -> tuple[Action, ...]:
    """The plan whose forwards cost least, F and T alike; `budget` as `peak_bytes` counts, gradients of
    parameters (`left`) included. ValueError: no plan fits."""
    check_layers("cheapest", len(layers))
    check_costs("cheapest", costs=costs)
    if len(costs) != len(layers):
        raise ValueError(f"cheapest: {len(costs)} costs of {len(layers)} layers; give one a layer")
    n, tie = len(layers), count()
    sizes = [0, *(layer.output for layer in layers[:-1])]  # of x_0, which is the caller's, and the others
    waiting, done = [(0, 2 * n, next(tie), _State(1, 0, n), None)], {}
    while waiting:
        cost, _, _, state, way = heappop(waiting)
        if state.left == 0:
            return tuple(action for steps in _in_order(way) for action in steps)
        cheaper = done.setdefault(state[1:], [])  # what was held with the same graphs, at no higher cost
        if any(not state.held & ~more for more in cheaper):
            continue
        cheaper.append(state.held)
        occupied = _occupied(state, layers, sizes)
        for action, most, after in _moves(state, layers):
            pinned = state.taped | 1 | 1 << action.layer
            for drop in ways_to_drop(sizes, state.held & ~pinned, occupied + most - budget):
                then = after._replace(held=after.held & ~drop)
                more = cost + costs[action.layer] * (action.kind != "B")
                steps = (way, [*(Action("D", i) for i in members(drop)), action])
                heappush(waiting, (more, 2 * then.left - then.taped.bit_count(), next(tie), then, steps))
    raise ValueError(f"cheapest: no plan of {n} layers fits {budget} bytes; use a larger budget")


def _moves(state: _State, layers: Sequence[LayerBytes]) -> Iterator[tuple[Action, Number, _State]]:
    """(action, the most that it takes beside what is held, the state behind it)."""
    held, taped, left = state
    if taped >> left - 1 & 1:  # the gradient is there
        rest = held & ~(1 << left - 1), taped & ~(1 << left - 1), left - 1
        yield Action("B", left - 1), layers[left - 1].backward, _State(*rest)
    for i in range(left):
        if not held >> i & 1 or taped >> i & 1:
            continue
        more = held | 1 << i + 1 if i + 1 < left and i + 1 < len(layers) else held
        yield Action("T", i), layers[i].taping, _State(more, taped | 1 << i, left)
        if more != held:
            yield Action("F", i), layers[i].forward, _State(more, taped, left)


def _occupied(state: _State, layers: Sequence[LayerBytes], sizes: Sequence[Number]) -> Number:
    """What is held: x and graphs, the output, one gradient, those of parameters."""
    n, behind = len(layers), layers[state.left :]
    total = sum(sizes[i] for i in members(state.held)) + sum(layers[i].tape for i in members(state.taped))
    total += sum(layer.left for layer in behind) + (behind[0].gradient if behind else 0)
    return total + layers[-1].output * bool(behind or state.taped >> n - 1 & 1)


def _in_order(way: tuple) -> list[list[Action]]:
    return [*_in_order(way[0]), way[1]] if way else []


def members(held: int) -> Iterator[int]:
    while held:
        yield (held & -held).bit_length() - 1
        held &= held - 1


def ways_to_drop(sizes: Sequence[Number], held: int, over: Number) -> Iterator[int]:
    """Sets out of `held` (a bit for each) of at least `over` bytes in which each is necessary."""
    if over <= 0:
        yield 0
        return
    largest_first = sorted(members(held), key=lambda i: -sizes[i])
    open_sets = [(0, 0, over)]  # (set, first member that may come, what is still missing)
    while open_sets:
        chosen, first, missing = open_sets.pop()
        for place, i in enumerate(largest_first[first:], first + 1):
            if sizes[i] >= missing:  # the smallest comes last: without any other it would not do
                yield chosen | 1 << i
            elif sizes[i]:
                open_sets.append((chosen | 1 << i, place, missing - sizes[i]))
