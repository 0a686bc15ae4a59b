# %% [markdown]
# # Exercises 11: zero bubble
#
# Four tasks, 10 points, about two and a half hours. Read chapter 11 first. No GPU, nothing to download.
#
# Write where a cell says `YOUR CODE HERE`, run the cell, then run the check below it. A check tells which property of your
# answer is broken, never the result it wants. When the visible checks pass, grade yourself in a terminal:
#
#     minitrain grade 11
#
# The grader runs the same checks and hidden ones with other sizes and other costs. Three rules:
#
# - An answer cell stands alone. It may use what read-only cells define, but not your other cells.
# - A schedule is a list for each rank; an action is `("F", stage, microbatch)`, `("I", ..)` or `("W", ..)`. All counting starts at 0.
# - All functions here run on one process and only say what ranks would do.
#
# F of a stage needs F of the stage before for the same microbatch. I, the backward for the input, needs the stage's own F, and I of the stage behind, if
# there is one. W, the gradients of the weights, needs its I, and nothing needs W. Activations of a microbatch are held from its F to its W.
#
# Zero bubble is Qi et al. 2023 (arXiv:2401.10241), V shapes are Qi et al. 2024 (arXiv:2405.15362, section 3), waves Liu et al. 2023 (arXiv:2308.15762).

# %% given="setup"
from collections import Counter
from contextlib import nullcontext
from fractions import Fraction
from functools import partial

import torch
from torch.utils.flop_counter import FlopCounterMode

from minitrain.course.grading.checks import Draw, ask, expect, expect_equal
from minitrain.course.grading.trial import Failure

draw = Draw()  # hidden checks draw sizes and costs


def F(stage, microbatch):
    return ("F", stage, microbatch)


def I(stage, microbatch):
    return ("I", stage, microbatch)


def W(stage, microbatch):
    return ("W", stage, microbatch)


def told(action):
    return f"{action[0]}{action[1]}.{action[2]}"


def needs(action, stages):
    kind, stage, i = action
    if kind == "F":
        return [F(stage - 1, i)] if stage else []
    if kind == "W":
        return [I(stage, i)]
    return [F(stage, i)] + ([I(stage + 1, i)] if stage + 1 < stages else [])


def simulate(lists, costs):
    """Start of every action, for stage r on rank r; costs is {"F": .., "I": .., "W": .., "send": ..}. ValueError if ranks wait in a circle."""
    ends, free, starts = {}, [0] * len(lists), [[] for _ in lists]
    moved = True
    while moved:
        moved = False
        for rank, own in enumerate(lists):
            while len(starts[rank]) < len(own):
                action = own[len(starts[rank])]
                before = needs(action, len(lists))
                if any(other not in ends for other in before):
                    break
                start = max(
                    [
                        free[rank],
                        *(ends[other] + costs["send"] * (other[1] != rank) for other in before),
                    ]
                )
                starts[rank].append(start)
                ends[action] = free[rank] = start + costs[action[0]]
                moved = True
    stuck = [told(own[len(done)]) for own, done in zip(lists, starts) if len(done) < len(own)]
    if stuck:
        raise ValueError(
            f"{', '.join(stuck[:4])} can never start: what they need comes later or waits for them"
        )
    return starts


def makespan(lists, costs):
    """From 0 to the end of the last action."""
    return max(
        times[-1] + costs[own[-1][0]] for own, times in zip(lists, simulate(lists, costs)) if own
    )


def held(own):
    """The most microbatches that a rank with this list ever holds, from F to W."""
    now = most = 0
    for kind, _, _ in own:
        now += {"F": 1, "I": 0, "W": -1}[kind]
        most = max(most, now)
    return most


def as_data(lists):
    """Lists of tuples, as they travel from the process of the answer."""
    return [[list(entry) for entry in own] for own in lists]


def as_schedule(data):
    return [[tuple(entry) for entry in own] for own in data]


