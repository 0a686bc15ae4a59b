# %% [markdown]
# # Exercises 25: talking less
#
# Five tasks, 10 points, about two hours. Read chapter 25 first. No GPU, nothing to download.
#
# Write where a cell says `YOUR CODE HERE`, run the cell, then run the check below it. A check tells which property of your
# answer is broken, never the result it wants. When the visible checks pass, grade yourself in a terminal:
#
#     minitrain grade 25
#
# The grader runs the same checks and hidden ones with other sizes and values. An answer cell stands alone: it may use read-only cells, but for those
# that say they are for checks, and not your other cells. Nothing here runs on ranks.
#
# Task 1 is Seide et al. 2014, *1-bit SGD*; task 2 the homomorphic code of THC (Li et al. 2024, arXiv:2302.08545); task 3 P3 (Jayarajan et al. 2019,
# arXiv:1905.03960); task 4 CoCoNet's chunks (Jangda et al. 2022, arXiv:2105.05720); task 5 SwitchML (Sapio et al. 2021, arXiv:1903.06701).

# %% given="setup"
import math
from fractions import Fraction

# %% judge="tools"
from itertools import product

from minitrain.course.grading.answer_checks import Draw, ask_each, expect
from minitrain.systems.plan import communication_order as plans

draw = Draw()  # hidden checks draw sizes and values


def expect_each(answer, cases, right, property, hint):
    """`right` of each case, exactly."""
    for said, case in zip(ask_each(answer, list(cases)), cases):
        wanted = right(*case)
        expect(type(said) is type(wanted), "kind of result", f"see the API (seen with {case})")
        expect(said == wanted, property, f"{hint} (seen with {case})")


# %% [markdown]
# ## 1. Send it later (2 points)
#
# A rank may send only `k` numbers of its gradient per step. It sends the `k` that are largest in absolute value (of equals the one with the lower
# place), of the gradient *and what earlier steps have left out*; what it does not send is left for the next step. Numbers are whole, so nothing is
# rounded.
#
# > **API** `feedback(gradients, k)` gets a list of gradients, one list of whole numbers per step, all of one length, and `k` of 1 to that length.
# > It returns (messages, rest): a list with one list of [place, value] per step, places rising, `k` of them even if a value is 0; and the
# > list of what is left after the last step.


# %% answer="feedback"
def feedback(gradients, k):
    """[[int]] -> ([[[place, value]]], [int])."""
    ### BEGIN SOLUTION
    rest, messages = [0] * len(gradients[0]), []
    for gradient in gradients:
        rest = [a + b for a, b in zip(rest, gradient)]
        places = sorted(sorted(range(len(rest)), key=lambda i: (-abs(rest[i]), i))[:k])
        messages.append([[i, rest[i]] for i in places])
        for i in places:
            rest[i] = 0
    return messages, rest
    ### END SOLUTION


# %% judge="feedback_right"
def feedback_is(gradients, k):
    left, sent = dict.fromkeys(range(len(gradients[0])), 0), []
    for gradient in gradients:
        for place, value in enumerate(gradient):
            left[place] += value
        chosen = []
        while len(chosen) < k:
            free = [place for place in left if place not in chosen]
            chosen.append(max(free, key=lambda place: (abs(left[place]), -place)))
        sent.append([[place, left.pop(place)] for place in sorted(chosen)])
        left = {place: left.get(place, 0) for place in range(len(gradient))}
    return sent, list(left.values())


def drawn_gradients(steps, size, most):
    return [[draw.integer(-most, most) for _ in range(size)] for _ in range(steps)]


# %% check="feedback-one" points=1
# One step: the largest are sent, the others are left.
expect_each(
    feedback,
    [([[3, -5, 1]], 1), ([[2, -2, 2]], 2)],
    feedback_is,
    "the largest",
    "in absolute value; which of equals?",
)
print("the visible checks pass")
### BEGIN HIDDEN TESTS
cases = [(drawn_gradients(1, size, 9), draw.integer(1, size)) for size in (2, 3, 5, 8)]
expect_each(feedback, cases, feedback_is, "the largest", "in absolute value; which of equals?")
### END HIDDEN TESTS

