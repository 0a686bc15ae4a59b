# %% [markdown]
# # Exercises 02: collectives
#
# Four tasks, 10 points, about an hour. No GPU, nothing to download. Read chapter 02 before.
#
# Write where a cell says `YOUR CODE HERE`, run the cell, then run the check below it. A check tells which property of your
# answer is broken, never the result it wants. When the checks are quiet, grade yourself in a terminal:
#
#     minitrain grade 02
#
# The grader runs the same checks and hidden ones with other sizes, other numbers of ranks and other values. Three rules:
#
# - An answer cell stands alone. It may use what read-only cells define, but not your other cells.
# - A function that runs on ranks gets its `group` last: `group.rank()` says who you are, `group.size()` how many you are.
# - Between ranks there is a network and nothing else. A `send` is over when the other side has asked for the message; with
#   `async_op=True` it returns at once with a handle, and `handle.wait()` waits until it is over.

# %% given="setup"
import torch

from minitrain import collectives
from minitrain.communication.check import check
from minitrain.communication.schedule import Schedule, Transfer, sent_shares
from minitrain.course.grading.checks import Draw, ask, expect, expect_equal, run_on_ranks

draw = Draw()  # hidden checks draw sizes, numbers of ranks and values
ready_made = [
    "exchange",
    "rotate",
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "broadcast",
    "reduce_from",
    "gather_from",
    "gather_to",
    "scatter_to",
    "reduce_scatter_to",
]

# %% [markdown]
# ## 1. The first half of a ring (4 points)
#
# Every rank has a flat tensor of n·d elements, where n is the number of ranks. Rank r returns elements r·d to (r+1)·d of
# the **sum** of all tensors. Write it as a ring, from `send` and `receive`: each rank sends only to its right neighbour
# (rank + 1, and the last rank to rank 0), one chunk of d elements in each of n-1 steps.
#
# Which chunk must leave rank r first, so that the last one to arrive there is its own?


# %% answer="ring_reduce_scatter"
def ring_reduce_scatter(x, group):
    """x [n·d] on each rank -> [d], on rank r the r-th chunk of the sum over all ranks."""
    ### BEGIN SOLUTION
    n, rank = group.size(), group.rank()
    chunks = x.chunk(n)
    partial = chunks[(rank - 1) % n]
    for step in range(n - 1):
        own_part = chunks[(rank - 2 - step) % n]
        sending = collectives.send(partial, (rank + 1) % n, group, async_op=True)
        partial = collectives.receive(own_part, (rank - 1) % n, group) + own_part
        sending.wait()
    return partial
    ### END SOLUTION


# %% check="ring-sum" points=2
# Rank r has chunk r of the sum.
given = [torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([10.0, 20.0, 30.0, 40.0])]
outcome = run_on_ranks(ring_reduce_scatter, given, forbid=ready_made)
expect_equal(
    outcome.results,
    [torch.tensor([11.0, 22.0]), torch.tensor([33.0, 44.0])],
    "chunk of the sum",
    "rank 0 returns the first chunk of the sum of all tensors, rank 1 the second",
)
given = [torch.arange(8.0) * 10**rank for rank in range(4)]
outcome = run_on_ranks(ring_reduce_scatter, given, forbid=ready_made)
expect_equal(
    outcome.results,
    list(sum(given).chunk(4)),
    "chunk of the sum",
    "write down for 4 ranks which chunk each one holds after every step; where does chunk c begin if it must end at rank c?",
)
### BEGIN HIDDEN TESTS
for ranks in (3, draw.choice([5, 6, 7])):
    given = [draw.exact(3 * ranks) for _ in range(ranks)]
    outcome = run_on_ranks(ring_reduce_scatter, given, forbid=ready_made)
    expect_equal(
        outcome.results,
        list(sum(given).chunk(ranks)),
        "chunk of the sum",
        "for every number of ranks, even or odd",
    )
### END HIDDEN TESTS

# %% check="ring-bytes" points=1
# Each rank sends one chunk a step, and only to its right neighbour.
given = [torch.ones(400)] * 4
outcome = run_on_ranks(ring_reduce_scatter, given, forbid=ready_made)
expect_equal(
    outcome.results,
    list(sum(given).chunk(4)),
    "chunk of the sum",
    "first let the sum be right, then count",
)
expect(
    outcome.sent_bytes == [1200] * 4,
    "bytes on the wire",
    "three chunks leave each of four ranks: (n-1)/n of the tensor",
)
expect(
    {(m.source, m.destination) for m in outcome.messages} == {(r, (r + 1) % 4) for r in range(4)},
    "only neighbours",
    "rank r sends to rank r+1 and to nobody else",
)
### BEGIN HIDDEN TESTS
ranks, d = draw.integer(5, 8), draw.integer(3, 40)
given = [draw.exact(ranks * d) for _ in range(ranks)]
outcome = run_on_ranks(ring_reduce_scatter, given, forbid=ready_made)
expect_equal(
    outcome.results,
    list(sum(given).chunk(ranks)),
    "chunk of the sum",
    "first let the sum be right, then count",
)
expect(
    outcome.sent_bytes == [(ranks - 1) * d * 8] * ranks,
    "bytes on the wire",
    "n-1 chunks leave each rank, for every n",
)
expect(
    {(m.source, m.destination) for m in outcome.messages}
    == {(r, (r + 1) % ranks) for r in range(ranks)},
    "only neighbours",
    "rank r sends to rank r+1 and to nobody else",
)
### END HIDDEN TESTS

