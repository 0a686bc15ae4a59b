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
# - An answer cell stands alone. It may use read-only cells, except those marked as being for the checks, and not your other cells.
# - A schedule is a list for each rank; an action is `("F", stage, microbatch)`, `("I", ..)` or `("W", ..)`. All counting starts at 0.
# - All functions here run on one process and only say what ranks would do.
#
# F of a stage needs F of the stage before for the same microbatch. I, the backward for the input, needs the stage's own F, and I of the next stage, if
# there is one. W, the gradients of the weights, needs its I, and nothing needs W. Activations of a microbatch are held from its F to its W.
#
# Zero bubble is Qi et al. 2023 (arXiv:2401.10241), V shapes are Qi et al. 2024 (arXiv:2405.15362, section 3), waves Liu et al. 2023 (arXiv:2308.15762).

# %% given="setup"
import torch

from minitrain import collectives


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


# %% judge="tools"
from collections import Counter
from fractions import Fraction

from minitrain.course.grading.answer_checks import (
    Draw,
    ask,
    ask_each,
    expect,
    expect_equal,
    run_on_ranks,
)
from minitrain.course.grading.trial import Failure

draw = Draw()  # hidden checks draw sizes and costs


def expect_valid(lists, p, m, costs):
    """Each action once, on the rank of its stage, and in an order in which all can be done."""
    expect(
        isinstance(lists, list) and len(lists) == p,
        "a list for each rank",
        f"{p} lists are wanted, one per rank",
    )
    for rank, own in enumerate(lists):
        counted = Counter(own)
        for action in (make(rank, i) for i in range(m) for make in (F, I, W)):
            expect(
                counted[action] == 1,
                "every action once",
                f"{told(action)} stands {counted[action]} times in the list of rank {rank}",
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
# A linear layer is y = x·Wᵀ, with W `[out, in]` and x `[.., in]`: any number of dims in front, also none. Write its backward in two halves, without autograd.
#
# `backward_input` is the I of one layer for one microbatch. It returns dx = dy·W, and puts on `queue` (a list) whatever the other half will need; what that
# is, you choose. A frozen layer (`trained` is False) has no other half: nothing goes on the queue.
#
# `backward_weight` is W: it takes the **oldest** entry off the queue and adds its dW = Σ dyᵀ·x, summed over all dims in front, to `grads[name]`. If the name
# has no gradient yet, that is the gradient. Microbatches come one after the other, and their gradients add up.
#
# Graded: the gradients; that dW is left for later, from x and dy themselves and not from copies of them (the check sends each dx on, writes other numbers into x and dy
# when all I are done, and wants the gradient of these); that I needs no memory for a dW, and W none for a dx; and that an x or dy that is no longer needed is released.
#
# > **API** `backward_input(name, x, weight, dy, trained, queue)` gets tensors x `[.., in]`, weight `[out, in]`, dy `[.., out]` and returns dx `[.., in]`.
# > `backward_weight(queue, grads)` returns nothing: it changes `queue`, a plain list, and `grads`, a dict from names to tensors `[out, in]`.
# > Any operation of torch on tensors is there but autograd; between the calls x and dy may be overwritten in place.
#
# W = `[[2., 3.]]`, x = `[[1., 10.]]` and dy = `[[4.]]`: dx is `[[8., 12.]]`, and later, if x and dy still hold these numbers, grads is `{name: [[4., 40.]]}`.


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


# %% driver="steps"
def step_in_halves(entries, group):
    """I of all entries, each dx sent to rank 1; then other numbers come into x and dy; then all W. The gradients after each."""
    if group.rank() == 1:
        return [collectives.receive(x, 0, group) for _, x, _, _, _ in entries]
    queue, grads, after = [], {}, []
    for entry in entries:
        dx = backward_input(*entry, queue)
        if dx is None:
            raise ValueError("backward_input returned nothing; dx is wanted")
        collectives.send(dx, 1, group)
    for number, (_, x, _, dy, _) in enumerate(entries):
        x.copy_(group.fetch(f"x {number}", x))
        dy.copy_(group.fetch(f"dy {number}", dy))
    for _ in range(sum(trained for *_, trained in entries)):
        backward_weight(queue, grads)
        after.append({name: grad.clone() for name, grad in grads.items()})
    return after


def in_turn(weight, dy, microbatches):
    """I and W of one microbatch after the other, where only x and dx are large. A row of each dx, and the gradient."""
    queue, grads, rows = [], {}, []
    for i in range(microbatches):
        x = torch.full((len(dy), weight.size(1)), i + 1.0, dtype=dy.dtype)
        dx = backward_input("layer", x, weight, dy, True, queue)
        backward_weight(queue, grads)
        rows.append(dx[-1].clone())
        del x, dx
    return rows, grads["layer"]


# %% judge="expect_halves"
NEAR = 1e-10  # sums of at most 4,096 products of normal numbers
MB = 1 << 20


def backward(x, weight, dy):
    """By autograd: the gradients of x and of the weight."""
    x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    return torch.autograd.grad(x @ weight.T, (x, weight), dy)


def gradients_after(entries, numbers):
    """What grads holds after each W, oldest first, if x and dy hold these numbers."""
    after, total = [], {}
    for (name, _, weight, _, trained), (x, dy) in zip(entries, numbers):
        if trained:
            total = total | {name: total.get(name, 0) + backward(x, weight, dy)[1]}
            after.append(total)
    return after


def values(grads):
    return [grads[name] for name in sorted(grads)]


def changes(after):
    """The names whose gradient each W made or changed."""
    pairs = zip([{}, *after], after)
    return [
        [name for name in sorted(new) if name not in old or not torch.equal(old[name], new[name])]
        for old, new in pairs
    ]


def expect_halves(shape, widths, trained, microbatches):
    """Layers in a row, all I of all microbatches, then all W."""
    layers = [
        (f"layer {number}", draw.real(out, into), yes)
        for number, (into, out, yes) in enumerate(zip(widths, widths[1:], trained))
    ]
    entries = [
        (name, draw.real(*shape, weight.size(1)), weight, draw.real(*shape, weight.size(0)), yes)
        for _ in range(microbatches)
        for name, weight, yes in reversed(layers)
    ]
    late = [(draw.real(*x.shape), draw.real(*dy.shape)) for _, x, _, dy, _ in entries]
    secrets = {f"x {number}": x for number, (x, _) in enumerate(late)}
    secrets |= {f"dy {number}": dy for number, (_, dy) in enumerate(late)}
    rules = {"autograd": False, "secrets": [secrets, {}]}
    run = run_on_ranks(step_in_halves, [(entries,)] * 2, **rules)
    (after, dxs), wanted = run.results, gradients_after(entries, late)
    where = (
        f"(seen with x {[*shape, widths[0]]}, {len(layers)} layers, {microbatches} microbatches)"
    )
    true = [backward(x, weight, dy)[0] for _, x, weight, dy, _ in entries]
    expect_equal(dxs, true, "the gradient of the input", f"dx = dy·W {where}", atol=NEAR)
    kinds = [event.kind for event in run.events]
    expect(
        "send" not in kinds[kinds.index("fetch") :],
        "dx at once",
        "dx goes to the rank before when I is done, before other numbers come",
    )
    expect(
        [len(changed) for changed in changes(after)] == [1] * len(wanted),
        "one entry for each W",
        f"each W takes one entry off the queue and adds one gradient; a frozen layer has no entry {where}",
    )
    expect(
        changes(after) == changes(wanted),
        "oldest first",
        f"each W adds one gradient, but of another layer than expected: which end of the queue does it take? {where}",
    )
    early = values(gradients_after(entries, [(x, dy) for _, x, _, dy, _ in entries])[-1])
    expect(
        not all(torch.allclose(one, other) for one, other in zip(values(after[-1]), early)),
        "half of it later",
        f"this is the gradient of what x and dy held before: was it computed in I, or from copies? {where}",
    )
    expect_equal(
        values(after[-1]),
        values(wanted[-1]),
        "the gradient of the weights",
        f"sum over all tokens and over all microbatches {where}",
        atol=NEAR,
    )
    expect_equal(
        [values(grads) for grads in after],
        [values(grads) for grads in wanted],
        "oldest first",
        f"in the end all is right, but not on the way: which microbatch comes first off the queue? {where}",
        atol=NEAR,
    )


def expect_room(microbatches):
    """I has no room for a dW of 32 MB, and there is room for one x and one dx of 32 MB, for nothing else."""
    x, weight, dy = draw.real(1, 2048), draw.real(2048, 2048), draw.real(1, 2048)
    rules = {"autograd": False, "budget_bytes": 16 * MB}
    dx = ask(backward_input, "layer", x, weight, dy, True, [], **rules)
    expect_equal(dx, backward(x, weight, dy)[0], "the gradient of the input", "dx = dy·W", NEAR)

    weight, dy = draw.real(2, 1024), draw.real(4096, 2)
    rules["budget_bytes"] = (32 + 32 + 16) * MB
    rows, grad = ask(in_turn, weight, dy, microbatches, **rules)
    x = torch.full((4096, 1024), sum(range(1, microbatches + 1)), dtype=dy.dtype)
    dx, dw = backward(x, weight, dy)
    expect_equal(rows, [dx[-1]] * microbatches, "the gradient of the input", "dx = dy·W", atol=NEAR)
    hint = "sum over all tokens and over all microbatches"
    expect_equal(grad, dw, "the gradient of the weights", hint, atol=100 * NEAR)


# %% check="halves-gradients" points=1
# Gradients of the input and, later, of the weights, added up over microbatches, oldest first.
expect_halves([1], [2, 1], [True], 1)
expect_halves([3], [4, 2, 3], [True, True], 2)
expect_room(1)
print("the visible checks pass")
### BEGIN HIDDEN TESTS
expect_halves(
    [draw.integer(2, 5)], [draw.integer(2, 5) for _ in range(3)], [True, True], draw.integer(2, 4)
)
### END HIDDEN TESTS

# %% check="halves-frozen" points=1
# A frozen layer has one half; any number of dims in front.
expect_halves([2, 3], [4, 5], [True], 2)
expect_halves([3], [4, 5, 2], [True, False], 2)
expect_room(1)
print("the visible checks pass")
### BEGIN HIDDEN TESTS
expect_halves([], [draw.integer(2, 4), 3], [True], 2)
expect_halves(
    [2, draw.integer(2, 4)],
    [draw.integer(2, 6) for _ in range(4)],
    [draw.choice([True, False]), True, False],
    draw.integer(2, 3),
)
### END HIDDEN TESTS

# %% check="halves-queue" points=1
# What is worked off is forgotten: four microbatches need no more memory than one.
expect_halves([3], [4, 5], [True], 2)
expect_room(4)
print("the visible checks pass")
### BEGIN HIDDEN TESTS
expect_halves([draw.integer(2, 6)], [draw.integer(2, 6) for _ in range(4)], [True, False, True], 3)
### END HIDDEN TESTS

# %% [markdown]
# ## 2. Between ZB-H1 and ZB-H2 (3 points)
#
# ZB-H1 holds p microbatches on every rank, ZB-H2 2p-1, and nothing in the chapter lies between. Your cluster has room for some number between. Write lists for
# p ranks (stage r on rank r), m microbatches and `room`, with p ≤ room ≤ 2p-1, that use what there is: one microbatch more, one W less of bubble.
#
# Both schedules are one pattern with two numbers for each rank: some forwards *ahead*; then a forward, an I and the oldest W that is not *held back* take turns;
# then what is left. Room for one more microbatch can go into either number, and it need not be the same one on each rank: the first rank waits for the first
# gradient to come back, the last one for the first forward to come. Try a few ways on paper, or with `simulate`, before you choose.
#
# Graded by a simulator, so that every right answer is right. The bubble here is that of *a rank's own span*: the longest that any rank takes from its own first
# action to its own last, minus its work. For m ≥ room it may be at most (p-1)·(F + I) - (room-1)·W for all costs with W ≤ F ≤ I, which is the bubble of
# ZB-H1 at room = p and that of ZB-H2 at room = 2p-1. No rank may ever hold more than `room` microbatches, for any m from 1.
#
# > **API** `between(p, m, room)` gets three whole numbers and returns a list of p lists of actions `F(stage, i)`, `I(stage, i)`, `W(stage, i)`, in which
# > stage and microbatch i count from 0. `simulate(lists, costs)`, `makespan(lists, costs)` and `held(own)` of the setup are yours to call.
#
# p = 2, m = 3, room = 3: rank 0 is `[F(0,0), F(0,1), F(0,2), I(0,0), W(0,0), I(0,1), W(0,1), I(0,2), W(0,2)]`, and rank 1 is
# `[F(1,0), I(1,0), F(1,1), I(1,1), F(1,2), I(1,2), W(1,0), W(1,1), W(1,2)]`. With F = I = W = 1 neither rank ever waits.


# %% answer="between"
def between(p, m, room):
    """A list of p lists of actions; no rank holds more than `room`, from p to 2p-1."""
    ### BEGIN SOLUTION
    lists = []
    for rank in range(p):
        # what is ahead hides the way back, what is held back the way there: at most twice 1F1B's
        ahead = min(2 * (p - 1 - rank), room - 1 - rank)
        held_back = room - 1 - ahead
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


# %% judge="expect_between"
ONES = {"F": 1, "I": 1, "W": 1, "send": 0}


def expect_between(*cases):
    """The lists for each (p, m, room, costs) are valid, hold `room` at most, and have the bubble of that room."""
    asked = [(p, m, room) for p, m, room, _ in cases]
    for (p, m, room, costs), lists in zip(cases, ask_each(between, asked)):
        expect_valid(lists, p, m, costs)
        f, i, w = (costs[kind] for kind in "FIW")
        for rank, (own, times) in enumerate(zip(lists, simulate(lists, costs))):
            where = f"(seen at rank {rank} of {p}, room {room}, {m} microbatches, costs {costs})"
            waiting = times[-1] + costs[own[-1][0]] - times[0] - m * (f + i + w)
            expect(
                held(own) <= room,
                "held at most",
                f"a microbatch is held from its F to its W: forwards ahead, plus W held back, plus one {where}",
            )
            expect(
                m < room or waiting <= (p - 1) * (f + i) - (room - 1) * w,
                "the bubble",
                f"who waits for whom here, and has that rank put its room where it shortens this way? {where}",
            )


def all_rooms(p, m, costs=ONES):
    """From ZB-H1's memory to ZB-H2's, in every check: what is right at one end only is worth nothing."""
    return [(p, m, room, costs) for room in range(p, 2 * p)]


# %% check="between-lists" points=1
# One W less of bubble for each microbatch of room, where all actions take the same time.
expect_between(*all_rooms(2, 3), *all_rooms(3, 5), *all_rooms(4, 8))
print("the visible checks pass")
### BEGIN HIDDEN TESTS
p = draw.integer(5, 7)
expect_between(*all_rooms(p, 2 * p + draw.integer(0, 6)), *all_rooms(draw.integer(3, 4), 9))
### END HIDDEN TESTS

# %% check="between-bubble" points=1
# The same with other costs.
expect_between(*all_rooms(3, 6, {"F": 3, "I": 4, "W": 2, "send": 0}))
print("the visible checks pass")
### BEGIN HIDDEN TESTS
cases = []
for p in (draw.integer(3, 4), draw.integer(5, 8), draw.integer(3, 6)):
    f = draw.integer(2, 6)
    costs = {"F": f, "I": draw.integer(f, 8), "W": draw.integer(1, f), "send": 0}
    cases += all_rooms(p, 2 * p + draw.integer(0, 8), costs)
expect_between(*cases)
### END HIDDEN TESTS

# %% check="between-held" points=1
# The same with fewer microbatches than room, with many, and with one rank.
expect_between(*all_rooms(3, 2), *all_rooms(3, 7))
print("the visible checks pass")
### BEGIN HIDDEN TESTS
p = draw.integer(4, 6)
expect_between(
    *all_rooms(p, draw.integer(1, 3)),
    *all_rooms(p, p),
    *all_rooms(3, 100),
    (1, draw.integer(3, 6), 1, ONES),
)
### END HIDDEN TESTS

# %% [markdown]
# ## 3. Under a limit of memory (3 points, with a leaderboard)
#
# Now memory is given: no rank may ever hold more than `limit` microbatches from F to W; limit is 1 or more, below p or above it. Costs are whole numbers in any
# ratio, and a message takes `send`. Return lists (stage r on rank r) with a short `makespan`, the time from 0 to the end of the last action.
#
# There is no formula. A *list scheduler* is a good way: let time advance, and whenever a rank is free, start the most urgent of the actions that it can start
# now; F only if there is room. Which kind is most urgent is up to you, and you may try several orders and keep the shortest lists: `makespan(lists, costs)` and
# `held(own)` are there for you to use. A message that arrives later is not there yet.
#
# Graded: (1) valid, and within the limit, for every limit from 1, and with room for p microbatches shorter than 1F1B with whole backwards; (2) at least as short as 1F1B
# with this limit, also where it is below p; (3) the leaderboard: at least as short as a list scheduler that takes I before F before W. The message says your bubble
# (idle time as a share of the makespan) and the one to beat.
#
# > **API** `under_limit(p, m, costs, limit)` gets whole numbers and costs `{"F": 2, "I": 3, "W": 2, "send": 1}`; it returns a list of p lists of actions, as in task 2.
# > Of the setup you may call `needs(action, p)`, `simulate(lists, costs)`, `makespan(lists, costs)`, `held(own)`; `simulate` raises ValueError where ranks wait for ever.


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


# %% judge="expect_under_limit"
def limited(*cases):
    """[(p, m, costs, limit, makespan), ..] of valid lists within the limit, asked in one go."""
    made = []
    for (p, m, costs, limit), lists in zip(cases, ask_each(under_limit, cases)):
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


def expect_bars(*cases):
    for case in limited(*cases):
        expect_bar(*case)


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
# Valid, never more than the limit, and shorter than 1F1B with room for p microbatches.
limited((2, 3, ONES, 1), (3, 5, ONES, 2))
expect_bars((4, 8, ONES, 4))
print("the visible checks pass")
### BEGIN HIDDEN TESTS
sizes = (
    (draw.integer(2, 4), draw.integer(3, 8), 1),
    (draw.integer(3, 6), draw.integer(5, 10), 2),
    (draw.integer(3, 5), draw.integer(6, 12), draw.integer(3, 9)),
    (1, 3, 1),
    (4, 2, 5),
)
limited(*((p, m, drawn_costs(draw), limit) for p, m, limit in sizes))
p = draw.integer(5, 7)
expect_bars((p, draw.integer(2 * p, 3 * p), ONES, p + draw.integer(0, 3)))
### END HIDDEN TESTS

# %% check="under_limit-bar" points=1
# At least as short as 1F1B with the same limit, and shorter with room for p microbatches.
expect_bars((4, 8, ONES, 4), (4, 8, ONES, 2))
print("the visible checks pass")
### BEGIN HIDDEN TESTS
cases = []
for p in (4, draw.integer(5, 6)):
    f = draw.integer(2, 4)
    cases += [
        (p, draw.integer(2 * p, 3 * p), {"F": f, "I": f, "W": draw.integer(1, f), "send": 0}, limit)
        for limit in (p, 2 * p - 1)
    ] + [(p, 2 * p, ONES, p - 1)]
expect_bars(*cases)
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
# > **API** `rank_of(stage, p)` and `messages(p, legs, m)` get whole numbers, counted from 0 where they are numbers of stages or ranks, and return one whole number.
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


# %% judge="expect_folded"
def expect_folded(p, legs, m, there, sent):
    """The ranks of all stages are `there`, and the messages of a step are `sent`."""
    said = ask_each(rank_of, [(stage, p) for stage in range(legs * p)])
    where = f"(seen with p = {p}, {legs} legs)"
    expect(said[:p] == there[:p], "the way down", f"stage r is on rank r at first {where}")
    expect(
        said[: 2 * p] == there[: 2 * p],
        "the way up",
        f"the last rank has two stages in a row, then back to rank 0 {where}",
    )
    expect_equal(
        said,
        there,
        "more legs",
        f"after the way up comes a way down; the turn at rank 0 is as the one at the other end {where}",
    )
    said = ask(messages, p, legs, m)
    expect(
        said <= sent,
        "no message within a rank",
        f"two stages of one rank need no message; how many turns are there? {where}",
    )
    expect_equal(
        said,
        sent,
        "messages",
        f"one forward and one back at each boundary between ranks, for each microbatch {where}",
    )


# %% check="folded-place" points=1
# Which rank has which stage, and how many messages that makes.
expect_folded(3, 2, 1, [0, 1, 2, 2, 1, 0], 8)
expect_folded(2, 1, 2, [0, 1], 4)
print("the visible checks pass")
### BEGIN HIDDEN TESTS
for p, legs in (
    (draw.integer(2, 6), 2),
    (draw.integer(2, 6), draw.integer(3, 6)),
    (1, 2),
    (draw.integer(3, 8), 4),
):
    m, there = draw.integer(2, 9), [*range(p), *reversed(range(p))] * legs
    there = there[: legs * p]
    sent = 2 * m * sum(one != other for one, other in zip(there, there[1:]))
    expect_folded(p, legs, m, there, sent)
### END HIDDEN TESTS