# %% check="feedback-more" points=1
# Several steps: what was left out comes later, and nothing is lost or sent twice.
expect_each(
    feedback,
    [([[3, 2], [0, 2]], 1)],
    feedback_is,
    "nothing is lost",
    "what was left from the step before?",
)
print("the visible checks pass")
### BEGIN HIDDEN TESTS
cases = [
    (drawn_gradients(draw.integer(3, 8), size, 20), draw.integer(1, size - 1))
    for size in (2, 4, 7) * 3
]
expect_each(feedback, cases, feedback_is, "nothing is lost", "what was left from the step before?")
### END HIDDEN TESTS

# %% [markdown]
# ## 2. A sum of codes (2 points)
#
# All ranks use one even grid of $2^b$ points from $-M$ to $M$; a code is the number of a point, from 0. A switch adds the codes of `count` ranks and
# knows nothing else. Return what the *sum* of the decoded numbers is, exactly, and how many bits a counter in the switch needs so that no sum of
# `count` codes of any value overflows.
#
# > **API** `decode(total, count, bits, largest)` gets the sum of codes, the number of ranks, $b$ (1 to 16) and $M$, a whole number above 0.
# > It returns (numerator, denominator, counter_bits), of which the first two are the exact sum as `Fraction.as_integer_ratio` gives it.


# %% answer="decode"
def decode(total, count, bits, largest):
    """-> (numerator, denominator, bits of a counter)."""
    ### BEGIN SOLUTION
    top = 2**bits - 1
    value = Fraction(2 * largest * total, top) - count * largest
    return (*value.as_integer_ratio(), (count * top).bit_length())
    ### END SOLUTION


# %% judge="decode_right"
def decode_is(total, count, bits, largest):
    points = [Fraction(-largest) + Fraction(2 * largest * i, 2**bits - 1) for i in range(2**bits)]
    codes, left = [], total
    for rank in range(count):
        codes.append(min(left, 2**bits - 1))
        left -= codes[-1]
    counter = 1
    while 2**counter <= count * (2**bits - 1):
        counter += 1
    return (*sum(points[code] for code in codes).as_integer_ratio(), counter)


# %% check="decode-one" points=1
# One rank: a code's number.
expect_each(
    decode,
    [(0, 1, 2, 3), (3, 1, 2, 3), (1, 1, 1, 5)],
    decode_is,
    "one code",
    "where do 0 and the highest code lie?",
)
print("the visible checks pass")
### BEGIN HIDDEN TESTS
cases = [(draw.integer(0, 2**bits - 1), 1, bits, draw.integer(1, 50)) for bits in (1, 2, 3, 5, 8)]
expect_each(decode, cases, decode_is, "one code", "where do 0 and the highest code lie?")
### END HIDDEN TESTS

# %% check="decode-sum" points=1
# Several ranks: the sum of what their codes mean, and a counter that is just wide enough.
expect_each(
    decode,
    [(5, 3, 2, 3), (0, 4, 3, 7)],
    decode_is,
    "the sum of decodes",
    "how often is the lowest point in it?",
)
print("the visible checks pass")
### BEGIN HIDDEN TESTS
counts = (2, 3, 8, 16, 17)
cases = [
    (draw.integer(0, n * (2**bits - 1)), n, bits, draw.integer(1, 50))
    for n, bits in product(counts, (1, 4, 6))
]
expect_each(
    decode,
    cases,
    decode_is,
    "the sum of decodes",
    "how often is the lowest point in it, and what is the largest sum?",
)
### END HIDDEN TESTS

# %% [markdown]
# ## 3. Who goes next (2 points)
#
# A step as in the chapter: backward from the last layer to the first, a sum of each layer on a network that carries one piece at a time, forward from
# the first layer to the last. A layer's sum is cut into `slices` equal pieces, ready when its backward is done. Whenever the network is free, it takes
# a piece that is ready: of the *lowest* layer if `priority`, else of the layer that was ready first. A piece that
# becomes ready in that very moment counts, and a piece is not interrupted. Forward of a layer
# needs all pieces of that layer.
#
# > **API** `step_s(layers, slices, priority)` gets a list of (forward, backward, sync) in whole seconds, all above 0, a whole number above 0 and a
# > bool. It returns the exact end of the last forward, as (numerator, denominator).


