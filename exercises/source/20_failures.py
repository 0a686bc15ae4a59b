# %% [markdown]
# # Exercises 20: failures
#
# Four tasks, 10 points, about three hours. Read chapter 20 first. No GPU, nothing to download.
#
# Write where a cell says `YOUR CODE HERE`, run the cell, then run the check below it. A check tells which property of your
# answer is broken, never the result it wants. When the visible checks pass, grade yourself in a terminal:
#
#     minitrain grade 20
#
# The grader runs the same checks and hidden ones with other sizes and values. Two rules:
#
# - An answer cell stands alone. It may use read-only cells, but for those that say they are for checks, and not your other cells.
# - Tasks 1, 2 and 4 are pure functions of plain values. Task 3 runs on ranks; its `collectives` has `send`, `receive`, `barrier` and `all_gather`.
#
# Sources: the flight recorder of PyTorch (task 1), Dong et al. 2024 (C4, arXiv:2406.04594, task 2), Dixit et al. 2021 (silent data corruptions at scale,
# arXiv:2102.11245, task 3), Young 1974 (task 4). The rules here differ from theirs where a task says so.

# %% given="setup"
import hashlib
import math

import torch

from minitrain import collectives

# %% judge="tools"
from minitrain.course.grading.answer_checks import (
    Draw,
    ask_each,
    expect,
    expect_equal,
    run_on_ranks,
)

draw = Draw()  # hidden checks draw sizes, numbers of ranks and values

# %% [markdown]
# ## 1. Who left out a collective (2 points)
#
# A job hangs. Every rank has a flight recorder, which holds its last calls; how many differs from rank to rank. What all of them hold has been
# merged into one list: each rank's entries are in their order, those of different ranks are mixed at random. An entry
#
#     [5, "tp0", 17, "all_reduce 4096"]      rank 5 called this in group tp0; it had called 17 collectives of tp0 before
#     [5, "", None, "send 3"]                a message from rank to rank: of no group, and not counted
#
# All members of a group should call the same collectives in the same order. At most one rank has left out one call of one of its groups. Each rank counts
# for itself, so from there on its number j is the others' number j + 1. While both are the same call nobody notices; the job stops where they
# differ, perhaps some calls later, as calls are logged when they are issued. Ranks that are behind have not gone wrong: they wait for somebody.
#
# Return `[rank, group, first, last]`: the call that is missing was one of those which the other members number first .. last. `last` is the first number
# at which the logs differ. Of the calls directly before it, those that are the same call as the others' number `last` could be the missing one as
# well; go back as far as any log of the group shows them. Return `None` if no rank has left out anything.
#
# > **API** A pure function: `skipped(log)` gets a list of lists `[rank, group, number, call]` as above and returns a list of an `int`, text and
# > two `int`s, or `None`. Groups have three members or more; where the logs differ, two of the others have logged that number.


# %% answer="skipped"
def skipped(log):
    """[[rank, group, number, call], ..] -> [rank, group, first, last], or None."""
    ### BEGIN SOLUTION
    said = {}  # (group, number) -> {rank: call}
    for rank, group, number, call in log:
        if group:
            said.setdefault((group, number), {})[rank] = call
    for (group, last), calls in sorted(said.items(), key=lambda item: item[0][1]):
        heard = list(calls.values())
        odd = [rank for rank, call in calls.items() if heard.count(call) == 1]
        if len({*heard}) > 1 and odd:
            usual = next(call for call in heard if heard.count(call) > 1)
            first = last
            while usual in said.get((group, first - 1), {}).values():
                first -= 1
            return [odd[0], group, first, last]
    return None
    ### END SOLUTION


# %% judge="expect_skipped"
WORDS = [f"{op} {size}" for op in ("all_reduce", "all_gather", "broadcast") for size in (64, 4096)]


def drawn_calls(count, longest):
    """Calls of one group in runs of equal ones; neighbouring runs differ."""
    calls = []
    while len(calls) < count:
        word = draw.choice([word for word in WORDS if calls[-1:] != [word]])
        calls += [word] * draw.integer(1, longest)
    return calls


