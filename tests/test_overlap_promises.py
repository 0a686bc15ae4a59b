"""What docstrings promise to be under way while something is computed, by the order of the ledger's events.

A call is hidden if a product is computed between its issue and its wait. Counted are the calls of an operation,
how many are hidden, and how many are under way at once at most; one launch runs all techniques on two ranks.
"""

from functools import cache

import torch
from torch import nn

from minitrain import collectives, launch
from minitrain.context.layout import zigzag
from minitrain.context.ring import flat_ring, ring_attention
from minitrain.data_parallel.bucketed import GradReducer
from minitrain.data_parallel.hybrid import Hybrid
from minitrain.data_parallel.zero1 import Zero1
from minitrain.data_parallel.zero2 import Zero2
from minitrain.data_parallel.zero3 import Zero3
from minitrain.ranks.events import Compute, Issue, Wait
from minitrain.ranks.launch import dryrun
from minitrain.ranks.ledger import Ledger
from minitrain.ranks.mesh import Mesh
from minitrain.systems.data_parallel.zeropp import ZeroPlusPlus
from minitrain.tensor_parallel import sequence

LAYERS, WIDTH = 6, 16


def counts(ledger, axis=None):
    """{operation: (calls, hidden calls, most at once)}, of all axes of the mesh or of one."""
    begun, products, found, under_way = {}, 0, {}, {}
    for event in ledger.events:
        if isinstance(event, Compute):
            products += event.flops > 0
        elif isinstance(event, Issue) and axis in (None, event.axis):
            op = "message" if event.op in ("send", "receive") else event.op
            begun[event.id] = op, products
            under_way[op] = under_way.get(op, 0) + 1
            calls, hidden, most = found.get(op, (0, 0, 0))
            found[op] = calls + 1, hidden, max(most, under_way[op])
        elif isinstance(event, Wait) and event.id in begun:
            op, before = begun.pop(event.id)
            under_way[op] -= 1
            calls, hidden, most = found[op]
            found[op] = calls, hidden + (products > before), most
    return found


def layers():
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.float64) for _ in range(LAYERS)))


def of_data_parallel(make, frozen=()):
    """A forward and backward of layers of a bucket or unit each, then the sums and the update: their account."""
    model = layers()
    for number in frozen:
        model[number].weight.requires_grad_(False)
    reducer = make(model, collectives.world(), lambda shards: torch.optim.SGD(shards, lr=0.1))
    x = torch.ones(3, WIDTH, dtype=torch.float64, requires_grad=True)
    with Ledger() as ledger:
        model(x).sum().backward()
        reducer.finish()
        if hasattr(reducer, "step"):
            reducer.step()
    gathered = max(live["gathered parameters"] for _, live in ledger.timeline(gathered=True))
    return counts(ledger), gathered // (WIDTH * WIDTH * 8)


BUCKET = WIDTH * WIDTH * 8
DATA_PARALLEL = {
    "bucketed": lambda model, group, _: GradReducer(model.parameters(), group, BUCKET),
    "zero1": lambda *args: Zero1(*args, BUCKET), "zero2": lambda *args: Zero2(*args, BUCKET),
    "zero3": Zero3, "zero3, later": lambda *args: Zero3(*args, reshard=False),
    "zero3, no prefetch": lambda *args: Zero3(*args, prefetch=False),
}  # fmt: skip


def of(forward, *tensors):
    """The accounts of a forward and of its backward."""
    inputs = [tensor.requires_grad_() for tensor in tensors]
    with Ledger() as first:
        y = forward(*inputs)
    with Ledger() as second:
        y.sum().backward()
    return counts(first), counts(second)


@cache
def found():
    def rank():
        group, double = collectives.world(), dict(dtype=torch.float64)
        cases = {name: of_data_parallel(make) for name, make in DATA_PARALLEL.items()}
        cases["zero3, frozen"] = of_data_parallel(Zero3, frozen=(1, 2, 3, 4))
        q, k, v = (torch.randn(1, 2, 8, 4, **double) for _ in range(3))
        with Ledger() as ledger:
            flat_ring(q, k, v, group)
        cases["flat ring"] = (counts(ledger),)
        cases["ring"] = of(
            lambda *qkv: ring_attention(*qkv, group=group, layout=zigzag, causal=False), q, k, v
        )
        return cases

    return launch.run(rank, ranks=2)


def test_gradients_travel_while_backward_goes_on():
    """All but the last, for which nothing is left to compute; of ZeRO-2 and ZeRO-3 one at a time."""
    for cases in found():
        assert cases["bucketed"][0] == {"all_reduce": (LAYERS, LAYERS - 1, LAYERS)}
        together = {"all_gather": (LAYERS, 0, LAYERS)}  # the new weights
        assert cases["zero1"][0] == {"reduce_scatter": (LAYERS, LAYERS - 1, LAYERS)} | together
        assert cases["zero2"][0] == {"reduce_scatter": (LAYERS, LAYERS - 1, 1)} | together
        for name in ("zero3", "zero3, later", "zero3, no prefetch"):
            assert cases[name][0]["reduce_scatter"] == (LAYERS, LAYERS - 1, 1)