def expect_valid(lists, p, m, costs):
    """Each action once, on the rank of its stage, and in an order in which all can be done."""
    expect(len(lists) == p, "a list for each rank", f"{p} lists are wanted, one a rank")
    for rank, own in enumerate(lists):
        counted = Counter(own)
        for i in range(m):
            for make in (F, I, W):
                expect(
                    counted[make(rank, i)] == 1,
                    "every action once",
                    f"{told(make(rank, i))} stands {counted[make(rank, i)]} times in the list of rank {rank}",
                )
        expect(
            len(own) == 3 * m,
            "every action once",
            f"rank {rank} has stage {rank} and nothing else, {3 * m} actions",
        )
    try:
        simulate(lists, costs)
    except ValueError as error:
        raise Failure("nobody waits for ever", str(error)) from None


# %% [markdown]
# ## 1. Half now, half later (3 points)
#
# A linear layer is y = x·Wᵀ, with W `[out, in]` and x `[.., in]`: any number of dims in front, also none. Write its backward in two halves.
#
# `backward_input` is the I of one layer for one microbatch. It returns dx = dy·W, and puts on `queue` (a list) whatever the other half will need; what that
# is, is yours to choose. A frozen layer (`trained` is False) has no other half: nothing goes on the queue.
#
# `backward_weight` is W: it takes the **oldest** entry off the queue and adds its dW = Σ dyᵀ·x, summed over all dims in front, to `grads[name]`. If the name
# has no gradient yet, that is the gradient. Microbatches come one after the other, and their gradients add up.
#
# Graded: the gradients; that each half is one matrix product and nothing is computed twice; that the queue holds x and dy themselves and not copies of them, and
# is empty when its work is done.
#
# W = `[[2., 3.]]`, x = `[[1., 10.]]` and dy = `[[4.]]`: dx is `[[8., 12.]]`, and later grads is `{name: [[4., 40.]]}`.


# %% answer="halves"
def backward_input(name, x, weight, dy, trained, queue):
    """x [.., in], weight [out, in], dy [.., out] -> dx [.., in]; what is left to do goes on the queue."""
    ### BEGIN SOLUTION
    if trained:
        queue.append((name, x, dy))
    return dy @ weight
    ### END SOLUTION


def backward_weight(queue, grads):
    """Takes the oldest entry off the queue and adds its gradient [out, in] to grads[name]. Returns nothing."""
    ### BEGIN SOLUTION
    name, x, dy = queue.pop(0)
    gradient = dy.reshape(-1, dy.size(-1)).T @ x.reshape(-1, x.size(-1))
    grads[name] = grads[name] + gradient if name in grads else gradient
    ### END SOLUTION


# %% given="expect_halves"
def tensors_in(entry):
    if isinstance(entry, torch.Tensor):
        return [entry]
    if isinstance(entry, dict):
        entry = list(entry.values())
    return (
        [x for part in entry for x in tensors_in(part)] if isinstance(entry, (list, tuple)) else []
    )


def step_in_halves(weights, trained, xs, dys, counter=nullcontext):
    """Layers in a row, all I of all microbatches, then all W. What came out and, with a counter, what it cost."""
    queue, grads, said = (
        [],
        {},
        {"dx": [], "I": [], "W": [], "on the queue": [], "new bytes": 0, "after": []},
    )
    known = set()
    with torch.no_grad():
        for x, dy in zip(xs, dys):
            inputs = [x]
            for weight in weights[:-1]:
                inputs.append(inputs[-1] @ weight.T)
            for number in reversed(range(len(weights))):
                known |= {
                    inputs[number].untyped_storage().data_ptr(),
                    dy.untyped_storage().data_ptr(),
                }
                with counter() as count:
                    dy = backward_input(
                        f"layer {number}",
                        inputs[number],
                        weights[number],
                        dy,
                        trained[number],
                        queue,
                    )
                said["I"].append(count.get_total_flops() if count else 0)
                said["on the queue"].append(len(queue))
            said["dx"].append(dy)
            known.add(dy.untyped_storage().data_ptr())
        kept = {
            x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors_in(queue)
        }
        said["new bytes"] = sum(size for pointer, size in kept.items() if pointer not in known)
        for _ in range(len(queue)):
            if not queue:
                break
            with counter() as count:
                backward_weight(queue, grads)
            said["W"].append(count.get_total_flops() if count else 0)
            said["after"].append({name: grad.clone() for name, grad in grads.items()})
        said["left"], said["grads"] = len(queue), dict(grads)
    return said


