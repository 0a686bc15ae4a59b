"""Where a router goes in turn, a dry run knows the table: whatever travels, its account is that of the real run."""

from dataclasses import replace
from functools import cache, partial

import pytest
import torch

from minitrain import collectives, launch
from minitrain.compose.parallelize import parallelize
from minitrain.model.config import ExpertsConfig, GPTConfig, presets
from minitrain.model.data.batches import Rows, random_tokens
from minitrain.moe import experts, router
from minitrain.plan.strategy import Strategy
from minitrain.ranks.events import Issue
from minitrain.ranks.launch import dryrun
from minitrain.ranks.ledger import Ledger
from minitrain.systems.moe import overlapped_experts
from tests.layouts import Draw, begin, dry_account
from tests.parallel import Traffic

SIZES = dict(vocab_size=11, d_model=8, num_heads=2, num_layers=1, max_positions=24)
CONFIG = GPTConfig(**SIZES, experts=ExpertsConfig(8, 3, "balanced", expert_width=2))
MIDDLE = replace(CONFIG, experts=replace(CONFIG.experts, expert_width=12))
WIDE = replace(CONFIG, experts=replace(CONFIG.experts, expert_width=36))


def case(config=CONFIG, length=16, rows=8, **values) -> Draw:
    strategy = Strategy(**(dict(precision="float64", dp=4, ep=4) | values))
    return Draw(config, strategy, (rows, rows), length, 0.3, (), "adamw", "ragged")


CASES = {
    "two levels": case(ep_node=2, rows=4),
    "two levels, uneven": case(WIDE, 11, ep_node=2, zero=3),
    "two levels, chunks": case(ep_node=2, ep_chunks=3, length=13),
    "one node": case(ep=2, ep_node=2, length=3),
    "chunks": case(ep_chunks=3, length=13, microbatches=2),
    "chunks, tp": case(dp=2, tp=2, ep=2, ep_chunks=2),
    "experts": case(ep_travel="experts", length=13),
    "few experts, nodes": case(ep_travel="experts", ep_node=2, length=2, rows=4),
    "cheaper: experts": case(ep_travel="cheaper"),
    "cheaper: rows": case(WIDE, ep_travel="cheaper"),
    "cheaper, tp": case(dp=2, tp=2, ep=2, ep_travel="cheaper"),
    "cheaper, pp": case(dp=2, pp=2, ep=2, ep_travel="cheaper", microbatches=2, recompute="stage"),
    "shadows": case(ep_shadow=3, length=13),
    "shadows, nodes, chunks": case(ep_shadow=3, ep_node=2, ep_chunks=2, length=11),
    "shadows, chunks, tp": case(MIDDLE, dp=2, tp=2, ep=2, ep_shadow=1, ep_chunks=2),  # by the rows of both
}


def parts(how):
    """FLOPs, bytes in order and peak of a layer in parts."""
    group, D, E = collectives.world(), 6, 8
    shapes, made = ((26, D), (2, D, 5), (2, 5, D)), dict(dtype=torch.float64, requires_grad=True)
    x, up, down = (torch.ones(shape, **made) for shape in shapes)
    routing = router.balanced(torch.zeros(26, E, dtype=torch.float64), 3, torch.arange(13).repeat(2, 1))
    with Ledger() as ledger:
        PARTS[how](x, routing, group, experts.grouped, (up, down)).sum().backward()
    sent = [(event.op, event.sent_bytes) for event in ledger.events if isinstance(event, Issue)]
    return ledger.flops, ledger.sent_bytes(), sent, ledger.peak_by_kind


PARTS = {
    "by capacity": partial(overlapped_experts.by_capacity, chunks=4),
    "reused": partial(overlapped_experts.reused, chunks=2),
    "by peer": overlapped_experts.by_peer,
}


@cache
def real():
    def rank():
        return {name: begin(one)[2] for name, one in CASES.items()}, {how: parts(how) for how in PARTS}

    return launch.run(rank, ranks=4, timeout_s=240)  # many cases


@pytest.mark.parametrize("name", CASES)
def test_a_dry_run_is_the_real_run(name):
    """FLOPs, bytes by operation and axis, peak by kind."""
    case = CASES[name]
    assert not case.numbers_decide, "the draws compare it as well"
    others = case.strategy.zero == 3 or case.strategy.tp > 1  # who gather as well
    decides = case.strategy.ep_travel == "cheaper" or case.strategy.ep_shadow > 0
    gathers = any(op == "all_gather" for accounts, _ in real() for op, _ in accounts[name]["bytes"])
    assert gathers == (decides or others), "counts are gathered to decide, and only then"
    first = list(CASES).index(name) % 2
    for rank in (first, 3 - first):
        account = real()[rank][0][name]
        assert dry_account(case, rank) == account


@pytest.mark.parametrize("how", PARTS)
def test_a_dry_layer_in_parts_is_the_real_one(how):
    for rank in (0, 3):
        assert dryrun.run(parts, how, rank=rank, ranks=4) == real()[rank][1][how]


def test_visits_are_those_of_the_table():
    """Any number of rows, tokens, choices and nodes; and of some experts alone. Without numbers, then with."""
    for rows, length, k, E in ((1, 1, 1, 4), (2, 5, 3, 8), (3, 16, 2, 6), (1, 40, 5, 12), (2, 7, 8, 8)):
        scores, at = torch.zeros(rows * length, E), torch.arange(length).repeat(rows, 1)
        dry, routing = router.balanced(scores.to("meta"), k, at.to("meta")), router.balanced(scores, k, at)
        for nodes in (n for n in range(1, E + 1) if E % n == 0):
            for only in (None, {0}, {1, E - 1}, set()):
                known, some = (r if only is None else r.only(only) for r in (dry, routing))
                node = some.experts.div(E // nodes, rounding_mode="floor")
                wanted = [int((node == n).any(1).sum()) for n in range(nodes)]
                assert known.visits(nodes) == wanted, (rows, length, k, E, nodes, only)
                assert known.sizes == tuple(some.counts.tolist())


def test_deepseek_v3_over_eight_nodes_dry():
    """ep 64 in nodes of 8: what crosses between nodes, from the docstring's formula and the table."""
    c, nodes, length = replace(presets["deepseek-v3"], num_layers=4), 8, 24
    k, D, E = c.experts.top_k, c.d_model, c.experts.num_experts

    def rank():
        run = parallelize(c, Strategy(dp=64, ep=64, ep_node=8, precision="bfloat16"), device="meta")
        rows = Rows(lambda s, r, n: random_tokens(s, r, n, 64, length, c.vocab_size, seed=0), 64, length)
        with Traffic() as ledger:
            run.forward_backward(run.batch(rows, 0))
        return ledger.sent_bytes(axis="ep_across"), ledger.sent_bytes("all_to_all", "ep_inside") > 0

    place, own = 5, 2  # of rank 21
    visited = [{(t * k + j) % E // 32 for j in range(k)} for t in range(length)]
    visits = [sum(n in one for one in visited) for n in range(nodes)]
    assert min(visits) < max(visits), "24 tokens go round the experts three quarters of the way"
    leave, arrive = sum(visits) - visits[own], (nodes - 1) * visits[own]
    elements = 2 * (leave + arrive) * D + (leave + arrive) * k  # rows; weights, and gradients of weights
    notes = 8 * (nodes - 1) + 8 * leave * k  # numbers of pairs, numbers of experts
    sent, inside = dryrun.run(rank, rank=own * 8 + place, ranks=64)
    assert sent == 2 * elements + notes and inside
