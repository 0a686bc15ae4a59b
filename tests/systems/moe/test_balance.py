"""Copies, replicas and plans that switch: outputs and gradients of one process, bytes of the routing table."""

from functools import cache
from itertools import chain, combinations
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F

from minitrain import collectives, launch
from minitrain.model.training.optim import adamw_update
from minitrain.moe import experts, router
from minitrain.ranks.mesh import Mesh
from minitrain.systems.moe import balance
from minitrain.systems.plan import expert_placement as plan
from tests.moe.by_token import by_token, experts_of, grads_of, joined, loss_of, numbers, tokens_of
from tests.parallel import Traffic
from tests.systems.moe import test_travel, test_two_level
from tests.systems.plan import test_expert_placement

N, D, WIDE, E, WORD = 40, 5, 11, 8, 8  # 2·D·WIDE = 110: three slices of it are unequal
W = 2 * D * WIDE
mask = torch.arange(N) % 4 != 1
zipf = torch.tensor([1 / (e + 1) for e in range(E)], dtype=torch.float64).log()


def top_2(s, part):
    return router.top_k(s + 2 * zipf[: s.shape[1]], 2)


def one_expert(s, part):
    return router.switch(s + 50.0 * F.one_hot(torch.tensor(s.shape[1] - 1), s.shape[1]).to(s.dtype))


ROUTES = {
    "top-2": top_2, "masked": lambda s, part: router.top_k(s, 2, mask[part]),
    "nobody": lambda s, part: router.top_k(s, 2, torch.zeros(len(s), dtype=torch.bool)),
    "all on one expert": one_expert,
}  # fmt: skip


@cache
def counts_of(ranks):
    """[rank][expert] rows of the route top-2, from one process."""
    x, gate, *_ = drawn()
    chosen = ROUTES["top-2"](x @ gate, slice(None)).experts
    parts = [chosen[tokens_of(N, rank, ranks)].flatten() for rank in range(ranks)]
    return [torch.bincount(part, minlength=E).tolist() for part in parts]


def holders_of(case, ranks):
    """Owner first; the copies behind it in any order."""
    plain = [list(there) for there in plan.owners(E, ranks)]
    if case == "shadows that pay":
        return plan.everywhere(plan.shadowed(counts_of(ranks), D, WIDE), E, ranks)
    if case == "a search":
        return plan.prophet(counts_of(ranks), plan.Costs(1.0, 1.0, 1.0))[-1][1]
    if case == "two shadows":
        return plan.everywhere((0, 5), E, ranks)
    if case == "all shadows":
        return plan.everywhere(range(E), E, ranks)
    if case == "some copies":
        plain[0].append(ranks - 1)
        plain[3] += [r for r in reversed(range(ranks)) if r not in plain[3]][: max(1, ranks - 2)]
    return tuple(map(tuple, plain))


COPIES = "owners alone", "shadows that pay", "two shadows", "some copies", "all shadows", "a search"
CASES = [("top-2", case) for case in COPIES] + [
    ("masked", "some copies"),
    ("nobody", "two shadows"),
    ("all on one expert", "two shadows"),
    ("all on one expert", "all shadows"),
]


def drawn(num=E):
    return numbers((N, D), (D, num), (num, D, WIDE), (num, WIDE, D))


def whole_layer(x, gate, up, down, route):
    return by_token(x, up, down, ROUTES[route](x @ gate, slice(None)))


@cache
def one_process(route, num=E):
    """(y, gradients of x, router, up, down)"""
    tensors = [t.requires_grad_() for t in drawn(num)]
    y = whole_layer(*tensors, route)
    loss_of(y).backward()
    return y.detach(), *grads_of(*tensors)


def busy(rows_seen):
    """The reference work, and how many rows it was given."""

    def work(rows, counts, up, down):
        rows_seen.append(len(rows))
        return experts.loop(rows, counts, up, down)

    return work


def never_reduced(weights, holders, group):
    """The mistake: copies arrive, their gradients do not come back."""
    held = balance.experts_of(holders, group.size())[group.rank()]
    own = torch.tensor([i for i, e in enumerate(held) if holders[e][0] == group.rank()])
    full = balance.copied([weight.detach() for weight in weights], holders, group)
    return [there.index_copy(0, own, weight) for there, weight in zip(full, weights)]