# %% check="ring-steps" points=1
# All ranks send at the same time: n-1 messages follow one another, no more.
given = [torch.ones(400)] * 4
outcome = run_on_ranks(ring_reduce_scatter, given, forbid=ready_made)
expect_equal(
    outcome.results,
    list(sum(given).chunk(4)),
    "chunk of the sum",
    "first let the sum be right, then count",
)
expect(
    outcome.steps <= 3,
    "steps",
    "chunks must travel at the same time, each on its own link; does a rank wait before it sends its first one?",
)
### BEGIN HIDDEN TESTS
ranks = draw.integer(5, 8)
given = [draw.exact(2 * ranks) for _ in range(ranks)]
outcome = run_on_ranks(ring_reduce_scatter, given, forbid=ready_made)
expect_equal(
    outcome.results,
    list(sum(given).chunk(ranks)),
    "chunk of the sum",
    "first let the sum be right, then count",
)
expect(
    outcome.steps <= ranks - 1,
    "steps",
    "n-1 steps for every n: in each of them every rank sends one chunk and receives one",
)
### END HIDDEN TESTS

# %% [markdown]
# ## 2. Pieces of unequal size (2 points)
#
# 1,001 elements on four ranks are 251, 250, 250 and 250; with other cuts a rank may even have nothing. Every rank has its
# piece and knows all sizes; everyone returns all pieces in the order of ranks. No padding: all ranks together may put
# (n-1)·S on the wire, where S is the whole result, and not a byte more.


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


# %% check="gather-result" points=1
# Every rank returns all pieces, in the order of ranks.
pieces = [torch.tensor([1.0, 2.0]), torch.tensor([3.0]), torch.tensor([4.0, 5.0, 6.0])]
outcome = run_on_ranks(gather_pieces, [(piece, [2, 1, 3]) for piece in pieces], forbid=ready_made)
expect_equal(
    outcome.results,
    [torch.cat(pieces)] * 3,
    "all pieces",
    "all of them, in the order of ranks, on every rank",
)
### BEGIN HIDDEN TESTS
for ranks in (2, draw.integer(4, 7)):
    sizes = [draw.integer(1, 9) for _ in range(ranks)]
    sizes[draw.integer(0, ranks - 1)] = 0
    pieces = [draw.exact(size) for size in sizes]
    outcome = run_on_ranks(gather_pieces, [(piece, sizes) for piece in pieces], forbid=ready_made)
    expect_equal(
        outcome.results,
        [torch.cat(pieces)] * ranks,
        "all pieces",
        "for any sizes; a piece may be empty",
    )
### END HIDDEN TESTS

# %% check="gather-bytes" points=1
# No byte of padding is sent.
pieces = [torch.full((size,), 1.0) for size in (10, 1, 1, 1)]
outcome = run_on_ranks(
    gather_pieces, [(piece, [10, 1, 1, 1]) for piece in pieces], forbid=ready_made
)
expect_equal(
    outcome.results,
    [torch.cat(pieces)] * 4,
    "all pieces",
    "first let every rank have all pieces, then count",
)
expect(
    sum(outcome.sent_bytes) <= 3 * 13 * 4,
    "bytes on the wire",
    "each piece travels n-1 times, with its own size and not that of the largest",
)
### BEGIN HIDDEN TESTS
ranks = draw.integer(3, 7)
sizes = [draw.integer(1, 50) for _ in range(ranks)]
pieces = [draw.exact(size) for size in sizes]
outcome = run_on_ranks(gather_pieces, [(piece, sizes) for piece in pieces], forbid=ready_made)
expect_equal(
    outcome.results,
    [torch.cat(pieces)] * ranks,
    "all pieces",
    "first let every rank have all pieces, then count",
)
expect(
    sum(outcome.sent_bytes) <= (ranks - 1) * sum(sizes) * 8,
    "bytes on the wire",
    "each piece travels n-1 times, with its own size",
)
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


# %% given="as-schedule"
def as_schedule(steps, n):
    messages = (
        (Transfer(source, to, range(first, end), True) for source, to, first, end in step)
        for step in steps
    )
    return Schedule(n, n, tuple(map(tuple, messages)))