# %% answer="step_s"
def step_s(layers, slices, priority):
    """-> (numerator, denominator) of the seconds from loss to loss."""
    ### BEGIN SOLUTION
    clock, ready = Fraction(0), {}
    for number in range(len(layers) - 1, -1, -1):
        clock += layers[number][1]
        ready[number] = clock
    backward, left, done = clock, dict.fromkeys(ready, slices), {}
    clock = Fraction(0)
    while left:
        waiting = [number for number in left if ready[number] <= clock]
        if not waiting:
            clock = min(ready[number] for number in left)
            continue
        chosen = min(waiting) if priority else max(waiting)
        clock += Fraction(layers[chosen][2], slices)
        left[chosen] -= 1
        if not left[chosen]:
            del left[chosen]
            done[chosen] = clock
    clock = backward
    for number, (forward, *_) in enumerate(layers):
        clock = max(clock, done[number]) + forward
    return clock.as_integer_ratio()
    ### END SOLUTION


# %% judge="step_right"
def step_is(layers, slices, priority):
    run = plans.step(layers, slices=slices, by=int if priority else None)
    return Fraction(run.end_s).as_integer_ratio()


THREE = [(1, 1, 4)] * 3


def drawn_layers(most):
    return [tuple(draw.integer(1, most) for _ in range(3)) for _ in range(draw.integer(2, 6))]


# %% check="step-line" points=1
# In line: three layers of 1, 1 and 4 seconds, and others.
expect_each(
    step_s,
    [(THREE, 1, False), ([(2, 3, 1)], 1, False)],
    step_is,
    "in line",
    "when can each sum begin?",
)
print("the visible checks pass")
### BEGIN HIDDEN TESTS
cases = [(drawn_layers(9), draw.integer(1, 3), False) for _ in range(12)]
expect_each(step_s, cases, step_is, "in line", "when can each sum begin?")
### END HIDDEN TESTS

# %% check="step-priority" points=1
# By priority, whole and in slices.
expect_each(
    step_s,
    [(THREE, 1, True), (THREE, 4, True)],
    step_is,
    "by priority",
    "which pieces are ready when the network is free?",
)
print("the visible checks pass")
### BEGIN HIDDEN TESTS
cases = [(drawn_layers(9), draw.integer(1, 5), True) for _ in range(12)]
cases += [([(1, 5, 1), (3, 1, 9)], 1, True), ([(1, 1, 9), (1, 2, 9), (1, 3, 9)], 3, True)]
expect_each(
    step_s, cases, step_is, "by priority", "which pieces are ready when the network is free?"
)
### END HIDDEN TESTS

# %% [markdown]
# ## 4. How many chunks (2 points)
#
# A product of `work` seconds and the sum of its output, `sync` seconds, are cut into $k$ chunks. A chunk's sum starts when its product is done and the
# sum before it has ended, and costs `1/pieces` seconds before its bytes move. Return the smallest best $k$ from 1 to 64, and its time.
#
# > **API** `chunks(work, sync, pieces)` gets three whole numbers above 0; the latency of a chunk is `Fraction(1, pieces)`. It returns
# > (k, numerator, denominator) with the exact time until the last sum has ended.


# %% answer="chunks"
def chunks(work, sync, pieces):
    """-> (k, numerator, denominator)."""

    ### BEGIN SOLUTION
    def seconds(k):
        product, total = Fraction(work, k), Fraction(sync, k) + Fraction(1, pieces)
        return product + (k - 1) * max(product, total) + total

    best = min(range(1, 65), key=seconds)
    return (best, *seconds(best).as_integer_ratio())
    ### END SOLUTION


# %% judge="chunks_right"
def chunks_are(work, sync, pieces):
    ends = {
        k: Fraction(plans.chunked(work, sync, k, Fraction(1, pieces)).end_s) for k in range(1, 65)
    }
    least = min(ends.values())
    return (min(k for k in ends if ends[k] == least), *least.as_integer_ratio())


# %% check="chunks-bind" points=1
# The sum is the longer part.
expect_each(
    chunks,
    [(16, 16, 1), (4, 9, 1)],
    chunks_are,
    "sums bind",
    "what is paid once, and what k times?",
)
print("the visible checks pass")
### BEGIN HIDDEN TESTS
cases = [(draw.integer(4, 30), draw.integer(31, 60), draw.integer(1, 6)) for _ in range(5)]
expect_each(chunks, cases, chunks_are, "sums bind", "what is paid once, and what k times?")
### END HIDDEN TESTS

