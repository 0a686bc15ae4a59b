# %% [markdown]
# # Exercises 14: expert balance and overlap
#
# Four tasks, 10 points, about two hours. Read chapter 14 first. No GPU, nothing to download.
#
# Write where a cell says `YOUR CODE HERE`, run the cell, then run the check below it. A check tells which property of your
# answer is broken, never the result it wants. When the visible checks pass, grade yourself in a terminal:
#
#     minitrain grade 14
#
# The grader runs the same checks and hidden ones with other sizes, other numbers of ranks and other loads: an expert without tokens, all
# tokens on one expert. Three rules:
#
# - An answer cell stands alone. It may use read-only cells, but for those that say they are for checks, and not your other cells.
# - A function that runs on ranks gets its `group` last: `group.rank()` says who you are, `group.size()` how many you are.
# - Between ranks there is a network and nothing else. In this chapter `collectives` has `send`, `receive`, `barrier`, `all_reduce`
#   and `all_to_all`.
#
# Sources: DeepSeek-V3 2024 (arXiv:2412.19437, section 2.1.2), Fedus et al. 2021 (Switch, arXiv:2101.03961, section 2.2), He et al. 2022
# (FasterMoE, PPoPP, section 4), Nie et al. 2023 (FlexMoE, arXiv:2304.03946), Shi et al. 2023 (PipeMoE, INFOCOM).

# %% given="setup"
import math
from collections import Counter
from fractions import Fraction
from itertools import combinations

import torch

from minitrain import collectives

NOWHERE = -1  # the choice of a masked token

# %% judge="tools"
from minitrain.course.grading.answer_checks import (
    Draw,
    Failure,
    ask,
    ask_each,
    expect,
    expect_equal,
    run_on_ranks,
)

LISTED = "all_reduce all_to_all"
draw = Draw()  # hidden checks draw sizes, numbers of ranks, loads and values

# %% [markdown]
# ## 1. A bias and a loss (2 points)
#
# The batch of a step comes in parts, one for each microbatch and rank. `chosen` [B, T, k] of a part are the experts of the tokens of its B
# rows; a masked token has -1 in all its places. All parts together are the batch. There are two ways to keep its experts equally busy.
#
# **A bias, counted in steps.** The bias of an expert is `steps[e]` times a speed that is not needed here. After each step of training
# `steps[e]` goes up by 1 if expert e got fewer tokens than the mean of all experts *in the whole batch*, down by 1 if it got more, and stays
# if it got exactly the mean. `moved` returns the new steps. They are whole numbers, so the result is int64: a division would make floats.
#
# **A loss, by its gradient.** Tokens are grouped by a scope: "row" (each row is a group), "microbatch" (each part is one) or "batch" (all
# tokens are one). `probs` [B, T, E] are the tokens' probabilities of all experts. The loss is
#
#     alpha · E / N · Σ over tokens n and experts e of  f_e(group of n) · probs[n, e]
#
# with N tokens in the batch, and f_e(group) the share of expert e among all choices of the group. Masked tokens count nowhere. f is a count
# and has no gradient, so the gradient of the loss by `probs` does not depend on `probs`. `slopes` returns it for each part, 0 for masked
# tokens.
#
# > **API** Pure functions, no network. `steps` is int64 [E], `parts` a list of int64 tensors [B, T, k], -1 for masked; B and T may differ.
# > `moved` returns int64 [E]; `slopes` a list with one float64 tensor [B, T, E] per part.
# > `torch.bincount(x, minlength=E)` counts whole numbers, none of them negative; int64 / int64 is float32, and `.double()` is float64.
#
# Two experts, two parts of one row with two tokens each, k = 1: chosen `[[[0], [0]]]` and `[[[0], [1]]]`. Steps of `[0, 0]` become `[-1, 1]`. With
# alpha = 1 every token has the slope `[.375, .125]` for the scope "batch"; for "row" those of the first part have `[.5, 0]`.


# %% answer="balance"
def moved(steps, parts):
    """steps [E] int64, parts a list of chosen [B, T, k] -> [E] int64, the steps of the bias after the step."""
    ### BEGIN SOLUTION
    chosen = torch.cat([part.flatten() for part in parts])
    loads = torch.bincount(chosen[chosen != NOWHERE], minlength=len(steps))
    return steps + torch.sign(loads.sum() - loads * len(steps))
    ### END SOLUTION


def slopes(parts, num_experts, alpha, scope):
    """parts a list of chosen [B, T, k] -> a list of [B, T, E] float64, the gradient of the loss by each token's probs."""
    ### BEGIN SOLUTION
    batch, found = torch.cat([part.flatten() for part in parts])[None], []
    tokens = sum(int((part[..., 0] != NOWHERE).sum()) for part in parts)
    for part in parts:
        groups = {"row": part.flatten(1), "microbatch": part.flatten()[None], "batch": batch}[scope]
        hits = torch.stack([(groups == e).sum(1) for e in range(num_experts)], 1).double()
        shares = hits / hits.sum(1, keepdim=True).clamp(min=1)
        found.append(alpha * num_experts / tokens * shares[:, None] * (part[..., :1] != NOWHERE))
    return found
    ### END SOLUTION


# %% judge="expect_balance"
def drawn_parts(experts, k, shapes, idle=()):
    """Parts of so many rows and tokens, some masked; nobody chooses the idle experts."""
    parts, open_ones = [], [e for e in range(experts) if e not in idle]
    for rows, tokens in shapes:
        chosen = torch.tensor([draw.several(open_ones, k) for _ in range(rows * tokens)])
        chosen = chosen.masked_fill(~draw.mask(rows * tokens)[:, None], NOWHERE)
        parts.append(chosen.view(rows, tokens, k))
    return parts


def expect_moved(steps, parts, signs):
    """signs: -1, 0 or 1 for each expert."""
    said = ask(moved, steps, parts)
    where = f"(seen with {len(steps)} experts in {len(parts)} parts)"
    hint = f"one for each expert; what does a division make of them? {where}"
    expect_equal(
        said * 0 if isinstance(said, torch.Tensor) else said, steps * 0, "whole numbers", hint
    )
    wanted = steps + torch.tensor(signs)
    expect(
        bool(((said - steps).abs() <= 1).all()),
        "a step of one size",
        f"by 1, up or down, however far a load is from the mean {where}",
    )
    busy = torch.cat([chosen.flatten() for chosen in parts]).unique()
    some = torch.isin(torch.arange(len(steps)), busy)
    hint = f"are loads those of the whole batch, and which of them are above the mean? {where}"
    expect_equal(said[some], wanted[some], "up where tokens are missing", hint)
    expect_equal(said, wanted, "an expert without tokens", f"it has fewer than the mean {where}")