def drawn_log(groups, longest, rings, skips=True, messages=0.4):
    """groups: {name: members} -> a merged log, and what is missing in it."""
    ranks = sorted({rank for members in groups.values() for rank in members})
    calls = {name: drawn_calls(60, longest) for name in groups}
    at = draw.choice(sorted(groups))
    odd, missing = draw.choice(groups[at]), draw.integer(8, 20)
    last = missing
    while calls[at][last + 1] == calls[at][missing]:
        last += 1
    begin = missing
    while begin > 0 and calls[at][begin - 1] == calls[at][missing]:
        begin -= 1
    logs, made, late = {rank: [] for rank in ranks}, dict.fromkeys(groups, 0), draw.integer(0, 2)
    while made[at] < last + 2 + late:
        group = draw.choice(sorted(groups))
        for rank in groups[group]:
            gone = group == at and rank == odd and skips
            if not (gone and made[group] == missing):
                number = made[group] - (gone and made[group] > missing)
                logs[rank].append([rank, group, number, calls[group][made[group]]])
        made[group] += 1
        if draw.random() < messages:
            one, other = draw.several(ranks, 2)
            logs[one].append([one, "", None, f"send {other}"])
            logs[other].append([other, "", None, f"receive {one}"])
    behind = draw.several([r for r in ranks if r != odd], len(ranks) - 3)[: draw.integer(0, 3)]
    for rank, entries in logs.items():
        if rank in behind:
            del entries[len(entries) - draw.integer(1, 6) :]
        if rings:  # some remember little: the odd rank often less than the others
            room = draw.integer(3, 12) if rank == odd else draw.integer(10, 40)
            del entries[: max(0, len(entries) - room)]
    held = {n: [r for r, g, m, _ in sum(logs.values(), []) if (g, m) == (at, n)] for n in range(60)}
    seen = [number for number in held if held[number]]
    whole = seen == list(range(seen[0], seen[-1] + 1)) if seen else False
    if not whole or odd not in held[last] or len(held[last]) < 3:
        return drawn_log(groups, longest, rings, skips, messages)
    merged, queues = [], [entries for entries in logs.values() if entries]
    while queues:
        queue = draw.choice(queues)
        merged.append(queue.pop(0))
        queues = [one for one in queues if one]
    return merged, [odd, at, max(begin, seen[0]), last] if skips else None


def expect_skipped(*cases):
    for said, (log, wanted) in zip(ask_each(skipped, [(log,) for log, _ in cases]), cases):
        where = f"(seen with {len(log)} entries, groups {sorted({one[1] for one in log} - {''})})"
        if wanted is None:
            hint = "who is behind, or has a shorter memory, has left out nothing"
            expect(said is None, "no false alarm", f"{hint} {where}")
            continue
        formed = isinstance(said, list) and len(said) == 4
        expect(
            formed, "four facts", f"rank, group, first, last: somebody has left out a call {where}"
        )
        expect(said[1] == wanted[1], "the group", f"each group has numbers of its own {where}")
        hint = "which entries belong to the same call, and who stands alone there?"
        expect(said[0] == wanted[0], "the rank", f"{hint} {where}")
        hint = "the first number at which not all who have logged it say the same"
        expect(said[3] == wanted[3], "where it shows", f"{hint} {where}")
        hint = "which calls before are the same, and does any log of the group show them?"
        expect(said[2] == wanted[2], "where it can have been", f"{hint} {where}")


ROWS = ["all_reduce 64", "all_gather 64", "all_reduce 4096", "broadcast 64", "all_gather 4096"]

# %% check="skipped-names" points=1
# One group, no call twice in a row, logs from the first call on.
expect_skipped(
    (
        [[r, "dp", n, ROWS[n + (r == 2 and n > 1)]] for n in range(4) for r in (1, 0, 2, 3)],
        [2, "dp", 2, 2],
    ),
    ([[r, "dp", n, ROWS[n]] for r in (0, 1, 2) for n in range(3 + r % 2)], None),
)
print("the visible checks pass")
### BEGIN HIDDEN TESTS
for ranks in (3, 4, 5, 6, 7):
    for _ in range(4):
        group = {"world": list(range(ranks))}
        expect_skipped(drawn_log(group, 1, False), drawn_log(group, 1, False, skips=False))
### END HIDDEN TESTS

# %% check="skipped-rings" points=1
# Equal calls in a row, several groups, messages between, and short memories.
equal = ["all_reduce 64", "broadcast 64", "broadcast 64", "broadcast 64", "all_gather 64"]
expect_skipped(
    (
        [[r, "dp", n, equal[n + (r == 1 and n > 1)]] for r in range(3) for n in range(4)],
        [1, "dp", 1, 3],
    ),
    (
        [[r, "tp", n, equal[n + (r == 1 and n > 1)]] for r in range(3) for n in range(2, 4)]
        + [[r, "", None, f"send {r + 3}"] for r in range(3)]
        + [[r, "dp", n, equal[n]] for r in range(6) for n in range(r % 3)],
        [1, "tp", 2, 3],
    ),
)
print("the visible checks pass")
### BEGIN HIDDEN TESTS
for _ in range(12):
    tp, dp = draw.integer(3, 4), draw.integer(3, 4)
    grid = {f"tp{d}": [d * tp + t for t in range(tp)] for d in range(dp)}
    grid |= {f"dp{t}": [d * tp + t for d in range(dp)] for t in range(tp)}
    cases = [drawn_log(grid, draw.integer(2, 9), True), drawn_log(grid, 4, True, skips=False)]
    expect_skipped(drawn_log({"world": list(range(5))}, draw.integer(3, 12), True), *cases)
