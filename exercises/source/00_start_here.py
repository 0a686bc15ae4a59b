# %% [markdown]
# # Exercises 00: start here
#
# Three tasks, 10 points, about half an hour. No GPU, nothing to download.
#
# Write where a cell says `YOUR CODE HERE`, run the cell, then run the check below it. A check tells which property of your
# answer is broken, never the result it wants. When the visible checks pass, grade yourself in a terminal:
#
#     minitrain grade 00
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
from minitrain.course.grading.answer_checks import (
    Draw,
    Failure,
    ask_each,
    expect,
    expect_equal,
    run_on_ranks,
)

draw = Draw()  # hidden checks draw sizes, numbers of ranks and values

# %% [markdown]
# ## 1. Pass a tensor on without a deadlock (4 points)
#
# Ranks form a ring. Each rank sends a tensor to its right neighbour (rank + 1; the last rank sends to rank 0) and receives
# the tensor of its left neighbour. Below is a first attempt. Run it, and read which rank waits for which.
#
# > **API** `group.rank()`, `group.size()`: which rank this is, and how many there are.
# > `collectives.send(x, to, group)` returns when rank `to` has asked for the message.
# > `collectives.receive(like, source, group)` waits for the message of rank `source` and returns it as a new tensor; `like` is
# > any tensor of the same shape and dtype.
# > With `async_op=True` both return a handle at once; `handle.wait()` waits, and for a receive returns the tensor.


# %% given="pass-on-first-try"
def pass_on_first_try(x, group):
    rank, size = group.rank(), group.size()
    collectives.send(x, (rank + 1) % size, group)
    return collectives.receive(x, (rank - 1) % size, group)


# %%
try:
    run_on_ranks(pass_on_first_try, [torch.tensor([float(rank)]) for rank in range(4)])
except Failure as failure:
    print(failure)

# %% [markdown]
# Repair it with blocking `send` and `receive`. Two things are graded: that it works on any number of ranks from 2 on, and
# what it costs. Each rank sends its tensor once, and no chain of messages that wait for one another may be longer than three,
# however many ranks there are. (If only rank 0 sends first, it works, and the messages go around the ring one after the other.)


# %% answer="pass_on"
def pass_on(x, group):
    """x, one tensor on each rank -> the tensor of the left neighbour, of the same shape and dtype."""
    ### BEGIN SOLUTION
    rank, size = group.rank(), group.size()
    right, left = (rank + 1) % size, (rank - 1) % size
    if rank % 2 == 0:
        collectives.send(x, right, group)
        return collectives.receive(x, left, group)
    received = collectives.receive(x, left, group)
    collectives.send(x, right, group)
    return received
    ### END SOLUTION


# %% judge="expect_passed_on"
def expect_passed_on(given, hint):
    """Run pass_on; every rank has its left neighbour's tensor, and sent its own once."""
    outcome, ranks = run_on_ranks(pass_on, given), len(given)
    expect_equal(outcome.results, given[-1:] + given[:-1], "left neighbour", hint)
    expect(
        outcome.sent_bytes == [given[0].nbytes] * ranks,
        "bytes on the wire",
        "each rank sends one tensor; does yours send more, or to more ranks?",
    )
    expect(
        {(m.source, m.destination) for m in outcome.messages}
        == {(r, (r + 1) % ranks) for r in range(ranks)},
        "only neighbours",
        "rank r sends to rank r+1 and to nobody else",
    )
    return outcome


# %% check="pass_on-result" points=2
# Every rank holds its left neighbour's tensor, each sends its own once, and there is no deadlock.
for ranks in (2, 4):
    expect_passed_on(
        [torch.tensor([10.0 * rank, 1.0]) for rank in range(ranks)],
        "rank r returns what rank r-1 was given, and rank 0 what the last rank was given",
    )
print("the visible checks pass")
### BEGIN HIDDEN TESTS
for ranks in (3, draw.choice([5, 6, 7])):
    shape, dtype = (
        draw.choice([(3,), (2, 5), (4, 1, 2)]),
        draw.choice([torch.float64, torch.float32, torch.int64]),
    )
    expect_passed_on(
        [(draw.exact(*shape) * 2**45).to(dtype) for _ in range(ranks)],
        "does it work for an odd number of ranks, and for every shape and dtype?",
    )
### END HIDDEN TESTS


# %% judge="expect_short_chain"
def expect_short_chain(given, property):
    """Run pass_on; at most three messages follow one another."""
    outcome = expect_passed_on(given, "first let it be right, then count")
    expect(
        outcome.steps <= 3,
        property,
        "no deadlock, but a long chain: each rank waits until the rank before it is done. "
        "Which ranks can send at the same moment?",
    )


# %% check="pass_on-cost" points=2
# At most three messages wait for one another.
expect_short_chain([torch.full((100,), float(rank)) for rank in range(6)], "steps")
print("the visible checks pass")
### BEGIN HIDDEN TESTS
for ranks in (5, draw.integer(7, 9)):
    expect_short_chain([draw.exact(7) for _ in range(ranks)], "steps on any number of ranks")
### END HIDDEN TESTS

# %% [markdown]
# ## 2. A sum without a collective (3 points)
#
# `collectives.all_reduce` adds up one tensor from each rank and returns the sum on all ranks. Write it yourself from `send`
# and `receive`. The network may carry at most 2(n-1) tensors on n ranks: not every rank to every other, which would
# be n(n-1).
#
# One more property, easily lost: all ranks return *the same bits*. Floating-point sums depend on the order of the additions, and
# replicas that add in different orders slowly become different models.
#
# > **API** as in task 1: `group.rank()`, `group.size()`, `collectives.send(x, to, group)` and
# > `collectives.receive(like, source, group)`, blocking or with `async_op=True`. No collective.
# > x is floating point, the same shape and dtype on each rank; return a tensor of that shape and dtype. Leave x as it is.