def counted_steps(steps):
    """The first counter in a process takes a second, so several steps are counted in one."""
    return [
        step_in_halves(*step, counter=partial(FlopCounterMode, display=False)) for step in steps
    ]


def drawn_step(draw, shape, widths, trained, microbatches):
    """Layers in a row whose numbers are exact, so that sums have one result."""
    weights = [draw.exact(out, into) for into, out in zip(widths, widths[1:])]
    xs = [draw.exact(*shape, widths[0]) for _ in range(microbatches)]
    dys = [draw.exact(*shape, widths[-1]) for _ in range(microbatches)]
    return weights, list(trained), xs, dys


def true_step(weights, trained, xs, dys):
    """By autograd: dx of each microbatch, and the gradients after each W, oldest first."""
    dxs, after, total = [], [], {}
    for x, dy in zip(xs, dys):
        x, params = (
            x.clone().requires_grad_(),
            [weight.clone().requires_grad_() for weight in weights],
        )
        y = x
        for param in params:
            y = y @ param.T
        y.backward(dy)
        dxs.append(x.grad)
        for number in reversed(range(len(weights))):
            if trained[number]:
                name = f"layer {number}"
                total = total | {
                    name: total[name] + params[number].grad
                    if name in total
                    else params[number].grad
                }
                after.append(total)
    return dxs, after


def expect_gradients(draw, shape, widths, trained, microbatches):
    step = drawn_step(draw, shape, widths, trained, microbatches)
    said, (dxs, after) = ask(step_in_halves, *step), true_step(*step)
    where = f"(seen with x {[*shape, widths[0]]}, {len(widths) - 1} layers, {microbatches} microbatches)"
    expect_equal(said["dx"], dxs, "the gradient of the input", f"dx = dy·W {where}")
    expect(
        sorted(said["grads"]) == sorted(after[-1] if after else {}),
        "a gradient for each trained layer",
        f"no more and no fewer than are trained {where}",
    )
    for name in said["grads"]:
        expect_equal(
            said["grads"][name],
            after[-1][name],
            "the gradient of the weights",
            f"sum over all tokens and over all microbatches {where}",
        )
    for number, (found, true) in enumerate(zip(said["after"], after)):
        expect(
            sorted(found) == sorted(true)
            and all(torch.equal(found[name], true[name]) for name in true),
            "oldest first",
            f"in the end all is right, but not on the way: which entry was worked off by W number {number}, and was it one only? {where}",
        )


def expect_costs(draw, *sizes):
    steps = [drawn_step(draw, *size) for size in sizes]
    for size, said in zip(sizes, ask(counted_steps, [list(step) for step in steps])):
        expect_cost(said, *size)


def expect_cost(said, shape, widths, trained, microbatches):
    tokens = 1
    for size in shape:
        tokens *= size
    products = [2 * tokens * into * out for into, out in zip(widths, widths[1:])][::-1]
    wanted = [flops for flops, yes in zip(products, trained[::-1]) if yes]
    expect(
        said["I"] == products * microbatches,
        "one product in I",
        "I is dy·W for one layer, and nothing else is multiplied there; compare the FLOPs of your halves with those of B",
    )
    counts = said["on the queue"]
    expected = [
        sum(trained[::-1][: k + 1]) + j * sum(trained)
        for j in range(microbatches)
        for k in range(len(trained))
    ]
    expect(
        counts[-1] <= expected[-1],
        "frozen layers",
        "a layer that is not trained has no second half, so nothing of it is kept",
    )
    expect(
        counts == expected,
        "one entry for each product",
        "every I of a trained layer puts one entry on the queue",
    )
    expect(
        said["W"] == wanted * microbatches,
        "one product in W",
        "W is the product of the oldest entry and nothing else; is something computed again, or several entries at once?",
    )


