"""Dispatch over nodes equals the flat one, and sends each token to each of its nodes once."""

from functools import cache, partial

import pytest
import torch
import torch.nn.functional as F

from minitrain import collectives, launch
from minitrain.model.config import ExpertsConfig, GPTConfig, presets
from minitrain.moe import experts, router
from minitrain.moe.dispatch import Dispatch
from minitrain.moe.router import NOWHERE
from minitrain.plan.strategy import Strategy
from minitrain.ranks.collectives import transport
from minitrain.ranks.events import Issue, Wait
from minitrain.ranks.mesh import Mesh
from minitrain.systems.moe.two_level import TwoLevelDispatch, TwoLevels, copies, two_level_all_to_all
from tests.moe.by_token import experts_of, grads_of, numbers, tokens_of
from tests.parallel import Traffic

N, D, WIDE, E = 24, 6, 10, 8
GRIDS = {2: ((1, 2), (2, 1)), 4: ((2, 2), (4, 1))}  # nodes, ranks in each
mask = torch.arange(N) % 4 != 1


def limited(nodes):
    return lambda s, part: router.deepseek(s, 2 * nodes, torch.zeros(E).to(s), nodes=4, node_limit=nodes)


CASES = {
    "top-4": lambda s, part: router.top_k(s, 4), "masked": lambda s, part: router.top_k(s, 3, mask[part]),
    "nobody": lambda s, part: router.top_k(s, 2, torch.zeros(len(s), dtype=torch.bool)),
    "all on one expert": lambda s, part: router.switch(s + 50.0 * F.one_hot(torch.tensor(5), E).to(s.dtype)),
    "two nodes of four": limited(2), "one node of four": limited(1),
    "all 8 experts": lambda s, part: router.top_k(s, 8),
    "dropped": lambda s, part: router.top_k(s, 2).within(3),
}  # fmt: skip


def step(make, case, group, wrong=""):
    """y and gradients of x, router, up, down of this rank; and the routing."""
    x, gate, up, down = (t / 2 for t in numbers((N, D), (D, E), (E, D, WIDE), (E, WIDE, D)))
    rank, ranks = group.rank(), group.size()
    part, own = tokens_of(N, rank, ranks), experts_of(E, rank, ranks)
    leaves = [t.clone().requires_grad_() for t in (x[part], gate, up[own], down[own])]
    x, gate, up, down = leaves
    routing = CASES[case](x @ gate, part)
    if isinstance(make, TwoLevels):
        y = make(x, routing, lambda rows, counts, sizes: experts.grouped(rows, counts, up, down))
    else:
        way = make(routing)
        y = experts.grouped(way.there(x), way.counts, up, down)
        if wrong == "sums come home in another order":
            way.tokens = way.tokens.flip(0)
        y = way.back(y, routing.weights)
    (y * torch.linspace(1, 2, D, dtype=y.dtype)).square().sum().backward()
    return [y.detach(), *grads_of(*leaves)], routing.experts


def largest(found, wanted):
    return max((a - b).abs().max().item() for a, b in zip(found, wanted, strict=True) if a.numel())


def meanwhile(events):
    """How many times something leaves inside the node while rows are between nodes."""
    times, crossing = 0, set()
    for event in events:
        if isinstance(event, Issue) and event.axis == "node":
            crossing.add(event.id)
        elif isinstance(event, Issue) and event.axis == "place":
            times += bool(crossing)
        crossing.discard(event.id if isinstance(event, Wait) else None)
    return times


def on_a_rank(wrong=""):
    group, outcomes = collectives.world(), {}
    for nodes, size in GRIDS[group.size()]:
        mesh = Mesh(node=nodes, place=size)
        across, inside = mesh.group("node"), mesh.group("place")
        for case in ["top-4"] if wrong else CASES:
            flat, chosen = step(lambda routing: Dispatch(routing, group), case, group)
            turns = []
            way = partial(TwoLevelDispatch, across=across, inside=inside, meanwhile=partial(turns.append, 1))
            with Traffic() as ledger:
                found, _ = step(way, case, group, wrong)
            outcomes["turns", nodes, size, case] = len(turns)
            with Traffic() as again:
                parts, _ = step(TwoLevels(across, inside, parts=3), case, group)
            beside = meanwhile(again.events), meanwhile(ledger.events)
            outcomes["parts", nodes, size, case] = largest(parts, flat), again.sent_bytes(axis="node"), beside
            differs = largest(found, flat)
            outcomes[nodes, size, case] = differs, chosen, ledger.sent_bytes(axis="node"), mesh.rank("node")
    return outcomes


@cache
def launched(ranks):
    return launch.run(on_a_rank, ranks=ranks)


def in_parts_the_levels_overlap_and_the_same_travels(ranks, case):
    """But for the counts of two more parts, a number for each other node."""
    for nodes, size in GRIDS[ranks]:
        for rank in launched(ranks):
            (differs, sent, beside), whole = rank["parts", nodes, size, case], rank[nodes, size, case]
            assert differs < 1e-12 and sent == whole[2] + 2 * 8 * (nodes - 1)
            assert beside == (8, 0), "of three parts' six ways inside forward, and six backward"


