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
from minitrain.data_parallel.zero1 import Zero1
from minitrain.data_parallel.zero2 import Zero2
from minitrain.data_parallel.zero3 import Zero3
from minitrain.ledger import Ledger
from minitrain.simulate.events import Compute, Issue, Wait

LAYERS, WIDTH = 6, 16


def counts(ledger):
    """{operation: (calls, hidden calls, most at once)}"""
    begun, products, found, under_way = {}, 0, {}, {}
    for event in ledger.events:
        if isinstance(event, Compute):
            products += event.flops > 0
        elif isinstance(event, Issue):
            op = "message" if event.op in ("send", "receive") else event.op
            begun[event.id] = op, products
            under_way[op] = under_way.get(op, 0) + 1
            calls, hidden, most = found.get(op, (0, 0, 0))
            found[op] = calls + 1, hidden, max(most, under_way[op])
        elif isinstance(event, Wait):
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
    "zero1": lambda *args: Zero1(*args, BUCKET),
    "zero2": lambda *args: Zero2(*args, BUCKET),
    "zero3": Zero3,
    "zero3, later": lambda *args: Zero3(*args, reshard=False),
    "zero3, no prefetch": lambda *args: Zero3(*args, prefetch=False),
}


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
