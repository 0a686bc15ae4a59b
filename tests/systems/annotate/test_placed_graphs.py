"""Graphs on ranks: gradients are autograd's, every signature of an equation is right, every box ends where it
should and sends what the formula says, and random annotations equal one process."""

import itertools
import random
from collections import Counter
from fractions import Fraction
from functools import partial

import pytest
import torch

from minitrain import collectives, launch
from minitrain.ranks.events import Issue
from minitrain.ranks.mesh import Mesh
from minitrain.systems.annotate import plan
from minitrain.systems.annotate.annotators import choose, propagate
from minitrain.systems.annotate.plan import BROADCAST as B
from minitrain.systems.annotate.plan import PARTIAL as P
from minitrain.systems.annotate.plan import (
    Graph,
    Op,
    collective,
    local_shape,
    mlp,
    moves,
    sent_along,
    signatures,
    with_gradients,
)
from minitrain.systems.annotate.plan import Split as S
from minitrain.systems.annotate.run_placed import box, box_along, compute, evaluate, local_part, run, whole
from tests.parallel import Traffic

ALL = ("x", "w1", "w2")
ODD = Graph(
    {"x": (4, 6), "w": (6, 6)},
    (
        Op("h", "product", "ab,bc->ac", ("x", "w")),
        Op("n", "negate", "ab->ab", ("h",)),
        Op("s", "add", "ab,ab,ab->ab", ("n", "h", "n")),
        Op("sums", "product", "ab->b", ("s",)),
        Op("y", "product", "ab,b,ab->ba", ("s", "sums", "s")),
        Op("unused", "relu", "ab->ab", ("h",)),
    ),
)


def mlp_step(rows, width, hidden):
    """The mlp, backward from an input d_y, and w_new = w - gradient of both parameters."""
    graph, gradients = with_gradients(mlp(rows, width, hidden), "y", ("w1", "w2"))
    ops = list(graph.ops)
    for name, gradient in gradients.items():
        shape = graph.shapes[name]
        ops.append(Op(f"{name}_step", "negate", plan.pointwise(shape), (gradient,)))
        ops.append(Op(f"{name}_new", "add", plan.pointwise(shape, 2), (name, f"{name}_step")))
    return Graph(graph.inputs, tuple(ops))


def random_values(graph, seed=0):
    draw = torch.Generator().manual_seed(seed)
    some = lambda shape: 0.3 * torch.randn(shape, dtype=torch.float64, generator=draw)
    return {name: some(shape) for name, shape in graph.inputs.items()}


def groups_of(axes):
    mesh = Mesh(**axes)
    return {axis: mesh.group(axis) for axis in axes}


@pytest.mark.parametrize("graph", [mlp(4, 6, 8), ODD], ids=["mlp", "odd"])
def test_gradients_are_those_of_autograd(graph):
    full, gradients = with_gradients(graph, "y", graph.inputs)
    assert set(full.shapes) > set(graph.shapes) and gradients.keys() == graph.inputs.keys()
    values = random_values(full)
    ours = evaluate(full, values)
    leaves = {name: values[name].clone().requires_grad_() for name in graph.inputs}
    y = evaluate(graph, leaves)["y"]
    torch.testing.assert_close(ours["y"], y, rtol=0, atol=0)
    y.backward(values["d_y"])
    for name, leaf in leaves.items():
        assert full.shapes[gradients[name]] == graph.inputs[name]
        torch.testing.assert_close(ours[gradients[name]], leaf.grad, rtol=1e-12, atol=1e-12)


def test_a_step_function_passes_no_gradient():
    on, gated = Op("on", "step", "bd->bd", ("x",)), Op("y", "product", "bd,bd->bd", ("x", "on"))
    full, gradients = with_gradients(Graph({"x": (4, 6)}, (on, gated)), "y", ["x"])
    values = {"x": torch.tensor([[-1.0, 0.0, 2.0]]).repeat(4, 2), "d_y": torch.ones(4, 6)}
    assert evaluate(full, values)["on"][0].tolist() == [0, 0, 1] * 2, "0 has no gradient, as relu's"
    assert gradients == {"x": "d_x"} and full.ops[-1].inputs == ("d_y", "on") and len(full.ops) == 3