def expect_kept(draw, shape, widths, trained, microbatches):
    step = drawn_step(draw, shape, widths, trained, microbatches)
    said, (_, after) = ask(step_in_halves, *step), true_step(*step)
    expect(
        said["new bytes"] == 0,
        "nothing is copied",
        "x and dy exist already; the queue needs to remember them, not to have them twice",
    )
    expect(
        said["left"] == 0,
        "the queue empties",
        "what is worked off must be forgotten, or its x and dy stay in memory",
    )
    expect(
        len(said["W"]) == len(after),
        "the queue empties",
        "a W for each I of a trained layer, then the queue is empty",
    )


# %% check="halves-gradients" points=1
# Gradients of the input and of the weights, added up over microbatches, oldest first.
expect_gradients(draw, [1], [2, 1], [True], 1)
expect_gradients(draw, [3], [4, 2, 3], [True, True], 2)
expect_gradients(draw, [2, 3], [4, 5], [True], 2)
print("the visible checks pass")
### BEGIN HIDDEN TESTS
expect_gradients(
    draw,
    [draw.integer(2, 5)],
    [draw.integer(2, 5), draw.integer(2, 5), draw.integer(2, 5)],
    [True, True],
    draw.integer(2, 4),
)
expect_gradients(draw, [2, draw.integer(2, 4)], [draw.integer(2, 4), 3], [True], 3)
expect_gradients(draw, [], [draw.integer(2, 4), 3], [True], 2)
### END HIDDEN TESTS

# %% check="halves-flops" points=1
# Each half is one product; a frozen layer has one half.
expect_costs(draw, ([3], [4, 5], [True], 1), ([3], [4, 5, 2], [False, True], 2))
print("the visible checks pass")
### BEGIN HIDDEN TESTS
expect_costs(
    draw,
    (
        [draw.integer(2, 6)],
        [draw.integer(2, 6) for _ in range(4)],
        [True, draw.choice([True, False]), False],
        draw.integer(2, 3),
    ),
    ([2, draw.integer(2, 4)], [draw.integer(2, 6) for _ in range(3)], [True, True], 3),
)
### END HIDDEN TESTS

# %% check="halves-queue" points=1
# The queue remembers, copies nothing, and is empty in the end.
expect_kept(draw, [3], [4, 5], [True], 2)
print("the visible checks pass")
### BEGIN HIDDEN TESTS
expect_kept(
    draw, [draw.integer(2, 6)], [draw.integer(2, 6) for _ in range(4)], [True, False, True], 3
)
expect_kept(draw, [2, draw.integer(2, 4)], [draw.integer(2, 6) for _ in range(3)], [True, True], 2)
### END HIDDEN TESTS

# %% [markdown]
# ## 2. ZB-H1 (3 points)
#
# Lists for p ranks (stage r on rank r) and m microbatches with F, I and W: a third of 1F1B's bubble in 1F1B's memory.
#
# Take 1F1B: rank r runs some forwards ahead, then a forward and an I take turns, then come the I that are left. What is new is where the W stand. If each W
# follows its I at once, a gradient waits for W at every rank on its way back. If a rank *holds back* its W, I travels fast, but activations stay.
# How many W may rank r hold back, if nobody shall hold more than p microbatches? Is it the first rank or the last one that has room?
#
# Graded by a simulator, so that every right answer is right. The bubble is the longest that any rank takes from its own first action to its own last, minus
# its work; for m ≥ p it may be at most (p-1)·(F + I - W) for all costs with W ≤ F, and no rank may ever hold more than p microbatches, for any m.
#
# p = 2, m = 2: rank 0 is F I W with one more F in front, `[F(0,0), F(0,1), I(0,0), W(0,0), I(0,1), W(0,1)]`, and rank 1 is
# `[F(1,0), I(1,0), F(1,1), I(1,1), W(1,0), W(1,1)]`.


