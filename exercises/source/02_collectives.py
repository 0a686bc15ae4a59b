# %% [markdown]
# # Exercises 02: collectives
#
# Four tasks, 10 points, about an hour. No GPU, nothing to download. Read chapter 02 before.
#
# Write where a cell says `YOUR CODE HERE`, run the cell, then run the check below it. A check tells which property of your
# answer is broken, never the result it wants. When the visible checks pass, grade yourself in a terminal:
#
#     minitrain grade 02
#
# The grader runs the same checks and hidden ones with other sizes, other numbers of ranks and other values. Two rules:
#
# - An answer cell stands alone. It may use the read-only cells, except those marked as being for the checks, and none of your
#   other cells.
# - Ranks share nothing but a network. The box **API** of each task lists what an answer may call.

# %% given="setup"
import torch

from minitrain import collectives

# %% judge="tools"
from minitrain.systems.communication.chunk_schedule import check
from minitrain.systems.communication.chunk_schedule import Schedule, Transfer, sent_shares
from minitrain.course.grading.answer_checks import (
    Draw,
    ask_each,
    expect,
    expect_equal,
    run_on_ranks,
)

draw = Draw()  # hidden checks draw sizes, numbers of ranks and values

# %% [markdown]
# ## 1. The first half of a ring that sends to the left (4 points)
#
# Every rank has a flat tensor of n·d elements, where n is the number of ranks. Rank r returns elements r·d to (r+1)·d of
# the **sum** of all tensors. Write it as a ring, from `send` and `receive`. The chapter's ring sends to the right; this
# one to the **left**: each rank sends only to its left neighbour (rank - 1, and rank 0 to the last rank), one chunk of d elements in each
# of n-1 steps, and it adds its own part to what arrives from the right.
#
# Which chunk must leave rank r first, so that the last one to arrive there is its own?
#
# > **API** `group.rank()`, `group.size()`: which rank this is, and how many there are.
# > `collectives.send(x, to, group)` returns when rank `to` has asked for the message; `collectives.receive(like, source, group)`
# > returns the message as a new tensor; `like` is any tensor of the same shape and dtype.
# > With `async_op=True` both return a handle at once; `handle.wait()` waits, and for a receive returns the tensor.
# > No collective. Leave x as it is.


# %% answer="ring_reduce_scatter"
def ring_reduce_scatter(x, group):
    """x [n·d] on each rank -> [d], on rank r the r-th chunk of the sum over all ranks."""
    ### BEGIN SOLUTION
    n, rank = group.size(), group.rank()
    chunks = x.chunk(n)
    partial = chunks[(rank + 1) % n]
    for step in range(n - 1):
        own_part = chunks[(rank + 2 + step) % n]
        sending = collectives.send(partial, (rank - 1) % n, group, async_op=True)
        partial = collectives.receive(own_part, (rank + 1) % n, group) + own_part
        sending.wait()
    return partial
    ### END SOLUTION


# %% judge="expect_ring"
def expect_ring(given, hint):
    """Run ring_reduce_scatter; rank r has chunk r of the sum, and n-1 chunks left it for its left neighbour."""
    outcome, n = run_on_ranks(ring_reduce_scatter, given), len(given)
    expect_equal(outcome.results, list(sum(given).chunk(n)), "chunk of the sum", hint)
    expect(
        max(outcome.sent_bytes) <= (n - 1) * given[0].nbytes // n,
        "bytes on the wire",
        "n-1 chunks leave each rank, (n-1)/n of the tensor, for every n",
    )
    expect(
        {(m.source, m.destination) for m in outcome.messages}
        == {(r, (r - 1) % n) for r in range(n)},
        "only the left neighbour",
        "rank r sends to rank r-1 and to nobody else",
    )
    return outcome


