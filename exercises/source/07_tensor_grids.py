# %% [markdown]
# # Exercises 07: tensor grids (SUMMA, Cannon, rotated weights, 2.5-D and 3-D)
#
# Five tasks, 10 points, about two hours. Read chapter 07 first. No GPU, nothing to download.
#
# Write where a cell says `YOUR CODE HERE`, run the cell, then run the check below it. A check tells which property of your
# answer is broken, never the result it wants. When the visible checks pass, grade yourself in a terminal:
#
#     minitrain grade 07
#
# The grader runs the same checks and hidden ones with other sizes, other grids and other values. Three rules:
#
# - An answer cell stands alone. It may use read-only cells, but for those that say they are for checks, and not your other cells.
# - On a grid of q×q ranks, rank i·q + j is in row i and column j. `row` is the group of the q ranks in your row, `column` that of your
#   column. Inside `row` you are told apart by your column: `row.rank()` is j, and `column.rank()` is i.
# - Ranks share nothing but a network. Each task's box says what your answer may call.
#
# Tasks 1 and 3 multiply C = A·B, task 2 is one half of its backward. Every matrix is cut into q×q blocks, rank i·q + j holds block (i, j) of
# each, and
#
#     C(i, j) = Σ_s A(i, s)·B(s, j)
#
# SUMMA is van de Geijn and Watts 1997 (Concurrency: Practice and Experience 9(4)), Cannon's algorithm is from his thesis of 1969, rotated
# tensor parallelism is Luo et al. 2023 (RTP, arXiv:2311.01635), 2.5-D is Wang et al. 2021 (Tesseract, arXiv:2105.14500) and 3-D is Bian
# et al. 2021 (arXiv:2105.14450).

# %% given="setup"
import torch

from minitrain import collectives

# %% judge="tools"
import math

from minitrain.course.grading.answer_checks import (
    Draw,
    ask_each,
    expect,
    expect_equal,
    run_on_ranks,
)

draw = Draw()  # hidden checks draw sizes, grids and values


# %% [markdown]
# ## 1. Which blocks meet where (1 point)
#
# Both algorithms take q steps. At each of them a rank multiplies a block of A with a block of B, and adds the product to its block of C.
#
#     SUMMA     step t: every rank of row i multiplies with A(i, t), every rank of column j with B(t, j)
#     Cannon    skew:   A(i, j) goes i places to the left, B(i, j) goes j places up
#               step t: multiply what is here; then every block of A goes one place left, every block of B one place up
#
# A block that goes left from column 0 arrives in column q-1, and one that goes up from row 0 arrives in row q-1. Say which two blocks a rank
# multiplies at a step. Steps count from 0, so in Cannon's step 0 the skew is over and nothing has moved since.
#
# q = 3: in SUMMA's step 1, rank 5 (row 1, column 2) multiplies A(1, 1) with B(1, 2): `((1, 1), (1, 2))`. In Cannon's step 0 it has
# A(1, 0) and B(0, 2), and in step 1 `((1, 1), (1, 2))`.
#
# > **API** A pure function: `algorithm` is "summa" or "cannon", `rank`, `side` (q) and `step` are ints. It returns two pairs of ints, row
# > and column of the block of A and of the block of B.


# %% answer="meeting"
def meeting(algorithm, rank, side, step):
    """ "summa" or "cannon" on side×side ranks -> ((row, column) of the block of A, (row, column) of the block of B)."""
    ### BEGIN SOLUTION
    i, j = divmod(rank, side)
    s = step if algorithm == "summa" else (i + j + step) % side
    return (i, s), (s, j)
    ### END SOLUTION


# %% judge="expect_meetings"
def expect_meetings(side):
    """Ask for all steps of a grid, and look at them property by property; returns {case: (block of A, block of B)}."""
    cases = [
        (algorithm, rank, side, step)
        for algorithm in ("summa", "cannon")
        for step in range(side)
        for rank in range(side**2)
    ]
    said = dict(zip(cases, ask_each(meeting, cases)))
    for (algorithm, rank, _, step), blocks in said.items():
        pairs = [blocks, *blocks] if isinstance(blocks, (list, tuple)) else [None]
        expect(
            all(isinstance(pair, (list, tuple)) and len(pair) == 2 for pair in pairs)
            and all(type(n) is int for block in blocks for n in block),
            "two blocks",
            "return two pairs of whole numbers: row and column of a block of A, then of a block of B",
        )
        expect(
            all(0 <= n < side for block in blocks for n in block),
            "inside the grid",
            "rows and columns count from 0 to q-1; where does a block arrive that leaves the grid?",
        )
        a, b = blocks
        expect(
            a[0] == rank // side and b[1] == rank % side,
            "its row of A, its column of B",
            f"{algorithm}: A moves along rows only and B along columns only, so A's row and B's column are the rank's own",
        )
        expect(
            a[1] == b[0],
            "blocks that fit",
            f"{algorithm}: in a term A(i, s)·B(s, j) both blocks have the same s; a pair was returned that is no term of C(i, j)",
        )
        expect(
            algorithm == "cannon" or a[1] == step,
            "SUMMA: all alike",
            "in SUMMA all ranks take the same term at the same step",
        )
    for rank in range(side**2):
        expect(
            len({said["cannon", rank, side, step][0][1] for step in range(side)}) == side,
            "every term once",
            "cannon: over the q steps a rank needs each term of its sum, and none twice",
        )
    return said