# %% check="chunks-hide" points=1
# The product is the longer part.
expect_each(
    chunks,
    [(16, 9, 1), (16, 9, 4)],
    chunks_are,
    "sums hide",
    "what do latencies cost while the product is longer?",
)
print("the visible checks pass")
### BEGIN HIDDEN TESTS
cases = [(draw.integer(31, 60), draw.integer(4, 30), draw.integer(1, 4)) for _ in range(5)]
expect_each(
    chunks, cases, chunks_are, "sums hide", "what do latencies cost while the product is longer?"
)
### END HIDDEN TESTS

# %% [markdown]
# ## 5. A slot that loses packets (2 points)
#
# A slot of a switch adds one number per chunk from each of `workers` workers. It has two copies: chunk $c$ uses copy $c \bmod 2$. A worker sends its
# number for chunk $c + 1$ only after it has heard the sum of chunk $c$, and sends again what got no answer in time; so a packet may come twice, and the
# answer may have been lost. The first packet of a *new* chunk clears the copy. A number is added once. When the last worker's is in, everybody is told
# the sum; who sends again after that is told the sum alone; who sends again before it is told nothing.
#
# > **API** `slot(packets, workers)` gets the packets that arrive, in order, as (worker, chunk, value); chunks count from 0 and a packet that comes is of
# > the chunk under way, or of the one before it. It returns a list with one entry per packet: None, ("all", sum) or (worker, sum).


# %% answer="slot"
def slot(packets, workers):
    """[(worker, chunk, value)] -> [None, ("all", sum) or (worker, sum)]."""
    ### BEGIN SOLUTION
    chunk_of, seen, sums, answers = [None, None], [set(), set()], [0, 0], []
    for worker, chunk, value in packets:
        copy = chunk % 2
        if chunk_of[copy] != chunk:
            chunk_of[copy], seen[copy], sums[copy] = chunk, set(), 0
        if worker not in seen[copy]:
            seen[copy].add(worker)
            sums[copy] += value
            answers.append(("all", sums[copy]) if len(seen[copy]) == workers else None)
        else:
            answers.append((worker, sums[copy]) if len(seen[copy]) == workers else None)
    return answers
    ### END SOLUTION


# %% judge="slot_right"
def slot_is(packets, workers):
    given, answers = {}, []
    for worker, chunk, value in packets:
        of = given.setdefault(chunk, {})
        new = worker not in of
        of.setdefault(worker, value)
        answers.append(None if len(of) < workers else ("all" if new else worker, sum(of.values())))
    return answers


def drawn_packets(workers, chunks, again):
    packets = []
    for chunk in range(chunks):
        order = draw.several(list(range(workers)), workers)
        values = {worker: draw.integer(-50, 50) for worker in order}
        for worker in order:
            packets += [(worker, chunk, values[worker])] * (1 + draw.integer(0, again))
        late = [packet for packet in packets if packet[1] == chunk]
        packets += [draw.choice(late)] * again
    return packets, workers


# %% check="slot-clean" points=1
# Nothing is lost: every chunk's sum is told to all, once.
expect_each(
    slot,
    [([(0, 0, 5), (1, 0, 7), (1, 1, 1), (0, 1, 2)], 2)],
    slot_is,
    "every sum",
    "is the copy cleared for a new chunk?",
)
print("the visible checks pass")
### BEGIN HIDDEN TESTS
cases = [drawn_packets(draw.integer(1, 5), draw.integer(3, 6), 0) for _ in range(8)]
expect_each(slot, cases, slot_is, "every sum", "is the copy cleared for a new chunk?")
### END HIDDEN TESTS

# %% check="slot-lossy" points=1
# Packets come again, of this chunk and of the one before.
PACKETS = [(0, 0, 5), (0, 0, 5), (1, 0, 7), (1, 1, 1), (0, 0, 5), (0, 1, 2), (1, 1, 1)]
expect_each(
    slot, [(PACKETS, 2)], slot_is, "sent again", "was it added? is everybody's in? who is told?"
)
print("the visible checks pass")
### BEGIN HIDDEN TESTS
cases = [drawn_packets(draw.integer(2, 5), draw.integer(3, 6), 2) for _ in range(6)]
late = [(0, 0, 1), (1, 0, 2), (1, 1, 3), (0, 0, 1), (0, 1, 4), (0, 2, 6), (1, 1, 3), (1, 2, 9)]
expect_each(
    slot,
    [*cases, (late, 2)],
    slot_is,
    "sent again",
    "was it added? is everybody's in? who is told?",
)
### END HIDDEN TESTS