# %% check="ring-sum" points=2
# Rank r has chunk r of the sum, and each rank sends n-1 chunks, only to its left neighbour.
expect_ring(
    [torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([10.0, 20.0, 30.0, 40.0])],
    "rank 0 returns the first chunk of the sum of all tensors, rank 1 the second",
)
expect_ring(
    [torch.arange(8.0) * 10**rank for rank in range(4)],
    "write down for 4 ranks which chunk each one holds after every step; where does chunk c begin if it must end at rank c?",
)
print("the visible checks pass")
### BEGIN HIDDEN TESTS
for ranks in (3, draw.choice([5, 6, 7])):
    given = [draw.exact(3 * ranks) for _ in range(ranks)]
    expect_ring(given, "for every number of ranks, even or odd")
### END HIDDEN TESTS

# %% check="ring-bytes" points=1
# A message is one chunk, and each rank sends n-1 of them.
outcome = expect_ring([torch.ones(400)] * 4, "first let the sum be right, then count")
expect(
    sorted((m.source, m.bytes) for m in outcome.messages)
    == [(r, 400) for r in range(4) for _ in range(3)],
    "one chunk per step",
    "each rank sends three messages of 100 elements",
)
print("the visible checks pass")
### BEGIN HIDDEN TESTS
n, d = draw.integer(5, 8), draw.integer(3, 40)
outcome = expect_ring(
    [draw.exact(n * d) for _ in range(n)], "first let the sum be right, then count"
)
expect(
    sorted((m.source, m.bytes) for m in outcome.messages)
    == [(r, d * 8) for r in range(n) for _ in range(n - 1)],
    "one chunk per step",
    "n-1 messages leave each rank, each of d elements, for every n",
)
### END HIDDEN TESTS

# %% check="ring-steps" points=1
# All ranks send at the same time: n-1 messages follow one another, no more.
outcome = expect_ring([torch.ones(400)] * 4, "first let the sum be right, then count")
expect(
    outcome.steps <= 3,
    "steps",
    "chunks must travel at the same time, each on its own link; does a rank wait before it sends its first one?",
)
print("the visible checks pass")
### BEGIN HIDDEN TESTS
n = draw.integer(5, 8)
outcome = expect_ring(
    [draw.exact(2 * n) for _ in range(n)], "first let the sum be right, then count"
)
expect(
    outcome.steps <= n - 1,
    "steps",
    "n-1 steps for every n: in each of them every rank sends one chunk and receives one",
)
### END HIDDEN TESTS

# %% [markdown]
# ## 2. Pieces of unequal size (2 points)
#
# 1,001 elements on four ranks are 251, 250, 250 and 250; with other cuts a rank may even have nothing. Every rank has its
# piece and knows all sizes; every rank returns all pieces in the order of ranks. No padding: all ranks together may put
# (n-1)·S on the wire, where S is the whole result, and not a byte more.
#
# > **API** as in task 1: `send` and `receive`, blocking or with `async_op=True`, and no collective. `sizes` is a list of n ints,
# > the same on every rank; `piece` has `sizes[rank]` elements, perhaps none. An empty tensor is sent and received like any
# > other, and costs nothing.


# %% answer="gather_pieces"
def gather_pieces(piece, sizes, group):
    """piece [sizes[rank]] on each rank, sizes a list of n integers -> [sum(sizes)], the pieces in the order of ranks."""
    ### BEGIN SOLUTION
    n, rank = group.size(), group.rank()
    places = list(piece.new_zeros(sum(sizes)).split(sizes))
    places[rank] = piece
    for step in range(n - 1):
        leaving, arriving = (rank - step) % n, (rank - step - 1) % n
        sending = collectives.send(places[leaving], (rank + 1) % n, group, async_op=True)
        places[arriving] = collectives.receive(places[arriving], (rank - 1) % n, group)
        sending.wait()
    return torch.cat(places)
    ### END SOLUTION


# %% judge="expect_gathered"
def expect_gathered(pieces, hint):
    """Run gather_pieces; every rank has all pieces, and each of them travelled n-1 times with its own size."""
    sizes, n = [len(piece) for piece in pieces], len(pieces)
    outcome = run_on_ranks(gather_pieces, [(piece, sizes) for piece in pieces])
    expect_equal(outcome.results, [torch.cat(pieces)] * n, "all pieces", hint)
    expect(
        sum(outcome.sent_bytes) == (n - 1) * outcome.results[0].nbytes,
        "bytes on the wire",
        "each piece travels n-1 times, with its own size and not that of the largest",
    )