def expect_slopes(parts, num_experts, alpha, scope, wanted):
    """wanted: for each part the gradient by each token's probabilities."""
    said = ask(slopes, parts, num_experts, alpha, scope)
    where = f"(seen with {num_experts} experts in {len(parts)} parts)"
    expect(
        isinstance(said, list) and len(said) == len(parts),
        "one gradient for each part",
        f"a list with as many tensors as there are parts {where}",
    )
    for found, chosen, goal in zip(said, parts, wanted):
        hint = f"one number for each row, token and expert, in float64 {where}"
        zeros = found * 0 if isinstance(found, torch.Tensor) else found
        expect_equal(zeros, goal * 0, "a gradient [B, T, E]", hint)
        hint = f"a masked token has no gradient {where}"
        expect(not found[chosen[..., 0] == NOWHERE].any(), "masked tokens count nowhere", hint)
    hint = f"whose choices are counted in f, and over how many tokens is the mean taken? {where}"
    expect_equal(said, wanted, f"f of the {scope}", hint, atol=1e-12 * alpha)


# %% check="balance-bias" points=1
# The bias follows the loads of the whole batch, by a step of one size.
expect_moved(
    torch.tensor([0, 0]), [torch.tensor([[[0], [0]]]), torch.tensor([[[0], [1]]])], [-1, 1]
)
expect_moved(
    torch.tensor([5, 0, -2]),
    [torch.tensor([[[0, 1], [0, 1]]]), torch.tensor([[[0, 2], [-1, -1]], [[0, 1], [1, 2]]])],
    [-1, -1, 1],
)
expect_moved(torch.ones(3, dtype=torch.long), [torch.tensor([[[0], [1], [1]]])], [0, -1, 1])
print("the visible checks pass")
### BEGIN HIDDEN TESTS


def signs_of(parts, experts):
    flat = [e for chosen in parts for e in chosen.flatten().tolist() if e >= 0]
    loads = [flat.count(e) * experts - len(flat) for e in range(experts)]
    return [(load < 0) - (load > 0) for load in loads]


for _ in range(4):
    experts = draw.integer(4, 8)
    idle = draw.several(range(experts), draw.integer(0, 2))
    shapes = [(draw.integer(1, 3), draw.integer(2, 5)) for _ in range(draw.integer(2, 4))]
    parts = drawn_parts(experts, draw.integer(1, 2), shapes, idle)
    steps = torch.tensor([draw.integer(-9, 9) for _ in range(experts)])
    expect_moved(steps, parts, signs_of(parts, experts))
for part in (  # one above the mean in most parts and below it in all; all tokens on one
    [torch.tensor([[[0], [0], [1]]]), torch.tensor([[[0], [0], [1]]]), torch.tensor([[[1]] * 5])],
    [torch.full((1, draw.integer(2, 5), 1), 3), torch.full((2, 1, 1), NOWHERE)],
):
    expect_moved(torch.tensor([draw.integer(-9, 9) for _ in range(4)]), part, signs_of(part, 4))
### END HIDDEN TESTS

# %% check="balance-loss" points=1
# The gradient of the loss, per row, per microbatch and of the whole batch.
two = [torch.tensor([[[0], [0]]]), torch.tensor([[[0], [1]]])]
mixed, half = [[[0.375, 0.125]] * 2], [[[0.25, 0.25]] * 2]
for scope, first, second in (("batch", mixed, mixed), ("microbatch", [[[0.5, 0.0]] * 2], half)):
    wanted = [torch.tensor(part, dtype=torch.float64) for part in (first, second)]
    expect_slopes(two, 2, 1.0, scope, wanted)
rows = [torch.tensor([[[0], [0]], [[1], [-1]]])]
wanted = torch.tensor([[[1, 0], [1, 0]], [[0, 1], [0, 0]]], dtype=torch.float64)
expect_slopes(rows, 2, 3.0, "row", [2 * wanted])
print("the visible checks pass")
### BEGIN HIDDEN TESTS


def by_hand(parts, experts, alpha, scope):
    """Token by token, in whole numbers until the end."""
    real = lambda tokens: [choice for token in tokens for choice in token if choice != NOWHERE]
    everyone = real([token for part in parts for row in part.tolist() for token in row])
    count = sum(token[0] != NOWHERE for part in parts for row in part.tolist() for token in row)
    found = []
    for part in parts:
        here = real([token for row in part.tolist() for token in row])
        numbers = []
        for row in part.tolist():
            group = {"row": real(row), "microbatch": here, "batch": everyone}[scope]
            share = [
                alpha * experts * group.count(e) / max(1, len(group)) / count
                for e in range(experts)
            ]
            numbers.append([share if token[0] != NOWHERE else [0.0] * experts for token in row])
        found.append(torch.tensor(numbers, dtype=torch.float64))
    return found


for k in (1, 2, draw.integer(1, 3)):
    experts, alpha = draw.integer(5, 8), draw.choice([0.01, 1.0, 3.0])
    shapes = [(draw.integer(2, 3), draw.integer(2, 5)) for _ in range(draw.integer(2, 4))]
    parts = drawn_parts(experts, k, shapes, draw.several(range(experts), draw.integer(0, 2)))
    parts.append(torch.full((1, 2, k), NOWHERE))  # a masked part
    for scope in ("row", "microbatch", "batch"):
        expect_slopes(parts, experts, alpha, scope, by_hand(parts, experts, alpha, scope))
### END HIDDEN TESTS

# %% [markdown]
# ## 2. Which experts to shadow (2 points)
#
# `rows[r]` are the experts that the rows of rank r are for, one number per row, in any order. Expert e belongs to rank `owner[e]`; a rank may
# own several experts, or none. A row travels to the owner and its result comes back, unless its own rank has a *copy* of the expert for this
# layer. A copy travels from the owner to one rank.
#
# **By traffic, copy by copy.** A row that travels puts `d_model` elements on the owner's link on its way in, and as many on its way out. A
# copy puts all weights of the expert there: `matrices` matrices of `d_model`·`d_ff` elements. `by_traffic` returns the copies with which all
# owners' links together carry least; of equal sets the one with the fewest copies. There may be hundreds of experts.
#
# **By time, expert by expert.** Now an expert is *shadowed* or not: if it is, each rank but the owner that has rows for it gets a copy, and
# works on its own rows. What a layer waits for is the busiest rank and the busiest link. Forward and backward together take
#
#     3 · compute · (rows that the busiest rank works on)
#     + 4 · move · (rows on the busiest link: the most that leave a rank, or arrive at one)
#     + 2 · carry · (the most copies that arrive at a rank)
#
# `by_time` returns the set of experts that takes least time; of equally fast ones the one with the fewest experts, and of these the one that
# comes first as a list, [0, 3] before [1, 2]. There are 10 experts at most here, so it may try all sets.
#
# > **API** Pure functions of lists and ints, no tensors, no network. `rows` is a list of n lists of ints, `owner` a list of E ints; everything
# > else is an int of any size, so keep to whole numbers. `by_traffic` returns a list of pairs (expert, rank) in rising order, `by_time` a list
# > of experts in rising order. `collections.Counter(rows[r])` counts; `itertools.combinations` may help in `by_time`.
#
# Two ranks, rows `[[0, 0], [1] + 9 * [0]]`, owner `[0, 1]`: rank 1 has 9 rows for expert 0. With d_model = 4 and matrices = 2 it gets a copy by
# traffic, `[(0, 1)]`, if d_ff is 8, as 2·9·4 > 2·4·8, and none if d_ff is 9. Without shadows the layer takes 3·11·compute + 4·9·move, and
# with a shadow of expert 0 it takes 3·10·compute + 2·1·carry.