### END HIDDEN TESTS

# %% [markdown]
# ## 2. A sender, a receiver, a rank or a link (2 points)
#
# Each rank has sent a message to each other, one pair at a time; the whole round was made several times. `tries[t][i][j]` is what the message from i to j took
# in round t, in microseconds. It is `None` where the message did not arrive, and for i = j. Find out what is slow:
#
# - a *sender* i: everything that it sends is slow; a *receiver* j: everything that it gets; a *rank*: both;
# - a *link* from i to j: this pair alone, in this direction.
#
# What is known: in some rounds anything can be in the way of a message, so that it takes longer by any amount, or is lost. A healthy pair needs
# less than 1.2 times as long as any other healthy pair, in at least one round. A slow pair needs at least 1.5 times as long as any healthy pair, in every round in
# which its message arrives, if any does. What is usual here is not known: it can be 5 µs or 5 ms. At most two things are slow, and they can be
# ranks: then most pairs may be. Some pairs are always healthy.
#
# > **API** A pure function: `culprits(tries)` returns a sorted list of lists `["link", i, j]`, `["rank", i]`, `["receiver", j]` or
# > `["sender", i]`, which can be empty. There are 5 ranks or more. A slow link between i and j is no news where i is a slow sender or j a slow receiver.


# %% answer="culprits"
def culprits(tries):
    """tries[t][i][j]: microseconds or None -> a sorted list of what is slow."""
    ### BEGIN SOLUTION
    n = len(tries[0])
    pairs = [(i, j) for i in range(n) for j in range(n) if i != j]
    took = {
        (i, j): min((one[i][j] for one in tries if one[i][j] is not None), default=math.inf)
        for i, j in pairs
    }
    slow = {pair for pair in pairs if took[pair] > 1.35 * min(took.values())}
    senders = {i for i in range(n) if all((i, j) in slow for j in range(n) if j != i)}
    receivers = {j for j in range(n) if all((i, j) in slow for i in range(n) if i != j)}
    found = [["rank", i] for i in senders & receivers]
    found += [["sender", i] for i in senders - receivers]
    found += [["receiver", j] for j in receivers - senders]
    found += [["link", i, j] for i, j in slow if i not in senders and j not in receivers]
    return sorted(found)
    ### END SOLUTION


# %% judge="expect_culprits"
def drawn_tries(n, slow, rounds, calm=0.6, lost=0.1):
    """Rounds with these things slow; each healthy pair is undisturbed in one round at least."""
    usual = draw.choice([5.0, 40.0, 700.0, 5000.0])
    tries = [[[None] * n for _ in range(n)] for _ in range(rounds)]
    for i in range(n):
        for j in range(n):
            if i == j:
                continue
            bad = any(
                thing in (["link", i, j], ["sender", i], ["receiver", j], ["rank", i], ["rank", j])
                for thing in slow
            )
            needs = usual * draw.uniform(1.0, 1.19)
            if bad:
                needs = usual * draw.choice([draw.uniform(1.8, 2.5), draw.uniform(3, 90)])
            good = draw.integer(0, rounds - 1)
            dead = bad and draw.random() < 0.1
            for t in range(rounds):
                more = 1 + (draw.random() > calm) * draw.choice([0.3, 1, 40]) * draw.random()
                gone = dead or t != good and draw.random() < lost
                tries[t][i][j] = None if gone else needs * (1 if t == good else more)
    return tries, sorted(slow)


def expect_culprits(*cases):
    for said, (tries, wanted) in zip(ask_each(culprits, [(tries,) for tries, _ in cases]), cases):
        where = f"(seen with {len(tries[0])} ranks, {len(tries)} rounds)"
        expect(isinstance(said, list), "a list", f"of what is slow {where}")
        if not wanted:
            hint = "a message that had something in its way once is no slow pair"
            expect(said == [], "no false alarm", f"{hint} {where}")
            continue
        hint = "what is usual, and what does a pair need when nothing is in its way?"
        expect(len(said) > 0, "nothing is missed", f"{hint} {where}")
        hint = "what explains all slow pairs with the fewest things?"
        expect(said == wanted, "what is slow", f"{hint} {where}")


