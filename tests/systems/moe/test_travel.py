"""What crosses ep, decided in each step: rows or experts, whichever is less, and shadows of busy experts."""

from functools import cache

import pytest
import torch

from minitrain import collectives, launch
from minitrain.compose import passes as compose_passes
from minitrain.compose.parallelize import parallelize
from minitrain.data_parallel import states
from minitrain.model.config import ExpertsConfig, GPTConfig
from minitrain.model.mixture import MixtureOfExperts
from minitrain.moe import router
from minitrain.moe.dispatch import place_experts
from minitrain.plan.strategy import Strategy
from minitrain.ranks.launch import dryrun
from minitrain.ranks.ledger import Ledger
from minitrain.ranks.mesh import Mesh
from minitrain.systems.moe import balance
from minitrain.systems.moe import move_experts as module
from tests.layouts import SEED, STEPS, Draw, Outcome, distance, one_process, step_of
from tests.parallel import Traffic

D, E, RANKS = 8, 8, 4
SIZE, HERE = 8, E // RANKS  # bytes of a number, experts of a rank


def config_of(width, activation="gelu"):
    experts = ExpertsConfig(E, 2, expert_width=width)
    sizes = dict(vocab_size=11, d_model=D, num_heads=2, num_layers=1)
    return GPTConfig(**sizes, activation=activation, experts=experts)


def layer(c, whole=False):
    """Experts of this rank of the world, or of all; the scores of expert 2 are high, of 5 a little."""
    torch.manual_seed(0)
    mixture = MixtureOfExperts(c, E, dtype=torch.float64)
    for param in mixture.parameters():
        torch.nn.init.normal_(param, std=0.3)
    with torch.no_grad():
        mixture.router.weight[:, 0] = torch.tensor([0.0, 0, 3, 0, 0, 1, 0, 0])
    rank = collectives.world().rank()
    for name, param in () if whole else list(mixture.experts.named_parameters()):
        setattr(mixture.experts, name, torch.nn.Parameter(param.detach().chunk(RANKS)[rank].clone()))
    return mixture


def drawn(tokens, rank):
    x = torch.randn(1, tokens, D, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))
    x[..., 0] = 1.0
    return x.requires_grad_()


def measured(width, tokens, activation="gelu", training=True, **how):
    """(distance from one process, counts [E] of this rank, bytes over ep, kinds of bytes) of one layer."""
    strategy, c = Strategy(dp=RANKS, ep=RANKS, **how), config_of(width, activation)
    mesh, rank, ours, whole = Mesh(**strategy.axes), collectives.world().rank(), layer(c), layer(c, True)
    groups = compose_passes.ExpertGroups(strategy, mesh)
    place_experts(ours.experts, groups.group)
    ours.hooks.experts = groups.travel(c, None)
    ours.train(training)
    x, at = drawn(tokens, rank), torch.arange(tokens)
    with Traffic() as ledger, torch.set_grad_enabled(training):
        y = ours(x, at)
        if training:
            y.square().sum().backward()
    sent = {op: ledger.sent_bytes(op) for op in ("all_to_all", "all_gather", "all_reduce")}
    alone = [drawn(tokens, r) for r in range(RANKS)]  # the tokens of all, for gradients are sums over all
    with torch.set_grad_enabled(training):
        outputs = [whole(one, at) for one in alone]
    far = [y - outputs[rank]]
    if training:
        sum(out.square().sum() for out in outputs).backward()
        far.append(x.grad - alone[rank].grad)
        own = slice(HERE * rank, HERE * (rank + 1))
        pairs = zip(ours.experts.parameters(), whole.experts.parameters(), strict=True)
        far += [mine.grad - theirs.grad[own] for mine, theirs in pairs]
    counts = router.top_k(whole.router.scores(x.flatten(0, 1)), 2).counts.tolist()
    return max(diff.abs().max().item() for diff in far), counts, sent


# ---- the cheaper of two ----------------------------------------------------------------------------------

# width, tokens of a rank, activation, is it training
SIZES = [(2, 40, "gelu", True), (2, 40, "swiglu", False), (2, 6, "swiglu", True), (9, 40, "gelu", True)]
SIZES += [(9, 40, "gelu", False)]  # without a backward experts are cheaper here
WAYS = ("tokens", "experts", "cheaper")


def all_ways():
    return [[measured(*sizes, ep_travel=what) for what in WAYS] for sizes in SIZES]


@cache
def ways():
    return launch.run(all_ways, ranks=RANKS, timeout_s=240)


