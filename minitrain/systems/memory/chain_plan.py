"""A plan for a chain of layers: when each runs, what is held, when it is differentiated. No torch.

    x_{i+1} = f_i(x_i)      i = 0 .. n-1             every(4, 2)  ->  F0 F1 D1 T2 T3 B3 B2 T0 T1 B1 B0

    F i    x_{i+1} without a graph            D i    lets x_i go
    T i    x_{i+1} with a graph ("tape")      B i    the gradient of x_i; lets the graph and x_i go

The actions up to the T of the last layer are the forward pass, the others backward: for each B it goes back
to an x that is still held and runs forward from there. `systems/memory/chain.py` runs any plan. `peak_bytes`
is exact where `LayerBytes` are. Chen et al. 2016, arXiv:1604.06174, section 3 (segments); Griewank and
Walther 2000, Algorithm 799 (actions). Differs: theirs has no T that outlives the next action.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from math import isqrt
from typing import NamedTuple

from minitrain.ranks.checks import MOST, require_ints


class Action(NamedTuple):
    kind: str  # F, T, D or B
    layer: int

    def __str__(self) -> str:
        return f"{self.kind}{self.layer}"


class LayerBytes(NamedTuple):
    """What one layer allocates beyond what is held when the action starts; x_i is held."""

    output: int  # x_{i+1}
    forward: int  # the most during F, x_{i+1} included
    tape: int  # what the graph of T holds without x_i and x_{i+1}
    taping: int  # the most during T, x_{i+1} included
    gradient: int  # that of x_i; 0 if nothing in front of layer i is trained
    backward: int  # the most during B beside graph, x_i and the gradient of x_{i+1}
    left: int = 0  # gradients of the layer's parameters that B leaves


def every(layers: int, size: int) -> tuple[Action, ...]:
    """Segments of `size` layers: a segment's input is held, in backward the segment runs once more and its
    graphs are held. The last segment, which may be shorter, keeps its graphs in the forward pass."""
    check_layers("every", layers)
    if not 1 <= size <= layers:
        raise ValueError(f"every: segments of {size} of {layers} layers; use 1 to {layers}")
    starts, plan = range(0, layers, size), []
    for start in starts[:-1]:
        plan += advance(start, start + size)
    for start in reversed(starts):
        segment = range(start, min(start + size, layers))
        plan += [Action("T", i) for i in segment] + [Action("B", i) for i in reversed(segment)]
    return tuple(plan)


def sqrt(layers: int) -> tuple[Action, ...]:
    """Segments of about sqrt(n) layers: least is held if all layers are alike."""
    check_layers("sqrt", layers)
    return every(layers, 1 + isqrt(layers - 1))


def advance(start: int, end: int) -> list[Action]:
    require_ints(0, MOST, start=start, end=end)
    plan = []
    for i in range(start, end):
        plan += [Action("F", i)] + [Action("D", i)] * (i > start)
    return plan


def forwards(plan: Iterable[Action]) -> Counter[int]:
    """How often each layer runs forward."""
    return Counter(action.layer for action in plan if action.kind in "FT")


def walk(plan: Sequence[Action], layers: int | None = None) -> Iterator[tuple[Action, frozenset[int]]]:
    """(action, numbers of the x that are held behind it). An x whose gradient is there is not kept again."""
    layers = layers or 1 + max(action.layer for action in plan)
    held, taped, left = frozenset({0}), set(), layers  # left: all gradients from here on are done
    for number, action in enumerate(plan):
        kind, i = action
        wrong = {
            f"is none of F, T, D, B of layers 0 to {layers - 1}": kind not in "FTDB" or not 0 <= i < layers,
            f"needs x_{i}, which is not held": kind in "FTD" and i not in held,
            f"comes while the graph of layer {i} is held": kind in "TD" and i in taped,
            "makes the output without a graph; use T for the last layer": kind == "F" and i == layers - 1,
            f"needs the graph of layer {i}, which is not held": kind == "B" and i not in taped,
            f"comes before B{left - 1}; gradients come from the last layer on": kind == "B" and i != left - 1,
        }
        if said := [words for words, true in wrong.items() if true]:
            raise ValueError(f"plan: action {number}, {action}, {said[0]}")
        if kind in "FT" and i + 1 < left:
            held |= {i + 1}
        if kind == "T":
            taped.add(i)
        if kind in "DB":
            held -= {i}
        if kind == "B":
            taped.discard(i)
            left = i
        yield action, held
    if left:
        raise ValueError(f"plan: it ends before B{left - 1}; a plan ends with B0")


def check(plan: Sequence[Action], layers: int) -> None:
    """ValueError: the first action that cannot be carried out, and why."""
    check_layers("plan", layers)
    for _ in walk(plan, layers):
        pass


def peak_bytes(plan: Sequence[Action], layers: Sequence[LayerBytes]) -> int:
    """The most that the plan allocates, x_0 and the gradient of the output, both the caller's, not included.
    The output stays with the caller to the end. What a layer puts out and its graph saves counts twice."""
    last, most, now, held = len(layers) - 1, 0, 0, frozenset({0})
    for (kind, i), after in walk(plan):
        layer, behind = layers[i], layers[i + 1].gradient if i < last else 0
        if kind in "FT":
            most = max(most, now + (layer.forward if kind == "F" else layer.taping))
            now += layer.tape * (kind == "T") + layer.output * (i == last)
        elif kind == "B":
            most = max(most, now + layer.backward)
            now += layer.gradient + layer.left - behind - layer.tape
        now += sum(layers[x - 1].output for x in after - held)
        now -= sum(layers[x - 1].output for x in held - after if x)
        held = after
    return most


def check_layers(what: str, layers: int) -> None:
    if not 1 <= layers <= MOST:
        raise ValueError(f"{what}: {layers} layers; a chain has 1 or more, up to {MOST:,}")