# %% answer="zb_h1"
def zb_h1(p, m):
    """A list of p lists of actions."""
    ### BEGIN SOLUTION
    lists = []
    for rank in range(p):
        ahead, held_back = p - rank - 1, rank
        own = [F(rank, i) for i in range(min(ahead, m))]
        for i in range(m):
            if ahead + i < m:
                own.append(F(rank, ahead + i))
            own.append(I(rank, i))
            if i >= held_back:
                own.append(W(rank, i - held_back))
        lists.append(own + [W(rank, i) for i in range(max(0, m - held_back), m)])
    return lists
    ### END SOLUTION


# %% given="expect_h1"
ONES = {"F": 1, "I": 1, "W": 1, "send": 0}


def zb_h1_of(sizes):
    return [as_data(zb_h1(p, m)) for p, m in sizes]


def h1_of(*sizes):
    """[(p, m, valid lists), ..], asked in one go."""
    made = [
        (p, m, as_schedule(lists))
        for (p, m), lists in zip(sizes, ask(zb_h1_of, [list(size) for size in sizes]))
    ]
    for p, m, lists in made:
        expect_valid(lists, p, m, ONES)
    return made


def expect_h1_bubble(p, m, lists, costs=ONES):
    starts = simulate(lists, costs)
    limit = (p - 1) * (costs["F"] + costs["I"] - costs["W"])
    for rank, (own, times) in enumerate(zip(lists, starts)):
        waiting = (
            times[-1] + costs[own[-1][0]] - times[0] - m * (costs["F"] + costs["I"] + costs["W"])
        )
        expect(
            waiting <= limit,
            "the bubble",
            f"who waits for whom, and could that one have left a W for later? (seen at rank {rank} of {p}, {m} microbatches, costs {costs})",
        )


def expect_h1_held(p, m, lists):
    for rank, own in enumerate(lists):
        expect(
            held(own) <= p,
            "held at most",
            f"a microbatch is held from its F to its W; how many W does this rank hold back while it goes on with forwards? (seen at rank {rank} of {p}, {m} microbatches)",
        )


# %% check="zb_h1-lists" points=1
# Everything once, in an order in which all can be done.
h1_of((2, 2), (3, 5))
print("the visible checks pass")
### BEGIN HIDDEN TESTS
made = h1_of(
    (1, 3),
    (draw.integer(3, 6), draw.integer(7, 12)),
    (draw.integer(5, 8), draw.integer(1, 3)),
    (4, 4),
)
### END HIDDEN TESTS

# %% check="zb_h1-bubble" points=1
# No rank waits longer than the formula says.
for p, m, lists in h1_of((2, 2), (4, 8)):
    expect_h1_bubble(p, m, lists)
    expect_h1_bubble(p, m, lists, {"F": 3, "I": 4, "W": 2, "send": 0})
print("the visible checks pass")
### BEGIN HIDDEN TESTS
sizes = [
    (p, p + draw.integer(0, 15))
    for p in (draw.integer(2, 4), draw.integer(5, 8), draw.integer(3, 6))
]
for p, m, lists in h1_of(*sizes, (3, 3)):
    f = draw.integer(2, 6)
    expect_h1_bubble(
        p, m, lists, {"F": f, "I": draw.integer(f, 8), "W": draw.integer(1, f), "send": 0}
    )
### END HIDDEN TESTS

# %% check="zb_h1-held" points=1
# No rank ever holds more than p microbatches, and the bubble is small all the same.
for p, m, lists in h1_of((2, 5)):
    expect_h1_held(p, m, lists)
    expect_h1_bubble(p, m, lists)
