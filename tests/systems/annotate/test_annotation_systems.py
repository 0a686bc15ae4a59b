"""Mesh-TensorFlow, GSPMD, OneFlow, PartIR on one engine: each completes what it is told, on ranks the result is that
of one process, and the ledger counts the collectives that the paper has."""

import math
from collections import Counter
from fractions import Fraction
from functools import partial

import pytest
import torch

from minitrain import collectives, launch
from minitrain.systems.annotate.annotators import Tactic, apply, choose, laid_out, propagate
from minitrain.systems.annotate.plan import BROADCAST as B
from minitrain.systems.annotate.plan import PARTIAL as P
from minitrain.systems.annotate.plan import Graph, Op, Placed, cut_along, mlp, sent, with_gradients
from minitrain.systems.annotate.plan import Split as S
from minitrain.systems.annotate.run_placed import box, local_part, whole
from tests.parallel import Traffic
from tests.systems.annotate.test_placed_graphs import groups_of, metered_run, mlp_step, pretend, random_values

ROWS, WIDTH, HIDDEN = 8, 4, 12
MLP = mlp(ROWS, WIDTH, HIDDEN)
WEIGHTS = ("w1", "w2")


def on_ranks(placed, without=None):
    """The largest error against one process and, over all ranks, bytes by (collective, axis); calls of a rank."""

    def rank():
        if without:
            setattr(collectives, without, partial(pretend, without))
        return metered_run(placed, groups_of(placed.axes), random_values(placed.graph))

    outcomes = launch.run(rank, ranks=math.prod(placed.axes.values()))
    total = sum((found[1] for found in outcomes), Counter())
    assert all(found[2] == placed.collectives() for found in outcomes) or without
    return max(found[0] for found in outcomes), dict(total), outcomes[0][2]


def planned_bytes(placed):
    return {key: elements * 8 for key, elements in placed.sent_elements().items()}


# ---- Mesh-TensorFlow


def test_mesh_tensorflow():
    """The layout batch -> row, hidden -> col on 2x2 gives the reference; two dims of a tensor on one axis are refused."""
    full, gradients = with_gradients(MLP, "y", WEIGHTS)
    placed = laid_out(full, {"row": 2, "col": 2}, {"b": "row", "f": "col"})
    assert {name: placed.specs[name] for name in ("x", "w1", "w2", "h", "y")} == {
        "x": (S(0), B), "w1": (B, S(1)), "w2": (B, S(0)), "h": (S(0), S(1)), "y": (S(0), B),
    }  # fmt: skip
    error, sent_bytes, calls = on_ranks(placed)
    assert error < 1e-12 and sent_bytes == planned_bytes(placed)
    assert calls == {("all_reduce", "col"): 1, ("all_reduce", "row"): 2}, "y, and gradients of both matrices"
    assert sent_bytes["all_reduce", "col"] == 2 * (2 - 1) * ROWS * WIDTH * 8
    assert on_ranks(placed, without="all_reduce")[0] > 1e-3
    with pytest.raises(ValueError) as refused:
        laid_out(MLP, {"row": 2, "col": 2}, {"b": "row", "f": "row"})
    assert str(refused.value) == ("illegal layout: h has b and f on row; move one")


@pytest.mark.parametrize(
    "axes, layout", [({"row": 4}, {"b": "row"}), ({"col": 4}, {"f": "col"}), ({"x": 2}, {"d": "x", "e": "x"})]
)
def test_one_rule_is_data_or_tensor_parallelism(axes, layout):
    """And cutting what a product sums over costs an all-reduce of its result."""
    placed = laid_out(MLP, axes, layout)
    error, sent_bytes, calls = on_ranks(placed)
    (axis,) = axes
    assert error < 1e-12 and sent_bytes == planned_bytes(placed)
    assert calls == ({} if "b" in layout else {("all_reduce", axis): 1})
    assert calls.keys() <= {("all_reduce", axis)}


def test_a_layout_that_means_nothing_is_refused():
    square = Graph(
        {"x": (4, 4), "w": (4, 4)},
        (Op("h", "product", "ab,bc->ac", ("x", "w")), Op("y", "product", "ab,bc->ac", ("h", "w"))),
    )
    outer = Graph({"x": (4,), "w": (4,)}, (Op("y", "product", "a,b->", ("x", "w")),))
    with pytest.raises(ValueError, match="h has the dims 'ac', in y 'ab'"):
        laid_out(square, {"x": 2}, {})
    with pytest.raises(ValueError, match="y sums over a and b on row"):
        laid_out(outer, {"row": 2}, {"a": "row", "b": "row"})


# ---- GSPMD