def test_something_else_is_done_while_rows_and_gradients_cross_each_way():
    turns = [n for ranks in GRIDS for rank in launched(ranks) for key, n in rank.items() if key[0] == "turns"]
    assert len(turns) == (2 + 4) * 2 * len(CASES) and set(turns) == {4}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("ranks", GRIDS)
def test_cross_node_a2a(ranks, case):
    """What crosses is a copy per (token, other node), and one row back, from the routing table itself: at most 4 of a
    token that visits 8 experts. The result is that of the flat all-to-all. In parts the levels work side by side."""
    in_parts_the_levels_overlap_and_the_same_travels(ranks, case)
    for nodes, size in GRIDS[ranks]:
        outcomes = [rank[nodes, size, case] for rank in launched(ranks)]
        assert max(differs for differs, *_ in outcomes) < 1e-12
        k = outcomes[0][1].shape[1]
        table = torch.zeros(ranks, nodes, dtype=torch.long)  # [rank, node]: copies
        for rank, (_, chosen, _, _) in enumerate(outcomes):
            for choices in chosen:
                for node in {int(e) // (E // nodes) for e in choices if e != NOWHERE}:
                    table[rank, node] += 1
        for rank, (_, chosen, sent, own) in enumerate(outcomes):
            leave = int(table[rank].sum() - table[rank, own])
            same_place = table[rank % size :: size]
            arrive = int(same_place[:, own].sum() - table[rank, own])
            rows = (leave + arrive + arrive + leave) * D  # there, back, and the gradients of both
            notes = leave * k + leave * k + arrive * k  # experts, weights, gradients of the weights
            assert sent == (rows + notes + nodes - 1) * 8
        if case.endswith("of four") and nodes == 4:
            copies = {"two": 2, "one": 1}[case.split()[0]]
            assert table.sum(1).tolist() == [copies * N // 2 // (3 if r else 1) for r in range(4)]
        if case == "all 8 experts":
            assert k == 8 and int(table.sum()) == N * nodes, "8 rows of a token in the flat one"


def test_mistakes_are_seen():
    outcomes = launch.run(on_a_rank, "sums come home in another order", ranks=2)
    assert max(rank[2, 1, "top-4"][0] for rank in outcomes) > 1e-3


# ---- the even all-to-all ---------------------------------------------------------------------------------


def messages_of(work):
    """(result, [(global rank, bytes) of each message this rank sends])."""
    sent, post = [], transport.post_send

    def counted(ch, call, tensor, to, tag):
        if call is not None:  # a header that checked mode compares
            sent.append((ch.members[to], tensor.nbytes))
        return post(ch, call, tensor, to, tag)

    transport.post_send = counted
    try:
        return work(), sent
    finally:
        transport.post_send = post


def all_to_all_on_a_rank():
    group, mesh = collectives.world(), Mesh(node=2, place=2)
    across, inside = mesh.group("node"), mesh.group("place")
    x = torch.randn(12, 5, 2, generator=torch.Generator().manual_seed(group.rank()))
    flat, plain = messages_of(lambda: collectives.all_to_all(x, group))
    ours, levels = messages_of(lambda: two_level_all_to_all(x, across, inside))
    leaf = x.clone().requires_grad_()
    back = two_level_all_to_all(two_level_all_to_all(leaf, across, inside), across, inside)
    (back * x).sum().backward()
    others = [rank for rank in range(4) if rank // 2 != group.rank() // 2]
    beyond = [[size for to, size in sent if to in others] for sent in (plain, levels)]
    with pytest.raises(ValueError, match="2 nodes of 2 ranks need a multiple"):
        two_level_all_to_all(x[:6], across, inside)
    within = sum(size for to, size in levels if to not in others)
    adjoint = torch.equal(back, x) and torch.equal(leaf.grad, x)
    return torch.equal(flat, ours), adjoint, beyond, within, x.nbytes


def test_two_level_all_to_all():
    """The same bits; between nodes n/g - 1 messages g times as large in place of n - g."""
    n, g = 4, 2
    for same, adjoint, (flat, two_level), within, size in launch.run(all_to_all_on_a_rank, ranks=n):
        assert same and adjoint and flat == [size // n] * (n - g)
        assert two_level == [g * size // n] * (n // g - 1) and within == size * (g - 1) // g


def test_copies_are_those_of_a_router_of_random_scores():
    """Nodes that its tokens visit, counted; DeepSeek-V3's go to its limit of four."""
    scores = torch.rand(4096, 64, generator=torch.Generator().manual_seed(1))
    for k, nodes in ((2, 4), (8, 8)):
        model = GPTConfig(experts=ExpertsConfig(64, k))
        chosen = router.top_k(scores, k).experts * nodes // 64
        visited = sum(len(set(row)) for row in chosen.tolist()) / len(chosen)
        assert copies(model, Strategy(dp=16, ep=16, ep_node=16 // nodes)) == pytest.approx(visited, rel=0.04)
    assert copies(presets["deepseek-v3"], Strategy(dp=64, ep=64, ep_node=8)) == 4