# ---- signatures


def test_the_signatures_of_a_product_are_the_six_of_the_paper():
    said = {
        f"{', '.join(map(str, one.inputs))} -> {one.output}"
        for one in signatures(Op("y", "product", "bd,df->bf", ("x", "w")))
    }
    six = "S(0), B -> S(0)|B, S(1) -> S(1)|S(1), S(0) -> P|P, B -> P|B, P -> P|B, B -> B"
    assert said == set(six.split("|"))


EQUATIONS = {
    "product": "bd,df->bf bf->b bf->fb b->fb bhts,bhsk->bhtk ab,b,ab->ba ab,cd->cbad ab->",
    "add": "ab,ab->ab ab->ab", "negate": "ab->ab", "relu": "ab->ab", "step": "a->a",
}  # fmt: skip
CASES = [(function, equation) for function, list_ in EQUATIONS.items() for equation in list_.split()]


@pytest.mark.parametrize("function, equation", CASES)
def test_every_signature_is_right_and_those_left_out_are_wrong(function, equation):
    """Two ranks in one process, each with its part, without sending: parts of the result put together again
    are the result. All other combinations of S, B and P are not."""
    terms = equation.partition("->")[0].split(",")
    new = sorted(set(equation.partition("->")[2]) - set("".join(terms)))
    op = Op("y", function, equation, tuple("uvw"[: len(terms)]), tuple((letter, 2) for letter in new))
    draw = torch.Generator().manual_seed(1)

    def number(*shape):
        return torch.randn(shape, dtype=torch.float64, generator=draw)

    whole = [number(*[4] * len(term)) for term in terms]
    terms_of_sum = [number(*x.shape) for x in whole]
    sizes = {letter: 4 for letter in op.letters}
    op4 = Op("y", function, equation, op.inputs, tuple((letter, 4) for letter in new))
    expected = compute(op4, whole, sizes)

    def part(x, noise, place, rank):
        if place == B:
            return x
        return (x - noise if rank else noise) if place == P else x.chunk(2, place.dim)[rank]

    def holds(inputs, output):
        cut = {term[place.dim] for term, place in zip(terms, inputs) if isinstance(place, S)}
        cut |= (
            {op.terms[-1][output.dim]} if isinstance(output, S) and op.terms[-1][output.dim] in new else set()
        )
        local = {letter: 2 if letter in cut else 4 for letter in op.letters}
        try:
            parts = [
                compute(op4, [part(x, n, to, rank) for x, n, to in zip(whole, terms_of_sum, inputs)], local)
                for rank in range(2)
            ]
        except (RuntimeError, ValueError):
            return False  # sizes do not meet
        if output == B:
            found = parts[0] if torch.allclose(*parts) else None
        else:
            found = sum(parts) if output == P else torch.cat(parts, output.dim)
        return found is not None and found.shape == expected.shape and torch.allclose(found, expected)

    words = [[B, P, *map(S, range(len(term)))] for term in (*terms, op.terms[-1])]
    listed = {(one.inputs, one.output) for one in signatures(op)}
    right = {
        (inputs, output)
        for *inputs, output in itertools.product(*words)
        for inputs in [tuple(inputs)]
        if holds(inputs, output)
    }
    assert right == listed


# ---- boxes


def every_box():
    """From every spec to every spec, on three meshes: the largest error, and what was sent beside the formula."""
    found = []
    for axes in ({"x": 2, "y": 2}, {"x": 4}):
        groups, draw = groups_of(axes), torch.Generator().manual_seed(2)
        tensor = torch.randn(8, 12, dtype=torch.float64, generator=draw)
        specs = list(itertools.product([S(0), S(1), B, P], repeat=len(axes)))
        for source, target in itertools.product(specs, specs):
            part = local_part(tensor, source, groups)
            if P in source:  # terms that are not zero elsewhere
                axis = source.index(P)
                group = groups[list(axes)[axis]]
                part = part + (0.5 if group.rank() == 0 else -0.5 / (group.size() - 1))
            with Traffic() as ledger:
                got = box_along(part, source, target, groups)
            assert tuple(got.shape) == local_shape((8, 12), target, axes, "t")
            path = moves(source, target)
            planned = sent_along(path, source, tensor.numel(), tuple(axes.values()))
            calls = [event.op for event in ledger.events if isinstance(event, Issue)]
            assert calls == [op for _, *ends in path if (op := collective(*ends))]
            error = (whole(got, target, groups) - tensor).abs().max().item()
            found.append((str((axes, source, target)), error, ledger.sent_bytes(), sum(planned) * 8))
    return found