print("the visible checks pass")
### BEGIN HIDDEN TESTS
for p, m, lists in h1_of(
    (draw.integer(3, 5), draw.integer(7, 12)),
    (draw.integer(6, 8), draw.integer(14, 20)),
    (1, 4),
    (draw.integer(4, 6), draw.integer(6, 7)),
):
    expect_h1_held(p, m, lists)
    expect_h1_bubble(p, m, lists)
### END HIDDEN TESTS

# %% [markdown]
# ## 3. Under a limit of memory (3 points, with a leaderboard)
#
# Now memory is what it is: no rank may ever hold more than `limit` microbatches from F to W; limit is 1 or more, below p or above. Costs are whole numbers of any
# ratio, and a message takes `send`. Return lists (stage r on rank r) with a short `makespan`, the time from 0 to the end of the last action.
#
# There is no formula. A *list scheduler* is a good way: let time go by, and whenever a rank is free, start the most urgent of the actions that it can start
# now; F only if there is room. Which kind is most urgent is up to you, and you may try several orders and keep the shortest lists: `makespan(lists, costs)` and
# `held(own)` are there for you to use. A message that arrives later is not there yet.
#
# Graded: (1) valid, and within the limit, for every limit from 1; (2) at least as short as 1F1B with this limit, I and W in one piece, and shorter where that is easy;
# (3) the leaderboard: at least as short as a list scheduler that takes I before F before W. The message says your bubble and the one to beat.


# %% answer="under_limit"
def under_limit(p, m, costs, limit):
    """A list of p lists of actions. costs is {"F": .., "I": .., "W": .., "send": ..}."""

    ### BEGIN SOLUTION
    def scheduled(order):
        ends, free, holding = {}, [0] * p, [0] * p
        lists, forwards, inputs, weights = [[] for _ in range(p)], [0] * p, [0] * p, [0] * p

        def ready_at(action):
            times = [ends.get(before) for before in needs(action, p)]
            if None in times:
                return None
            return max(
                [
                    0,
                    *(
                        end + costs["send"] * (before[1] != action[1])
                        for end, before in zip(times, needs(action, p))
                    ),
                ]
            )

        alarms = {0}
        while alarms:
            now = min(alarms)
            alarms.discard(now)
            for rank in range(p):
                if free[rank] > now:
                    continue
                heads = {
                    "F": F(rank, forwards[rank])
                    if forwards[rank] < m and holding[rank] < limit
                    else None,
                    "I": I(rank, inputs[rank]) if inputs[rank] < m else None,
                    "W": W(rank, weights[rank]) if weights[rank] < m else None,
                }
                times = {
                    kind: ready_at(action) for kind, action in heads.items() if action is not None
                }
                alarms |= {time for time in times.values() if time is not None and time > now}
                kind = next(
                    (kind for kind in order if times.get(kind) is not None and times[kind] <= now),
                    None,
                )
                if kind is None:
                    continue
                lists[rank].append(heads[kind])
                free[rank] = ends[heads[kind]] = now + costs[kind]
                alarms |= {free[rank], free[rank] + costs["send"]}
                forwards[rank] += kind == "F"
                inputs[rank] += kind == "I"
                weights[rank] += kind == "W"
                holding[rank] += (kind == "F") - (kind == "W")
        return lists

    tried = [scheduled(order) for order in ("IFW", "FIW", "IWF", "WIF")]
    return min(tried, key=lambda lists: makespan(lists, costs))
    ### END SOLUTION


# %% given="expect_under_limit"
def under_limit_of(cases):
    return [as_data(under_limit(p, m, dict(costs), limit)) for p, m, costs, limit in cases]


