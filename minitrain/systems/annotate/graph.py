"""A computation as a list of operators whose dims have letters, and its gradients as more of the same list.

    Op("h", "product", "bd,df->bf", ("x", "w1"))       h[b, f] = sum over d of x[b, d] · w1[d, f]
    Op("a", "relu", "bf->bf", ("h",))                  one element at a time, dims as they are

Letters belong to one operator: what is `f` here may be `d` in the next, only sizes must agree. A product may
have one operand (a sum, a transposition) and letters that its result alone has (copies along them, of
`copies`). The functions are few, and closed under gradients: `with_gradients` appends operators that carry
`d_y`, an input more, back to the tensors that are asked for. So who places tensors on ranks places backward
and the update too, as compilers do that see a whole step.

plan.py says how an operator can be cut, run_placed.py runs it. `mlp` and `mlp_step` are graphs to begin
with. No torch.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Op:
    """One operator: the name of its result, what it does, its dims, its operands."""

    name: str
    function: str
    equation: str
    inputs: tuple[str, ...]
    copies: tuple[tuple[str, int], ...] = ()  # letters that the result alone has, and their sizes

    @property
    def terms(self) -> list[str]:
        """The letters of each operand, and last those of the result."""
        operands, _, result = self.equation.partition("->")
        return [*operands.split(","), result]

    @property
    def tensors(self) -> tuple[str, ...]:
        """The operands and last the result, as `terms`."""
        return (*self.inputs, self.name)

    @property
    def letters(self) -> list[str]:
        return list(dict.fromkeys("".join(self.terms)))


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
    """The graph with backward, and for each of `wanted` which tensor is the gradient of sum(of · d_of).

    `d_of` is an input more, shaped as `of`. Only what depends on one of `wanted` gets a gradient."""
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
    """Appends what takes dy to operand `at`; the name of the gradient there."""
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


# ---- graphs to begin with


def mlp(rows: int, width: int, hidden: int) -> Graph:
    """y = relu(x · w1) · w2 with x[b, d], w1[d, f], w2[f, e]."""
    ops = (
        Op("h", "product", "bd,df->bf", ("x", "w1")),
        Op("a", "relu", "bf->bf", ("h",)),
        Op("y", "product", "bf,fe->be", ("a", "w2")),
    )
    return Graph({"x": (rows, width), "w1": (width, hidden), "w2": (hidden, width)}, ops)


def mlp_step(rows: int, width: int, hidden: int) -> Graph:
    """The same, backward from an input d_y, and w_new = w - gradient of both parameters; the learning rate is
    in d_y, as every factor is."""
    graph, gradients = with_gradients(mlp(rows, width, hidden), "y", ("w1", "w2"))
    ops = list(graph.ops)
    for name, gradient in gradients.items():
        shape = graph.shapes[name]
        ops.append(Op(f"{name}_step", "negate", pointwise(shape), (gradient,)))
        ops.append(Op(f"{name}_new", "add", pointwise(shape, 2), (name, f"{name}_step")))
    return Graph(graph.inputs, tuple(ops))