flat = [[None if i == j else 10 + (i + j) % 2 for j in range(5)] for i in range(5)]


def every_kind(n):
    i, j = draw.several(range(n), 2)
    return [[["sender", i]], [["receiver", i]], [["rank", i]], [["link", i, j]], []]


# %% check="culprits-one" points=1
# One thing at most.
spoiled = [[x and (x + 90 if i == 3 else x) for x in row] for i, row in enumerate(flat)]
expect_culprits(([flat], []), ([spoiled], [["sender", 3]]), ([spoiled, flat], []))
print("the visible checks pass")
### BEGIN HIDDEN TESTS
for n in (5, 6, draw.integer(7, 10)):
    expect_culprits(*(drawn_tries(n, slow, draw.integer(3, 6)) for slow in every_kind(n)))
    expect_culprits(*(drawn_tries(n, slow, 12, calm=0.2) for slow in every_kind(n)))
### END HIDDEN TESTS

# %% check="culprits-two" points=1
# Two, which can cross.
crossed = [
    [x and x + 50 * (i == 3 or j == 1) for j, x in enumerate(row)] for i, row in enumerate(flat)
]
most = [[x and x + 50 * bool({i, j} & {0, 4}) for j, x in enumerate(r)] for i, r in enumerate(flat)]
expect_culprits(([crossed], [["receiver", 1], ["sender", 3]]), ([most], [["rank", 0], ["rank", 4]]))
print("the visible checks pass")
### BEGIN HIDDEN TESTS
cases = []
for n in (5, 6, draw.integer(7, 10)):
    i, j, k = draw.several(range(n), 3)
    for slow in (
        [["sender", i], ["sender", j]],
        [["sender", i], ["receiver", j]],
        [["rank", i], ["rank", j]],
        [["rank", i], ["receiver", j]],
        [["rank", i], ["link", j, k]],
        [["sender", i], ["link", j, i]],
        [["receiver", i], ["link", i, j]],
        [["link", i, j], ["link", j, i]],
        [["link", i, j], ["link", i, k]],
        [["link", i, k], ["link", j, k]],
    ):
        cases.append(drawn_tries(n, slow, draw.integer(4, 7)))
expect_culprits(*cases)
### END HIDDEN TESTS

# %% [markdown]
# ## 3. A replica that is no longer one (3 points)
#
# In data parallelism every rank holds the same tensors, to the bit. Something has flipped bits on some ranks. Find out where, and mend it.
#
# Right is what more than half of the ranks hold, bit by bit. Of a tensor of which this exists, every rank that holds something else is *odd*, and gets the
# right one from a rank that has it. If no value has more than half of the ranks, nobody knows: the tensor is reported with rank -1 and stays as it is.
#
# Two tensors are the same if shape, dtype and the bits of every element are. So -0.0 is not 0.0; a NaN is the same as a NaN of the same bits; and it does not
# matter how a tensor lies in memory: a rank may hold a transposed view. Several elements can have been changed at once, or exchanged.
#
# > **API** `healed(tensors, group)` gets a dict {name: tensor}, on every rank with the same names (in the same order), shapes and dtypes. It returns
# > on every rank `{"odd": [[rank, name], ..], "tensors": {name: tensor}}`, sorted by the dict's order of names, then rank; a dict of
# > mended tensors. dtypes: float64, float32, bfloat16, int64. `collectives.all_gather(x, group)`: [d] -> [n·d]; `send(x, to, group)`;
# > `receive(like, source, group)`: a tensor with the shape and dtype of `like`. `x.view(torch.uint8)` wants a contiguous x with a dimension.
#
# Bytes: 8 for each tensor from each rank to each other, and each odd tensor once. A sum can be the same although the terms are not, and `hashlib.blake2b(data,
# digest_size=8)` takes what `x.numpy().tobytes()` gives.


# %% answer="healed"
def healed(tensors, group):
    """{name: tensor} -> {"odd": [[rank, name], ..], "tensors": {name: tensor}}, the same on every rank."""

    ### BEGIN SOLUTION
    def digest(x):
        data = x.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little", signed=True)

    rank, n = group.rank(), group.size()
    mine = torch.tensor([digest(x) for x in tensors.values()], dtype=torch.int64)
    heard = collectives.all_gather(mine, group).view(n, -1).T.tolist()
    odd, mended = [], dict(tensors)
    for name, words in zip(tensors, heard):
        right = max(words, key=words.count)
        if 2 * words.count(right) <= n:
            odd.append([-1, name])
            continue
        giver = words.index(right)
        for other in (r for r, word in enumerate(words) if word != right):
            odd.append([other, name])
            if rank == giver:
                collectives.send(tensors[name], other, group)
            elif rank == other:
                mended[name] = collectives.receive(tensors[name], giver, group)
    return {"odd": odd, "tensors": mended}
    ### END SOLUTION