def limited(*cases):
    """[(p, m, costs, limit, makespan), ..] of valid lists within the limit, asked in one go."""
    made = []
    for (p, m, costs, limit), data in zip(
        cases, ask(under_limit_of, [list(case) for case in cases])
    ):
        lists = as_schedule(data)
        expect_valid(lists, p, m, costs)
        for rank, own in enumerate(lists):
            expect(
                held(own) <= limit,
                "the limit",
                f"from F to W; an I alone makes no room (seen at rank {rank} of {p}, limit {limit})",
            )
        made.append((p, m, costs, limit, makespan(lists, costs)))
    return made


def in_one_piece(p, m, limit):
    """1F1B with this limit, W right behind its I."""
    lists = []
    for rank in range(p):
        ahead = min(p - rank, limit, m)
        own = [F(rank, i) for i in range(ahead)]
        for i in range(m):
            own += [I(rank, i), W(rank, i)] + ([F(rank, ahead + i)] if ahead + i < m else [])
        lists.append(own)
    return lists


def bubble_of(time, p, m, costs):
    return float(1 - Fraction(m * (costs["F"] + costs["I"] + costs["W"]), time))


def expect_bar(p, m, costs, limit, time):
    bar, easy = makespan(in_one_piece(p, m, limit), costs), p > 3 and limit >= p
    where = f"(seen with p = {p}, m = {m}, limit {limit}, costs {costs}: your bubble is {bubble_of(time, p, m, costs):.1%} of the time, that of 1F1B {bubble_of(bar, p, m, costs):.1%})"
    expect(
        time <= bar,
        "as short as 1F1B",
        f"1F1B with this limit and whole backwards is shorter; what does a rank do while it waits? {where}",
    )
    expect(
        not easy or time < bar,
        "shorter than 1F1B",
        f"nobody waits for a W; where could it go? {where}",
    )


def expect_target(p, m, costs, limit, time):
    from minitrain.pipeline.schedules.greedy import greedy
    from minitrain.pipeline.simulate import Costs, simulate as simulated

    prices = Costs(**costs)
    target = simulated(greedy(range(p), p, m, prices, limit=limit), prices).makespan
    expect(
        time <= target,
        "the leaderboard",
        f"your bubble is {bubble_of(time, p, m, costs):.2%} of the time, the one to beat is {bubble_of(target, p, m, costs):.2%} "
        f"(seen with p = {p}, m = {m}, limit {limit}, costs {costs})",
    )
    return target


def drawn_costs(draw):
    return {
        "F": draw.integer(1, 5),
        "I": draw.integer(1, 6),
        "W": draw.integer(1, 5),
        "send": draw.integer(0, 3),
    }


# %% check="under_limit-valid" points=1
# Valid, and never more than the limit.
limited((2, 3, ONES, 1), (3, 5, ONES, 2))
print("the visible checks pass")
### BEGIN HIDDEN TESTS
sizes = (
    (draw.integer(2, 4), draw.integer(3, 8), 1),
    (draw.integer(3, 6), draw.integer(5, 10), 2),
    (draw.integer(3, 5), draw.integer(6, 12), draw.integer(3, 9)),
    (1, 3, 1),
    (4, 2, 5),
)
made = limited(*((p, m, drawn_costs(draw), limit) for p, m, limit in sizes))
### END HIDDEN TESTS

# %% check="under_limit-bar" points=1
# At least as short as 1F1B with the same limit, and shorter with room for p microbatches.
for case in limited((4, 8, ONES, 4), (4, 8, ONES, 2)):
    expect_bar(*case)
print("the visible checks pass")
### BEGIN HIDDEN TESTS
cases = []
for p in (4, draw.integer(5, 6)):
    f = draw.integer(2, 4)
    cases += [
        (p, draw.integer(2 * p, 3 * p), {"F": f, "I": f, "W": draw.integer(1, f), "send": 0}, limit)
        for limit in (p, 2 * p - 1)
    ] + [(p, 2 * p, ONES, p - 1)]
for case in limited(*cases):
    expect_bar(*case)
### END HIDDEN TESTS

