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
# - An answer cell stands alone. It may use what read-only cells define, but not your other cells.
# - On a grid of q×q ranks, rank i·q + j stands in row i and column j. `row` is the group of the q ranks in your row, `column` that of your
#   column. Inside `row` you are told apart by your column: `row.rank()` is j, and `column.rank()` is i.
# - Between ranks there is a network and nothing else; `minitrain.collectives` is the door to it.
#
# Tasks 1 to 3 multiply C = A·B. Every matrix is cut into q×q blocks, and rank i·q + j holds A(i, j) and B(i, j) and returns C(i, j):
#
#     C(i, j) = Σ_s A(i, s)·B(s, j)
#
# SUMMA is van de Geijn and Watts 1997 (Concurrency: Practice and Experience 9(4)), Cannon's algorithm is from his thesis of 1969, rotated
# tensor parallelism is Luo et al. 2023 (RTP, arXiv:2311.01635), 2.5-D is Wang et al. 2021 (Tesseract, arXiv:2105.14500) and 3-D is Bian
# et al. 2021 (arXiv:2105.14450).

# %% given="setup"
import math

import torch
import torch.distributed as dist

from minitrain import collectives
from minitrain.course.grading.checks import Draw, ask, expect, expect_equal, run_on_ranks

draw = Draw()  # hidden checks draw sizes, grids and values


def whole_numbers(draw, *shape):
    """From -4 to 4: products and their sums are exact in float64, in every order."""
    return (draw.exact(*shape) * 16).remainder(9) - 4


# %% [markdown]
# ## 1. Which blocks meet where (1 point)
#
# Both algorithms take q steps. At each of them a rank multiplies a block of A with a block of B, and adds the product to its block of C.
#
#     SUMMA     step t: every rank of row i multiplies with A(i, t), every rank of column j with B(t, j)
#     Cannon    skew:   A(i, j) goes i places to the left, B(i, j) goes j places up
#               step t: multiply what is here; then every block of A goes one place left, every block of B one place up
#
# Who goes left from column 0 arrives in column q-1, who goes up from row 0 in row q-1. Say which two blocks a rank multiplies at a step.
# Steps count from 0, so in Cannon's step 0 the skew is over and nothing has moved since.
#
# q = 3: in SUMMA's step 1, rank 5 (row 1, column 2) multiplies A(1, 1) with B(1, 2): `((1, 1), (1, 2))`. In Cannon's step 0 it has
# A(1, 0) and B(0, 2), and in step 1 `((1, 1), (1, 2))`.


# %% answer="meeting"
def meeting(algorithm, rank, side, step):
    """ "summa" or "cannon" on side×side ranks -> ((row, column) of the block of A, (row, column) of the block of B)."""
    ### BEGIN SOLUTION
    i, j = divmod(rank, side)
    s = step if algorithm == "summa" else (i + j + step) % side
    return (i, s), (s, j)
    ### END SOLUTION


# %% given="expect_meetings"
def meetings(side):
    """What `meeting` says of each algorithm, step and rank."""
    return {
        algorithm: [
            [meeting(algorithm, rank, side, step) for rank in range(side**2)]
            for step in range(side)
        ]
        for algorithm in ("summa", "cannon")
    }


