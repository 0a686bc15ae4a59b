"""Moving the experts gives what moving the tokens gives, and sends an expert for each that is pulled, exactly."""

from functools import cache

import pytest
import torch
import torch.nn.functional as F

from minitrain import collectives, launch
from minitrain.moe import experts, router
from minitrain.moe.dispatch import Dispatch
from minitrain.ranks.events import Issue, Wait
from minitrain.ranks.ledger import Ledger
from minitrain.ranks.mesh import Mesh
from minitrain.systems.moe import move_experts
from minitrain.systems.moe.move_experts import pull_is_cheaper, pulled
from tests.parallel import Traffic

N, D, WIDE, E = 24, 6, 10, 8
GRIDS = {2: ((2, 1), (1, 2)), 4: ((4, 1), (2, 2))}  # nodes, ranks in each
CASES = {
    "top-2": lambda s: router.top_k(s, 2),
    "few visited": lambda s: router.top_k(s + 9.0 * (torch.arange(E) % 3 == 1), 2),
    "few visited, gated": lambda s: CASES["few visited"](s),
    "all on one": lambda s: router.switch(s + 50.0 * F.one_hot(torch.tensor(5), E)),
    "nobody": lambda s: router.top_k(s, 2, torch.zeros(len(s), dtype=torch.bool)),
}