# %% check="under_limit-leaderboard" points=1
# The leaderboard: at least as short as the chapter's list scheduler.
for case in limited((4, 12, {"F": 2, "I": 3, "W": 2, "send": 1}, 5)):
    print(
        f"p = 4, m = 12, limit 5: {case[-1]} units; the chapter's list scheduler takes {expect_target(*case)}"
    )
print("the visible checks pass")
### BEGIN HIDDEN TESTS
limits = (
    (draw.integer(3, 4), draw.integer(2, 3)),
    (draw.integer(4, 5), draw.integer(4, 6)),
    (draw.integer(5, 6), draw.integer(7, 9)),
    (draw.integer(3, 6), draw.integer(3, 12)),
)
for case in limited(
    *((p, draw.integer(2 * p, 3 * p), drawn_costs(draw), limit) for p, limit in limits)
):
    expect_target(*case)
### END HIDDEN TESTS

# %% [markdown]
# ## 4. Folded stages (1 point)
#
# A V has 2p stages: down through the ranks, and back up, so that rank p-1 has two in a row. More legs go on like this, down, up, down, up: Hanayo's waves. With
# `legs` of them there are legs·p stages. `rank_of(stage, p)` is the rank of a stage, for any number of legs.
#
# `messages(p, legs, m)` is how many messages all ranks together send in a step of m microbatches: activations forward and gradients back at each
# boundary between stages, but none where both stages are on one rank.
#
# p = 3, two legs: the ranks of the stages 0 to 5 are 0, 1, 2, 2, 1, 0, and one microbatch needs 8 messages.


# %% answer="folded"
def rank_of(stage, p):
    """An int."""
    ### BEGIN SOLUTION
    leg, place = divmod(stage, p)
    return p - 1 - place if leg % 2 else place
    ### END SOLUTION


def messages(p, legs, m):
    """An int."""
    ### BEGIN SOLUTION
    return 2 * m * legs * (p - 1)
    ### END SOLUTION


# %% given="expect_folded"
def folded_of(cases):
    return [
        {
            "ranks": [rank_of(stage, p) for stage in range(legs * p)],
            "messages": messages(p, legs, m),
        }
        for p, legs, m in cases
    ]


def expect_folded(*cases):
    for case, said in zip(cases, ask(folded_of, [list(case) for case in cases])):
        expect_place(said, *case)


def expect_place(said, p, legs, m):
    there = []
    for leg in range(legs):
        there += list(range(p)) if leg % 2 == 0 else list(reversed(range(p)))
    where = f"(seen with p = {p}, {legs} legs)"
    expect(said["ranks"][:p] == there[:p], "the way down", f"stage r is on rank r at first {where}")
    expect(
        said["ranks"][: 2 * p] == there[: 2 * p],
        "the way up",
        f"the last rank has two stages in a row, then back to rank 0 {where}",
    )
    expect(
        said["ranks"] == there,
        "more legs",
        f"after the way up comes a way down; the turn at rank 0 is as the one at the other end {where}",
    )
    sent = 2 * m * sum(one != other for one, other in zip(there, there[1:]))
    expect(
        said["messages"] <= sent,
        "no message within a rank",
        f"two stages of one rank need no message; how many turns are there? {where}",
    )
    expect(
        said["messages"] == sent,
        "messages",
        f"one forward and one back at each boundary between ranks, for each microbatch {where}",
    )


# %% check="folded-place" points=1
# Which rank has which stage, and how many messages that makes.
expect_folded((3, 2, 1), (2, 1, 2))
print("the visible checks pass")
### BEGIN HIDDEN TESTS
expect_folded(
    *(
        (p, legs, draw.integer(2, 9))
        for p, legs in (
            (draw.integer(2, 6), 2),
            (draw.integer(2, 6), draw.integer(3, 6)),
            (1, 2),
            (draw.integer(3, 8), 4),
        )
    )
)
### END HIDDEN TESTS