def expect_meetings(side):
    """Ask for all steps of a grid, and look at them property by property."""
    said = ask(meetings, side)
    for algorithm, steps in said.items():
        for blocks in sum(steps, []):
            expect(
                isinstance(blocks, (list, tuple))
                and len(blocks) == 2
                and all(
                    isinstance(block, (list, tuple))
                    and len(block) == 2
                    and all(type(n) is int for n in block)
                    for block in blocks
                ),
                "two blocks",
                "return two pairs of whole numbers: row and column of a block of A, then of a block of B",
            )
            expect(
                all(0 <= n < side for block in blocks for n in block),
                "inside the grid",
                "rows and columns count from 0 to q-1; where does a block arrive that leaves the grid?",
            )
        for step, of_ranks in enumerate(steps):
            for rank, (a, b) in enumerate(of_ranks):
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
        for rank in range(side**2):
            expect(
                len({steps[step][rank][0][1] for step in range(side)}) == side,
                "every term once",
                f"{algorithm}: over the q steps a rank needs each term of its sum, and none twice",
            )
    for step, of_ranks in enumerate(said["summa"]):
        expect(
            all(a[1] == step for a, _ in of_ranks),
            "SUMMA: all alike",
            "in SUMMA all ranks take the same term at the same step",
        )
    for rank, (a, b) in enumerate(said["cannon"][0]):
        i, j = divmod(rank, side)
        expect(
            a[1] == (i + j) % side,
            "Cannon: the skew",
            "A(i, j) goes i places to the left; which block has then come to column j? Try a row that is neither 0 nor 1",
        )
    for before, after in zip(said["cannon"], said["cannon"][1:]):
        for rank in range(side**2):
            right = rank // side * side + (rank + 1) % side
            expect(
                tuple(after[rank][0]) == tuple(before[right][0]),
                "Cannon: one place left",
                "what is here now was one place further right a step ago",
            )


# %% check="meeting-all" points=1
# The blocks of each step, in both algorithms.
expect_meetings(2)
expect_meetings(3)
print("the visible checks pass")
### BEGIN HIDDEN TESTS
for side in (1, 4, draw.integer(5, 9)):
    expect_meetings(side)
### END HIDDEN TESTS

# %% [markdown]
# ## 2. SUMMA (3 points)
#
# At step s, column s of A's blocks goes along the rows of the grid and row s of B's blocks along its columns. So A(i, s) comes from the rank
# of your row that has it, B(s, j) from the rank of your column, and all multiply. C stays where it is.
#
# Multiply with the read-only `multiply(s, a, b, group)`. It returns A(i, s)·B(s, j) times a factor that belongs to s and comes from outside
# when it is asked for; your sum so is Σ_s factor_s·A(i, s)·B(s, j). Give it `row` or `column` as the group. That moment is written down among
# your messages. Call it once for each s.
#
# Graded: the product; the bytes, at most q-1 blocks of A and q-1 blocks of B sent by each rank; and how much is here at a time. When a
# product is asked for, the blocks of this step may have arrived, and those of the next one (`async_op=True`), and no others. What
# sends as little, but gathers a whole row of A first, needs q times the memory.
#
# q = 2, blocks of one number, factors 1: A = `[[1, 2], [3, 4]]`, B = `[[5, 6], [7, 8]]`. At step 0 rank 3 gets 3 from rank 2 and 6 from rank
# 1; at step 1 it has 4 and 8 itself. It returns 18 + 32 = 50, and sends 4 to rank 2 and 8 to rank 1.


# %% given="multiply"
def row_and_column(side, group):
    """The groups `row` and `column` of this rank."""
    i, j = divmod(group.rank(), side)
    members = (
        [i * side + other for other in range(side)],
        [other * side + j for other in range(side)],
    )
    return [dist.new_group(ranks, use_local_synchronization=True) for ranks in members]


def multiply(s, a, b, group):
    """A(i, s) [m, k] times B(s, j) [k, n] -> [m, n], times the factor of s, which comes from outside."""
    return group.fetch(f"factor {s}", a.new_empty(())) * (a @ b)


# %% answer="summa"
def summa(a, b, row, column):
    """A(i, j) [m, k], B(i, j) [k, n] -> C(i, j) [m, n], a sum of what `multiply` returns."""
    ### BEGIN SOLUTION
    c = a.new_zeros(a.shape[0], b.shape[1])
    for s in range(row.size()):
        c += multiply(s, collectives.broadcast(a, s, row), collectives.broadcast(b, s, column), row)
    return c
    ### END SOLUTION


# %% given="grids"
def summa_on_a_rank(a, b, side, group):
    return summa(a, b, *row_and_column(side, group))