# %% driver="heal"
def heal(tensors, turned, group):
    """With `turned`, matrices lie in memory column by column."""
    own = {
        name: x.T.contiguous().T if turned and x.dim() == 2 else x for name, x in tensors.items()
    }
    return healed(own, group)


# %% judge="expect_healed"
def bits(x):
    return x.contiguous().reshape(-1).view(torch.uint8).clone()


def flipped(x, *places):
    """A copy with a bit changed in each of these elements, places being (element, bit)."""
    raw, size = bits(x), x.element_size()
    for element, bit in places:
        raw[element % x.numel() * size + bit // 8] ^= 1 << bit % 8
    return raw.view(x.dtype).view(x.shape)


def swapped(x):
    """A copy with two different elements exchanged."""
    y = x.clone().view(-1)
    other = next(i for i in range(1, len(y)) if not torch.equal(bits(y[i]), bits(y[0])))
    y[0], y[other] = x.view(-1)[other], x.view(-1)[0]
    return y.view(x.shape)


def expect_healed(right, changes, ranks, property, turned=(), unknown=()):
    """changes: {(rank, name): the tensor there}; `unknown`: names that nobody can mend."""
    held = [{name: changes.get((r, name), x) for name, x in right.items()} for r in range(ranks)]
    odd = []
    for name in right:
        odd += (
            [[-1, name]]
            if name in unknown
            else [[r, name] for r in range(ranks) if (r, name) in changes]
        )
    outcome = run_on_ranks(
        heal, [(own, r in turned) for r, own in enumerate(held)], collectives="all_gather"
    )
    where = f"(seen with {ranks} ranks, {len(right)} tensors)"
    for rank, result in enumerate(outcome.results):
        keyed = isinstance(result, dict) and set(result) == {"odd", "tensors"}
        expect(keyed, "two facts", f"`odd` and `tensors` {where}")
        hint = "who holds what more than half of the ranks hold, to the bit, and who does not?"
        expect(result["odd"] == odd, property, f"{hint} {where}")
    moved = sum(changes[place].nbytes for place in changes if place[1] not in unknown)
    limit = 8 * len(right) * ranks * (ranks - 1) + moved
    hint = "what is the least that tells whether two tensors are the same?"
    expect(sum(outcome.sent_bytes) <= limit, "bytes on the wire", f"{hint} {where}")
    for rank, result in enumerate(outcome.results):
        mended = result["tensors"]
        expect(
            isinstance(mended, dict) and [*mended] == [*right], "all tensors", f"by name {where}"
        )
        for name, x in right.items():
            wanted = held[rank][name] if name in unknown else x
            said = mended[name]
            same = torch.is_tensor(said) and (said.dtype, said.shape) == (
                wanted.dtype,
                wanted.shape,
            )
            same = same and torch.equal(bits(said), bits(wanted))
            hint = "the right one on every rank, to the bit; what nobody knows stays"
            expect(same, "mended", f"{hint} {where}")


def drawn_tensors(count):
    kinds = draw.several([torch.float64, torch.float32, torch.bfloat16, torch.int64], 4)
    made = {}
    for i in range(count):
        shape = [draw.integer(2, 9) for _ in range(draw.integer(1, 3))]
        made[f"w{i}"] = (draw.real(*shape) * 100).to(kinds[i % 4])
    return made


pair = {"w": torch.arange(12.0).view(3, 4), "b": torch.tensor([0.5, -2.0])}

# %% check="healed-flip" points=1
# Flipped bits, one tensor or several, are found and mended, for 8 bytes a tensor and the odd ones.
FLIP = "which ranks are odd"
expect_healed(pair, {}, 3, FLIP)
expect_healed(
    pair, {(0, "w"): flipped(pair["w"], (5, 0)), (2, "b"): flipped(pair["b"], (1, 30))}, 3, FLIP
)
print("the visible checks pass")
### BEGIN HIDDEN TESTS
for ranks in (3, 4, 5):
    right = drawn_tensors(draw.integer(4, 6))
    changes = {}
    for name in draw.several(right, 3):
        for rank in draw.several(range(ranks), draw.integer(1, (ranks - 1) // 2)):
            x = right[name]
            place = draw.integer(0, x.numel() - 1), draw.integer(0, 8 * x.element_size() - 1)
            changes[rank, name] = flipped(x, place)
    expect_healed(right, changes, ranks, FLIP)
right = drawn_tensors(4)
same = flipped(right["w2"], (1, 4))
expect_healed(right, {(0, "w2"): same, (1, "w2"): same}, 5, FLIP)
### END HIDDEN TESTS

# %% check="healed-bits" points=1
# Bits, not values: zeros with a sign, NaNs, changes that a sum does not see; and not the order in memory.
BITS = "the same bits"
odd_ones = {"nan": torch.tensor([[1.0, math.nan], [0.0, 3.0]]), "w": pair["w"]}
expect_healed(odd_ones, {}, 3, BITS, turned=[1])
expect_healed(odd_ones, {(1, "nan"): flipped(odd_ones["nan"], (2, 31))}, 3, BITS)
print("the visible checks pass")
### BEGIN HIDDEN TESTS
for ranks in (3, 4):
    right = drawn_tensors(8)
    right["nan"] = torch.full((3, 2), math.nan)
    right["zero"] = torch.zeros(draw.integer(2, 5), 2)
    right["one"] = torch.tensor(draw.random())
    right["none"] = torch.zeros(0, 3)
    changes = {
        (draw.integer(0, ranks - 1), "nan"): flipped(right["nan"], (1, draw.integer(0, 21))),
        (draw.integer(0, ranks - 1), "zero"): -right["zero"],
        (draw.integer(0, ranks - 1), "one"): flipped(right["one"], (0, draw.integer(0, 31))),
        (draw.integer(0, ranks - 1), "w0"): swapped(right["w0"]),
        (draw.integer(0, ranks - 1), "w1"): flipped(right["w1"], (0, 5), (1, 5)),
        (draw.integer(0, ranks - 1), "w2"): right["w2"].flip(0),
    }
    changes = {
        key: y for key, y in changes.items() if not torch.equal(bits(y), bits(right[key[1]]))
    }
    expect_healed(right, changes, ranks, BITS, turned=draw.several(range(ranks), 2))
### END HIDDEN TESTS

# %% check="healed-nobody" points=1
# Where no value has more than half of the ranks, nobody is called odd.
NOBODY = "nobody knows"
split = {(2, "b"): flipped(pair["b"], (0, 9)), (3, "b"): flipped(pair["b"], (0, 9))}
expect_healed(pair, split, 4, NOBODY, unknown=["b"])
print("the visible checks pass")
### BEGIN HIDDEN TESTS
for ranks in (2, 3, 4, 5):
    right = drawn_tensors(5)
    others = range(ranks) if draw.random() < 0.5 else range(ranks - 1)
    changes = {(r, "w1"): flipped(right["w1"], (1, 2 + r)) for r in others}
    if ranks > 2:
        changes[draw.integer(0, ranks - 1), "w3"] = flipped(right["w3"], (2, 1))
    expect_healed(right, changes, ranks, NOBODY, unknown=["w1"])
### END HIDDEN TESTS

# %% [markdown]
# ## 4. How often to save, with last year's failures (3 points)
#
# A cluster keeps a list of its failures. With it you can replay the year for each interval and take the best. All times are whole seconds, and the
# replay is exact:
#
# - A step takes `step` seconds. When a step ends and the number of finished steps is a multiple of k, a save begins (none before step 0, none at `back`):
#   training stands still for `pause` seconds, until the state is copied. Then it goes on, and the copy is written in the background, `write` seconds; from then
#   on the save is *there*. There is one write at a time: if the one before is still under way when a save is due, training first stands still until that is over,
#   then begins its pause.
# - Of the saves that are there the newest `kept` stay; an older one is removed when a new one is there.
# - A failure is `[broke, found, back]`. At `broke` something goes wrong, and every state that is not yet copied by then is wrong, too; a crash is found at
#   once, a silent one later: broke ≤ found. At `found` all stops; a step, a pause or a write that is not over by then is lost. At `back`, later than
#   found, training goes on from the newest of the saves that are there and were copied by `broke`, newer ones are thrown away; if there is none, from step 0.
# - What is over at a time t is over by t: a step that ends at `end` counts, a write that ends at `found` is there.
#
# Write `progress`, the number of finished steps that the state has at `end`, and `save_every`, the k from 1 to `most` with the most progress; of
# equal ones the smallest.
#
# > **API** Pure functions: `progress(k, job, failures)` and `save_every(most, job, failures)` return an `int`. `job` is a dict of `int`s: step, pause,
# > write, kept, end; step and kept are at least 1. `failures` is a list of lists of three `int`s, in order: no `broke` lies before
# > the `back` of the one before, every `found` lies before `end`, the last `back` may not.


# %% answer="replay"
def progress(k, job, failures):
    """-> the number of finished steps at job["end"], with a save behind every k."""
    ### BEGIN SOLUTION
    step, pause, write = job["step"], job["pause"], job["write"]
    saves, now, done = [], 0, 0  # (copied at, steps)
    for broke, found, back in [*failures, [job["end"]] * 3]:
        busy = now
        while (copied := max(now + k * step, busy) + pause) <= found:
            now, done, busy = copied, done + k, copied + write
            if busy <= found:
                saves = [*saves, (copied, done)][-job["kept"] :]
        if found == job["end"]:
            return done + min(k, max(0, found - now) // step)
        saves = [save for save in saves if save[0] <= broke]
        done, now = saves[-1][1] if saves else 0, back
    ### END SOLUTION


def save_every(most, job, failures):
    """-> k, from 1 to most."""
    ### BEGIN SOLUTION
    return max(range(1, most + 1), key=lambda k: (progress(k, job, failures), -k))
    ### END SOLUTION


# %% judge="expect_replay"
def drawn_job(steps, kept=1):
    step = draw.integer(2, 9)
    sizes = {"pause": draw.integer(0, 4), "write": draw.choice([0, 5, step * draw.integer(2, 9)])}
    return {"step": step, **sizes, "kept": kept, "end": steps * step + draw.integer(0, step)}


def drawn_failures(job, count, late):
    """So many failures, found up to `late` seconds after they broke something."""
    times = sorted(draw.several(range(1, job["end"] - 1), 3 * count))
    failures = []
    for broke, found, back in zip(times[::3], times[1::3], times[2::3]):
        found = min(found, broke + draw.integer(0, late))
        failures.append([broke, found, min(back, found + draw.integer(1, 9 * job["step"]))])
    return failures


def expect_progress(cases, wanted, property, hint):
    for said, case, right in zip(ask_each(progress, cases), cases, wanted, strict=True):
        seen = f"(seen with k={case[0]}, {case[1]}, failures {case[2][:3]})"
        expect(type(said) is int, "a number of steps", f"a whole number {seen}")
        expect(said == right, property, f"{hint} {seen}")


LATE = "which saves are there, which of them are right, and which has a newer one pushed out?"
CRASH = "what is lost at `found`, and where does training go on?"
job = {"step": 10, "pause": 1, "write": 15, "kept": 1, "end": 200}

# %% check="replay-crash" points=1
# Failures that are found at once.
expect_progress(
    [(3, job, []), (1, job, []), (3, job, [[50, 50, 60]]), (3, job, [[46, 46, 60]])],
    [19, 13, 16, 16],
    "progress",
    CRASH,
)
print("the visible checks pass")
### BEGIN HIDDEN TESTS


def second_by_second(k, job, failures):
    """What each second does: a step, a wait, a pause, or nothing."""
    failures, saves, writing = list(failures), [], None  # writing: (over at, copied at, steps)
    done, what, left, broken_until = 0, "step", job["step"], 0

    def over(now):
        nonlocal writing, saves
        if writing and writing[0] <= now:
            saves, writing = [*saves, writing[1:]][-job["kept"] :], None

    for now in range(job["end"] + 1):
        if now < broken_until:
            continue
        if now == broken_until and now:
            what, left = "step", job["step"]
        while left == 0 or what == "wait":  # what ends now
            over(now)
            if what == "step":
                done += 1
                what, left = ("wait", 0) if done % k == 0 else ("step", job["step"])
            elif what == "wait":
                if writing:
                    break
                what, left = "pause", job["pause"]
            else:
                writing = (now + job["write"], now, done)
                over(now)
                what, left = "step", job["step"]
        over(now)
        if failures and failures[0][1] == now:
            broke, _, broken_until = failures.pop(0)
            writing = None
            saves = [save for save in saves if save[0] <= broke]
            done = saves[-1][1] if saves else 0
            continue
        left -= what != "wait"
    return done


cases = []
for _ in range(24):
    job = drawn_job(draw.integer(20, 80))
    cases.append((draw.integer(1, 12), job, drawn_failures(job, draw.integer(0, 4), 0)))
at_once = {"step": 5, "pause": 2, "write": 0, "kept": 1, "end": 90}
cases += [(3, at_once, [[17 + more] * 2 + [40]]) for more in (-1, 0, 1)]
expect_progress(cases, [second_by_second(*case) for case in cases], "progress", CRASH)
### END HIDDEN TESTS

# %% check="replay-late" points=1
# Failures that are found late, when some saves are wrong already.
expect_progress(
    [(3, {**job, "kept": kept}, [[40, 105, 110]]) for kept in (1, 2, 3)],
    [8, 11, 11],
    "found late",
    LATE,
)
print("the visible checks pass")
### BEGIN HIDDEN TESTS


def second_by_second(k, job, failures):
    """What each second does: a step, a wait, a pause, or nothing."""
    failures, saves, writing = list(failures), [], None  # writing: (over at, copied at, steps)
    done, what, left, broken_until = 0, "step", job["step"], 0

    def over(now):
        nonlocal writing, saves
        if writing and writing[0] <= now:
            saves, writing = [*saves, writing[1:]][-job["kept"] :], None

    for now in range(job["end"] + 1):
        if now < broken_until:
            continue
        if now == broken_until and now:
            what, left = "step", job["step"]
        while left == 0 or what == "wait":  # what ends now
            over(now)
            if what == "step":
                done += 1
                what, left = ("wait", 0) if done % k == 0 else ("step", job["step"])
            elif what == "wait":
                if writing:
                    break
                what, left = "pause", job["pause"]
            else:
                writing = (now + job["write"], now, done)
                over(now)
                what, left = "step", job["step"]
        over(now)
        if failures and failures[0][1] == now:
            broke, _, broken_until = failures.pop(0)
            writing = None
            saves = [save for save in saves if save[0] <= broke]
            done = saves[-1][1] if saves else 0
            continue
        left -= what != "wait"
    return done


cases = []
for _ in range(30):
    job = drawn_job(draw.integer(30, 90), draw.integer(1, 3))
    failures = drawn_failures(job, draw.integer(1, 4), draw.choice([5, 60, 300]))
    cases.append((draw.integer(1, 12), job, failures))
expect_progress(cases, [second_by_second(*case) for case in cases], "found late", LATE)
### END HIDDEN TESTS

# %% check="replay-best" points=1
# The best interval, and the smallest of equal ones.
short = {"step": 10, "pause": 1, "write": 15, "kept": 1, "end": 200}
asked = [(9, short, []), (9, short, [[50, 50, 60]]), (9, short, [[90, 140, 141]])]
hint = "is another k not better? Of equal ones the smallest"
for said, right, case in zip(ask_each(save_every, asked), [2, 3, 8], asked):
    expect(said == right, "the best interval", f"{hint} (seen with {case[1]})")
print("the visible checks pass")
### BEGIN HIDDEN TESTS


def second_by_second(k, job, failures):
    """What each second does: a step, a wait, a pause, or nothing."""
    failures, saves, writing = list(failures), [], None  # writing: (over at, copied at, steps)
    done, what, left, broken_until = 0, "step", job["step"], 0

    def over(now):
        nonlocal writing, saves
        if writing and writing[0] <= now:
            saves, writing = [*saves, writing[1:]][-job["kept"] :], None

    for now in range(job["end"] + 1):
        if now < broken_until:
            continue
        if now == broken_until and now:
            what, left = "step", job["step"]
        while left == 0 or what == "wait":  # what ends now
            over(now)
            if what == "step":
                done += 1
                what, left = ("wait", 0) if done % k == 0 else ("step", job["step"])
            elif what == "wait":
                if writing:
                    break
                what, left = "pause", job["pause"]
            else:
                writing = (now + job["write"], now, done)
                over(now)
                what, left = "step", job["step"]
        over(now)
        if failures and failures[0][1] == now:
            broke, _, broken_until = failures.pop(0)
            writing = None
            saves = [save for save in saves if save[0] <= broke]
            done = saves[-1][1] if saves else 0
            continue
        left -= what != "wait"
    return done


cases = []
for late in (0, 0, 40, 40, 200, 200, 500):
    job = drawn_job(draw.integer(60, 120), draw.integer(1, 3))
    cases.append((25, job, drawn_failures(job, draw.integer(1, 5), late)))
cases.append((25, drawn_job(90), []))
for said, case in zip(ask_each(save_every, cases), cases):
    made = {k: second_by_second(k, *case[1:]) for k in range(1, 26)}
    right = min(k for k in made if made[k] == max(made.values()))
    expect(said == right, "the best interval", f"{hint} (seen with {case[1]})")
### END HIDDEN TESTS