# %% check="meeting-all" points=1
# The blocks of each step, in both algorithms.
expect_meetings(2)
said = expect_meetings(3)
in_the_text = [[[1, 0], [0, 2]], [[1, 1], [1, 2]]]
expect_equal(
    [[list(block) for block in said["cannon", 5, 3, step]] for step in (0, 1)],
    in_the_text,
    "Cannon: the example",
    "rank 5 of the text; which blocks has the skew brought to it, and which ones a shift later?",
)
print("the visible checks pass")
### BEGIN HIDDEN TESTS
for side in (1, 4, draw.integer(5, 9)):
    said = expect_meetings(side)
    for rank in range(side**2):
        i, j = divmod(rank, side)
        expect(
            said["cannon", rank, side, 0][0][1] == (i + j) % side,
            "Cannon: the skew",
            "A(i, j) goes i places to the left; which block has then come to column j? Try a row that is neither 0 nor 1",
        )
        for step in range(1, side):
            right = i * side + (j + 1) % side
            expect(
                said["cannon", rank, side, step][0] == said["cannon", right, side, step - 1][0],
                "Cannon: one place left",
                "what is here now was one place further right a step ago",
            )
### END HIDDEN TESTS


# %% [markdown]
# ## 2. The gradient of a weight on a grid (3 points)
#
# Backward of C = A·B needs B's gradient, Aᵀ·dC. Rank i·q + j holds A(i, j) and C(i, j) (think of dC) and returns block (i, j) of
#
#     B(l, j) = Σ_i A(i, l)ᵀ·C(i, j)
#
# No matrix is transposed on the grid, and C stays where it is. A(i, l) comes from the rank of your row that has it, all q ranks of the row
# compute their term for the same l, and the q terms of one B(l, j), which are on the q ranks of a column, are added up on their way to rank l
# of that column. It is the mirror of the product that chapter 07 shows, whose sums travel along rows.
#
# Each term is computed by the read-only `term(l, a, c, group)`, which multiplies by a **factor from outside**. Why a factor? A check sees
# messages, not your memory. The factor is sent when your rank asks for it, so this request is recorded among your messages, and
# the check knows which blocks and sums had arrived. A term computed without asking has the wrong value. Each rank has its own factor for each l.
#
# Graded: the sum; the bytes, at most q-1 blocks of A and q-1 blocks of sums sent by each rank; and how much is here at a time. When a
# term is asked for, the blocks of A for this term may have arrived and those of the next one (`async_op=True`), and no others; and the sums
# of earlier terms have gone their way: who computes all q terms first holds q blocks of sums.
#
# q = 2, blocks of one number, factors 1: A = `[[1, 2], [3, 4]]`, C = `[[5, 6], [7, 8]]`. B(1, 0) = 2·5 + 4·7 = 38 on rank 2: rank 0 gets
# A(0, 1) = 2 from rank 1, computes 2·5 and sends 10 to rank 2.
#
# > **API** `term(l, a, c, group)` takes A(i, l) and C(i, j), returns a tensor [k, n]; call it once for each l, with `row` or `column`
# > as the group. `collectives.broadcast(x, source, group)` returns the tensor of rank `source` of that group; all its ranks call it
# > with tensors of one shape. `collectives.rotate(x, group, shift=1)` sends x to rank + shift of the group and returns what comes from
# > rank - shift. Both take `async_op=True` and then return a handle whose `.wait()` returns the tensor. `send` and `receive` are there too.


# %% given="term"
def term(l, a, c, group):
    """A(i, l) [m, k], C(i, j) [m, n] -> A(i, l)ᵀ·C(i, j) [k, n], times this rank's factor for l, which comes from outside."""
    return group.fetch(f"factor {l}", a.new_empty(())) * (a.T @ c)


# %% answer="summa_tn"
def summa_tn(a, c, row, column):
    """A(i, j) [m, k], C(i, j) [m, n] -> B(i, j) [k, n], a sum of what `term` returns on the q ranks of the column."""
    ### BEGIN SOLUTION
    side, i, total = row.size(), column.rank(), 0
    for step in range(1, side + 1):
        total = total if step == 1 else collectives.rotate(total, column)
        l = (i - step) % side
        total = total + term(l, collectives.broadcast(a, l, row), c, row)
    return total
    ### END SOLUTION