def cannon_on_a_rank(a, b, side, group):
    return cannon(a, b, *row_and_column(side, group))


def blocks_of(matrix, side):
    """The blocks in rank order."""
    return [block.contiguous() for rows in matrix.chunk(side, 0) for block in rows.chunk(side, 1)]


def product_of(on_a_rank, a_blocks, b_blocks, factors):
    """Run the answer on a grid with these blocks and factors, look at its product, and return the outcome."""
    side = len(factors)
    outcome = run_on_ranks(
        on_a_rank,
        [(a, b, side) for a, b in zip(a_blocks, b_blocks)],
        secrets=[{f"factor {s}": factor for s, factor in enumerate(factors)}] * side**2,
    )
    for rank, said in enumerate(outcome.results):
        i, j = divmod(rank, side)
        wanted = sum(
            factor * (a_blocks[i * side + s] @ b_blocks[s * side + j])
            for s, factor in enumerate(factors)
        )
        expect_equal(
            said,
            wanted,
            "the product",
            "C(i, j) on rank i·q + j: are all q terms there, each once, with blocks and factor of the "
            f"same s? (seen at rank {rank} of {side}×{side})",
        )
    return outcome


def drawn_product(on_a_rank, draw, side, m, k, n):
    """Blocks [m, k] and [k, n] of drawn numbers. Returns (outcome, bytes of a block of A, of a block of B)."""
    a_blocks, b_blocks = (
        [whole_numbers(draw, *shape) for _ in range(side**2)] for shape in ([m, k], [k, n])
    )
    factors = [
        torch.tensor(float(factor)).double() for factor in draw.several(range(1, side + 3), side)
    ]
    return (
        product_of(on_a_rank, a_blocks, b_blocks, factors),
        a_blocks[0].nbytes,
        b_blocks[0].nbytes,
    )


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


