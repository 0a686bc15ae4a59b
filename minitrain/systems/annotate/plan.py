"""Operators whose dims have letters, where their tensors are on a mesh, and the program of a rank. No torch.

    Op("h", "product", "bd,df->bf", ("x", "w1"))       h[b, f] = sum over d of x[b, d] · w1[d, f]

Letters belong to one operator: only sizes must agree. The functions are few, and closed under gradients, so
who places tensors on ranks places backward and the update too, as compilers do that see a whole step.
Along each axis of a mesh a tensor is Split(d), S(d): a rank has its slice along dim d; BROADCAST, B: each
has all of it; or PARTIAL, P: each has a term, and the sum is the tensor. If two axes cut one dim, the first
is the outer one. The signatures of an operator follow from its equation. Cut along a letter, what has it is
split there, operands that have not are whole, a result that has not is a sum; the six of a product are

    bd,df->bf     b: S(0), B -> S(0)     f: B, S(1) -> S(1)     d: S(1), S(0) -> P
                  linear in each operand:   P, B -> P           B, P -> P            and whole: B, B -> B

The program of a `Placed` graph follows: operands are boxed to what the chosen signature asks for, results to
where they are kept. What was boxed once is there for the next: a weight gathered in forward is not gathered
again in backward, and stays until the end. Yuan et al. 2021, OneFlow, arXiv:2110.15032, section 3.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import NamedTuple


@dataclass(frozen=True)
class Op:
    """One operator: the name of its result, what it does, its dims, its operands. A product may have one
    operand (a sum, a transposition)."""

    name: str
    function: str
    equation: str
    inputs: tuple[str, ...]
    copies: tuple[tuple[str, int], ...] = ()  # letters that the result alone has, and their sizes

    # The letters of each operand, and last those of the result; the tensors, in this order; each letter once.
    terms = property(lambda self: self.equation.replace("->", ",").split(","))
    tensors = property(lambda self: (*self.inputs, self.name))
    letters = property(lambda self: list(dict.fromkeys("".join(self.terms))))


@dataclass(frozen=True)
class Graph:
    """Shapes of the inputs, and operators in an order in which they can be run."""

    inputs: Mapping[str, tuple[int, ...]]
    ops: tuple[Op, ...]

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of every tensor, whole."""
        shapes = dict(self.inputs)
        for op in self.ops:
            sizes = letter_sizes(op, shapes)
            shapes[op.name] = tuple(sizes[letter] for letter in op.terms[-1])
        return shapes