TABLE = SIZE * E * (RANKS - 1)  # of the counts, to all
NOTES = {"tokens": SIZE * E * (RANKS - 1) // RANKS, "experts": E * (RANKS - 1) // RANKS}  # counts; who wants


def test_what_travels_is_the_cheaper_to_the_byte_and_equals_one_process():
    chosen = []
    for number in range(len(SIZES)):
        total, by_rank = dict.fromkeys(("tokens", "experts"), 0), [rank[number] for rank in ways()]
        for found in by_rank:
            assert max(far for far, *_ in found) < 1e-12
            for what in total:
                total[what] += found[WAYS.index(what)][2]["all_to_all"] - NOTES[what]
        less = min(total, key=total.get)
        assert total["tokens"] != total["experts"]
        for found in by_rank:
            _, _, sent = found[WAYS.index("cheaper")]
            assert sent["all_to_all"] == found[WAYS.index(less)][2]["all_to_all"]
            assert sent["all_gather"] == TABLE and not sent["all_reduce"]
            assert not found[0][2]["all_gather"] and not found[1][2]["all_gather"], "nothing to decide"
        chosen.append(less)
    assert set(chosen) == {"tokens", "experts"} and chosen[0] == "experts", chosen


def test_the_rule_counts_what_crosses():
    """Of random tables, from the definition: rows there and back, experts and their gradients, of D = 1."""
    draws, seen = torch.Generator().manual_seed(0), set()
    for width in (1, 2, 3) * 20:
        table = torch.randint(0, 9, (4, 8), generator=draws)
        rows = experts = 0
        for rank in range(4):
            for e in range(8):
                if e // 2 != rank:
                    rows, experts = rows + int(table[rank, e]), experts + int(table[rank, e] > 0)
        for gated, backward in ((False, True), (True, True), (True, False)):
            by_experts = experts * width * (2 + gated) * (3 if backward else 1)
            less = by_experts < rows * (4 if backward else 2)
            found = module.experts_are_cheaper(table.tolist(), width, gated=gated, backward=backward)
            assert found == less
            seen.add(less)
    assert seen == {True, False}


# ---- shadows ---------------------------------------------------------------------------------------------

# width, tokens of a rank, settings; and how many the rule picks of those allowed
SHADOWS = [
    (2, 40, dict(ep_shadow=1), 1), (2, 40, dict(ep_shadow=8), 8), (2, 40, dict(ep_shadow=2, ep_chunks=2), 2),
    (50, 40, dict(ep_shadow=8), 2), (36, 40, dict(ep_shadow=8, activation="swiglu"), 1),
    (50, 4, dict(ep_shadow=8), 0), (2, 40, dict(ep_shadow=2, training=False), 2),
]  # fmt: skip


def all_shadows():
    return [measured(width, tokens, **how) for width, tokens, how, _ in SHADOWS] + [kept((1, 2, 7))]


def kept(chosen):
    """Elements that stay when these are copied, of experts of W = 12; the own ones count as they are read."""
    own = [torch.ones(HERE, *shape, dtype=torch.float64, requires_grad=True) for shape in ((2, 3), (3, 2))]
    with Ledger() as ledger:
        _here = balance.shadows(own, chosen, collectives.world())
        return ledger.live_bytes // SIZE - HERE * 12


@cache
def copies():
    return launch.run(all_shadows, ranks=RANKS, timeout_s=240)


def picked(table, W, most):
    """By the rule itself: rows from other ranks, 2·D elements each, against weights of W."""
    remote = [sum(row[e] for r, row in enumerate(table) if r != e // HERE) for e in range(E)]
    loads = [sum(column) for column in zip(*table)]
    pays = [e for e in range(E) if 2 * remote[e] * D > W]
    return sorted(pays, key=lambda e: (-loads[e], e))[:most]


def without(table, chosen, rank):
    """Elements of rows that a rank sends in one pass: its own to others, and those of others home."""
    travel = [e for e in range(E) if e not in chosen]
    out = sum(table[rank][e] for e in travel if e // HERE != rank)
    home = sum(table[r][e] for e in travel for r in range(RANKS) if e // HERE == rank != r)
    return (out + home) * D


@pytest.mark.parametrize("number", range(len(SHADOWS)))
def test_shadows_keep_rows_at_home_and_send_copies(number):
    """Bytes: the table without the columns of the chosen, and W from each owner, two thirds of it passed on."""
    width, _, how, wanted = SHADOWS[number]
    by_rank, passes = [rank[number] for rank in copies()], 1 + how.get("training", True)
    table = [counts for _, counts, _ in by_rank]
    W = (3 if "activation" in how else 2) * D * width
    chosen = picked(table, W, how["ep_shadow"])
    assert len(chosen) == wanted and chosen[:1] in ([], [2]), chosen
    for rank, (far, _, sent) in enumerate(by_rank):
        assert far < 1e-12
        own = sum(e // HERE == rank for e in chosen)
        cuts = [W * j // (RANKS - 1) for j in range(RANKS)]
        mine = {e: [r for r in range(RANKS) if r != e // HERE] for e in chosen if e // HERE != rank}
        held = sum(cuts[at.index(rank) + 1] - cuts[at.index(rank)] for at in mine.values())
        there = own * W + held * (RANKS - 2)
        back = (len(chosen) - own) * W if passes == 2 else 0
        rows = passes * without(table, chosen, rank)
        assert sent["all_to_all"] == (rows + there + back) * SIZE + NOTES["tokens"]
        assert sent["all_gather"] == TABLE and not sent["all_reduce"]


def test_a_copy_takes_its_weights_on_every_rank_and_no_more():
    """And owners of one a number for backward, which it is."""
    assert [rank[-1] for rank in copies()] == [3 * 12 + (r in (0, 1, 3)) for r in range(RANKS)]


def test_a_dry_table_has_the_rows_of_all_ranks_beside():
    def on_rank():
        mesh, positions = Mesh(ep=2, tp=2), torch.arange(6).view(1, 6)
        routing = router.balanced(torch.zeros(6, E), 2, positions)
        return module.table_of(routing, mesh.group("ep"), [mesh.group("tp")])

    assert dryrun.run(on_rank, rank=1, ranks=4) == [[4, 4, 4, 4, 2, 2, 2, 2]] * 2


def test_the_busiest_come_first_and_of_equal_ones_the_first():
    table = [[1, 5, 0, 4], [2, 0, 3, 1]]
    assert module.busiest(table, (0, 1, 2, 3), 2) == [1, 3] and module.busiest(table, (3, 0, 2), 2) == [0, 3]
    assert module.busiest(table, (1, 2), 9) == [1, 2] and module.busiest(table, (), 1) == []


# ---- in a run --------------------------------------------------------------------------------------------

SHAPE = dict(vocab_size=29, d_model=8, num_layers=2, num_heads=2, d_ff=16, max_positions=24, tied=True)
CONFIG = GPTConfig(**SHAPE, experts=ExpertsConfig(4, 2, expert_width=2, balance_alpha=0.05))


def case(**values):
    return Draw(CONFIG, Strategy(precision="float64", **values), (9, 8), 24, 0.3, (), "adamw", "ragged")


RUNS = {
    2: [case(dp=2, ep=2, ep_shadow=2), case(dp=2, ep=2, ep_travel="cheaper", ep_chunks=2)],
    4: [
        case(dp=2, pp=2, ep=2, microbatches=3, recompute="stage", ep_travel="cheaper"),
        case(dp=2, tp=2, ep=2, zero=2, ep_travel="cheaper"),
        case(dp=2, pp=2, ep=2, microbatches=3, recompute="stage", ep_shadow=3),
        case(dp=2, tp=2, ep=2, zero=1, ep_shadow=2),
        case(dp=4, ep=2, zero=3, ep_shadow=4, ep_chunks=2),
        case(dp=4, ep=4, ep_node=2, ep_chunks=2, ep_shadow=2),
        case(dp=2, cp=2, ep=4, ep_node=2, ep_chunks=3, ep_shadow=2, zero=2),
    ],
}


def trained(case):
    torch.manual_seed(collectives.world().rank())
    run = parallelize(case.config, case.strategy, case.make_optimizer, seed=SEED)
    losses = [step_of(case, run, step).item() for step in range(STEPS)]
    return Outcome(losses, states.full_grads(run.sync), run.state_dict()["parameters"])


@pytest.mark.parametrize("ranks", RUNS)
def test_a_run_equals_one_process(ranks):
    """Gradients, clipped steps and whole states, with the names and shapes of one process; shadows there are."""

    def rank():
        chosen, copied, tables, table_of = [], module.shadows, [], compose_passes.table_of

        def shadows(own, which, group):
            chosen.append(len(which))
            return copied(own, which, group)

        def table(*given, **named):
            tables.append(table_of(*given, **named))
            return tables[-1]

        module.shadows, compose_passes.table_of, found = shadows, table, []
        for one in RUNS[ranks]:
            chosen.clear(), tables.clear()
            found.append((trained(one), max(chosen, default=0), list(tables)))
        return found

    results = launch.run(rank, ranks=ranks, timeout_s=240)  # many cases
    for number, one in enumerate(RUNS[ranks]):
        reference = one_process(one)
        assert max(distance(found[number][0], reference) for found in results) < 1e-12, one.strategy
        assert all(bool(found[number][1]) == (one.strategy.ep_shadow > 0) for found in results), one.strategy
        if one.strategy.tp > 1:  # its ranks share out the tokens: 9 rows, then 8, of 24 tokens, 2 choices
            tables = [found[number][2] for found in results]
            assert all(table == tables[0] for table in tables)
            assert [sum(map(sum, table)) for table in tables[0]] == [9 * 48] * 2 + [8 * 48] * 2


def test_without_the_sum_of_its_copies_a_shadow_learns_too_little():
    """Control: copies without a way back."""

    def rank():
        copied = module.shadows
        module.shadows = lambda *given: [tensor.detach() for tensor in copied(*given)]
        return trained(RUNS[2][0])

    reference = one_process(RUNS[2][0])
    assert max(distance(found, reference) for found in launch.run(rank, ranks=2)) > 1e-6