def test_the_next_unit_comes_while_this_one_computes():
    """All but the first of each pass; two units are whole at once, frozen ones too."""
    for cases in found():
        assert cases["zero3"][0]["all_gather"] == (2 * LAYERS, 2 * LAYERS - 2, 1) and cases["zero3"][1] == 2
        assert cases["zero3, later"][0]["all_gather"] == (LAYERS, LAYERS - 1, 1)
        assert cases["zero3, no prefetch"][0]["all_gather"] == (2 * LAYERS, 0, 1)
        assert cases["zero3, no prefetch"][1] == 1 and cases["zero3, frozen"][1] == 2


def test_keys_travel_while_others_are_looked_at():
    for cases in found():
        assert cases["flat ring"][0]["message"] == (4, 4, 4)
        assert [counted["message"][:2] for counted in cases["ring"]] == [(4, 4), (8, 4)]


# ---- in dry runs -----------------------------------------------------------------------------------------


def step(zero, model, microbatches=1):
    """The account of a forward and backward of each microbatch, and of the sums."""
    with Ledger() as ledger:
        for number in range(microbatches):
            zero.enabled = number == microbatches - 1
            model(torch.ones(3, WIDTH, dtype=torch.float64)).sum().backward()
        zero.finish()
    return ledger


def sgd(shards):
    return torch.optim.SGD(shards, lr=0.1)


def test_what_crosses_nodes_comes_ahead_of_its_layer():
    """Of a whole that is cut over all ranks; inside the node the rest is gathered when the layer needs it. In
    ZeRO++ that goes when it is called, and only the node's own copy comes ahead, in backward."""

    def rank(make):
        mesh, model = Mesh(inter=2, intra=2), layers()
        ledger = step(make(model, mesh.group("inter"), mesh.group("intra")), model)
        return [counts(ledger, axis).get("all_gather") for axis in ("inter", "intra")]

    def hybrid(model, inter, intra):
        return Hybrid(model, intra, inter, sgd, "GGG")

    def plus_plus(model, inter, intra):
        return ZeroPlusPlus(model, collectives.world(), intra, inter, sgd, block=8)

    assert dryrun.run(rank, hybrid, ranks=4) == [(2 * LAYERS, 2 * LAYERS - 2, 1), (2 * LAYERS, 0, 1)]
    across, inside = dryrun.run(rank, plus_plus, ranks=4)
    assert across == (LAYERS, 0, 1) and inside == (2 * LAYERS, LAYERS - 1, 1)


def test_every_microbatch_gathers_anew():
    def rank(microbatches, **how):
        model = layers()
        ledger = step(Zero3(model, collectives.world(), sgd, **how), model, microbatches)
        return [counts(ledger)[op][0] // LAYERS for op in ("all_gather", "reduce_scatter")]

    for m in (1, 3):
        found = [dryrun.run(lambda how: rank(m, **how), how, ranks=2) for how in ({}, dict(reshard=False))]
        assert found == [[2 * m, m], [m, m]]


def test_a_tied_weight_is_gathered_for_each_use_forward_and_once_backward():
    def rank():
        model = layers()
        model[-1].weight = model[0].weight
        with Ledger() as ledger:
            zero = Zero3(model, collectives.world(), sgd)
            y = model(torch.ones(3, WIDTH, dtype=torch.float64)).sum()
            forward = ledger.num_calls("all_gather")
            y.backward()
            zero.finish()
        most = max(live["gathered parameters"] for _, live in ledger.timeline(gathered=True))
        return forward, ledger.num_calls("all_gather") - forward, most / BUCKET

    assert dryrun.run(rank, ranks=2) == (LAYERS, LAYERS - 1, 3)  # in backward with a unit in use and the next


def test_meanwhile_something_else_is_computed():
    """While pieces of a blocking all-to-all travel, forward and backward."""

    def rank():
        x, weight = torch.ones(4, 4), torch.ones(4, 4)
        products = []

        def meanwhile():
            products.append(weight @ weight)

        found = []
        for way in (None, meanwhile):
            with Ledger() as ledger:
                y = collectives.all_to_all(x.requires_grad_(), collectives.world(), meanwhile=way)
                y.sum().backward()
            found.append(counts(ledger)["all_to_all"])
        return found, len(products)

    assert dryrun.run(rank, ranks=2) == ([(2, 0, 1), (2, 2, 1)], 2)


def test_sequence_parallelism_gathers_again_and_scatters_behind_products():
    def rank():
        x, dy, weight = torch.ones(1, 4, 8), torch.ones(1, 8, 6), torch.ones(6, 8)
        with Ledger() as ledger:
            sequence.column_backward([dy, dy], x, [weight, weight], [True, True], collectives.world())
        return counts(ledger)

    assert dryrun.run(rank, ranks=2) == {"all_gather": (1, 1, 1), "reduce_scatter": (1, 1, 1)}