# %% check="gather-result" points=1
# Every rank returns all pieces, in the order of ranks, and no byte of padding is sent.
expect_gathered(
    [torch.tensor([1.0, 2.0]), torch.tensor([3.0]), torch.tensor([4.0, 5.0, 6.0])],
    "all of them, in the order of ranks, on every rank",
)
print("the visible checks pass")
### BEGIN HIDDEN TESTS
for ranks in (2, draw.integer(4, 7)):
    pieces = [draw.exact(size) for size in draw.several(range(1, 50), ranks)]
    expect_gathered(pieces, "for any number of ranks and any sizes")
### END HIDDEN TESTS

# %% check="gather-bytes" points=1
# A piece may be large, and another one empty: what is not there is not sent.
expect_gathered(
    [torch.full((size,), 1.0) for size in (10, 1, 0, 1)], "rank 2 has nothing, and gets all"
)
print("the visible checks pass")
### BEGIN HIDDEN TESTS
for ranks in (2, draw.integer(4, 7)):
    sizes = [draw.integer(1, 9) for _ in range(ranks)]
    sizes[draw.integer(0, ranks - 1)] = 0
    expect_gathered([draw.exact(size) for size in sizes], "any piece may be empty")
### END HIDDEN TESTS

# %% [markdown]
# ## 3. Recursive halving as a list of transfers (2 points)
#
# Now no rank runs: you write the *plan*. n is a power of two, and a tensor has n chunks. In the first step each rank
# exchanges one half of all chunks with the rank n/2 away, in the next one half of what it still gathers with the rank n/4
# away, and so on. In the end rank r has chunk r, complete, and has sent (n-1)/n of the tensor, in log2(n) steps.
#
# Return a list of steps, each a list of messages `(source, to, first, end)`: chunks first, ..., end-1 travel, and the
# receiver adds them. All messages of a step read what was there before it. The check runs the proof of the chapter.
#
# > **API** a function of one whole number, n = 1, 2, 4, 8, ...; return a list of lists of tuples of four ints. No network, and no
# > tensor. For n = 1 the list is empty.


# %% judge="expect_plan"
def as_schedule(steps, n):
    numbers = [number for step in steps for message in step for number in message]
    expect(
        all(type(number) is int and 0 <= number <= n for number in numbers),
        "complete chunks",
        "ranks and chunks are numbers from 0 to n",
    )
    messages = (
        (Transfer(source, to, range(first, end), True) for source, to, first, end in step)
        for step in steps
    )
    return Schedule(n, n, tuple(map(tuple, messages)))


def expect_plan(n, steps):
    """The proof has nothing against the plan, and it costs what halving costs."""
    schedule = as_schedule(steps, n)
    try:
        check(schedule, "reduce_scatter")
    except ValueError as error:
        expect(False, "complete chunks", f"n={n}: {error}")
    expect(
        len(steps) == n.bit_length() - 1,
        "steps",
        "partners are n/2, n/4, ..., 1 away: how many distances are that?",
    )
    expect(
        max(sent_shares(schedule)) * n == n - 1,
        "bytes on the wire",
        "a rank gives away half of the chunks it still gathers, not more",
    )


def expect_partners(n, steps):
    expect_plan(n, steps)
    for number, step in enumerate(steps):
        expect(
            sorted(message[:2] for message in step)
            == [(rank, rank ^ (n >> number + 1)) for rank in range(n)],
            "partners",
            "in the first step one message leaves each rank, for the rank n/2 away; and then?",
        )