def fault_in(steps, n):
    """What the proof says against the plan; nothing if it is right."""
    try:
        check(as_schedule(steps, n), "reduce_scatter")
    except ValueError as error:
        return str(error)
    return ""


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
# The plan is proved: rank r has chunk r of the sum in the end.
for n in (2, 4):
    fault = fault_in(ask(halving_steps, n), n)
    expect(not fault, "complete chunks", f"n={n}: {fault}")
### BEGIN HIDDEN TESTS
for n in (1, 8, draw.choice([16, 32])):
    fault = fault_in(ask(halving_steps, n), n)
    expect(not fault, "complete chunks", f"n={n}: {fault}")
### END HIDDEN TESTS

# %% check="halving-cost" points=1
# It takes log2(n) steps, and each rank sends (n-1)/n of the tensor.
steps = ask(halving_steps, 4)
expect(not fault_in(steps, 4), "complete chunks", "first let the plan be right, then count")
expect(len(steps) == 2, "steps", "partners are n/2, n/4, ..., 1 away: how many distances are that?")
expect(
    max(sent_shares(as_schedule(steps, 4))) * 4 == 3,
    "bytes on the wire",
    "a rank gives away half of the chunks it still gathers, not more",
)
### BEGIN HIDDEN TESTS
for n in (8, draw.choice([16, 32])):
    steps = ask(halving_steps, n)
    expect(not fault_in(steps, n), "complete chunks", "first let the plan be right, then count")
    expect(
        len(steps) == n.bit_length() - 1,
        "steps",
        "partners are n/2, n/4, ..., 1 away: how many distances are that?",
    )
    expect(
        max(sent_shares(as_schedule(steps, n))) * n == n - 1,
        "bytes on the wire",
        "a rank gives away half of the chunks it still gathers",
    )
### END HIDDEN TESTS

# %% [markdown]
# ## 4. Where is the crossover? (2 points)
#
# On equal links, with alpha seconds for each message and B bytes a second, an all-reduce of S bytes takes
#
# - in a ring 2(n-1) steps, each with S/n bytes;
# - with recursive doubling log2(n) steps, each with all S bytes.
#
# Below which S is recursive doubling faster? n is a power of two. If it is faster at *every* size, the answer is `float("inf")`.


# %% answer="crossover"
def crossover(n, alpha, B):
    """The S in bytes at which both take the same time (a float); inf if recursive doubling is always faster."""
    ### BEGIN SOLUTION
    log = n.bit_length() - 1
    fewer_steps = 2 * (n - 1) - log
    more_bytes = log - 2 * (n - 1) / n
    return alpha * B * fewer_steps / more_bytes if more_bytes > 0 else float("inf")
    ### END SOLUTION


# %% check="crossover-four" points=1
# Both take the same time at the crossover of four ranks.
S = ask(crossover, 4, 4e-6, 50e9)
expect(isinstance(S, float) and S > 0, "a size", "a positive float, in bytes")
ring, doubling = 6 * (4e-6 + S / 4 / 50e9), 2 * (4e-6 + S / 50e9)
expect(
    abs(ring - doubling) < 1e-9 * ring,
    "equal times",
    "put your S into both formulas, for n = 4: the times differ",
)
### BEGIN HIDDEN TESTS
alpha, B = draw.integer(1, 90) * 1e-6, draw.integer(1, 90) * 1e9
S = ask(crossover, 4, alpha, B)
ring, doubling = 6 * (alpha + S / 4 / B), 2 * (alpha + S / B)
expect(
    abs(ring - doubling) < 1e-9 * ring,
    "equal times",
    "the times differ with another alpha and B; are both in your formula?",
)
### END HIDDEN TESTS

# %% check="crossover-any" points=1
# The crossover of any number of ranks, two included.
expect(
    ask(crossover, 2, 1e-6, 1e9) == float("inf"),
    "two ranks",
    "two ranks: write down steps and bytes of both; is there a size at which the ring catches up?",
)
### BEGIN HIDDEN TESTS
for n in (8, 2 ** draw.integer(4, 12)):
    alpha, B = draw.integer(1, 90) * 1e-6, draw.integer(1, 90) * 1e9
    S = ask(crossover, n, alpha, B)
    expect(
        isinstance(S, float) and 0 < S < float("inf"),
        "a size",
        "a positive float, in bytes; only two ranks never cross",
    )
    ring, doubling = 2 * (n - 1) * (alpha + S / n / B), (n.bit_length() - 1) * (alpha + S / B)
    expect(
        abs(ring - doubling) < 1e-9 * ring,
        "equal times",
        "put your S into both formulas, for more ranks: the times differ",
    )
### END HIDDEN TESTS