def test_gspmd():
    """X's rows and W1's columns are annotated: W2 is cut by rows, there is one all-reduce, and y is that of one process."""
    test_what_leaves_dims_as_they_are_goes_first_and_the_cheaper_letter_wins()
    placed = propagate(MLP, {"axis0": 2, "axis1": 2}, {"x": {"axis0": S(0)}, "w1": {"axis1": S(1)}})
    assert placed.specs["w2"] == (B, S(0)) and placed.specs["a"] == (S(0), S(1))
    error, sent_bytes, calls = on_ranks(placed)
    assert error < 1e-12 and calls == {("all_reduce", "axis1"): 1}
    assert sent_bytes == planned_bytes(placed) == {("all_reduce", "axis1"): 2 * 1 * ROWS * WIDTH * 8}
    assert on_ranks(placed, without="all_reduce")[0] > 1e-3


def test_annotations_stay_and_axes_that_they_do_not_name_are_open():
    closed = {"x": {"axis0": S(0)}, "w1": {"axis0": B, "axis1": S(1)}, "w2": {"axis1": B}}
    placed = propagate(MLP, {"axis0": 2, "axis1": 2}, closed)
    assert placed.specs["w2"] == (B, B) and placed.specs["x"] == (S(0), B)
    assert placed.chosen["y"][1].letter == "f", "a slice of what is whole is free"
    assert propagate(MLP, {"axis0": 2}, {"y": {"axis0": S(0)}}).specs["x"] == (S(0),), "backwards too"


def test_a_result_may_be_annotated_as_a_sum_that_nobody_adds():
    columns = {"w1": {"model": S(1)}}
    added = propagate(MLP, {"model": 2}, columns)
    left = propagate(MLP, {"model": 2}, columns | {"y": {"model": P}})
    assert added.collectives() == {("all_reduce", "model"): 1} and left.collectives() == {}
    assert left.specs["y"] == (P,)


def test_what_leaves_dims_as_they_are_goes_first_and_the_cheaper_letter_wins():
    """h is wanted by rows and y by columns: relu takes its operand's cut first; then y's product can go on by rows of a,
    which is large, or gather it."""
    placed = propagate(MLP, {"x": 2}, {"h": {"x": S(0)}, "y": {"x": S(1)}})
    assert placed.specs["a"] == (S(0),) and placed.chosen["y"][0].letter == "b"
    assert placed.collectives() == {("all_to_all", "x"): 1}
    small = propagate(mlp(2, 8, 2), {"x": 2}, {"x": {"x": S(0)}, "w1": {"x": S(0)}, "h": {"x": B}})
    assert small.chosen["h"][0].letter == "d", "x is smaller than w1, so x changes"
    late = propagate(MLP, {"x": 2}, {"x": {"x": S(0)}, "a": {"x": S(1)}})
    assert late.specs["h"] == (S(1),), "relu says so before the product, which stands in front of it"


# ---- OneFlow

TABLE_2 = {  # source, target: of p devices and T elements, what the paper says is sent
    (S(0), S(0)): lambda p, T: 0,
    (S(0), S(1)): lambda p, T: Fraction(p - 1, p) * T,
    (S(0), B): lambda p, T: (p - 1) * T,
    (S(0), P): lambda p, T: 0,
    (B, S(0)): lambda p, T: 0,
    (B, B): lambda p, T: 0,
    (B, P): lambda p, T: 0,
    (P, S(0)): lambda p, T: (p - 1) * T,
    (P, B): lambda p, T: 2 * (p - 1) * T,
    (P, P): lambda p, T: 0,
}


def boxed_for_table_2():
    groups, metered = groups_of({"x": collectives.world().size()}), []
    tensor = torch.arange(96.0, dtype=torch.float64).view(8, 12)
    for source, target in TABLE_2:
        part = local_part(tensor, (source,), groups)
        with Traffic() as ledger:
            got = box(part, source, target, groups["x"])
        back = whole(got, (target,), groups)
        metered.append((ledger.sent_bytes(), (back - tensor).abs().max().item()))
    return metered


@pytest.mark.parametrize("ranks", [2, 4])
def test_oneflow_sbp(ranks):
    """What the ledger meters for every row of table 2, over all ranks, is the paper's formula; the tensor is the same."""
    outcomes = launch.run(boxed_for_table_2, ranks=ranks)
    for (source, target), formula, *metered in zip(TABLE_2, TABLE_2.values(), *outcomes):
        total = sum(sent_bytes for sent_bytes, _ in metered)
        assert total == formula(ranks, 96) * 8 == sent(source, target, 96, ranks) * 8, (source, target)
        assert max(error for _, error in metered) < 1e-12
    test_terms_of_a_sum_are_added_once_and_late(ranks)  # the signature that is cheapest to reach


CHAIN = Graph(
    {"u": (8, 8), "v": (8, 8), "w": (8, 4)},
    (Op("z", "product", "ab,bc->ac", ("u", "v")), Op("y", "product", "ab,bc->ac", ("z", "w"))),
)


