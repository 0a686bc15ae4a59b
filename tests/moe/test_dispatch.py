"""Experts over ranks equal a loop over tokens in one process, and send what the routing table says, row by row."""

from dataclasses import replace
from functools import cache

import pytest
import torch
import torch.nn.functional as F

from minitrain import collectives, launch
from minitrain.moe import experts, router
from minitrain.moe.dispatch import Dispatch
from tests.moe.by_token import by_token, experts_of, grads_of, joined, loss_of, numbers, tokens_of
from tests.parallel import Traffic

N, D, WIDE, E = 42, 6, 10, 8
mask = torch.arange(N) % 4 != 1


def only(expert):
    """All tokens on one expert."""
    return lambda s, part: router.switch(s + 50.0 * F.one_hot(torch.tensor(expert), E).to(s.dtype))


def without(expert):
    """An expert that nobody visits."""
    return lambda s, part: router.top_k(s - 50.0 * F.one_hot(torch.tensor(expert), E).to(s.dtype), 2)


CASES = {
    "top-2": lambda s, part: router.top_k(s, 2),
    "masked": lambda s, part: router.top_k(s, 3, mask[part]),
    "nobody": lambda s, part: router.top_k(s, 2, torch.zeros(len(s), dtype=torch.bool)),
    "an expert without tokens": without(3),
    "all on one expert": only(5),
    "few nodes": lambda s, part: router.deepseek(s, 4, torch.zeros(E).to(s), nodes=4, node_limit=2),
    "a place that is dropped": lambda s, part: router.top_k(s, 2).without(
        (torch.arange(N)[part] % 3 == 0)[:, None]
    ),
}


def drawn():
    return numbers((N, D), (D, E), (E, D, WIDE), (E, WIDE, D))


@cache
def one_process(case):
    """(y, gradients of x, router, up, down)"""
    tensors = x, gate, up, down = [tensor.requires_grad_() for tensor in drawn()]
    y = by_token(x, up, down, CASES[case](x @ gate, slice(None)))
    loss_of(y).backward()
    return y.detach(), *grads_of(*tensors)


def on_a_rank(case, work, wrong=""):
    group = collectives.world()
    rank, ranks = group.rank(), group.size()
    part, own = tokens_of(N, rank, ranks), experts_of(E, rank, ranks)
    x, gate, up, down = drawn()
    x, gate, up, down = (t.clone().requires_grad_() for t in (x[part], gate, up[own], down[own]))
    routing = CASES[case](x @ gate, part)
    with Traffic() as ledger:
        way = Dispatch(routing, group)
        rows = way.there(x)
        y = getattr(experts, work)(rows, way.counts, up, down)
        if wrong == "no inverse permutation":
            way.order = torch.arange(len(rows))
        y = way.back(y, routing.weights * (routing.weights if wrong == "weights applied twice" else 1))
        loss_of(y).backward()
    grads = grads_of(x, gate, up, down)
    if wrong == "expert gradients summed over ep":
        grads[2] = collectives.all_reduce(grads[2], group)
    table = torch.tensor([(routing.experts // (E // ranks) == r).sum() for r in range(ranks)])
    return y.detach(), *grads, ledger.sent_bytes(), table, way.counts


def check_sizes_known_in_advance():
    """Of unequal experts, 2 tokens or 1: what is counted on a rank is what its routing knows."""
    group, routing = collectives.world(), router.balanced(torch.zeros(5, E), 2, torch.arange(5)[None])
    known = replace(routing, sizes=(2, 2, 1, 1, 1, 1, 1, 1))
    counted, told = (Dispatch(one, group) for one in (routing, known))
    assert told.sizes == counted.counts.tolist() == told.counts.tolist() and counted.sizes is None
    assert (told.send_sizes, told.receive_sizes) == (counted.send_sizes, counted.receive_sizes)


def all_cases():
    check_sizes_known_in_advance()
    return {(case, work): on_a_rank(case, work) for case in CASES for work in ("loop", "padded")}


@cache
def launched(ranks):
    return launch.run(all_cases, ranks=ranks)


@pytest.mark.parametrize("work", ["loop", "padded"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_equals_a_loop_over_tokens_in_one_process(ranks, case, work):
    outcomes = [rank[case, work] for rank in launched(ranks)]
    for found, wanted in zip(joined(outcomes), one_process(case), strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_bytes_are_the_routing_table_times_the_width(ranks, case):
    """Rows there, results back, and both again in backward; the table itself crosses once."""
    outcomes = [rank[case, "loop"] for rank in launched(ranks)]
    table = torch.stack([outcome[6] for outcome in outcomes])  # [rank, rank]: rows from one to the other
    away = table * (1 - torch.eye(ranks, dtype=torch.long))
    for rank, outcome in enumerate(outcomes):
        rows = 2 * away[rank].sum() + 2 * away[:, rank].sum()
        assert outcome[5] == int(rows) * D * 8 + (ranks - 1) * (E // ranks) * 8
        assert outcome[7].sum() == table[:, rank].sum()


@pytest.mark.parametrize(
    "wrong", ["no inverse permutation", "weights applied twice", "expert gradients summed over ep"]
)
def test_mistakes_are_seen(wrong):
    outcomes = launch.run(on_a_rank, "top-2", "loop", wrong, ranks=2)
    pairs = zip(joined(outcomes), one_process("top-2"))
    assert max((found - wanted).abs().max() for found, wanted in pairs) > 1e-3


def test_rows_leave_by_expert_then_by_token():
    routing = router.top_k(drawn()[0] @ drawn()[1], 3, mask)
    way = Dispatch(routing)
    rows = list(zip(routing.experts.flatten()[way.choices].tolist(), way.tokens.tolist()))
    assert rows == sorted(rows) and len(rows) == 3 * int(mask.sum())
    assert Dispatch(replace(router.top_k(drawn()[0] @ drawn()[1], 3), sizes=(9,) * E)).sizes == [9] * E