# %% answer="halving_steps"
def halving_steps(n):
    """A list of log2(n) steps, each a list of n tuples (source, to, first, end)."""
    ### BEGIN SOLUTION
    steps, windows, distance = [], {rank: (0, n) for rank in range(n)}, n // 2
    while distance:
        step = []
        for rank, (first, end) in windows.items():
            middle = (first + end) // 2
            upper = bool(rank & distance)
            step.append((rank, rank ^ distance, *((first, middle) if upper else (middle, end))))
            windows[rank] = (middle, end) if upper else (first, middle)
        steps.append(step)
        distance //= 2
    return steps
    ### END SOLUTION


# %% check="halving-proof" points=1
# The plan is proved: rank r has chunk r of the sum in the end, after log2(n) steps and (n-1)/n of the tensor.
for n, steps in zip((2, 4), ask_each(halving_steps, [(2,), (4,)])):
    expect_plan(n, steps)
print("the visible checks pass")
### BEGIN HIDDEN TESTS
sizes = [1, 8, draw.choice([16, 32])]
for n, steps in zip(sizes, ask_each(halving_steps, [(n,) for n in sizes])):
    expect_plan(n, steps)
### END HIDDEN TESTS

# %% check="halving-cost" points=1
# Partners are n/2 away, then n/4, and so on, and a message is one half.
expect_partners(4, ask_each(halving_steps, [(4,)])[0])
print("the visible checks pass")
### BEGIN HIDDEN TESTS
sizes = [8, draw.choice([16, 32]), 64]
for n, steps in zip(sizes, ask_each(halving_steps, [(n,) for n in sizes])):
    expect_partners(n, steps)
### END HIDDEN TESTS

# %% [markdown]
# ## 4. Where is the crossover? (2 points)
#
# On equal links, with alpha seconds for each message and B bytes per second, an all-reduce of S bytes takes
#
# - in a ring 2(n-1) steps, each with S/n bytes;
# - with recursive doubling log2(n) steps, each with all S bytes.
#
# Below which S is recursive doubling faster? n is a power of two. If it is faster at *every* size, the answer is `float("inf")`.
#
# > **API** a function of n (2, 4, 8, ...), alpha in seconds and B in bytes per second; return a float, in bytes.


# %% answer="crossover"
def crossover(n, alpha, B):
    """The S in bytes at which both take the same time (a float); inf if recursive doubling is always faster."""
    ### BEGIN SOLUTION
    log = n.bit_length() - 1
    fewer_steps = 2 * (n - 1) - log
    more_bytes = log - 2 * (n - 1) / n
    return alpha * B * fewer_steps / more_bytes if more_bytes > 0 else float("inf")
    ### END SOLUTION


# %% judge="expect_equal_times"
def expect_equal_times(cases, hint):
    for (n, alpha, B), S in zip(cases, ask_each(crossover, cases)):
        finite = isinstance(S, float) and 0 < S < float("inf")
        expect(finite, "a size", "a positive float, in bytes; only two ranks never cross")
        ring, doubling = 2 * (n - 1) * (alpha + S / n / B), (n.bit_length() - 1) * (alpha + S / B)
        expect(abs(ring - doubling) < 1e-9 * ring, "equal times", hint)


def drawn(*ranks):
    return [(n, draw.integer(1, 90) * 1e-6, draw.integer(1, 90) * 1e9) for n in ranks]


# %% check="crossover-four" points=1
# Both take the same time at the crossover of four ranks, or eight.
expect_equal_times([(4, 4e-6, 50e9)], "put your S into both formulas, for n = 4: the times differ")
print("the visible checks pass")
### BEGIN HIDDEN TESTS
expect_equal_times(
    drawn(4, 8), "the times differ with another n, alpha and B; are all of them in your formula?"
)
### END HIDDEN TESTS

# %% check="crossover-any" points=1
# The crossover of any number of ranks, two included.
expect(
    ask_each(crossover, [(2, 1e-6, 1e9)]) == [float("inf")],
    "two ranks",
    "two ranks: write down steps and bytes of both; is there a size at which the ring catches up?",
)
print("the visible checks pass")
### BEGIN HIDDEN TESTS
expect_equal_times(
    drawn(8, 2 ** draw.integer(4, 12)),
    "put your S into both formulas, for more ranks: the times differ",
)
### END HIDDEN TESTS