# %% answer="shadows"
def by_traffic(rows, owner, d_model, d_ff, matrices):
    """rows: a list of experts for each rank; owner: a rank for each expert -> a list of pairs (expert, rank)."""
    ### BEGIN SOLUTION
    found = []
    for r, mine in enumerate(rows):
        for e, here in Counter(mine).items():
            if owner[e] != r and 2 * here * d_model > matrices * d_model * d_ff:
                found.append((e, r))
    return sorted(found)
    ### END SOLUTION


def by_time(rows, owner, compute, move, carry):
    """The same rows and owners, and three whole prices -> a list of experts."""
    ### BEGIN SOLUTION
    n, num, counts = len(rows), len(owner), [Counter(mine) for mine in rows]

    def time(shadows):
        worked, sent, received, taken = ([0] * n for _ in range(4))
        for e in range(num):
            for r in range(n):
                here = counts[r][e]
                stays = e in shadows or r == owner[e]
                worked[r if stays else owner[e]] += here
                sent[r] += 0 if stays else here
                received[owner[e]] += 0 if stays else here
                taken[r] += e in shadows and r != owner[e] and here > 0
        return 3 * compute * max(worked) + 4 * move * max(sent + received) + 2 * carry * max(taken)

    sets = (list(some) for size in range(num + 1) for some in combinations(range(num), size))
    return min(sets, key=time)
    ### END SOLUTION


# %% judge="expect_shadows"
def loads(n, experts, hot, low=20, high=60):
    """Numbers of rows of each rank for each expert: a few for all, many for the `hot` ones; some ranks have none."""
    return [
        [
            draw.integer(low, high) if e in hot else max(0, draw.integer(-2, 6))
            for e in range(experts)
        ]
        for _ in range(n)
    ]


def listed(counts):
    """The same as lists of experts, one number per row, in a drawn order."""
    each = [[e for e, number in enumerate(own) for _ in range(number)] for own in counts]
    return [draw.several(own, len(own)) for own in each]


def expect_traffic(*cases):
    """Cases (rows, owner, d_model, d_ff, matrices, wanted pairs)."""
    said = ask_each(by_traffic, [case[:-1] for case in cases])
    for found, (rows, owner, *prices, wanted) in zip(said, cases):
        where = f"(seen with {len(rows)} ranks, {len(owner)} experts and the numbers {prices})"
        whole = lambda pair: isinstance(pair, (list, tuple)) and [*map(type, pair)] == [int, int]
        expect(
            isinstance(found, (list, tuple)) and all(map(whole, found)),
            "pairs of expert and rank",
            f"a list of pairs of whole numbers {where}",
        )
        found = [tuple(pair) for pair in found]
        expect(
            found == sorted(set(found)),
            "pairs of expert and rank",
            f"each once, in rising order {where}",
        )
        expect(
            all(0 <= r < len(rows) and e in rows[r] and owner[e] != r for e, r in found),
            "a copy that is used",
            f"the owner needs none, nor does a rank without rows for it {where}",
        )
        hint = f"another set costs less; what does each copy cost, and the rows that travel without it? {where}"
        expect(set(wanted) <= set(found), "the least cost", hint)
        expect(
            found == wanted, "no shadow for nothing", f"with fewer copies it costs no more {where}"
        )


def expect_time(*cases):
    """Cases (arguments, wanted set, time of a set)."""
    said = ask_each(by_time, [arguments for arguments, _, _ in cases])
    for found, (arguments, wanted, time) in zip(said, cases):
        (rows, owner), prices = arguments[:2], arguments[2:]
        where = f"(seen with {len(rows)} ranks, {len(owner)} experts and the numbers {prices})"
        expect(
            isinstance(found, (list, tuple))
            and all(type(e) is int and 0 <= e < len(owner) for e in found)
            and list(found) == sorted(set(found)),
            "a set of experts",
            f"numbers of experts, each once, in rising order {where}",
        )
        hint = f"with fewer shadows it costs no more {where}"
        expect(
            not set(wanted) < set(found) or time(found) != time(wanted),
            "no shadow for nothing",
            hint,
        )
        hint = f"another set costs less; which rank, and which link, is the busiest? {where}"
        expect(time(found) == time(wanted), "the least cost", hint)
        hint = f"of equally fast sets the smallest, then the first {where}"
        expect(list(found) == wanted, "no shadow for nothing", hint)


def timed(rows, owner, compute, move, carry):
    """The time of a set of shadows: what each rank computes, sends, receives and takes, found rank by rank."""
    ranks = range(len(rows))
    away = [[[e for e in rows[r] if owner[e] == q] for q in ranks] for r in ranks]  # from r to q

    def time(found):
        travel = [[sum(e not in found for e in away[r][q]) for q in ranks] for r in ranks]
        into = [sum(travel[q][r] for q in ranks if q != r) for r in ranks]
        out = [sum(travel[r][q] for q in ranks if q != r) for r in ranks]
        work = [len(rows[r]) - out[r] + into[r] for r in ranks]
        copies = [len({e for e in rows[r] if e in found and owner[e] != r}) for r in ranks]
        return 3 * compute * max(work) + 4 * move * max(into + out) + 2 * carry * max(copies)

    return time


# %% check="shadows-traffic" points=1
# Copies whose rows would put more on the owner's link than the weights do.
both = [[0, 0], [1] + 9 * [0]]
expect_traffic(
    (both, [0, 1], 4, 8, 2, [(0, 1)]),
    (both, [0, 1], 4, 9, 2, []),
    ([[3, 1, 1, 3, 3], [0, 0, 2, 0, 3], [1, 0, 1, 2, 1]], [2, 1, 1, 0], 8, 2, 2, [(0, 1), (1, 2)]),
)
print("the visible checks pass")
### BEGIN HIDDEN TESTS


def cheapest(rows, owner, d_model, d_ff, matrices):
    """Each possible copy against the rows that would travel without it."""
    price, found = matrices * d_model * d_ff, []
    for e, home in enumerate(owner):
        for r in range(len(rows)):
            if r != home and sum(2 * d_model for one in rows[r] if one == e) > price:
                found.append((e, r))
    return found