# %% answer="total"
def total(x, group):
    """x, one tensor on each rank, all of one shape and dtype -> their sum, on every rank the same bits."""
    ### BEGIN SOLUTION
    rank, others = group.rank(), range(1, group.size())
    if rank > 0:
        collectives.send(x, 0, group)
        return collectives.receive(x, 0, group)
    result = x.clone()
    for source in others:
        result += collectives.receive(x, source, group)
    for to in others:
        collectives.send(result, to, group)
    return result
    ### END SOLUTION


# %% judge="expect_total"
def expect_total(given, hint):
    """Run total; the sum is on every rank, and no more travels than two tensors for each rank but one."""
    outcome, ranks = run_on_ranks(total, given), len(given)
    expect_equal(outcome.results, [torch.stack(given).sum(0)] * ranks, "sum on every rank", hint)
    expect(
        sum(outcome.sent_bytes) <= 2 * (ranks - 1) * given[0].nbytes,
        "bytes on the wire",
        "who really needs to hear from everybody? count the messages as a function of n",
    )


# %% check="total-sum" points=2
# Every rank returns the sum of all tensors, with at most 2(n-1) tensors on the network.
given = [torch.tensor([1.0, 2.0]), torch.tensor([10.0, 20.0]), torch.tensor([100.0, 200.0])]
expect_total(given, "rank 0 is not the only one who needs it")
print("the visible checks pass")
### BEGIN HIDDEN TESTS
for ranks in draw.several([2, 3, 4, 5, 6], 3):
    shape = draw.choice([(draw.integer(1, 40),), (draw.integer(1, 6), 3)])
    expect_total(
        [draw.exact(*shape) for _ in range(ranks)],
        "for every number of ranks and every shape; is it a sum, and of all ranks?",
    )
### END HIDDEN TESTS

# %% check="total-bits" points=1
# Sums whose digits depend on the order of the additions are the same bits everywhere.
expect_total([torch.full((50,), 1.0)] * 4, "first let every rank return the sum")
print("the visible checks pass")
### BEGIN HIDDEN TESTS
given = [draw.real(200) for _ in range(5)]
outcome = run_on_ranks(total, given)
expect_equal(outcome.results, [sum(given)] * 5, "sum on every rank", "for all numbers", atol=1e-12)
expect_equal(
    outcome.results,
    outcome.results[:1] * 5,
    "same bits",
    "let every rank get its sum from the same additions in the same order",
)
expect(
    sum(outcome.sent_bytes) <= 2 * 4 * given[0].nbytes,
    "bytes on the wire",
    "count the messages as a function of n",
)
### END HIDDEN TESTS

# %% [markdown]
# ## 3. How many bytes? (3 points)
#
# Read `relay` and predict, for a float32 tensor of `numel` elements, how many bytes each rank sends. Running it is the
# check's part.
#
# > **API** a function of two whole numbers, `ranks` (2 or more) and `numel`; return a list of `ranks` ints. No network.
# > A float32 number has 4 bytes, a bfloat16 number 2; `n // 2` rounds down.


# %% given="relay"
def relay(x, group):
    """Rank 0's tensor travels down the line; each rank that received it answers rank 0 with the first half, in bfloat16."""
    rank, size = group.rank(), group.size()
    if rank > 0:
        x = collectives.receive(x, rank - 1, group)
    if rank < size - 1:
        collectives.send(x, rank + 1, group)
    half = x[: x.numel() // 2].to(torch.bfloat16)
    if rank > 0:
        collectives.send(half, 0, group)
    else:
        for source in range(1, size):
            collectives.receive(half, source, group)
    return x


# %% answer="relay_bytes"
def relay_bytes(ranks, numel):
    """A list of `ranks` integers: the bytes each rank sends in relay(x, group) when x has `numel` float32 elements."""
    ### BEGIN SOLUTION
    forward, answer = 4 * numel, 2 * (numel // 2)
    return [forward * (rank < ranks - 1) + answer * (rank > 0) for rank in range(ranks)]
    ### END SOLUTION


# %% judge="expect_bytes"
def expect_bytes(*cases, hint):
    """The prediction for each (ranks, numel) is what ranks of the course send."""
    for (ranks, numel), said in zip(cases, ask_each(relay_bytes, cases)):
        measured = run_on_ranks(relay, [torch.zeros(numel)] * ranks).sent_bytes
        expect_equal(said, measured, "bytes of each rank", hint)


# %% check="relay_bytes-four" points=1
# The bytes of four ranks.
expect_bytes(
    (4, 1000),
    hint="which ranks pass the tensor on, which ones answer, and how large is an element of what they send?",
)
print("the visible checks pass")
### BEGIN HIDDEN TESTS
expect_bytes((4, 2 * draw.integer(20, 400)), hint="the same with another size")
### END HIDDEN TESTS

# %% check="relay_bytes-any" points=2
# The bytes of any number of ranks and any size.
expect_bytes((2, 10), hint="with two ranks, the first is not the last")
print("the visible checks pass")
### BEGIN HIDDEN TESTS
expect_bytes(
    (draw.integer(3, 6), 2 * draw.integer(20, 400) + 1),
    (draw.integer(3, 6), 2 * draw.integer(20, 400)),
    hint="try an odd number of elements, and more ranks",
)
### END HIDDEN TESTS