def letter_sizes(op: Op, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
    sizes = dict(op.copies)
    for name, term in zip(op.inputs, op.terms):
        sizes.update(zip(term, shapes[name], strict=True))
    return sizes


def pointwise(shape: Sequence[int], operands: int = 1) -> str:
    """The equation of an operator on tensors of this shape that leaves dims as they are."""
    term = "abcdefgh"[: len(shape)]
    return f"{','.join([term] * operands)}->{term}"


def with_gradients(graph: Graph, of: str, wanted: Iterable[str]) -> tuple[Graph, dict[str, str]]:
    """The graph with backward, and for each of `wanted` which tensor is the gradient of sum(of · d_of), with
    an input more, `d_of`, shaped as `of`. Only what depends on one of `wanted` gets a gradient."""
    wanted = tuple(wanted)
    moving, above = set(wanted), {of}  # depends on one of wanted; is something that `of` depends on
    for op in graph.ops:
        moving |= {op.name} if moving & set(op.inputs) and op.function != "step" else set()
    for op in reversed(graph.ops):
        above |= set(op.inputs) if op.name in above else set()
    live = [op for op in graph.ops if op.name in moving & above]
    uses = Counter(name for op in live for name in op.inputs)
    ops, parts, grads = list(graph.ops), defaultdict(list), {of: f"d_{of}"}

    def new(*given) -> str:
        ops.append(Op(*given))
        return ops[-1].name

    def gradient(name: str) -> str:
        if name not in grads:
            terms = tuple(parts[name])
            added = pointwise(graph.shapes[name], len(terms))
            grads[name] = new(f"d_{name}", "add", added, terms) if len(terms) > 1 else terms[0]
        return grads[name]

    for op in reversed(live):
        dy = gradient(op.name)
        for at, name in enumerate(op.inputs):
            if name in moving:
                called = f"d_{name}" if uses[name] == 1 else f"d_{name}.{op.name}{at}"
                parts[name].append(_back(op, at, dy, called, letter_sizes(op, graph.shapes), new))
    gradients = {name: gradient(name) for name in wanted}
    return Graph({**graph.inputs, f"d_{of}": graph.shapes[of]}, tuple(ops)), gradients


def _back(op: Op, at: int, dy: str, called: str, sizes: dict[str, int], new: Callable) -> str:
    term, result = op.terms[at], op.terms[-1]
    alone, pair = f"{term}->{term}", f"{term},{term}->{term}"
    match op.function:
        case "product":
            rest = [i for i in range(len(op.inputs)) if i != at]
            terms, others = [result, *(op.terms[i] for i in rest)], [op.inputs[i] for i in rest]
            copies = tuple((letter, sizes[letter]) for letter in term if letter not in "".join(terms))
            return new(called, "product", f"{','.join(terms)}->{term}", (dy, *others), copies)
        case "add":
            return dy
        case "negate":
            return new(called, "negate", alone, (dy,))
        case "relu":
            on = new(f"{called}.on", "step", alone, op.inputs)
            return new(called, "product", pair, (dy, on))
    raise AssertionError(op.function)


# ---- places of tensors, signatures of operators


class Split(NamedTuple):
    dim: int

    def __str__(self) -> str:
        return f"S({self.dim})"


BROADCAST, PARTIAL = "B", "P"
Place = Split | str
Spec = tuple[Place, ...]  # of a tensor: one for each axis of the mesh


class Signature(NamedTuple):
    """Of an operator along one axis; `letter` is what is cut."""

    inputs: tuple[Place, ...]
    output: Place
    letter: str | None = None


def signatures(op: Op) -> list[Signature]:
    """All that are right, whatever the numbers; first the whole one."""
    *terms, result = op.terms
    right = [Signature((BROADCAST,) * len(terms), BROADCAST)]

    def at(term: str, letter: str, otherwise: Place) -> Place:
        return Split(term.index(letter)) if letter in term else otherwise

    for letter in op.letters:
        inputs = tuple(at(term, letter, BROADCAST) for term in terms)
        right.append(Signature(inputs, at(result, letter, PARTIAL), letter))
    if op.function == "product":  # linear in each operand, but not in several at once
        for linear in range(len(terms)):
            inputs = tuple(PARTIAL if i == linear else BROADCAST for i in range(len(terms)))
            right.append(Signature(inputs, PARTIAL))
    elif op.function in ("add", "negate"):
        right.append(Signature((PARTIAL,) * len(terms), PARTIAL))
    return right


def cut_along(op: Op, letter: str | None) -> Signature:
    return next(one for one in signatures(op) if one.letter == letter)


def local_shape(shape: tuple[int, ...], spec: Spec, axes: Mapping[str, int], what: str) -> tuple[int, ...]:
    """What one rank has of a tensor; ValueError where a dim does not divide."""
    local = list(shape)
    for place, (axis, ranks) in zip(spec, axes.items()):
        if isinstance(place, Split):
            if local[place.dim] % ranks:
                size = f"{local[place.dim]} along dim {place.dim} of {list(shape)}"
                raise ValueError(f"{what}: {size} is no multiple of {axis}={ranks}; leave it whole")
            local[place.dim] //= ranks
    return tuple(local)


# ---- from one place to another


def collective(source: Place, target: Place) -> str | None:
    """What has to be called; None where nothing is sent."""
    if source == target or source == BROADCAST or target == PARTIAL:
        return None
    if source == PARTIAL:
        return "all_reduce" if target == BROADCAST else "reduce_scatter"
    return "all_gather" if target == BROADCAST else "all_to_all"


def sent(source: Place, target: Place, elements: int | Fraction, ranks: int) -> Fraction:
    """Elements sent by all ranks together, of so many whole: table 2 of the paper. From B there is a slice,
    to P there are zeros: nothing is sent."""
    others = ranks - 1
    factor = {None: 0, "all_to_all": Fraction(others, ranks), "all_gather": others, "reduce_scatter": others}
    return (factor | {"all_reduce": 2 * others})[collective(source, target)] * Fraction(elements)


Move = tuple[int, Place, Place]  # of one tensor along one axis, by its number: from, to


def moves(source: Spec, target: Spec) -> list[Move]:
    """One axis after the other, from the outermost. What an inner axis has cut of a dim that an outer one is
    about to change would end in the wrong order: it is gathered first, and cut again when its turn comes."""
    if len(source) != len(target):
        raise ValueError(f"from {source} to {target}: give a place for each axis of the mesh")
    now, path = list(source), []

    def move(axis: int, to: Place) -> None:
        if now[axis] != to:
            path.append((axis, now[axis], to))
            now[axis] = to

    for axis in reversed(range(len(now))):
        outside = [pair for pair in zip(now[:axis], target[:axis]) if pair[0] != pair[1]]
        if isinstance(now[axis], Split) and any(now[axis] in pair for pair in outside):
            move(axis, BROADCAST)
    for axis, to in enumerate(target):
        move(axis, to)
    return path


def sent_along(path: list[Move], source: Spec, elements: int, ranks: tuple[int, ...]) -> list[Fraction]:
    """Elements that each move sends, over all groups of its axis together."""
    now, totals = list(source), []
    for axis, before, after in path:
        others = [place for place in enumerate(now) if place[0] != axis]
        cut = math.prod(ranks[other] for other, place in others if isinstance(place, Split))
        groups = math.prod(ranks) // ranks[axis]
        totals.append(groups * sent(before, after, Fraction(elements, cut), ranks[axis]))
        now[axis] = after
    return totals


# ---- a graph that is placed


class Box(NamedTuple):
    tensor: str
    source: Spec
    target: Spec


class Compute(NamedTuple):
    """One operator on what this rank has: its operands and its result as the signatures say."""

    op: Op
    inputs: tuple[Spec, ...]
    output: Spec


@dataclass(frozen=True)
class Placed:
    graph: Graph
    axes: Mapping[str, int]  # ranks of each axis, the outermost first
    specs: Mapping[str, Spec]
    chosen: Mapping[str, tuple[Signature, ...]]  # one for each axis of the mesh

    def __post_init__(self):
        for name, shape in self.graph.shapes.items():
            local_shape(shape, self.specs[name], self.axes, name)
        for op, needs, makes in map(self.computed, self.graph.ops):
            assert all(one in signatures(op) for one in self.chosen[op.name]), op
            for name, spec in zip(op.tensors, (*needs, makes)):
                local_shape(self.graph.shapes[name], spec, self.axes, f"{op.name}: {name}")

    def computed(self, op: Op) -> Compute:
        chosen = self.chosen[op.name]
        needs = tuple(tuple(one.inputs[at] for one in chosen) for at in range(len(op.inputs)))
        return Compute(op, needs, tuple(one.output for one in chosen))

    def program(self) -> list[Box | Compute]:
        there = {(name, self.specs[name]) for name in self.graph.inputs}
        steps: list[Box | Compute] = []

        def box(name: str, source: Spec, target: Spec) -> None:
            if (name, target) not in there:
                steps.append(Box(name, source, target))
                there.add((name, target))

        for op, needs, made in map(self.computed, self.graph.ops):
            for name, spec in zip(op.inputs, needs):
                box(name, self.specs[name], spec)
            steps.append(Compute(op, needs, made))
            there.add((op.name, made))
            box(op.name, made, self.specs[op.name])
        return steps

    def collectives(self) -> Counter[tuple[str, str]]:
        """How often each is called, by (collective, axis)."""
        return Counter(key for key, _ in self._sent())

    def sent_elements(self) -> dict[tuple[str, str], Fraction]:
        """By all ranks together, by (collective, axis)."""
        total: dict[tuple[str, str], Fraction] = defaultdict(Fraction)
        for key, elements in self._sent():
            total[key] += elements
        return dict(total)

    def _sent(self):
        names, ranks = list(self.axes), tuple(self.axes.values())
        for step in self.program():
            if isinstance(step, Box):
                path = moves(step.source, step.target)
                counts = sent_along(path, step.source, math.prod(self.graph.shapes[step.tensor]), ranks)
                for (axis, source, target), count in zip(path, counts):
                    if op := collective(source, target):
                        yield (op, names[axis]), count


def cheapest(graph: Graph, op: Op, places: Sequence[Place | None], ranks: int, choices=None) -> Signature:
    """Along one axis the signature whose operands and result cost least to box, then that which leaves most
    of them as they are, then the first. `places`: where the operands are and the result is to be; None will
    be as the signature has it. A slice is not made a term of a sum: free, it only puts off a cost."""

    def cost(one: Signature) -> tuple:
        boxes = [*zip(op.inputs, places, one.inputs), (op.name, one.output, places[-1])]
        boxes = [(name, at, to) for name, at, to in boxes if None not in (at, to)]
        elements = sum(sent(at, to, math.prod(graph.shapes[name]), ranks) for name, at, to in boxes)
        put_off = any(isinstance(at, Split) and to == PARTIAL for _, at, to in boxes)
        return put_off, elements, sum(at != to for _, at, to in boxes)

    return min(choices or signatures(op), key=cost)


def place(graph: Graph, axes: Mapping[str, int], known: Mapping, chosen: Mapping) -> Placed:
    """From what is known by (tensor, axis) and chosen by (operator, axis); else whole, and the cheapest."""
    specs = {name: tuple(known.get((name, axis), BROADCAST) for axis in axes) for name in graph.shapes}

    def signature(op: Op, at: int, axis: str) -> Signature:
        here = [specs[name][at] for name in op.tensors]
        return chosen.get((op.name, axis)) or cheapest(graph, op, here, axes[axis])

    each = {op.name: tuple(signature(op, *axis) for axis in enumerate(axes)) for op in graph.ops}
    return Placed(graph, axes, specs, each)


# ---- a graph to begin with


def mlp(rows: int, width: int, hidden: int) -> Graph:
    """y = relu(x · w1) · w2 with x[b, d], w1[d, f], w2[f, e]."""
    ops = (
        Op("h", "product", "bd,df->bf", ("x", "w1")),
        Op("a", "relu", "bf->bf", ("h",)),
        Op("y", "product", "bf,fe->be", ("a", "w2")),
    )
    return Graph({"x": (rows, width), "w1": (width, hidden), "w2": (hidden, width)}, ops)