cases = []
for n, num in ((2, 6), (3, 4), (4, 8), (3, 9), (5, 5)):
    rows = listed(loads(n, num, draw.several(range(num), 2), 1, 12))
    owner = [draw.integer(0, n - 1) for _ in range(num)]
    some = [row.count(e) for r, row in enumerate(rows) for e in set(row) if owner[e] != r]
    for matrices, d_ff in (
        (2, draw.choice([1, *some])),
        (2, draw.integer(2, 12)),
        (3, draw.integer(1, 9)),
    ):
        prices = (
            draw.choice([1, 8, 13]),
            d_ff,
            matrices,
        )  # the first: a copy costs the same both ways
        cases.append((rows, owner, *prices, cheapest(rows, owner, *prices)))
cases.append(([[], [], []], [0, 2, 1], 4, 1, 2, []))  # nobody has rows
far = [[2] * 40, [2] * 41]
cases.append((far, [1, 0, 1], 4, 8, 3, cheapest(far, [1, 0, 1], 4, 8, 3)))  # all for one
n, num = 8, 64 * draw.integer(2, 4)
rows = listed([[draw.integer(0, 9) for _ in range(num)] for _ in range(n)])
owner = [draw.integer(0, n - 1) for _ in range(num)]
cases.append((rows, owner, 64, 5, 2, cheapest(rows, owner, 64, 5, 2)))
expect_traffic(*cases)
### END HIDDEN TESTS

# %% check="shadows-time" points=1
# The set with which the busiest rank and the busiest link are done first.
both = [[0, 0], [1] + 9 * [0]]
for prices, wanted in (((1, 1, 10), [0]), ((1, 1, 30), []), ((2, 0, 3), [])):
    expect_time(((both, [0, 1], *prices), wanted, timed(both, [0, 1], *prices)))
four = [[2, 2, 3, 2, 2, 1, 1, 1, 3, 2, 2, 2, 2], [0, 3, 2, 3, 2, 2, 2, 1, 2, 3, 1, 2, 2, 2, 2, 3]]
expect_time(((four, [0, 0, 1, 1], 1, 2, 12), [0, 2], timed(four, [0, 0, 1, 1], 1, 2, 12)))
print("the visible checks pass")
### BEGIN HIDDEN TESTS


def fastest(*arguments):
    """A case, by trying every set."""
    num, time = len(arguments[1]), timed(*arguments)
    sets = [list(some) for size in range(num + 1) for some in combinations(range(num), size)]
    return arguments, min(sets, key=lambda some: (time(some), len(some), some)), time


def in_order_of_loads(rows, owner, *prices):
    """FasterMoE's own way: the heaviest experts first, as long as it gets faster."""
    time, chosen = timed(rows, owner, *prices), []
    for e in sorted(range(len(owner)), key=lambda e: -sum(row.count(e) for row in rows)):
        if time([*chosen, e]) >= time(chosen):
            break
        chosen.append(e)
    return sorted(chosen)


def apart(arguments, best, time):
    """What a case with this best set tells apart."""
    rows, owner, *prices = arguments
    alike, longer = (combinations(range(len(owner)), len(best) + more) for more in (0, 1))
    if time(in_order_of_loads(*arguments)) > time(best):
        yield "the order of loads"
    if best and any(time(some) == time(best) for some in longer):
        yield "a tie"
    if any(time(some) == time(best) and list(some) > best for some in alike):
        yield "the first of equals"
    forward = [Fraction(price, passes) for price, passes in zip(prices, (3, 2, 2))]
    if time(fastest(rows, owner, *forward)[1]) > time(best):
        yield "forward and backward"
    everywhere = lambda some: max(sum(owner[e] != r for e in some) for r in range(len(rows)))
    sets = [
        list(some)
        for size in range(len(owner) + 1)
        for some in combinations(range(len(owner)), size)
    ]
    without = timed(rows, owner, *prices[:2], 0)
    if time(min(sets, key=lambda some: without(some) + 2 * prices[2] * everywhere(some))) > time(
        best
    ):
        yield "copies where rows are"