def arrived_before_products(outcome, rank, side):
    """For each product of a rank, in order: (s, bytes that have arrived along the row, along the column)."""
    arrived, found = [0, 0], []
    for event in outcome.events:
        if event.rank == rank and event.kind == "receive":
            arrived[event.peer // side != rank // side] += event.bytes
        elif event.rank == rank and event.kind == "fetch":
            found.append((int(event.name.split()[1]), *arrived))
    return found


# %% check="summa-product" points=1
# Every rank returns its block of the product.
one = torch.ones((), dtype=torch.float64)
product_of(
    summa_on_a_rank,
    blocks_of(torch.tensor([[1.0, 2.0], [3.0, 4.0]]).double(), 2),
    blocks_of(torch.tensor([[5.0, 6.0], [7.0, 8.0]]).double(), 2),
    [one, one],
)
drawn_product(summa_on_a_rank, draw, 2, 2, 3, 4)
print("the visible checks pass")
### BEGIN HIDDEN TESTS
for side in (3, draw.choice([1, 2])):
    drawn_product(summa_on_a_rank, draw, side, *draw.several(range(1, 6), 3))
drawn_product(summa_on_a_rank, draw, 4, 2, 1, 3)
### END HIDDEN TESTS


# %% check="summa-bytes" points=1
# A rank sends at most q-1 blocks of A and q-1 blocks of B, in its row and its column.
def expect_bytes_of_summa(side, m, k, n):
    outcome, a_bytes, b_bytes = drawn_product(summa_on_a_rank, draw, side, m, k, n)
    for rank in range(side**2):
        for messages, block, name in zip(
            sent_by(outcome, rank, side),
            (a_bytes, b_bytes),
            ("A along the row", "B along the column"),
        ):
            expect(
                sum(message.bytes for message in messages) <= (side - 1) * block,
                "bytes on the wire",
                f"{name}: the blocks that a rank sends are q-1 in all steps together; what else is on its way? (seen at rank {rank})",
            )


expect_bytes_of_summa(2, 4, 5, 3)
print("the visible checks pass")
### BEGIN HIDDEN TESTS
for side in (2, 3):
    expect_bytes_of_summa(side, *draw.several(range(3, 10), 3))
### END HIDDEN TESTS


# %% check="summa-live" points=1
# When a product is asked for, only blocks of this step and the next have arrived.
def expect_step_by_step(side, m, k, n):
    outcome, a_bytes, b_bytes = drawn_product(summa_on_a_rank, draw, side, m, k, n)
    for rank in range(side**2):
        i, j = divmod(rank, side)
        found = arrived_before_products(outcome, rank, side)
        for t, (_, a_arrived, b_arrived) in enumerate(found):
            soon = {s for s, _, _ in found[: t + 2]}
            expect(
                a_arrived <= len(soon - {j}) * a_bytes and b_arrived <= len(soon - {i}) * b_bytes,
                "one step at a time",
                "a product was computed when blocks of later steps than the next had arrived; who needs them so early?",
            )


expect_step_by_step(3, 2, 3, 1)
print("the visible checks pass")
### BEGIN HIDDEN TESTS
expect_step_by_step(3, *draw.several(range(1, 8), 3))
expect_step_by_step(4, *draw.several(range(1, 8), 3))
### END HIDDEN TESTS

# %% [markdown]
# ## 3. Cannon's algorithm (2 points)
#
# The same product, and nobody speaks to anybody but neighbours, once the blocks are skewed. A rank sends
#
# 1. **skew**: one message with its block of A, i places to the left, if i > 0, and one with its block of B, j places up, if j > 0. One
#    message to where the block belongs, not i times to the neighbour.
# 2. **q-1 shifts**: the block of A that is here to the left neighbour, the block of B that is here to the upper neighbour, cyclically.
#
# There are q products and q-1 shifts. `collectives.rotate(x, group, shift)` sends x to rank + shift of the group, cyclically, and returns what
# comes from rank - shift; a shift of 0 or of -1 is fine. All ranks of a group must call it with the same shift.
#
# Multiply with `multiply(s, a, b, group)` as in task 2: s says which A(i, s) and B(s, j) you have here. Again the blocks of this step and of the
# next may have arrived when a product is asked for, and no more.
#
# q = 3, rank 5 (row 1, column 2): its A(1, 2) goes one place left to rank 4 and its B(1, 2) two places up to rank 8. It gets A(1, 0) from rank
# 3 and B(0, 2) from rank 2: s = 0. Then each block goes on, twice.


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


# %% check="cannon-product" points=1
# Every rank returns its block of the product.
one = torch.ones((), dtype=torch.float64)
product_of(
    cannon_on_a_rank,
    blocks_of(torch.tensor([[1.0, 2.0], [3.0, 4.0]]).double(), 2),
    blocks_of(torch.tensor([[5.0, 6.0], [7.0, 8.0]]).double(), 2),
    [one, one],
)
drawn_product(cannon_on_a_rank, draw, 2, 2, 3, 4)
print("the visible checks pass")
### BEGIN HIDDEN TESTS
for side in (3, draw.choice([1, 2])):
    drawn_product(cannon_on_a_rank, draw, side, *draw.several(range(1, 6), 3))
drawn_product(cannon_on_a_rank, draw, 4, 2, 1, 3)
### END HIDDEN TESTS


# %% check="cannon-neighbours" points=1
# One message for the skew, q-1 to the neighbour, and no block arrives too early.
def expect_neighbours(side, m, k, n):
    outcome, *block_bytes = drawn_product(cannon_on_a_rank, draw, side, m, k, n)
    for rank in range(side**2):
        i, j = divmod(rank, side)
        left, up = sent_by(outcome, rank, side)
        ways = (
            [(rank - message.destination) % side for message in left],
            [(rank - message.destination) // side % side for message in up],
        )
        for messages, way, skew, block in zip((left, up), ways, (i, j), block_bytes):
            wanted = sorted([1] * (side - 1) + [skew] * (skew > 0))
            expect(
                len(way) <= len(wanted),
                "q-1 shifts",
                "more messages than one for the skew and q-1 shifts; is the skew one message, and who needs what leaves after the last product?",
            )
            expect(
                sorted(way) == wanted,
                "neighbours only",
                "after one message for the skew, A goes one place left and B one place up, q-1 times; somebody else was spoken to, or nobody",
            )
            expect(
                sum(message.bytes for message in messages) <= len(wanted) * block,
                "bytes on the wire",
                "a message is one block",
            )
        for t, (_, a_arrived, b_arrived) in enumerate(arrived_before_products(outcome, rank, side)):
            shifts = min(t + 1, side - 1)
            expect(
                a_arrived <= (shifts + (i > 0)) * block_bytes[0]
                and b_arrived <= (shifts + (j > 0)) * block_bytes[1],
                "one step at a time",
                "a product was computed when blocks of later steps than the next had arrived; who needs them so early?",
            )


expect_neighbours(2, 2, 3, 1)
print("the visible checks pass")
### BEGIN HIDDEN TESTS
expect_neighbours(3, *draw.several(range(1, 8), 3))
expect_neighbours(4, *draw.several(range(1, 8), 3))
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
# The two products are read-only functions, `input_term` for dX and `weight_term` for dW. Each multiplies with a factor that belongs to your
# rank and to s, comes from outside, and so tells when it was asked for. Call each of them once for each s.
#
# Graded: both gradients; the bytes, p-1 shards of weights and p-1 shards of gradients from each rank, to the next rank only; and what is
# here at a time. When a term of dX is computed, the shard it needs and the one after it may have come, and no other: gathering W takes p of
# them. When a term of dW is computed, the sum it joins is here, or on its last hop to here: a dW of full size takes p shards as well.
#
# Two ranks, k = n/p = 1, all factors 1, W = `[[2]]` and `[[3]]`, X = `[[1]]` and `[[10]]`, all dY = 1. dX = 2 + 3 = 5 on both ranks. dW_0
# begins on rank 1 with 10, goes to rank 0, and becomes 11 there; dW_1 begins on rank 0 with 1 and becomes 11 on rank 1.


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


# %% given="rotation"
def backward_on_a_rank(dy, x, weight, group):
    return rotated_backward(dy, x, weight, group)


def rotated_of(draw, rows, shard_rows, width):
    """Run the answer with rows[r] rows on rank r, look at both gradients, and return (the outcome, bytes of a shard)."""
    ranks = range(len(rows))
    xs, dys = (
        [whole_numbers(draw, m, size) for m in rows] for size in (width, len(rows) * shard_rows)
    )
    weights = [whole_numbers(draw, shard_rows, width) for _ in ranks]
    factors = [
        {
            f"{name} {s}": torch.tensor(float(draw.integer(1, 4))).double()
            for name in ("dX", "dW")
            for s in ranks
        }
        for _ in ranks
    ]
    outcome = run_on_ranks(backward_on_a_rank, list(zip(dys, xs, weights)), secrets=factors)
    pieces = [dy.chunk(len(rows), dim=1) for dy in dys]
    for rank, said in enumerate(outcome.results):
        expect(
            isinstance(said, (list, tuple)) and len(said) == 2,
            "two gradients",
            "return dx and dweight",
        )
        expect_equal(
            said[0],
            sum(factors[rank][f"dX {s}"] * (pieces[rank][s] @ weights[s]) for s in ranks),
            "gradient of x",
            f"each shard with the columns of dY that belong to it; whose shard is here after t hops? (seen at rank {rank} of {len(rows)})",
        )
        expect_equal(
            said[1],
            sum(factors[r][f"dW {rank}"] * (pieces[r][rank].T @ xs[r]) for r in ranks),
            "gradient of the weight",
            "the terms of all ranks, of the rank's own shard; where does each sum begin, and where does it end? "
            f"(seen at rank {rank} of {len(rows)})",
        )
    return outcome, weights[0].nbytes


# %% check="rotated_backward-gradients" points=1
# Each rank's own dX, and the gradient of its shard summed over all ranks.
rotated_of(draw, [2, 2], 1, 3)
rotated_of(draw, [1, 2, 3], 2, 3)
print("the visible checks pass")
### BEGIN HIDDEN TESTS
for ranks in (1, 2, 4, draw.choice([3, 5])):
    rotated_of(
        draw, [draw.integer(1, 5) for _ in range(ranks)], draw.integer(1, 4), draw.integer(2, 6)
    )
### END HIDDEN TESTS


# %% check="rotated_backward-ring" points=1
# Twice p-1 shards to the next rank, and only a few here at once.
def expect_ring(rows, shard_rows, width):
    outcome, shard = rotated_of(draw, rows, shard_rows, width)
    ranks = len(rows)
    expect(
        max(outcome.sent_bytes) <= 2 * (ranks - 1) * shard,
        "bytes on the wire",
        "p-1 hops take a weight to all others, and p-1 hops take a gradient home; who needs what is sent beyond that?",
    )
    expect(
        all(message.destination == (message.source + 1) % ranks for message in outcome.messages),
        "next rank only",
        "in a ring everything goes to the next rank; who else was spoken to?",
    )
    for rank in range(ranks):
        arrived, done = 0, {"dX": 0, "dW": 0}
        for event in outcome.events:
            if event.rank == rank and event.kind == "receive":
                arrived += event.bytes
            elif event.rank == rank and event.kind == "fetch":
                term, s = event.name.split()
                if (
                    term == "dX"
                ):  # weights that may have come: those of so many hops, and one; gradients: one a term, and one
                    hops = (rank - int(s)) % ranks
                    expect(
                        arrived
                        <= (min(ranks - 1, hops + 1) + min(ranks - 1, done["dW"] + 1)) * shard,
                        "one shard at a time",
                        "a term of dX was computed when shards had come that it does not need yet; must W be whole anywhere?",
                    )
                else:  # weights that must have come: one for each term of dX but the first; gradients: those of the hops before the last
                    hops = (rank - 1 - int(s)) % ranks
                    expect(
                        arrived >= (max(0, done["dX"] - 1) + hops - 1) * shard,
                        "sums that travel",
                        "a term of dW was computed long before the sum arrived that it joins; who keeps it until then?",
                    )
                done[term] += 1


expect_ring([1, 2, 1, 2], 2, 3)
print("the visible checks pass")
### BEGIN HIDDEN TESTS
expect_ring(
    [draw.integer(1, 5) for _ in range(draw.integer(4, 6))], draw.integer(1, 4), draw.integer(3, 9)
)
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


# %% given="counting"
def elements_in(cases):
    return [elements_sent(*case) for case in cases]


def crossovers_in(cases):
    return [crossover(*case) for case in cases]


HINTS = {
    "1-D": "how large is the sum, and how often does all of it pass a rank in an all-reduce? the first product needs no sum",
    "2-D": "two products; q-1 blocks of each of two matrices, and a block has both dims cut",
    "2.5-D": "what is cut over the layers, and what has every layer whole?",
    "3-D": "two products, of three matrices each; which share of a matrix is whole on l ranks together?",
    "RTP": "two weights travel, and activations stay",
}


def expect_elements(*cases):
    """Cases (arguments of elements_sent, elements of the left matrices, of the weights and of the results that are sent by a rank)."""
    said = ask(elements_in, [case for case, _ in cases])
    for count, (case, wanted) in zip(said, cases):
        expect(
            type(count) is int, "whole numbers", "elements are ints; which division gives an int?"
        )
        expect(count == wanted, f"elements in {case[0]}", HINTS[case[0]])


def expect_crossovers(property, hint, *cases):
    """Cases (arguments of crossover, p)."""
    for said, (_, wanted) in zip(ask(crossovers_in, [case for case, _ in cases]), cases):
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