# %% driver="grids"
import torch.distributed as dist


def row_and_column(side, group):
    """The groups `row` and `column` of this rank."""
    i, j = divmod(group.rank(), side)
    members = (
        [i * side + other for other in range(side)],
        [other * side + j for other in range(side)],
    )
    return [dist.new_group(ranks, use_local_synchronization=True) for ranks in members]


def summa_tn_on_a_rank(a, c, side, group):
    return summa_tn(a, c, *row_and_column(side, group))


def cannon_on_a_rank(a, b, side, group):
    return cannon(a, b, *row_and_column(side, group))


# %% judge="on_a_grid"
def drawn_blocks(side, *shapes):
    """For each shape one block per rank."""
    return [[draw.real(*shape) for _ in range(side**2)] for shape in shapes]


def counted_up():
    """The 2·2 blocks of one number of the texts: 1 to 4, and 5 to 8."""
    numbers = torch.arange(1.0, 9.0, dtype=torch.float64).view(8, 1, 1)
    return list(numbers[:4]), list(numbers[4:])


def sent_by(outcome, rank, side):
    """The messages of a rank along its row, and along its column; no message may go elsewhere."""
    sent = [], []
    for message in outcome.messages:
        if message.source == rank:
            same_row = message.destination // side == rank // side
            expect(
                same_row or message.destination % side == rank % side,
                "rows and columns",
                "a message went to a rank of another row and another column; who needs a block of this rank?",
            )
            sent[not same_row].append(message)
    return sent