def with_copies(route, case, copied=balance.copied):
    group = collectives.world()
    rank, ranks = group.rank(), group.size()
    part, own = tokens_of(N, rank, ranks), experts_of(E, rank, ranks)
    x, gate, up, down = drawn()
    x, gate, up, down = (t.clone().requires_grad_() for t in (x[part], gate, up[own], down[own]))
    holders, rows, sent = holders_of(case, ranks), [], []
    routing = ROUTES[route](x @ gate, part)
    with Traffic() as ledger:
        weights = copied((up, down), holders, group)
        sent.append(ledger.sent_bytes())
        y = balance.layer(x, routing, weights, holders, group, busy(rows))
        sent.append(ledger.sent_bytes())
        loss_of(y).backward()
        sent.append(ledger.sent_bytes())
    table = torch.stack([(routing.experts == e).sum() for e in range(E)])
    size = weights[0].untyped_storage().nbytes()  # up and down are views of one
    return (y.detach(), *grads_of(x, gate, up, down)), sent, table, rows[0], size


# ---- replicas that stay ----------------------------------------------------------------------------------

STEPS, ADAM = 5, dict(lr=1e-2, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1)


def replicas(ranks):
    """Loads, and holders: the owners; what the planner makes of them, with replicas and experts elsewhere;
    then without the first holder of a replicated expert, and with one more expert elsewhere."""
    loads, before = one_process_loads(), plan.owners(E, ranks)
    after = plan.applied(before, plan.flexmoe(loads, before, ranks, slots=E // ranks + 2, threshold=1.0))
    twice = next(e for e, there in enumerate(after) if len(there) > 1)
    to = next(r for r in range(ranks) if r not in after[1])
    steps = [plan.Shrink(twice, after[twice][0]), plan.Migrate(1, after[1][0], to)]
    return loads, before, after, plan.applied(after, steps)


@cache
def one_process_loads():
    x, gate, _, _ = drawn()
    return ROUTES["top-2"](x @ gate, slice(None)).counts.tolist()


@cache
def trained():
    """(up, down) after each step of torch's AdamW in one process."""
    x, gate, up, down = drawn()
    up, down = up.requires_grad_(), down.requires_grad_()
    optimizer, found = torch.optim.AdamW([up, down], **ADAM), []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss_of(whole_layer(x, gate, up, down, "top-2")).backward()
        optimizer.step()
        found.append((up.detach().clone(), down.detach().clone()))
    return found


def flexible(wrong=""):
    """Steps with the owners alone, then with replicas, then after a move; weights and states of each."""
    group = collectives.world()
    rank, ranks = group.rank(), group.size()
    _, *layouts = replicas(ranks)
    part, own = tokens_of(N, rank, ranks), experts_of(E, rank, ranks)
    x, gate, up, down = drawn()
    weights, found, rows, sent = [up[own].clone(), down[own].clone()], [], [], []
    states = [{"step": 0, "exp_avg": torch.zeros_like(w), "exp_avg_sq": torch.zeros_like(w)} for w in weights]
    for step, layout in enumerate([0, 1, 1, 1, 2]):
        if step and layout != [0, 1, 1, 1, 2][step - 1]:
            moments = [state[name] for state in states for name in ("exp_avg", "exp_avg_sq")]
            if wrong == "moments stay behind":
                moments = [torch.zeros_like(moment) for moment in moments]
            with Traffic() as ledger:
                new = balance.moved([*weights, *moments], layouts[layout - 1], layouts[layout], group)
            sent.append(ledger.sent_bytes())
            weights, moments = new[:2], new[2:]
            for state, pair in zip(states, zip(moments[::2], moments[1::2])):
                state["exp_avg"], state["exp_avg_sq"] = (moment.clone() for moment in pair)
        weights = [weight.clone().requires_grad_() for weight in weights]
        routing = ROUTES["top-2"](x[part] @ gate, part)
        y = balance.layer(x[part], routing, weights, layouts[layout], group, busy(rows), share=True)
        loss_of(y).backward()
        grads = grads_of(*weights)
        with Traffic() as ledger:
            if wrong != "replicas never meet":
                grads = balance.summed(grads, layouts[layout], group)
        sent.append(ledger.sent_bytes())
        weights = [weight.detach() for weight in weights]
        for weight, grad, state in zip(weights, grads, states):
            state["step"] += 1
            adamw_update(weight, grad, state, ADAM)
        found.append([weight.clone() for weight in weights])
    return found, rows, sent


# ---- plans that switch -----------------------------------------------------------------------------------

FULL = 12
ROUTE_OF = {8: "top-2", 4: "masked", 2: "top-2", 1: "all on one expert"}
PLANS = [(num, c) for num in (8, 4, 2, 1) for c in (1, 2, 4)]  # experts, ranks that gather


def shard(tensors, num, rank, ranks):
    """The layout of `switchable`."""
    up, down = tensors
    if num >= ranks:
        own = slice(num // ranks * rank, num // ranks * (rank + 1))
        return [up[own].clone(), down[own].clone()]
    s = ranks // num
    cut = torch.arange(FULL).chunk(s)[rank % s]
    return [up[rank // s, :, cut].clone()[None], down[rank // s, cut].clone()[None]]


def wide(num):
    """Experts of which 4 ranks can have equal parts."""
    x, gate, *_ = drawn(num)
    return x, gate, *numbers((num, D, FULL), (num, FULL, D), seed=1)


@cache
def one_process_wide(num, steps=1):
    """(y, gradients of x, router, up, down) of the last of some steps of plain descent, and the weights."""
    tensors = [t.requires_grad_() for t in wide(num)]
    for _ in range(steps):
        for t in tensors:
            t.grad = None
        y = whole_layer(*tensors, ROUTE_OF[num])
        loss_of(y).backward()
        with torch.no_grad():
            for t in tensors[2:]:
                t -= 1e-3 * t.grad
    return y.detach(), *grads_of(*tensors), *(t.detach() for t in tensors[2:])


def with_plans(num, gathering, gather=collectives.gather_to):
    """A step of plain descent for each plan in `gathering`."""
    with patch.object(collectives, "gather_to", gather):
        return steps_with_plans(num, gathering)


def steps_with_plans(num, gathering):
    group = collectives.world()
    rank, ranks = group.rank(), group.size()
    part = tokens_of(N, rank, ranks)
    x, gate, *weights = wide(num)
    x, gate = x[part].clone().requires_grad_(), gate.clone().requires_grad_()
    weights = [weight.requires_grad_() for weight in shard(weights, num, rank, ranks)]
    sharing = {c: Mesh(part=ranks // c, sharing=c).group("sharing") for c in sorted({*gathering})}
    sent, places = [], [weight.data_ptr() for weight in weights]
    with Traffic() as ledger:
        for c in gathering:
            for t in (x, gate, *weights):
                t.grad = None
            routing, before = ROUTES[ROUTE_OF[num]](x @ gate, part), ledger.sent_bytes()
            y = balance.switchable(x, routing, weights, sharing[c], group)
            loss_of(y).backward()
            sent.append(ledger.sent_bytes() - before)
            with torch.no_grad():
                for weight in weights:
                    weight -= 1e-3 * weight.grad
    assert places == [weight.data_ptr() for weight in weights], "no shard was made anew"
    table = torch.stack([(routing.experts == e).sum() for e in range(num)])
    grads = grads_of(x, gate, *weights)
    return (y.detach(), *grads, *(w.detach() for w in weights)), sent, ledger.sent_bytes(), table


# ---- one launch for each number of ranks -----------------------------------------------------------------


def everything():
    ranks, found = collectives.world().size(), {case: with_copies(*case) for case in CASES}
    found["flexible"] = flexible()
    for num, c in PLANS:
        if c <= ranks:
            found[num, c] = with_plans(num, [c])
    for num in (8, 4, 2):
        found["switching", num] = with_plans(num, [1, ranks, 2, 1, ranks])
    return found


@cache
def launched(ranks):
    return launch.run(everything, ranks=ranks)


def close(found, wanted):
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("route, case", CASES)
@pytest.mark.parametrize("ranks", [2, 4])
def test_copies_change_nothing(ranks, route, case):
    """Output and all gradients are those of a loop over tokens in one process."""
    outcomes = [rank[route, case][0] for rank in launched(ranks)]
    for found, wanted in zip(joined(outcomes), one_process(route), strict=True):
        close(found, wanted)


def test_without_the_way_back_the_owner_has_the_gradient_of_its_own_rows():
    outcomes = [rank[0] for rank in launch.run(with_copies, "top-2", "two shadows", never_reduced, ranks=2)]
    y, *_, up, _ = joined(outcomes)
    close(y, one_process("top-2")[0])
    far = (up - one_process("top-2")[3]).abs().amax((1, 2)) > 1e-3
    assert far.tolist() == [e in (0, 5) for e in range(E)]


def cuts(size, parts):
    return [size * (j + 1) // parts - size * j // parts for j in range(parts)]


def rows_between(outcomes, holders):
    """[from, to], from each rank's table and the rule: home if there is a copy, else to the owner."""
    ranks = len(outcomes)
    rows = torch.zeros(ranks, ranks, dtype=torch.long)
    for r, outcome in enumerate(outcomes):
        for e, count in enumerate(outcome.tolist()):
            rows[r, r if r in holders[e] else holders[e][0]] += count
    return rows


@pytest.mark.parametrize("route, case", CASES)
@pytest.mark.parametrize("ranks", [2, 4])
def test_bytes_of_copies_are_the_table_and_the_slices(ranks, route, case):
    outcomes, holders = [rank[route, case] for rank in launched(ranks)], holders_of(case, ranks)
    rows = rows_between([outcome[2] for outcome in outcomes], holders)
    held = [[e for e in range(E) if r in holders[e]] for r in range(ranks)]
    for r, (_, sent, _, worked, size) in enumerate(outcomes):
        there = back = 0  # elements
        for owner, *others in holders:
            if others and r == owner:
                there += W
            elif r in others:
                own = cuts(W, len(others))[others.index(r)]
                there += own * (len(others) - 1)
                back += W
        out, home = int(rows[r].sum() - rows[r, r]), int(rows[:, r].sum() - rows[r, r])
        table = (ranks - 1) * max(map(len, held)) * 8
        assert sent[0] == there * WORD and sent[1] == (there + (out + home) * D) * WORD + table
        assert sent[2] == sent[1] + (back + (out + home) * D) * WORD
        assert worked == rows[:, r].sum() and size == len(held[r]) * W * WORD


@pytest.mark.parametrize("case", COPIES)
@pytest.mark.parametrize("ranks", [2, 4])
def test_the_planner_counts_what_ranks_do(ranks, case):
    outcomes = [rank["top-2", case] for rank in launched(ranks)]
    assert [outcome[2].tolist() for outcome in outcomes] == counts_of(ranks)
    modelled = plan.loads_of(counts_of(ranks), holders_of(case, ranks))
    rows = rows_between([outcome[2] for outcome in outcomes], holders_of(case, ranks))
    assert modelled.computed == [outcome[3] for outcome in outcomes]
    assert modelled.sent == (rows.sum(1) - rows.diag()).tolist()
    assert modelled.received == (rows.sum(0) - rows.diag()).tolist()
    for r, outcome in enumerate(outcomes):
        copies = sum(r in others for _, *others in holders_of(case, ranks))
        assert modelled.carried[r] == pytest.approx(max(outcome[1][0] / (W * WORD), copies), abs=E / W)


@pytest.mark.parametrize("ranks", [2, 4])
def test_fastermoe(ranks):
    """The chosen shadows are the best of all sets under the cost model; with them output and gradients are
    those of one process, and of the rows that ranks computed the most over the mean falls."""
    test_travel.test_shadows_keep_rows_at_home_and_send_copies(1)
    counts = counts_of(ranks)
    remote = [sum(row[e] for r, row in enumerate(counts) if r != e // (E // ranks)) for e in range(E)]

    def elements(chosen):
        return sum(2 * (W if e in chosen else 2 * remote[e] * D) for e in range(E))

    every = chain.from_iterable(combinations(range(E), size) for size in range(E + 1))
    chosen = min(every, key=lambda chosen: (elements(chosen), len(chosen), chosen))
    assert plan.shadowed(counts, D, WIDE) == chosen and 0 < len(chosen) < E
    outcomes = {case: [rank["top-2", case] for rank in launched(ranks)] for case in COPIES[:2]}
    alone, shadows = outcomes.values()
    close(joined([outcome[0] for outcome in shadows]), one_process("top-2"))
    before, after = (max(outcome[3] for outcome in case) * ranks / (2 * N) for case in (alone, shadows))
    assert after < before - 0.1


@pytest.mark.parametrize("ranks", [2, 4])
def test_flexmoe(ranks):
    """Five steps: owners alone, replicas for three, then an expert moves. Weights are torch's AdamW's in one
    process, and replicas equal each other bit by bit. Zipf loads end below 1.1 after two primitives an expert at most;
    when another expert is hot, the old one shrinks."""
    test_expert_placement.test_flexmoe_takes_replicas_back_when_the_load_moves()
    heat, owners = [10_000 // (e + 1) for e in range(E)], plan.owners(E, ranks)
    steps = plan.flexmoe(heat, owners, ranks, slots=E // ranks + 2)
    both = owners, plan.applied(owners, steps)
    levels = [plan.balance_ratio(plan.shared_loads(heat, holders, ranks)) for holders in both]
    assert levels[1] < 1.1 < levels[0] and 0 < len(steps) <= 2 * E
    loads, *layouts = replicas(ranks)
    outcomes = [rank["flexible"] for rank in launched(ranks)]
    assert max(map(len, layouts[1])) > 1 and layouts[1][1] != layouts[0][1], "replicated, and moved"
    for step, layout in enumerate([0, 1, 1, 1, 2]):
        held = balance.experts_of(layouts[layout], ranks)
        for e, there in enumerate(layouts[layout]):
            for matrix in (0, 1):
                copies = [outcomes[r][0][step][matrix][held[r].index(e)] for r in there]
                close(copies[0], trained()[step][matrix][e])
                assert all(torch.equal(copies[0], copy) for copy in copies)
    rows = [[outcome[1][step] for outcome in outcomes] for step in (0, 1)]
    assert plan.balance_ratio(rows[1]) < plan.balance_ratio(rows[0])
    assert plan.balance_ratio(plan.shared_loads(loads, layouts[1], ranks)) < 1.1
    expected = [float(load) for load in plan.shared_loads(loads, layouts[1], ranks)]
    several = [sum(len(there) > 1 and r in there for there in layouts[1]) for r in range(ranks)]
    assert all(abs(a - b) <= ranks * num for a, b, num in zip(rows[1], expected, several)), "one row a source"


@pytest.mark.parametrize("ranks", [2, 4])
def test_bytes_of_replicas(ranks):
    """Summing: each holder sends the slices of others and its own sum to all. Moving: six tensors from the
    first holder to each new one: up and down with two moments each."""
    _, *layouts = replicas(ranks)
    for r, rank in enumerate(launched(ranks)):
        summed, moved = [], []
        for before, layout in zip([layouts[0], *layouts], layouts):
            elements = 0
            for there in layout:
                if r in there:
                    own = cuts(W, len(there))[there.index(r)]
                    elements += W - own + own * (len(there) - 1)
            summed.append(elements * WORD)
            new = sum(old[0] == r for old, now in zip(before, layout) for to in now if to not in old)
            moved.append(3 * W * WORD * new)
        assert rank["flexible"][2] == [summed[0], moved[1], *3 * [summed[1]], moved[2], summed[2]]


@pytest.mark.parametrize("wrong", ["replicas never meet", "moments stay behind"])
def test_mistakes_of_replicas_are_seen(wrong):
    outcomes, layouts = launch.run(flexible, wrong, ranks=2), replicas(2)[1:]
    held, step = balance.experts_of(layouts[1], 2), 1
    far = max(
        (outcomes[r][0][step][0][i] - trained()[step][0][e]).abs().max()
        for r in range(2)
        for i, e in enumerate(held[r])
    )
    assert far > 1e-4


@pytest.mark.parametrize("ranks", [2, 4])
def test_tutel(ranks):
    """Every plan of the same shards gives the outputs and gradients of one process, for its own bytes; a run
    that changes plan at every step trains like one that does not, and sends not one byte more. The two-level
    all-to-all (2DH) gives the bits of the flat one, in n/g - 1 messages between nodes."""
    if ranks == 4:
        test_two_level.test_two_level_all_to_all()
    for num, c in [pair for pair in PLANS if pair[1] <= ranks]:
        outcomes = [rank[num, c] for rank in launched(ranks)]
        check_plan(outcomes, one_process_wide(num), num, c)
    for num in (8, 4, 2, 1):
        sent = {c: max(rank[num, c][1][0] for rank in launched(ranks)) for c in (1, 2, 4) if c <= ranks}
        loads = torch.stack([rank[num, 1][3] for rank in launched(ranks)])
        for wide in (1, 50):  # what weights take, were they so much wider
            found = balance.lightest_sharing(loads, wide * num * 2 * D * FULL // ranks, D)
            more = {
                c: size + 2 * (c - 1) * (wide - 1) * num * 2 * D * FULL // ranks * WORD
                for c, size in sent.items()
            }
            assert found == min(more, key=more.get)
    for num in (8, 4, 2):
        outcomes = [rank["switching", num] for rank in launched(ranks)]
        check_outcomes(outcomes, one_process_wide(num, 5), num)
        for outcome, alone in zip(outcomes, launched(ranks)):
            assert outcome[1] == [alone[num, c][1][0] for c in (1, ranks, 2, 1, ranks)]
            assert outcome[2] == sum(outcome[1]), "nothing is sent between two steps"


def test_a_shard_without_the_others_gradients_is_seen():
    """The control: weights are gathered, their gradients cut and not added up."""
    outcomes = launch.run(with_plans, 8, [2], collectives.gather_from, ranks=2)
    close(torch.cat([outcome[0][0] for outcome in outcomes]), one_process_wide(8)[0])
    far = torch.cat([outcome[0][3] for outcome in outcomes]) - one_process_wide(8)[3]
    assert far.abs().max() > 1e-3


def check_outcomes(outcomes, wanted, num):
    ranks, found = len(outcomes), [outcome[0] for outcome in outcomes]
    y, x, gate = torch.cat([f[0] for f in found]), torch.cat([f[1] for f in found]), sum(f[2] for f in found)
    for one, other in zip((y, x, gate), wanted):
        close(one, other)
    for r in range(ranks):
        for one, other in zip(found[r][3:5], shard(wanted[3:5], num, r, ranks)):
            close(one, other)
        for one, other in zip(found[r][5:7], shard(wanted[5:7], num, r, ranks)):
            close(one, other)


def check_plan(outcomes, wanted, num, c):
    """Weights: (c-1) shards each way. Rows: to every rank of one copy of the expert, there and back, twice."""
    check_outcomes(outcomes, wanted, num)
    ranks = len(outcomes)
    rows, r_parts = torch.zeros(ranks, ranks, dtype=torch.long), max(1, ranks // (num * c))
    for r, outcome in enumerate(outcomes):
        for e, count in enumerate(outcome[3].tolist()):
            for i in range(r_parts):
                block = (e * r_parts + i) * (ranks // c) // (num * r_parts)  # neighbours that gather it
                rows[r, block * c + r % c] += count
    shard_elements = num * 2 * D * FULL // ranks
    for r, outcome in enumerate(outcomes):
        crossing = int(rows[r].sum() + rows[:, r].sum() - 2 * rows[r, r])
        table = (ranks - 1) * max(1, num * c // ranks) * 8
        assert outcome[1][0] == 2 * (c - 1) * shard_elements * WORD + 2 * crossing * D * WORD + table
    if c == ranks:
        assert crossing == 0, "weights travel, tokens do not"


def test_a_row_for_replicas_is_the_turn_of_a_holder():
    class Rank:
        size = staticmethod(lambda: 4)
        rank = staticmethod(lambda: 1)

    routing = router.balanced(torch.zeros(24, 4, dtype=torch.float64), 2, torch.arange(24)[None])
    holders = ((0, 2, 3), (1,), (2, 0), (3,))
    found = balance.placed(routing, holders, Rank(), share=True).experts
    held = balance.experts_of(holders, 4)
    for e, there in enumerate(holders):
        to = (found[routing.experts == e] // 2).tolist()
        assert to == [there[(i + 1) % len(there)] for i in range(12)]
    assert [held[s // 2][s % 2] for s in found.flatten().tolist()] == routing.experts.flatten().tolist()


def test_bad_input_is_refused_before_anything_is_sent():
    class Group:
        def __init__(self, ranks, rank=0):
            self.size, self.rank = (lambda: ranks), (lambda: rank)

    weights, four = (torch.zeros(1, D, WIDE), torch.zeros(1, WIDE, D)), Group(4)
    switched = torch.zeros(4, D), router.top_k(torch.zeros(4, 4), 2), weights
    for last in ((), (3, 3), (0,), (3, 4)):
        with pytest.raises(
            ValueError, match="each expert has holders, all different, of 0 to 3, and each rank"
        ):
            balance.experts_of(((0,), (1,), (2,), last), 4)
    with pytest.raises(ValueError, match="the owner of expert e, rank e·4/4"):
        balance.copied(weights, ((1, 0), (1,), (2,), (3,)), four)
    for sharing in (Group(3), Group(2, rank=1)):
        with pytest.raises(ValueError, match="4 experts on 4 ranks, . gather: neighbours gather"):
            balance.switchable(*switched, sharing, four)