def test_every_box_ends_where_it_should_and_sends_what_the_formula_says():
    for same in zip(*launch.run(every_box, ranks=4)):
        name, planned = same[0][0], same[0][3]
        assert all(error < 1e-12 for _, error, _, _ in same), name
        assert sum(sent for _, _, sent, _ in same) == planned, name


def test_an_inner_cut_of_a_dim_is_gathered_before_the_outer_one_changes():
    said = [tuple(map(str, move)) for move in moves((S(0), S(0)), (B, S(0)))]
    assert said == [("1", "S(0)", "B"), ("0", "S(0)", "B"), ("1", "B", "S(0)")]
    assert [axis for axis, *_ in moves((S(0), S(1)), (B, S(1)))] == [0]
    three = moves((S(0), S(0), S(0)), (B, S(0), S(0)))  # the innermost first, and last again
    assert [(axis, str(target)) for axis, _, target in three] == [
        *((axis, "B") for axis in (2, 1, 0)),
        *((axis, "S(0)") for axis in (1, 2)),
    ]
    assert moves((S(0), S(0)), (S(0), S(1))) == [(1, S(0), S(1))]  # the outer one stays: none is gathered


def test_what_is_sent_of_a_table_and_along_a_path():
    """One row and column of it a place; a second move finds what the first has gathered."""
    places, t, p = (S(0), S(1), B, P), 12, 3
    found = {(a, b): (collective(a, b), plan.sent(a, b, t, p)) for a in places for b in places}
    said = {(a, b): (None, 0) for a in places for b in places}
    for cut, other in ((S(0), S(1)), (S(1), S(0))):
        said[cut, other] = "all_to_all", Fraction(p - 1, p) * t
        said[cut, B] = "all_gather", (p - 1) * t
        said[P, cut] = "reduce_scatter", (p - 1) * t
    assert found == said | {(P, B): ("all_reduce", 2 * (p - 1) * t)}
    path = moves((S(0), S(1)), (B, B))
    assert sent_along(path, (S(0), S(1)), 24, (2, 3)) == [3 * 1 * 24 // 3, 2 * 2 * 24]


# ---- random annotations


def draws(count, axes, seed):
    """Placed graphs: what is annotated, how, and who completes it is drawn."""
    random_ = random.Random(seed)
    graphs = [mlp_step(8, 4, 8), with_gradients(mlp(8, 8, 8), "y", ALL)[0]]
    while count:
        graph = random_.choice(graphs)
        names = random_.sample(list(graph.shapes), random_.randint(1, 5))
        annotations = {
            name: {axis: random_.choice([B, *map(S, range(len(graph.shapes[name])))]) for axis in axes}
            for name in names
        }
        try:
            if random_.random() < 0.5:
                placed = propagate(graph, axes, annotations)
            else:
                placed = choose(graph, axes, {n: tuple(p.values()) for n, p in annotations.items()})
        except ValueError as error:
            assert "is not a multiple" in str(error)
            continue
        count -= 1
        yield placed


def metered_run(placed, groups, values):
    """On this rank: the largest error against one process, bytes and calls by (collective, axis)."""
    expected = evaluate(placed.graph, values)
    parts = {name: local_part(x, placed.specs[name], groups) for name, x in values.items()}
    with Traffic() as ledger:
        results = run(placed, parts, groups)
    errors, sent, calls = [], Counter(), Counter()
    for name, x in results.items():
        error = (whole(x, placed.specs[name], groups) - expected[name]).abs().max().item()
        errors.append(error / (1 + expected[name].abs().max().item()))
    for event in ledger.events:
        if isinstance(event, Issue):
            sent[event.op, event.axis] += event.sent_bytes
            calls[event.op, event.axis] += 1
    return max(errors), sent, calls


def run_draws(count, axes, seed):
    groups = groups_of(axes)
    return [metered_run(p, groups, random_values(p.graph, seed)) for p in draws(count, axes, seed)]


@pytest.mark.parametrize(
    "axes", [{"x": 2}, pytest.param({"x": 4}, marks=pytest.mark.slow), {"x": 2, "y": 2}], ids=str
)
def test_random_annotations_equal_one_process_and_send_what_is_planned(axes):
    count, ranks = 24, 2 if axes == {"x": 2} else 4
    outcomes = launch.run(run_draws, count, axes, 7, ranks=ranks, timeout_s=120)
    kinds = Counter()
    for placed, found in zip(draws(count, axes, 7), zip(*outcomes)):
        assert all(error < 1e-12 for error, _, _ in found)
        total = Counter()
        for _, sent, calls in found:
            assert calls == placed.collectives()
            total.update(sent)
        assert total == {key: elements * 8 for key, elements in placed.sent_elements().items()}
        kinds.update(op for op, _ in placed.collectives())
    assert kinds.keys() == {"all_reduce", "all_gather", "reduce_scatter", "all_to_all"}, "drawn too few"


def pretend(op, x, group, dim=0):
    """In the place of a collective: the right shape, and nothing from anybody else."""
    if op == "all_gather":
        return torch.cat([x] * group.size(), dim)
    return x.chunk(group.size(), dim)[group.rank()] if op == "reduce_scatter" else x


def test_without_a_collective_it_fails():
    def rank():
        groups, pairs = groups_of({"x": 2}), [(P, B), (S(0), B), (P, S(1)), (S(0), S(1))]
        whole, errors = torch.arange(64.0, dtype=torch.float64).view(8, 8), {}
        for broken in (collective(*pair) for pair in pairs):
            real = getattr(collectives, broken)
            setattr(collectives, broken, partial(pretend, broken))
            for source, target in pairs:
                term = whole * (0.25 + 0.5 * groups["x"].rank())
                part = term if source == P else local_part(whole, (source,), groups)
                far = box(part, source, target, groups["x"]) - local_part(whole, (target,), groups)
                errors[broken, collective(source, target)] = far.abs().max().item()
            setattr(collectives, broken, real)
        return errors

    found = launch.run(rank, ranks=2)
    for broken, op in found[0]:
        assert (max(errors[broken, op] for errors in found) > 1e-3) == (op == broken), (broken, op)


def test_what_was_boxed_once_is_there_for_the_next_operator():
    """A weight that is kept cut is gathered in forward, and not again in backward."""
    graph, _ = with_gradients(mlp(8, 4, 8), "y", ALL)
    placed = propagate(graph, {"x": 2}, {"x": {"x": S(0)}, "w1": {"x": S(0)}, "h": {"x": S(0)}})
    uses = [op.name for op in graph.ops if "w1" in op.inputs]
    assert uses == ["h", "d_x"] and placed.collectives() == {("all_gather", "x"): 1, ("all_reduce", "x"): 2}
    gathers = [step for step in placed.program() if getattr(step, "tensor", None) == "w1"]
    assert [step.target for step in gathers] == [(B,)]
    assert placed.sent_elements()["all_reduce", "x"] == Fraction(2 * 1 * 2 * 32)  # d_w1 and d_w2


# ---- refusals


@pytest.mark.parametrize(
    "words, placed",
    {
        "4 along dim 1 of [8, 4] is no multiple of x=3": {"x": {"x": S(1)}},
        "has no dim 2 to cut over x": {"w1": {"x": S(2)}},
        "w1 is an input, and no sum over x": {"w1": {"x": P}},
    }.items(),
)
def test_what_cannot_be_placed_is_refused(words, placed):
    with pytest.raises(ValueError) as error:
        propagate(mlp(8, 4, 8), {"x": 3}, placed)
    assert words in str(error.value)