cases, missing = [], {"the order of loads": 3, "a tie": 3, "the first of equals": 2}
missing |= {"forward and backward": 2, "copies where rows are": 2}
for _ in range(500):
    n, num = draw.choice([(2, 4), (2, 6), (3, 6), (4, 4), (3, 3), (3, 5)])
    hot = draw.several(range(num), draw.integer(1, min(3, num)))
    high = draw.choice([6, 30])
    counts = loads(n, num, hot, high // 3, high)
    counts[draw.integer(0, n - 1)][hot[0]] = 0
    owner = [draw.integer(0, n - 1) for _ in range(num)]
    prices = draw.integer(0, 3), draw.integer(0, 3), draw.integer(1, 2 * high)
    case = fastest(listed(counts), owner, *prices)
    found = [kind for kind in apart(*case) if missing[kind]]
    missing |= {kind: missing[kind] - 1 for kind in found}
    cases += [case] if found else []
    if not any(missing.values()):
        break
cases += [fastest([[4] * (30 + r) for r in range(3)], [0, 0, 1, 1, 2], 1, 1, 8)]  # all for one
cases += [fastest([[], []], [1, 0], 1, 1, 1)]  # nobody has rows
n = draw.choice([2, 5])
counts = loads(n, 10, draw.several(range(10), 2), 9, 20)
cases.append(
    fastest(listed(counts), [draw.integer(0, n - 1) for _ in range(10)], 1, 1, draw.integer(4, 40))
)
expect_time(*cases)
### END HIDDEN TESTS

# %% [markdown]
# ## 3. Replicas (3 points)
#
# A busy expert is held by several ranks, for good. `holders[e]` are the ranks that hold expert e, one or more, in any order; all ranks know
# all of `holders`. A rank may hold several experts, or none.
#
# **Rows are shared.** `shared(chosen, holders, rank)` says where each row of a rank goes. Of the rows that rank r has for expert e, row i
# (the first is row 0) goes to holder number (r + i) mod h of the h holders. A row with -1 goes nowhere: -1.
#
# **Gradients are added up.** Each holder has the gradient of its share of the rows. `summed(grads, holders, group)` gives every holder of
# an expert the sum over its holders, with the same bits everywhere: replicas that differ in the last bit drift apart. All ranks call it at
# the same time; there are no smaller groups.
#
# What travels is graded too. Of an expert with W elements and h holders, all holders together send 2(h-1)·W elements, as in an all-reduce.
# No holder sends much more than another, and a rank that does not hold the expert sends nothing of it.
#
# > **API** `shared(chosen, holders, rank)`: `chosen` [N] int64, `holders` a list of lists of ranks; return a tensor [N] of int64. No network.
# > `summed(grads, holders, group)`: `grads` is a dict {e: tensor of float64} of this rank's experts; return such a dict of the sums.
# > `collectives.send(x, to, group)`, `receive(like, source, group)`, with `async_op=True` a handle whose `wait()` returns what came;
# > `all_to_all(x, group, send_sizes=.., receive_sizes=..)` and `all_reduce(x, group)`, both by all ranks of the group together.
#
# Then `replica_steps` below trains: replicas stay equal, and all weights are those of one process.
#
# `shared(tensor([0, 1, 0, 0]), [[2, 0], [1]], 0)` is `[2, 1, 0, 2]`.


# %% answer="replicas"
def shared(chosen, holders, rank):
    """chosen [N] whole numbers -> [N], the rank that each row goes to."""
    ### BEGIN SOLUTION
    seen, to = [0] * len(holders), []
    for e in chosen.tolist():
        if e == NOWHERE:
            to.append(NOWHERE)
            continue
        to.append(holders[e][(rank + seen[e]) % len(holders[e])])
        seen[e] += 1
    return torch.tensor(to, dtype=torch.long)
    ### END SOLUTION


def summed(grads, holders, group):
    """grads {e: [..]} of the experts that this rank holds -> {e: [..]}, their sums over all holders."""
    ### BEGIN SOLUTION
    rank = group.rank()

    def exchange(outgoing, like):
        """outgoing[e, to] to each other holder; what comes from it is shaped like like[e, from]."""
        pairs = [(e, other) for e in sorted(grads) for other in holders[e] if other != rank]
        sends = [collectives.send(outgoing[p], p[1], group, async_op=True) for p in pairs]
        comes = [collectives.receive(like[p], p[1], group, async_op=True) for p in pairs]
        arrived = {p: handle.wait() for p, handle in zip(pairs, comes)}
        for handle in sends:
            handle.wait()
        return arrived

    slices = {  # a slice of each gradient for each of its holders
        (e, to): piece
        for e, grad in grads.items()
        for to, piece in zip(holders[e], grad.flatten().tensor_split(len(holders[e])))
    }
    parts = exchange(slices, {(e, to): slices[e, rank] for e, to in slices})
    parts |= {(e, rank): slices[e, rank] for e in grads}
    totals = {}
    for e in grads:
        first, *others = holders[e]
        totals[e] = parts[e, first].clone()
        for other in others:
            totals[e] += parts[e, other]
    sums = exchange({(e, to): totals[e] for e, to in slices}, slices)
    sums |= {(e, rank): totals[e] for e in grads}
    return {
        e: torch.cat([sums[e, by] for by in holders[e]]).view_as(grad) for e, grad in grads.items()
    }
    ### END SOLUTION


# %% driver="replica_steps"
def sum_once(numbers, own, holders, group):
    """The gradients of the experts `numbers` that this rank holds -> their sums."""
    sums = summed(dict(zip(numbers, own)), holders, group)
    return [sums[e] for e in numbers]


def replica_steps(numbers, weights, rows, chosen, holders, lr, group):
    """A step for each of rows [steps, N, D]: rows go to holders, gradients are added up. The weights after each step.

    Expert e computes W x for its rows, with the loss ½|W x|².
    """
    weights, after = dict(zip(numbers, [w.clone() for w in weights])), []
    for x, experts in zip(rows, chosen):
        to = shared(experts, holders, group.rank())
        order = to.argsort(stable=True)[int((to == NOWHERE).sum()) :]
        sizes = torch.bincount(to[order], minlength=group.size())
        arriving = collectives.all_to_all(sizes, group).tolist()
        leaving = torch.cat([x[order], experts[order, None].to(x.dtype)], 1)
        come = collectives.all_to_all(
            leaving, group, send_sizes=sizes.tolist(), receive_sizes=arriving
        )
        grads = {}
        for e, weight in weights.items():
            mine = come[come[:, -1] == e, :-1]
            grads[e] = (mine @ weight.T).T @ mine
        sums = summed(grads, holders, group)
        for e in weights:
            weights[e] -= lr * sums[e]
        after.append([weights[e].clone() for e in numbers])
    return after


# %% judge="expect_replicas"
def held(holders, rank):
    return [e for e, there in enumerate(holders) if rank in there]


def expect_shared(cases):
    """Cases (chosen, holders, rank, wanted ranks)."""
    said = ask_each(shared, [case[:-1] for case in cases])
    for found, (chosen, holders, rank, wanted) in zip(said, cases):
        where = f"(seen with {len(chosen)} rows on rank {rank}, {len(holders)} experts)"
        hint = f"a whole number for each row {where}"
        expect_equal(found * 0, chosen * 0, "a rank for each row", hint)
        pairs = list(zip(found.tolist(), chosen.tolist()))
        expect(
            all(to == NOWHERE if e == NOWHERE else to in holders[e] for to, e in pairs),
            "to a holder",
            f"a row goes to a rank that holds its expert, -1 goes nowhere {where}",
        )
        evenly = all(
            abs(pairs.count((one, e)) - pairs.count((other, e))) <= 1
            for e, there in enumerate(holders)
            for one in there
            for other in there
        )
        expect(evenly, "shared evenly", f"no holder gets two rows more than another {where}")
        hint = f"turns are counted for each expert, from another holder on each rank, or all first rows meet on one {where}"
        expect_equal(found.tolist(), wanted, "whose turn it is", hint)


def expect_sent(outcome, holders, elements, times, moved):
    """Bytes of `times` sums of experts with so many elements each; `moved[r]` bytes are for other things."""
    wanted = 8 * times * sum(2 * (len(there) - 1) * elements for there in holders)
    others = sum(moved)
    expect(
        sum(outcome.sent_bytes) <= wanted + others,
        "bytes on the wire",
        "gradients go to other holders of the expert and to nobody else, in slices",
    )
    expect(
        sum(outcome.sent_bytes) >= wanted + others,
        "bytes on the wire",
        "fewer than a sum needs: is all of it added up, with all its bits?",
    )
    for rank, sent in enumerate(outcome.sent_bytes):
        most = 0
        for e in held(holders, rank):
            h = len(holders[e])
            most += elements + (h - 2) * math.ceil(elements / h) if h > 1 else 0
        expect(
            sent <= 8 * times * most + moved[rank],
            "bytes of each rank",
            f"one holder sends for all; who else could add up a part? (seen at rank {rank})",
        )


def expect_sum(ranks, holders, shape, values):
    """Every holder has the sum of the gradients of all holders, in the bytes of an all-reduce over these."""
    own = [{e: values(*shape) for e in held(holders, r)} for r in range(ranks)]
    inputs = [(list(mine), list(mine.values()), holders) for mine in own]
    outcome = run_on_ranks(sum_once, inputs, collectives=LISTED)
    where = f"(seen with {ranks} ranks, {len(holders)} experts)"
    sums = {e: sum(own[r][e] for r in there) for e, there in enumerate(holders)}
    wanted = [[sums[e] for e in mine] for mine in own]
    found = outcome.results
    hint = f"the sum over the holders, no mean {where}"
    expect_equal(found, wanted, "the sum over holders", hint, 0 if values == draw.exact else 1e-12)
    by_expert = [dict(zip(mine, given)) for mine, given in zip(own, found)]
    for e, there in enumerate(holders):
        hint = f"all holders add in one order, or one adds for all {where}"
        first = by_expert[there[0]][e]
        for r in there[1:]:
            expect(torch.equal(by_expert[r][e], first), "the same bits", hint)
    expect_sent(outcome, holders, math.prod(shape), 1, [0] * ranks)


def expect_trained(ranks, weights, rows, chosen, holders, away):
    """A step for each of chosen[r] [steps, N]; `away[r]` rows leave rank r in all. Replicas and one process agree."""
    inputs, lr, steps = [], 0.01, len(chosen[0])
    for r in range(ranks):
        mine = held(holders, r)
        inputs.append((mine, [weights[e] for e in mine], rows[r], chosen[r], holders, lr))
    outcome = run_on_ranks(replica_steps, inputs, collectives=LISTED)
    where = f"(seen with {ranks} ranks, {len(holders)} experts, {steps} steps)"
    found = [[dict(zip(held(holders, r), now)) for now in outcome.results[r]] for r in range(ranks)]
    for e, there in enumerate(holders):
        for r in there[1:]:
            same = all(torch.equal(a[e], b[e]) for a, b in zip(found[r], found[there[0]]))
            expect(same, "the same bits", f"replicas have drifted apart {where}")
    now, truth = list(weights), []
    for step in range(steps):
        for e in range(len(holders)):
            x = torch.cat([rows[r][step][chosen[r][step] == e] for r in range(ranks)])
            now[e] = now[e] - lr * (x @ now[e].T).T @ x
        truth.append(list(now))
    goal = [[[then[e] for e in held(holders, r)] for then in truth] for r in range(ranks)]
    hint = f"is every row's gradient in the sum, once? {where}"
    expect_equal(outcome.results, goal, "the weights of one process", hint, atol=1e-9)
    width = rows[0].shape[-1]
    moved = [8 * ((width + 1) * away[r] + (ranks - 1) * steps) for r in range(ranks)]
    expect_sent(outcome, holders, weights[0].numel(), steps, moved)


# %% check="replicas-shared" points=1
# Each rank shares its rows for an expert among the holders.
expect_shared(
    [
        (torch.tensor([0, 1, 0, 0]), [[2, 0], [1]], 0, [2, 1, 0, 2]),
        (torch.tensor([0, 0, -1, 0]), [[0, 1, 2]], 1, [1, 2, -1, 0]),
    ]
)
print("the visible checks pass")
### BEGIN HIDDEN TESTS


def by_hand(chosen, holders, rank):
    rows = chosen.tolist()
    return [
        NOWHERE if e < 0 else holders[e][(rank + rows[:i].count(e)) % len(holders[e])]
        for i, e in enumerate(rows)
    ]


cases = [(torch.zeros(0, dtype=torch.long), [[0], [1]], 1, [])]
for _ in range(8):
    ranks, num = draw.integer(3, 6), draw.integer(2, 6)
    holders = [draw.several(range(ranks), draw.integer(1, ranks)) for _ in range(num)]
    rows = [draw.integer(-1, num - 1) for _ in range(draw.integer(6, 30))]
    chosen, rank = torch.tensor(rows), draw.integer(0, ranks - 1)
    cases.append((chosen, holders, rank, by_hand(chosen, holders, rank)))
holders = [draw.several(range(5), 4), [1], draw.several(range(5), 3)]
for rank in range(5):  # all rows of all ranks for one expert, one without rows
    chosen = torch.full((draw.integer(1, 9),), 2)
    cases.append((chosen, holders, rank, by_hand(chosen, holders, rank)))
expect_shared(cases)
### END HIDDEN TESTS

# %% check="replicas-summed" points=1
# Gradients are added up among the holders of an expert alone, the same bits on each.
expect_sum(3, [[2, 0, 1]], (2, 3), draw.real)
expect_sum(3, [[0, 1, 2], [1], [2, 0]], (5,), draw.exact)
print("the visible checks pass")
### BEGIN HIDDEN TESTS
for ranks in (4, 5, draw.integer(3, 5)):
    orders = [draw.several(range(ranks), h) for h in (ranks, 1, 2, 3)]
    shape = draw.integer(2, 6), draw.integer(3, 7)
    expect_sum(ranks, draw.several(orders, 4), shape, draw.exact)
    expect_sum(ranks, orders, shape, draw.real)
idle = draw.integer(0, 3)  # a rank that holds nothing; experts smaller than their holders are many
others = [r for r in range(4) if r != idle]
expect_sum(4, [draw.several(others, 3), draw.several(others, 2)], (2,), draw.exact)
expect_sum(2, [[0], [1]], (3,), draw.exact)
### END HIDDEN TESTS

# %% check="replicas-steps" points=1
# Replicas that share their rows stay equal, step after step, and are the weights of one process.
both = [torch.tensor([[0, 1, 0, 0], [0, -1, 1, 0]]), torch.tensor([[0, 0, 0, 1], [1, 1, 0, 0]])]
both.append(torch.tensor([[-1, -1, 0, 0], [0, 0, 0, 0]]))
expect_trained(
    3,
    [draw.real(2, 3) for _ in range(2)],
    [draw.real(2, 4, 3) for _ in range(3)],
    both,
    [[2, 0, 1], [1]],
    [5, 3, 4],
)
print("the visible checks pass")
### BEGIN HIDDEN TESTS


def by_hand(chosen, holders, rank):
    rows = chosen.tolist()
    return [
        NOWHERE if e < 0 else holders[e][(rank + rows[:i].count(e)) % len(holders[e])]
        for i, e in enumerate(rows)
    ]


for ranks in (4, draw.integer(3, 5)):
    holders = [draw.several(range(ranks), h) for h in (draw.integer(3, ranks), 1, 2)]
    steps, tokens, shape = 3, draw.integer(6, 9), (draw.integer(2, 4), draw.integer(3, 5))
    chosen = [
        torch.tensor([[draw.integer(-1, 1) for _ in range(tokens)] for _ in range(steps)])
        for _ in range(ranks)
    ]
    for own in chosen:
        own[draw.integer(0, 2)] = 0  # a step in which most rows are for one expert
    away = [
        sum(to not in (r, NOWHERE) for now in chosen[r] for to in by_hand(now, holders, r))
        for r in range(ranks)
    ]
    weights = [draw.real(*shape) for _ in holders]
    rows = [draw.real(steps, tokens, shape[1]) for _ in range(ranks)]
    expect_trained(ranks, weights, rows, chosen, holders, away)
### END HIDDEN TESTS

# %% [markdown]
# ## 4. In chunks (3 points)
#
# Experts can work on some rows while others travel: cut the rows of a layer into r chunks. How many, and what is started when?
#
# **The number.** Rows go out in one byte per number and come home in two, so the two ways have prices of their own: n rows take a + b·n
# with (a, b) = `out` to the experts, `work` on them, and `home` back. All transfers share one link, which carries one at a time: first the r
# dispatches, chunk by chunk, then the r combines. The expert works on one chunk at a time, in the same order. Work on a chunk begins when the
# chunk has arrived and the work before it is done; its combine begins when its work is done and the link is free. The layer ends with the
# last combine. Each chunk has rows/r rows, a whole number or not. `chunk_count` returns an r from 1 to `most` with which the layer takes
# least time; of equally good ones any.
#
# rows = 12, out (1, 1), work (2, 2), home (1, 2): r = 1 takes 13 + 26 + 25 = 64, and r = 2 takes 7 + 2·14 + 13 = 48.
#
# **The layer.** Each rank has one expert, and x [A, D]: rows for rank 0 first, then those for rank 1, and so on. `send_sizes` says how many
# for each rank, `receive_sizes` how many come from each. Of the c rows from one rank to another, chunk j has rows start to stop of `cut(c,
# j, r)`. `work(rows)` is this rank's expert. It takes what has arrived of one chunk, in the order of the ranks it comes from, and returns
# as many results. Call it once for each chunk, the first chunk first, also when no rows have arrived. Results go home; return them as [A,
# D], in the places of their rows.
#
# The order is graded too. While the expert works on chunk j, chunk j+1 is on its way, and nothing of later chunks; so are the results of
# chunk j-1. And nobody waits for either of them before the work on chunk j is done: another rank may be a chunk behind. A row travels
# once there and once back.
#
# > **API** `collectives.all_to_all(x, group, send_sizes=.., receive_sizes=.., async_op=True)` cuts x into pieces of so many rows, piece j for
# > rank j, and returns a handle at once; `handle.wait()` returns the pieces that have come, in rank order, as one tensor. Transfers of a
# > group run one after the other, in the order of the calls. Sizes are lists of ints. `work(rows)`: [R, D] -> [R, D]; call it with the
# > rows alone. `cut(c, j, r)` returns (start, stop). In `chunk_count` use `Fraction`, not floats; return an int.


# %% given="cut"
def cut(c, j, r):
    """Start and stop of chunk j of c rows in r chunks; some are empty where c < r."""
    return c * j // r, c * (j + 1) // r


# %% answer="chunks"
def chunk_count(rows, out, work, home, most):
    """rows and most whole numbers; out, work and home pairs (a, b) -> a number of chunks."""

    ### BEGIN SOLUTION
    def time(r):
        sent, busy, back = (a + b * Fraction(rows, r) for a, b in (out, work, home))
        done, link = 0, r * sent
        ends = [done := max(done, (j + 1) * sent) + busy for j in range(r)]
        for end in ends:
            link = max(link, end) + back
        return link

    return min(range(1, most + 1), key=time)
    ### END SOLUTION


def in_chunks(x, send_sizes, receive_sizes, work, r, group):
    """x [A, D] float64 -> [A, D]; send_sizes and receive_sizes are lists of whole numbers, one for each rank."""

    ### BEGIN SOLUTION
    def sizes(pieces, j):
        return [stop - start for start, stop in (cut(c, j, r) for c in pieces)]

    def transfer(rows, leaving, arriving, j):
        return collectives.all_to_all(
            rows,
            group,
            send_sizes=sizes(leaving, j),
            receive_sizes=sizes(arriving, j),
            async_op=True,
        )

    def dispatch(j):
        pieces = [piece[slice(*cut(len(piece), j, r))] for piece in x.split(send_sizes)]
        return transfer(torch.cat(pieces), send_sizes, receive_sizes, j)

    coming, going = dispatch(0), []
    for j in range(r):
        following = dispatch(j + 1) if j + 1 < r else None
        going.append(transfer(work(coming.wait()), receive_sizes, send_sizes, j))
        coming = following
    y = torch.empty_like(x)
    for j, handle in enumerate(going):
        for piece, rows in zip(y.split(send_sizes), handle.wait().split(sizes(send_sizes, j))):
            piece[slice(*cut(len(piece), j, r))] = rows
    return y
    ### END SOLUTION


# %% [markdown]
# How is "while the expert works" checked, without a clock? The expert below multiplies each chunk by another matrix, which is fetched from
# outside when the work on the chunk begins. That moment is written down among your messages, and the matrix is handed over when nothing
# else moves, as if the work took longer than the network needs for what was started before. Then all of it once more with one rank ahead of
# the others: they are done with a chunk only when that rank has begun the next one.


# %% driver="layer_in_chunks"
def layer_in_chunks(x, send_sizes, receive_sizes, r, ahead, group):
    """The layer, and how many rows each call of work had. `ahead` is a rank, or None."""
    called = []

    def work(rows):
        j = len(called)
        called.append(rows.shape[0])
        if j >= r:
            raise ValueError(f"work is called more than {r} times")
        if group.rank() == ahead and j > 0:
            collectives.barrier(group)
        matrix = group.fetch(f"chunk {j}", rows.new_empty(rows.shape[1], rows.shape[1]))
        if ahead not in (None, group.rank()) and j < r - 1:
            collectives.barrier(group)
        return rows @ matrix

    return in_chunks(x, send_sizes, receive_sizes, work, r, group), called


# %% judge="expect_chunks"
def expect_count(*cases):
    """Cases (rows, out, work, home, most, time): time(r) is what r chunks take."""
    given = [case[:-1] for case in cases]
    for r, (rows, *prices, most, time) in zip(ask_each(chunk_count, given), cases):
        where = f"(seen with {rows} rows, out, work, home {prices}, most {most})"
        expect(type(r) is int and 1 <= r <= most, "a number of chunks", f"from 1 to {most} {where}")
        hint = f"another number is faster; who waits for whom, the link or the expert? {where}"
        expect(time(r) == min(map(time, range(1, most + 1))), "the fastest number", hint)


def expect_in_chunks(sizes, width, r):
    """sizes[r][q] rows go from rank r to rank q. With all ranks alike, then with one ahead of the others."""
    ranks = range(len(sizes))
    columns = [[sizes[q][rank] for q in ranks] for rank in ranks]
    x = [draw.real(sum(own), width) for own in sizes]
    matrices = [{f"chunk {j}": draw.real(width, width) for j in range(r)} for _ in ranks]
    pieces = [[list(cut(c, j, r)) for j in range(r)] for c in range(1 + max(map(max, sizes)))]
    wanted = []
    for rank in ranks:
        rows = []
        for to, piece in enumerate(x[rank].split(sizes[rank])):
            for j, (start, stop) in enumerate(pieces[len(piece)]):
                rows.append(piece[start:stop] @ matrices[to][f"chunk {j}"])
        wanted.append(torch.cat(rows))
    where = f"(seen with {len(sizes)} ranks and {r} chunks)"
    for ahead in (None, draw.integer(0, len(sizes) - 1)):
        inputs = [(x[rank], sizes[rank], columns[rank], r, ahead) for rank in ranks]
        try:
            outcome = run_on_ranks(layer_in_chunks, inputs, collectives=LISTED, secrets=matrices)
        except Failure as failure:
            expect(
                failure.property != "no deadlock" or ahead is None,
                "work waits for nobody",
                f"a rank that could work waits for another that is a chunk behind {where} ({failure})",
            )
            raise
        called = [
            [sum(b - a for a, b in (pieces[c][j] for c in columns[rank])) for j in range(r)]
            for rank in ranks
        ]
        found = [one for _, one in outcome.results]
        expect(found == called, "rows of each chunk", f"work meets one chunk at a time {where}")
        hint = f"do results come back to the places of their rows? {where}"
        said = [y for y, _ in outcome.results]
        expect_equal(said, wanted, "the layer's results", hint, atol=1e-10)
        crossing = sum(sizes[one][other] for one in ranks for other in ranks if one != other)
        expect(
            sum(outcome.sent_bytes) == 2 * 8 * width * crossing,
            "bytes on the wire",
            f"a row travels once there and once back, to no one else {where}",
        )
        if ahead is None:
            for rank in ranks:
                expect_order(outcome.events, rank, sizes, pieces, width, r, where)


def expect_order(events, rank, sizes, pieces, width, r, where):
    """Before the work on chunk j a rank has sent chunks 0 to j+1 and the results of chunks 0 to j-1, no more."""

    def rows(way, j):
        counts = [way(other) for other in range(len(sizes)) if other != rank]
        return sum(pieces[c][j][1] - pieces[c][j][0] for c in counts)

    there = [rows(lambda other: sizes[rank][other], j) for j in range(r)]
    back = [rows(lambda other: sizes[other][rank], j) for j in range(r)]
    sent = j = 0
    for event in events:
        if event.rank == rank and event.kind == "send":
            sent += event.bytes
        if event.rank == rank and event.kind == "fetch":
            due = 8 * width * (sum(there[: j + 2]) + sum(back[:j]))
            expect(
                sent >= due,
                "on its way meanwhile",
                f"the next chunk and the results of the last one leave before the work {where}",
            )
            expect(
                sent <= due,
                "one chunk ahead",
                f"more is under way than the next chunk and finished results {where}",
            )
            j += 1


# %% check="chunks-count" points=1
# As many chunks as make the layer fastest.
expect_count(
    (12, (1, 1), (2, 2), (1, 2), 4, {1: 64, 2: 48, 3: 44, 4: 44}.get),
    (8, (3, 1), (0, 0), (3, 1), 4, {1: 22, 2: 28, 3: 34, 4: 40}.get),
    (8, (2, 1), (0, 9), (1, 0), 3, {1: 83, 2: 79, 3: Fraction(233, 3)}.get),
)
print("the visible checks pass")
### BEGIN HIDDEN TESTS


def lived(rows, *prices, most):
    """A case; its time is the longest way through the layer, from the first dispatch to the last combine."""

    def time(r):
        sent, busy, back = (a + b * Fraction(rows, r) for a, b in prices)
        ways = [r * (sent + back)]  # the link has no pause
        for first in range(
            r
        ):  # the expert works without a pause from chunk `first` to chunk `last`
            for last in range(first, r):
                ways.append((first + 1) * sent + (last - first + 1) * busy + (r - last) * back)
        return max(ways)

    return *[rows, *prices], most, time


a_few = lambda: draw.integer(200, 400)
expect_count(
    lived(7, (0, 1), (0, 1), (0, 1), most=9),
    lived(5, (9, 0), (9, 0), (4, 0), most=6),
    lived(64, (1, 4), (16, 1), (1, 8), most=8),
    lived(400, (1, 2), (8, 5), (1, 2), most=1),
    lived(a_few(), (2, 3), (draw.integer(20, 40), 5), (2, 6), most=16),  # a valley within
    lived(
        a_few(), (draw.integer(10, 20), 3), (1, 7), (9, 3), most=16
    ),  # where link and expert meet
    lived(a_few(), (draw.integer(5, 9), 9), (3, 1), (5, 18), most=16),
    lived(
        a_few(), (3, 1), (2, 4), (draw.integer(20, 40), 9), most=16
    ),  # home is the longest of the three
    lived(a_few(), (draw.integer(20, 40), 9), (2, 6), (3, 1), most=16),  # out is
    *(
        lived(
            draw.integer(20, 500),
            (draw.integer(0, 30), draw.integer(1, 5)),
            (draw.integer(0, 40), draw.integer(1, 9)),
            (draw.integer(0, 30), draw.integer(1, 9)),
            most=draw.integer(2, 20),
        )
        for _ in range(14)
    ),
)
### END HIDDEN TESTS

# %% check="chunks-order" points=1
# The next chunk and the last results travel while the expert works, and nobody waits for them.
expect_in_chunks([[4, 4], [4, 4]], 3, 2)
expect_in_chunks([[3, 6], [3, 3]], 2, 3)
print("the visible checks pass")
### BEGIN HIDDEN TESTS
for ranks, r in ((2, 4), (3, 3), (draw.integer(2, 4), 5)):
    each = r * draw.integer(1, 3)
    expect_in_chunks([[each] * ranks] * ranks, draw.integer(2, 5), r)
expect_in_chunks([[2, 3], [4, 1]], 3, 1)
### END HIDDEN TESTS

# %% check="chunks-uneven" points=1
# The same with loads of any kind: chunks that do not divide, ranks without rows, all rows for one.
expect_in_chunks([[2, 5], [7, 0]], 3, 3)
print("the visible checks pass")
### BEGIN HIDDEN TESTS
for ranks in (3, draw.integer(2, 4)):
    sizes = [[draw.integer(0, 9) for _ in range(ranks)] for _ in range(ranks)]
    sizes[0][1] = 1  # fewer rows than chunks
    expect_in_chunks(sizes, draw.integer(2, 5), draw.integer(3, 5))
hot, rows = draw.integer(0, 2), draw.integer(4, 9)
expect_in_chunks([[rows if q == hot else 0 for q in range(3)] for _ in range(3)], 3, 3)
expect_in_chunks(
    [[draw.integer(3, 7) if q != hot else 0 for q in range(3)] for _ in range(3)], 2, 4
)
### END HIDDEN TESTS