@pytest.mark.parametrize("ranks", [2, 4])
def test_terms_of_a_sum_are_added_once_and_late(ranks):
    """u · v is P, which the product with w takes as it is: y, half as large as u · v, is what is added."""
    given = {"u": (S(1),), "v": (S(0),)}
    lazy = choose(CHAIN, {"x": ranks}, {**given, "y": (B,)})
    at_once = propagate(CHAIN, {"x": ranks}, {name: {"x": to[0]} for name, to in given.items()})
    assert lazy.specs["z"] == (P,) and lazy.chosen["y"][0] == ((P, B), P, None)
    assert choose(CHAIN, {"x": ranks}, given).specs["y"] == (P,), "nobody asked for more"
    sums = {}
    for name, placed in (("lazy", lazy), ("at once", at_once)):
        error, sent_bytes, calls = on_ranks(placed)
        assert error < 1e-12 and calls == {("all_reduce", "x"): 1} and sent_bytes == planned_bytes(placed)
        sums[name] = sent_bytes["all_reduce", "x"]
    assert sums == {"lazy": 2 * (ranks - 1) * 32 * 8, "at once": 2 * (ranks - 1) * 64 * 8}


def test_what_is_not_linear_takes_no_terms():
    """The terms are added for relu, in the cheaper of two ways: a reduce-scatter."""
    graph = Graph({"u": (8, 8), "v": (8, 8)}, (CHAIN.ops[0], Op("r", "relu", "ab->ab", ("z",))))
    placed = choose(graph, {"x": 2}, {"u": (S(1),), "v": (S(0),)})
    assert placed.specs == {"u": (S(1),), "v": (S(0),), "z": (P,), "r": (S(0),)}
    assert placed.collectives() == {("reduce_scatter", "x"): 1} and on_ranks(placed)[0] < 1e-12


def test_of_equal_costs_fewer_operands_change_and_no_slice_becomes_a_term():
    """On two ranks one gather costs what two exchanges cost; to call a slice a term of a sum is free, and puts it off."""
    graph = Graph(
        {"u": (8, 8), "v": (8, 8)},
        (Op("y", "product", "db,df->bf", ("u", "v")), Op("s", "add", "ab,ab->ab", ("u", "v"))),
    )
    one, other = (choose(graph, {"x": 2}, {"u": (S(dim),), "v": (S(1),)}) for dim in (1, 0))
    assert one.chosen["y"][0].letter == "b" and one.collectives() == {("all_gather", "x"): 1}
    assert other.chosen["s"][0].letter == "a" and other.specs["s"] == (S(0),)


def test_what_an_operator_made_is_there_beside_what_is_kept():
    """h is made by rows and kept by columns; relu asks for rows, and nothing travels back."""
    graph = Graph(MLP.inputs, MLP.ops[:2])
    by_rows = {op.name: (cut_along(op, "b"),) for op in graph.ops}
    specs = {"x": (S(0),), "w1": (B,), "w2": (B,), "h": (S(1),), "a": (S(0),)}
    placed = Placed(graph, {"x": 2}, specs, by_rows)
    assert placed.collectives() == {("all_to_all", "x"): 1} and on_ranks(placed)[0] < 1e-12


# ---- PartIR

SCHEDULE = [
    Tactic("BP", "batch", {"x": 0}),
    Tactic("MP", "model", {"w1": 1}),
    Tactic("Z3", "batch", {"w1": 0, "w2": 1}),
]
AFTER = {
    "BP": {("all_reduce", "batch"): 2},
    "MP": {("all_reduce", "batch"): 2, ("all_reduce", "model"): 1},
    "Z3": {("all_gather", "batch"): 2, ("reduce_scatter", "batch"): 2, ("all_reduce", "model"): 1},
}


def test_partir():
    """A training step of the MLP after each tactic: the ledger's calls are the expected list, the new parameters those
    of one process."""
    step = mlp_step(ROWS, WIDTH, HIDDEN)
    for tactic, placed in zip(SCHEDULE, apply(step, {"batch": 2, "model": 2}, SCHEDULE), strict=True):
        error, sent_bytes, calls = on_ranks(placed)
        assert calls == AFTER[tactic.name], tactic.name
        assert error < 1e-12 and sent_bytes == planned_bytes(placed), tactic.name
    assert placed.specs["w1"] == placed.specs["w1_new"] == (S(0), S(1))
    assert placed.specs["w2"] == placed.specs["w2_new"] == (S(1), S(0))
    for collective in ("all_reduce", "all_gather", "reduce_scatter"):
        assert on_ranks(placed, without=collective)[0] > 1e-3, collective


def test_the_order_of_tactics_decides():
    """Behind BP, Z3 finds h and y cut by rows and gathers matrices for them; before it, h is cut along what it sums over."""
    usual, reverse = ([*apply(MLP, {"batch": 2}, order)][-1] for order in (SCHEDULE[::2], SCHEDULE[2:]))
    assert usual.collectives() == {("all_gather", "batch"): 2} and usual.chosen["h"][0].letter == "b"
    assert reverse.collectives() == {("all_reduce", "batch"): 1} and reverse.chosen["h"][0].letter == "d"
    with pytest.raises(ValueError, match="tactic BP: x is placed on batch; name another"):
        [*apply(MLP, {"batch": 2}, [SCHEDULE[2], SCHEDULE[0]])]