def leaves_of(rank, ranks, gated, frozen=()):
    """x, router, up, down, gate of a rank; half of the tokens are rank 0's."""
    generator = torch.Generator().manual_seed(0)
    shapes = (N, D), (D, E), (E, D, WIDE), (E, WIDE, D), (E, D, WIDE)
    x, scores, *matrices = (torch.randn(s, generator=generator, dtype=torch.float64) / 2 for s in shapes)
    share = N // 2 // (ranks - 1)
    part = slice(0, N // 2) if rank == 0 else slice(N // 2 + share * (rank - 1), N // 2 + share * rank)
    own = slice(E // ranks * rank, E // ranks * (rank + 1))
    leaves = [x[part], scores, *(m[own] for m in matrices)][: 5 if gated else 4]
    return [leaf.clone().requires_grad_(i not in frozen) for i, leaf in enumerate(leaves)]


def outcome(y, leaves):
    (y * torch.linspace(1, 2, D, dtype=y.dtype)).square().sum().backward()
    return [y.detach(), *(torch.zeros_like(t) if t.grad is None else t.grad for t in leaves)]


def dispatched(leaves, case, group):
    x, scores, up, down, *gate = leaves
    routing = CASES[case](x @ scores)
    way = Dispatch(routing, group)
    y = experts.grouped(way.there(x), way.counts, up, down, F.silu, *gate)
    return outcome(way.back(y, routing.weights), leaves)


def moved(leaves, case, across, inside):
    x, scores, up, down, *gate = leaves
    routing = CASES[case](x @ scores)
    way = Dispatch(routing)
    y = pulled(way.there(x), way.counts, up, down, F.silu, *gate, across=across, inside=inside)
    return outcome(way.back(y, routing.weights), leaves), way.counts


def on_a_rank():
    group, outcomes = collectives.world(), {}
    rank, ranks = group.rank(), group.size()
    for nodes, g in GRIDS[ranks]:
        mesh = Mesh(node=nodes, place=g)
        groups = mesh.group("node"), mesh.group("place")
        for case in CASES:
            leaves = [leaves_of(rank, ranks, "gated" in case) for _ in range(2)]
            wanted = dispatched(leaves[0], case, group)
            with Traffic() as ledger:
                found, counts = moved(leaves[1], case, *groups)
            differs = max((a - b).abs().max().item() for a, b in zip(found, wanted, strict=True))
            sent = ledger.sent_bytes(axis="node"), ledger.sent_bytes(axis="place")
            outcomes[nodes, g, case] = differs, counts, sent
    return outcomes


@cache
def launched(ranks):
    return launch.run(on_a_rank, ranks=ranks)


@pytest.mark.parametrize("ranks", GRIDS)
def test_janus(ranks):
    """Equal to tokens that travel: results, gradients of tokens, router and experts; the bytes are those of the experts
    that are pulled, each behind the work of the one before, and where pulling is cheaper the rule says."""
    for case in CASES:
        for nodes, g in GRIDS[ranks]:
            assert max(rank[nodes, g, case][0] for rank in launched(ranks)) < 1e-12
        bytes_are_the_experts_that_are_pulled(ranks, case)
    test_pulling_is_cheaper_where_the_rule_says_so()
    test_the_next_expert_is_on_its_way_while_one_computes()


def bytes_are_the_experts_that_are_pulled(ranks, case):
    """Twice out, once home: per expert and rank that wants it, or per node on the slow axis."""
    for nodes, g in GRIDS[ranks]:
        outcomes = [rank[nodes, g, case] for rank in launched(ranks)]
        wants = torch.stack([counts for _, counts, _ in outcomes]).gt(0)  # [rank, expert]
        enters = wants.view(nodes, g, E).any(1)  # [node, expert]
        home, here = torch.arange(E) // (E // ranks), E // ranks
        expert = (3 if "gated" in case else 2) * D * WIDE * 8
        for rank, (_, _, (across, inside)) in enumerate(outcomes):
            node, place = divmod(rank, g)
            mine, others = home == rank, torch.arange(nodes) != node
            out = enters[others][:, mine].sum()
            back = enters[node, (home % g == place) & (home // g != node)].sum()
            assert across == (2 * out + back) * expert + (nodes - 1) * here
            through = home % g == place
            neighbours = [node * g + other for other in range(g) if other != place]
            out, back = wants[neighbours][:, through].sum(), wants[rank, ~through].sum()
            assert inside == (2 * out + back) * expert + (g - 1) * nodes * here


# ---- memory and order ------------------------------------------------------------------------------------


def metered(g):
    """How many experts are live at most, beside what lives throughout; and the events of forward."""
    group = collectives.world()
    mesh = Mesh(node=group.size() // g, place=g)
    groups = dict(across=mesh.group("node"), inside=mesh.group("place"))
    here, width, wide = 3, 32, 64
    up, down = torch.randn(here, width, wide), torch.randn(here, wide, width)
    up.requires_grad_(), down.requires_grad_()
    counts = torch.ones(here * group.size(), dtype=torch.long)
    rows, expert = torch.randn(len(counts), width, requires_grad=True), 2 * width * wide * 4
    with Ledger() as ledger:
        y = pulled(rows, counts, up, down, **groups)
        kept = up.nbytes + down.nbytes + rows.nbytes + y.nbytes + len(rows) * wide * 4
        forward = (ledger.peak_bytes - kept) / expert
        live = (ledger.live_bytes - kept) / expert
    events = ledger.events
    with Ledger() as ledger:
        y.sum().backward()
        kept += up.nbytes + down.nbytes + rows.nbytes  # gradients
        backward = (ledger.peak_bytes - kept) / expert
    return forward, live, backward, events


@cache
def measured(g, ranks):
    return launch.run(metered, g, ranks=ranks)


@pytest.mark.parametrize("g, ranks, most, with_gradients", [(1, 4, 2, 5), (2, 4, 2, 7), (3, 6, 3, 8)])
def test_two_experts_live_at_most_and_one_more_where_it_is_shared(g, ranks, most, with_gradients):
    for forward, live, backward, _ in measured(g, ranks):
        assert most <= forward < most + 0.1 and with_gradients - 0.1 < backward < with_gradients + 0.1
        assert 0 <= live < 0.1  # none is kept for backward


def test_the_next_expert_is_on_its_way_while_one_computes():
    for _, _, _, events in measured(1, 4):
        order = "".join(
            "e" if isinstance(e, Issue) else "w" if isinstance(e, Wait) else "p"
            for e in events
            if isinstance(e, (Issue, Wait)) or getattr(e, "flops", 0)
        )
        # who wants what; of the rank's own 3 the last computes behind the first pull, and so on to the last one
        assert order == "ewew" + "pp" * 2 + "eeppww" * 9 + "pp"


# ---- when is it worth it ---------------------------------------------------------------------------------


SHAPES = [(tokens, wide) for tokens in (16, 64) for wide in (3, 6, 40)]


def both_ways():
    group = collectives.world()
    mesh = Mesh(node=group.size(), place=1)
    groups = dict(across=mesh.group("node"), inside=mesh.group("place"))
    return [sent_by(tokens, wide, group, groups) for tokens, wide in SHAPES]


@cache
def sent_both_ways():
    return launch.run(both_ways, ranks=2)


def sent_by(tokens, wide, group, groups):
    generator, sent = torch.Generator().manual_seed(group.rank()), []
    for way in ("rows", "experts"):
        x = torch.randn(tokens, D, generator=generator, dtype=torch.float64, requires_grad=True)
        up, down = (torch.randn(2, *size).double().requires_grad_() for size in ((D, wide), (wide, D)))
        scores = torch.zeros(tokens, 2 * group.size()).double()
        routing = router.balanced(scores, 2, torch.arange(tokens)[None])
        with Traffic() as ledger:
            if way == "rows":
                dispatch = Dispatch(routing, group)
                y = experts.grouped(dispatch.there(x), dispatch.counts, up, down)
            else:
                dispatch = Dispatch(routing)
                y = pulled(dispatch.there(x), dispatch.counts, up, down, **groups)
            with ledger.phase("still forward"):
                y = dispatch.back(y, routing.weights)
            forward = ledger.sent_bytes()
            y.sum().backward()
        sent.append((forward, ledger.sent_bytes()))
    away = int((routing.experts // 2 != group.rank()).sum())
    return sent, away, 2 * (group.size() - 1)


def test_pulling_is_cheaper_where_the_rule_says_so():
    """Forward k·T > 4·h·E_remote for F = 4h; with backward 3 times the experts against twice the rows."""
    assert pull_is_cheaper(4 * 16 * 3 + 1, 3, 4 * 16, backward=False)
    assert not pull_is_cheaper(4 * 16 * 3, 3, 4 * 16, backward=False)
    assert pull_is_cheaper(4 * 16 * 3 * 3 // 2 + 1, 3, 4 * 16)
    assert not pull_is_cheaper(4 * 16 * 3 * 3 // 2, 3, 4 * 16)
    assert pull_is_cheaper(145, 3, 64, gated=True, backward=False) is False
    assert pull_is_cheaper(3 * 3 * 64 // 2 + 1, 3, 64, gated=True, backward=False)
    seen = set()
    for (_, wide), *outcomes in zip(SHAPES, *sent_both_ways()):
        away, remote = sum(outcome[1] for outcome in outcomes), sum(outcome[2] for outcome in outcomes)
        for index, backward in ((0, False), (1, True)):
            rows, moved = (sum(outcome[0][way][index] for outcome in outcomes) for way in (0, 1))
            assert pull_is_cheaper(away, remote, wide, backward=backward) == (moved < rows)
            seen.add((backward, moved < rows))
    assert len(seen) == 4  # both sides of both thresholds


# ---- controls --------------------------------------------------------------------------------------------


def broken(wrong):
    group, mesh = collectives.world(), Mesh(node=2, place=1)
    if wrong == "gradients do not go home":
        move_experts.Homeward.arrive = lambda self: setattr(self, "leaving", None)
    if wrong == "the neighbour's expert is not fetched":
        move_experts.start = lambda _, like, *rest: [collectives.Handle(lambda: None, x.clone) for x in like]
    wanted = dispatched(leaves_of(group.rank(), 2, True), "top-2", group)
    found, _ = moved(leaves_of(group.rank(), 2, True), "top-2", mesh.group("node"), mesh.group("place"))
    return [(a - b).abs().max().item() for a, b in zip(found, wanted, strict=True)]


def test_mistakes_are_seen():
    home, _ = launch.run(broken, "gradients do not go home", ranks=2)
    assert max(home[:2]) < 1e-12 < 1e-3 < min(home[3:])  # only gradients of experts are wrong
    stayed, _ = launch.run(broken, "the neighbour's expert is not fetched", ranks=2)
    assert stayed[0] > 1e-3