def asked(outcome, rank, side):
    """[(s, bytes that had arrived along the row, along the column)] at each factor that the rank asked for; each s once."""
    arrived, found = [0, 0], []
    for event in outcome.events:
        if event.rank == rank and event.kind == "receive":
            arrived[event.peer // side != rank // side] += event.bytes
        elif event.rank == rank and event.kind == "fetch":
            found.append((int(event.name.split()[1]), *arrived))
    once = sorted(s for s, *_ in found) == list(range(side))
    expect(
        once, "every term once", "ask for the product of each term once, by the read-only function"
    )
    return found


HERE = (
    "a product of what is here",
    "fewer blocks had come than the steps until here bring; was a factor asked for before its blocks?",
)
AT_A_TIME = (
    "one step at a time",
    "a product was computed when blocks of later steps than the next had arrived; who needs them so early?",
)
TRAVEL = (
    "sums that travel",
    "a term was computed when sums of the terms before it had not been passed on; who keeps them until then?",
)


# %% judge="expect_summa_tn"
def drawn_tn(side, m, k, n):
    """Blocks of A and C, and a factor for each rank and each l."""
    return *drawn_blocks(side, (m, k), (m, n)), [1 + draw.real(side) ** 2 for _ in range(side**2)]


def expect_summa_tn(a_blocks, c_blocks, factors, ahead=2):
    """The sum, by steps: no rank sends more than it must, has blocks of more than `ahead` terms to come, or keeps its terms."""
    side, places = len(factors[0]), range(len(factors[0]))
    outcome = run_on_ranks(
        summa_tn_on_a_rank,
        [(a, c, side) for a, c in zip(a_blocks, c_blocks)],
        collectives="broadcast rotate",
        secrets=[{f"factor {l}": factor for l, factor in enumerate(its)} for its in factors],
    )
    wanted = [
        sum(
            factors[i * side + j][l] * (a_blocks[i * side + l].T @ c_blocks[i * side + j])
            for i in places
        )
        for l in places
        for j in places
    ]
    expect_equal(
        outcome.results,
        wanted,
        "the product",
        "B(l, j) on rank l·q + j: are all q terms there, each once, with block and factor of the "
        f"same l? ({side}×{side} ranks)",
        atol=1e-11,
    )
    block_bytes = a_blocks[0].nbytes, wanted[0].nbytes
    expect(
        max(outcome.sent_bytes) <= (side - 1) * sum(block_bytes),
        "bytes on the wire",
        "a rank sends q-1 blocks of A and q-1 blocks of sums in all steps together; what else is on its way?",
    )
    for rank in range(side**2):
        found, own = asked(outcome, rank, side), rank % side
        order = [l for l, *_ in found]
        for t, (_, blocks, sums) in enumerate(found):
            needed, allowed = (set(order[: t + 1 + more]) - {own} for more in (0, ahead))
            expect(blocks >= len(needed) * block_bytes[0], *HERE)
            expect(blocks <= len(allowed) * block_bytes[0], *AT_A_TIME)
            expect(sums >= (t - ahead) * block_bytes[1], *TRAVEL)
    return outcome, block_bytes


# %% check="summa_tn-product" points=1
# Every rank returns its block of the gradient, step by step.
expect_summa_tn(*counted_up(), [torch.ones(2, dtype=torch.float64)] * 4)
expect_summa_tn(*drawn_tn(2, 2, 3, 4))
print("the visible checks pass")
### BEGIN HIDDEN TESTS
for side in (4, 3, draw.choice([1, 2])):
    expect_summa_tn(*drawn_tn(side, *draw.several(range(1, 6), 3)))
### END HIDDEN TESTS


# %% check="summa_tn-bytes" points=1
# A rank sends at most q-1 blocks of A along its row and q-1 blocks of sums along its column.
def expect_bytes_of_summa_tn(side, m, k, n):
    outcome, block_bytes = expect_summa_tn(*drawn_tn(side, m, k, n))
    for rank in range(side**2):
        for messages, block, name in zip(
            sent_by(outcome, rank, side), block_bytes, ("A along the row", "sums along the column")
        ):
            expect(
                sum(message.bytes for message in messages) <= (side - 1) * block,
                "bytes on the wire",
                f"{name}: q-1 blocks in all steps together (seen at rank {rank})",
            )


expect_bytes_of_summa_tn(2, 4, 5, 3)
print("the visible checks pass")
### BEGIN HIDDEN TESTS
for side in (3, 4):
    expect_bytes_of_summa_tn(side, *draw.several(range(3, 10), 3))
### END HIDDEN TESTS


# %% check="summa_tn-live" points=1
# When a term is asked for, only blocks of this term and the next have arrived, and earlier sums are on their way.
expect_summa_tn(*drawn_tn(3, 2, 3, 1), ahead=1)
print("the visible checks pass")
### BEGIN HIDDEN TESTS
for side in (3, 4):
    expect_summa_tn(*drawn_tn(side, *draw.several(range(1, 8), 3)), ahead=1)
### END HIDDEN TESTS


# %% [markdown]
# ## 3. Cannon's algorithm (2 points)
#
# C = A·B again, and after the skew ranks send to neighbours only. A rank sends
#
# 1. **skew**: one message with its block of A, i places to the left, if i > 0, and one with its block of B, j places up, if j > 0. One
#    message to where the block belongs, not i times to the neighbour.
# 2. **q-1 shifts**: the block of A that is here to the left neighbour, the block of B that is here to the upper neighbour, cyclically.
#
# There are q products and q-1 shifts. Multiply with the read-only `multiply(s, a, b, group)`; s says which A(i, s) and B(s, j) are here. Its
# factor belongs to s and comes from outside, as in task 2, so that the check sees what had arrived: the blocks of this step and of the next,
# and no more.
#
# q = 3, rank 5 (row 1, column 2): its A(1, 2) goes one place left to rank 4 and its B(1, 2) two places up to rank 8. It gets A(1, 0) from rank
# 3 and B(0, 2) from rank 2: s = 0. Then each block goes on, twice.
#
# > **API** `multiply(s, a, b, group)` returns a tensor [m, n]; call it once for each s, with `row` or `column` as the group.
# > `collectives.rotate(x, group, shift)` sends x to rank + shift of the group, cyclically, and returns what comes from rank - shift; a
# > shift of 0 or of -1 is fine, and all ranks of a group must call it with the same shift. With `async_op=True` it returns a handle
# > whose `.wait()` returns the tensor. It is the one collective that you have, beside `send` and `receive`.


# %% given="multiply"
def multiply(s, a, b, group):
    """A(i, s) [m, k] times B(s, j) [k, n] -> [m, n], times the factor of s, which comes from outside."""
    return group.fetch(f"factor {s}", a.new_empty(())) * (a @ b)


# %% answer="cannon"
def cannon(a, b, row, column):
    """A(i, j) [m, k], B(i, j) [k, n] -> C(i, j) [m, n], a sum of what `multiply` returns."""
    ### BEGIN SOLUTION
    side, i, j = row.size(), column.rank(), row.rank()
    a, b = collectives.rotate(a, row, -i), collectives.rotate(b, column, -j)
    c = multiply((i + j) % side, a, b, row)
    for step in range(1, side):
        a, b = collectives.rotate(a, row, -1), collectives.rotate(b, column, -1)
        c += multiply((i + j + step) % side, a, b, row)
    return c
    ### END SOLUTION


# %% judge="expect_cannon"
def drawn(side, m, k, n):
    """Blocks of A and B, and a factor for each s."""
    return *drawn_blocks(side, (m, k), (k, n)), [1 + draw.real() ** 2 for _ in range(side)]


def expect_cannon(a_blocks, b_blocks, factors, exactly=False):
    """The product, between neighbours. Unless `exactly`, the skew may be many shifts, and one shift more may follow."""
    side, block_bytes = len(factors), (a_blocks[0].nbytes, b_blocks[0].nbytes)
    outcome = run_on_ranks(
        cannon_on_a_rank,
        [(a, b, side) for a, b in zip(a_blocks, b_blocks)],
        collectives="rotate",
        secrets=[{f"factor {s}": factor for s, factor in enumerate(factors)}] * side**2,
    )
    expect_equal(
        outcome.results,
        [
            sum(factors[s] * (a_blocks[i * side + s] @ b_blocks[s * side + j]) for s in range(side))
            for i in range(side)
            for j in range(side)
        ],
        "the product",
        "C(i, j) on rank i·q + j: are all q terms there, each once, with blocks and factor of the "
        f"same s? ({side}×{side} ranks)",
        atol=1e-11,
    )
    for rank in range(side**2):
        places = i, j = divmod(rank, side)
        left, up = sent_by(outcome, rank, side)
        ways = (
            [(rank - message.destination) % side for message in left],
            [(rank - message.destination) // side % side for message in up],
        )
        for messages, way, skew, block in zip((left, up), ways, places, block_bytes):
            wanted = sorted([1] * (side - 1) + [skew] * (skew > 0))
            expect(
                not exactly or len(way) <= len(wanted),
                "q-1 shifts",
                "more messages than one for the skew and q-1 shifts; is the skew one message, and who needs what leaves after the last product?",
            )
            expect(
                sorted(way) == wanted if exactly else set(way) <= {1, skew},
                "neighbours only",
                "after one message for the skew, A goes one place left and B one place up, q-1 times; somebody else was spoken to, or nobody",
            )
            expect(
                sum(m.bytes for m in messages) <= (len(wanted) if exactly else side + skew) * block,
                "bytes on the wire",
                "a message is one block",
            )
        for t, (_, *arrived) in enumerate(asked(outcome, rank, side)):
            for have, block, place in zip(arrived, block_bytes, places):
                skew = place > 0 if exactly else place
                expect(have >= (t + (place > 0)) * block, *HERE)
                expect(have <= (min(t + 1, side - 1) + skew) * block, *AT_A_TIME)


# %% check="cannon-product" points=1
# Every rank returns its block of the product, and sends to neighbours only after the skew.
expect_cannon(*counted_up(), [torch.ones((), dtype=torch.float64)] * 2)
expect_cannon(*drawn(2, 2, 3, 4))
print("the visible checks pass")
### BEGIN HIDDEN TESTS
for side in (3, draw.choice([1, 2]), 4):
    expect_cannon(*drawn(side, *draw.several(range(1, 6), 3)))
### END HIDDEN TESTS

# %% check="cannon-neighbours" points=1
# One message for the skew, q-1 to the neighbour, and no block arrives too early.
expect_cannon(*drawn(2, 2, 3, 1), exactly=True)
print("the visible checks pass")
### BEGIN HIDDEN TESTS
for side in (3, 4):
    expect_cannon(*drawn(side, *draw.several(range(1, 8), 3)), exactly=True)
### END HIDDEN TESTS


# %% [markdown]
# ## 4. Weights that travel, and their gradients (2 points)
#
# In rotated tensor parallelism every rank keeps its own rows X_r [m_r, k] (m_r may differ), and one shard W_r [n/p, k] of the weight, cut by
# output. The shards travel round the ring of p ranks, so that each rank multiplies with all of them, Y_r = X_r·Wᵀ, and never holds W. In backward
# they travel once more, and the gradient of each shard travels too:
#
#     W_s   begins on rank s, and goes on to the next rank p-1 times; where it is,    dX_r += dY_r[:, s]·W_s
#     dW_s  begins on rank s+1, and goes on to the next rank p-1 times; where it is,  dW_s += dY_r[:, s]ᵀ·X_r
#
# dY_r[:, s] are the n/p columns of dY_r that belong to shard s. The next rank of r is r+1, cyclically. A gradient needs no weight, only
# dY and X: so dW_s can run one place ahead of W_s, and its last hop ends at home, on rank s, as the sum over the rows of all ranks. If it
# travelled together with W_s, it would need one hop more.
#
# The two products are read-only functions, `input_term` for dX and `weight_term` for dW. Each multiplies by a factor that belongs to your
# rank and to s and comes from outside, as in task 2: the check sees when it was asked for. Call each of them once for each s.
#
# Graded: both gradients; the bytes, p-1 shards of weights and p-1 shards of gradients from each rank, to the next rank only; and what is
# here at a time. When a term of dX is computed, the shard it needs and the one after it may have come, and no other: gathering W takes p of
# them. When a term of dW is computed, the sum it joins is here, or on its last hop to here: a dW of full size takes p shards as well.
#
# Two ranks, k = n/p = 1, all factors 1, W = `[[2]]` and `[[3]]`, X = `[[1]]` and `[[10]]`, all dY = 1. dX = 2 + 3 = 5 on both ranks. dW_0
# begins on rank 1 with 10, goes to rank 0, and becomes 11 there; dW_1 begins on rank 0 with 1 and becomes 11 on rank 1.
#
# > **API** `input_term(s, dy_s, weight_s, group)` returns [m_r, k], `weight_term(s, dy_s, x, group)` returns [n/p, k]; `dy_s` is a tensor
# > [m_r, n/p]. `collectives.rotate(x, group, shift=1)` sends x to rank + shift and returns what comes from rank - shift, one tensor; with
# > `async_op=True` a handle whose `.wait()` returns it. `group.rank()` and `group.size()` are ints.


# %% given="terms"
def input_term(s, dy_s, weight_s, group):
    """dY_r[:, s] [m_r, n/p], W_s [n/p, k] -> this shard's term of dX_r [m_r, k]."""
    return group.fetch(f"dX {s}", dy_s.new_empty(())) * (dy_s @ weight_s)


def weight_term(s, dy_s, x, group):
    """dY_r[:, s] [m_r, n/p], X_r [m_r, k] -> this rank's term of dW_s [n/p, k]."""
    return group.fetch(f"dW {s}", dy_s.new_empty(())) * (dy_s.T @ x)


# %% answer="rotated_backward"
def rotated_backward(dy, x, weight, group):
    """dy [m_r, n] and x [m_r, k] of this rank, weight [n/p, k] -> (dx [m_r, k], dweight [n/p, k], summed over all ranks)."""
    ### BEGIN SOLUTION
    ranks, rank, columns = group.size(), group.rank(), dy.chunk(group.size(), dim=1)
    dx, dweight = torch.zeros_like(x), torch.zeros_like(weight)
    for step in range(ranks):
        if step > 0:
            weight, dweight = collectives.rotate(weight, group), collectives.rotate(dweight, group)
        owner, ahead = (rank - step) % ranks, (rank - step - 1) % ranks
        dx += input_term(owner, columns[owner], weight, group)
        dweight += weight_term(ahead, columns[ahead], x, group)
    return dx, dweight
    ### END SOLUTION


# %% judge="expect_rotated"
def expect_rotated(rows, shard_rows, width, exactly=False):
    """With rows[r] rows on rank r both gradients come of shards on their way round the ring.

    Unless `exactly`, a rank may send one shard more, and sums may begin and end where they like.
    """
    ranks, ring = len(rows), range(len(rows))
    xs, dys = ([draw.real(m, size) for m in rows] for size in (width, ranks * shard_rows))
    weights = [draw.real(shard_rows, width) for _ in ring]
    names = [f"{name} {s}" for name in ("dX", "dW") for s in ring]
    factors = [{name: 1 + draw.real() ** 2 for name in names} for _ in ring]
    inputs = list(zip(dys, xs, weights))
    outcome = run_on_ranks(rotated_backward, inputs, collectives="rotate", secrets=factors)
    for said in outcome.results:
        two = isinstance(said, (list, tuple)) and len(said) == 2
        expect(two, "two gradients", "return dx and dweight")
    pieces = [dy.chunk(ranks, dim=1) for dy in dys]
    expect_equal(
        [said[0] for said in outcome.results],
        [sum(factors[r][f"dX {s}"] * (pieces[r][s] @ weights[s]) for s in ring) for r in ring],
        "gradient of x",
        "each shard with the columns of dY that belong to it; whose shard is here after t hops?",
        atol=1e-11,
    )
    expect_equal(
        [said[1] for said in outcome.results],
        [sum(factors[r][f"dW {s}"] * (pieces[r][s].T @ xs[r]) for r in ring) for s in ring],
        "gradient of the weight",
        "the terms of all ranks, of the rank's own shard; where does each sum begin, and where does it end?",
        atol=1e-11,
    )
    shard = weights[0].nbytes
    expect(
        max(outcome.sent_bytes) <= (2 * (ranks - 1) + (not exactly)) * shard,
        "bytes on the wire",
        "p-1 hops take a weight to all others, and p-1 hops take a gradient home; who needs what is sent beyond that?",
    )
    expect(
        all(message.destination == (message.source + 1) % ranks for message in outcome.messages),
        "next rank only",
        "in a ring everything goes to the next rank; who else was spoken to?",
    )
    for rank in ring:
        arrived, done = 0, []
        for event in outcome.events:
            if event.rank == rank and event.kind == "receive":
                arrived += event.bytes
            elif event.rank == rank and event.kind == "fetch":
                expect_shards_in_time(ranks, rank, arrived / shard, done, event.name, exactly)
                done.append(event.name)
        expect(sorted(done) == sorted(names), "every term once", "two products for each shard")


def expect_shards_in_time(ranks, rank, arrived, done, name, exactly):
    """`arrived` shards, weights and sums together, are what a rank may have when it asks for the factor of this term."""
    term, s = name.split()
    dx, dw = (sum(one.startswith(kind) for one in done) for kind in ("dX", "dW"))
    if term == "dX":
        # weights: those of so many hops have come, and perhaps one; sums: one a term, and one more or less
        hops = (rank - int(s)) % ranks
        expect(
            arrived >= hops + max(0, dw - 2),
            "a term of what is here",
            "a factor was asked for before what it belongs to had come: a shard of W, or the sum a term joins",
        )
        expect(
            arrived <= min(ranks - 1, hops + 1) + min(ranks - 1, dw + 1),
            "one shard at a time",
            "a term of dX was computed when shards had come that it does not need yet; must W be whole anywhere?",
        )
    else:
        # weights: one for each term of dX but the first; sums: those of the hops before the last
        hops = (rank - 1 - int(s)) % ranks if exactly else dw
        expect(
            arrived >= max(0, dx - 1) + hops - 1,
            "sums that travel",
            "a term of dW was computed long before the sum arrived that it joins; who keeps it until then?",
        )


# %% check="rotated_backward-gradients" points=1
# Each rank's own dX, and the gradient of its shard summed over all ranks, round the ring.
expect_rotated([2, 2], 1, 3)
expect_rotated([1, 2, 3], 2, 3)
print("the visible checks pass")
### BEGIN HIDDEN TESTS
for ranks in (1, 2, 4, draw.choice([3, 5])):
    rows = [draw.integer(1, 5) for _ in range(ranks)]
    expect_rotated(rows, draw.integer(1, 4), draw.integer(2, 6))
### END HIDDEN TESTS

# %% check="rotated_backward-ring" points=1
# Twice p-1 shards to the next rank, and only a few here at once.
expect_rotated([1, 2, 1, 2], 2, 3, exactly=True)
print("the visible checks pass")
### BEGIN HIDDEN TESTS
rows = [draw.integer(1, 5) for _ in range(draw.integer(4, 6))]
expect_rotated(rows, draw.integer(1, 4), draw.integer(3, 9), exactly=True)
### END HIDDEN TESTS


# %% [markdown]
# ## 5. How many elements a rank sends (2 points)
#
# An MLP of m tokens, width h and inner width f: Y[m, f] = X[m, h]·W1[h, f], then Z[m, h] = Y[m, f]·W2[f, h]. What one rank sends in the forward,
# on p ranks, each ring or tree counted at its best:
#
#     1-D      p        one all-reduce of Z: every rank has a sum of full size that is not complete, and sends 2(p-1)/p of it
#     2-D      q·q      SUMMA, for each product: q-1 blocks of the left matrix and q-1 of the right one, of 1/q² each
#     2.5-D    q·q·d    d layers of q·q ranks. Each has 1/d of the tokens, and all of the weights; on each layer there is SUMMA
#     3-D      l·l·l    for each product: the two factors are gathered, the result is reduce-scattered. Each of the three has 1/l²
#                       when it is whole, and goes among l ranks: (l-1)/l of that is sent
#     RTP      p        p-1 shards of each weight, of 1/p each
#
# `elements_sent` returns a whole number, exact for any size; m, h and f are such that everything divides. `crossover` returns the smallest
# p = q·q with q ≥ 2 at which 2-D sends **less** than 1-D; there the sizes need not divide, and only exact numbers tell less from equal.
#
# m = 16384, h = 1024, f = 4096 on 64 ranks: 1-D sends 33030144, 2-D 10092544, 2.5-D with q = d = 4 5505024, 3-D 8257536 and RTP 8257536. For
# this MLP the crossover is at p = 4. With m = 64 tokens it is at p = 66² = 4356.
#
# > **API** Two pure functions of ints that return ints; floats are not exact enough. `elements_sent("2.5-D", m, h, f, q, d)`: the side is p,
# > q, q, l or p for the five kinds, and the depth is 1 except in 2.5-D. `crossover(m, h, f)`.


# %% answer="elements"
def elements_sent(kind, tokens, width, inner, side, depth):
    """kind is "1-D", "2-D", "2.5-D", "3-D" or "RTP"; side is p, q, q, l or p, depth is d (1 where there is none) -> elements, an int."""
    ### BEGIN SOLUTION
    activations, weights = tokens * (width + inner), 2 * width * inner
    if kind == "1-D":
        return 2 * (side - 1) * tokens * width // side
    if kind == "RTP":
        return (side - 1) * weights // side
    if kind == "3-D":
        return (side - 1) * (2 * activations + weights) // side**3
    return (side - 1) * (activations // depth + weights) // side**2
    ### END SOLUTION


def crossover(tokens, width, inner):
    """The smallest square p of at least 4 at which 2-D sends less than 1-D, an int."""
    ### BEGIN SOLUTION
    # (q-1)/q² · (activations + weights) < 2(q²-1)/q² · tokens·width; both sides times q²/(q-1)
    side = 2
    while tokens * (width + inner) + 2 * width * inner >= 2 * (side + 1) * tokens * width:
        side += 1
    return side**2
    ### END SOLUTION


# %% judge="counting"
HINTS = {
    "1-D": "how large is the sum, and how often does all of it pass a rank in an all-reduce? the first product needs no sum",
    "2-D": "two products; q-1 blocks of each of two matrices, and a block has both dims cut",
    "2.5-D": "what is cut over the layers, and what has every layer whole?",
    "3-D": "two products, of three matrices each; which share of a matrix is whole on l ranks together?",
    "RTP": "two weights travel, and activations stay",
}


def expect_elements(*cases):
    """Cases (arguments of elements_sent, elements of the left matrices, of the weights and of the results that are sent by a rank)."""
    said = ask_each(elements_sent, [case for case, _ in cases])
    for count, (case, wanted) in zip(said, cases):
        expect(
            type(count) is int, "whole numbers", "elements are ints; which division gives an int?"
        )
        expect(count == wanted, f"elements in {case[0]}", HINTS[case[0]])


def expect_crossovers(property, hint, *cases):
    """Cases (arguments of crossover, p)."""
    for said, (_, wanted) in zip(ask_each(crossover, [case for case, _ in cases]), cases):
        expect(
            type(said) is int and math.isqrt(said) ** 2 == said >= 4,
            "a square",
            "the ranks of a 2-D grid, q·q with q of at least 2, as an int",
        )
        expect(said == wanted, property, hint)


# %% check="elements-sent" points=1
# What a rank sends in the forward, on five kinds of grids.
of_the_text = 16384, 1024, 4096
expect_elements(
    (("1-D", *of_the_text, 64, 1), 33030144),
    (("2-D", *of_the_text, 8, 1), 10092544),
    (("2.5-D", *of_the_text, 4, 4), 5505024),
    (("3-D", *of_the_text, 4, 1), 8257536),
    (("RTP", *of_the_text, 64, 1), 8257536),
)
print("the visible checks pass")
### BEGIN HIDDEN TESTS
for low, high in ((1, 99), (10**9, 10**10)):
    cases = []
    for kind in HINTS:
        for side in (1, 2, draw.integer(3, 9)):
            depth = draw.integer(1, side) if kind == "2.5-D" else 1
            m, h, f = (
                draw.integer(low, high) for _ in range(3)
            )  # of a piece, of which there are side³·depth
            cut = side**3 * depth
            mh, mf, hf = (
                m * h * cut * (cut // side),
                m * f * cut * (cut // side),
                h * f * cut * (cut // side),
            )  # one cut by side
            wanted = {
                "1-D": 2 * (side - 1) * mh,
                "RTP": (side - 1) * 2 * hf,
                "2-D": (side - 1) * (mh + mf + 2 * hf) // side,
                "3-D": 2 * (side - 1) * (mh + mf + hf) // side**2,
                "2.5-D": (side - 1) * ((mh + mf) // depth + 2 * hf) // side,
            }[kind]
            cases.append(((kind, m * cut, h * cut, f * cut, side, depth), wanted))
    expect_elements(*cases)
side = draw.integer(3, 9)
m, h, f = (draw.integer(1, 99) * side**2 for _ in range(3))
expect_elements(
    (("2.5-D", m, h, f, side, 1), (side - 1) * (m * h + h * f + m * f + f * h) // side**2)
)
### END HIDDEN TESTS

# %% check="elements-crossover" points=1
# The smallest square at which 2-D sends less than 1-D.
CROSSING = (
    "smallest square",
    "at one square less than that 2-D must not send less than 1-D; how does each side of the comparison depend on q?",
)
expect_crossovers(*CROSSING, ((16384, 1024, 4096), 4), ((64, 1024, 4096), 4356))
print("the visible checks pass")
### BEGIN HIDDEN TESTS
sizes = [(draw.integer(8, 999), draw.integer(1, 500), draw.integer(1, 2000)) for _ in range(12)]
sizes += [
    (m, h, f) for m in range(1, 6) for h in range(1, 6) for f in range(1, 6)
]  # rounded counts are wrong here
cases, near = [], []
for m, h, f in sizes:
    side, rest = divmod(m * (h + f) + 2 * h * f, 2 * m * h)
    if rest > 0:
        cases.append(((m, h, f), max(2, side) ** 2))
expect_crossovers(*CROSSING, *cases)
for _ in range(12):  # f = (2t-1)h - 2 and m = h·f: 2-D sends as much as 1-D where q + 1 = t
    t, h = draw.integer(4, 99), draw.integer(3, 999)
    f = (2 * t - 1) * h - 2
    near.append(((h * f, h, f), t**2))
expect_crossovers("less, not as much", "at one q both send the same; that is not less", *near)
far = []
for _ in range(16):
    t, h = draw.integer(4, 99), draw.integer(10**17, 10**18)
    f = (2 * t - 1) * h - 1
    far.append(((draw.integer(10**39, 10**40), h, f), (t - 1) ** 2))
expect_crossovers(
    "exact",
    "the two are nearly the same; a float has 53 bits, and a quotient of ints may have more",
    *far,
)
### END HIDDEN TESTS
