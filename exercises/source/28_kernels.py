# %% [markdown]
# # Exercises 28: kernels and compilers
#
# Five tasks, 10 points, about two hours. Read chapter 28 first. No GPU, nothing to download.
#
# Write where a cell says `YOUR CODE HERE`, run the cell, then run the check below it. A check tells which property of your
# answer is broken. When the visible checks pass, grade yourself in a terminal:
#
#     minitrain grade 28
#
# The grader runs the same checks and hidden ones with other sizes and values. An answer cell stands alone: it may use read-only cells, but for those
# that say they are for checks, and not your other cells. Nothing here runs on ranks.
#
# Task 2 asks what CUTLASS and Roller (Zhu et al. 2022) ask; task 3 FlashAttention-2 (Dao 2023, arXiv:2307.08691) with a window; task 4 is how
# TorchInductor treats pointwise operators, task 5 TorchDynamo (both Ansel et al. 2024).

# %% given="setup"
from itertools import product

# %% judge="tools"
from minitrain.course.grading.answer_checks import Draw, ask_each, expect

draw = Draw()  # hidden checks draw sizes and values


def expect_each(answer, cases, wanted, property, hint):
    """wanted[i] of cases[i], exactly."""
    for said, case, right in zip(ask_each(answer, list(cases)), cases, wanted):
        expect(type(said) is type(right), "kind of result", f"see the API (seen with {case})")
        expect(said == right, property, f"{hint} (seen with {case})")


# %% [markdown]
# ## 1. A cache with sets (2 points)
#
# The chapter's cache may hold any lines. A real one has *sets*: line number L may be in set L mod `sets` only, and a set holds `ways` lines. A touch
# whose line is not there loads it; if the set is full, the line of this set that was touched longest ago leaves.
#
# A touch may write. A line that was written since it was loaded is stored when it leaves, once however often it was written. After the last touch all
# such lines that are still there are stored as well.
#
# > **API** `cached(touches, sets, ways)` gets a list of (line, writes), a whole number from 0 and a bool, and whole numbers above 0. It returns
# > (loads, stores), in lines.


# %% answer="cached"
def cached(touches, sets, ways):
    """[(line, writes)] -> (lines loaded, lines stored)."""
    ### BEGIN SOLUTION
    inside = [
        {} for _ in range(sets)
    ]  # of each set: line -> is it written; touched longest ago first
    loads = stores = 0
    for line, writes in touches:
        here = inside[line % sets]
        if line not in here:
            loads += 1
            if len(here) == ways:
                stores += here.pop(next(iter(here)))
        here[line] = here.pop(line, False) or writes
    return loads, stores + sum(sum(here.values()) for here in inside)
    ### END SOLUTION


# %% judge="cached_right"
def drawn_touches(count, lines, writing):
    steps = [draw.integer(0, lines - 1) for _ in range(count)]
    return [(line, bool(writing) and draw.random() < 0.3) for line in steps]


### BEGIN HIDDEN TESTS
def by_distance(touches, sets, ways):
    """A touch finds its line if fewer than `ways` others of its set came since the line's touch before."""
    loads, written, of_line = 0, [], {}  # the stays of each line: written?
    for at, (line, writes) in enumerate(touches):
        before = next((b for b in range(at - 1, -1, -1) if touches[b][0] == line), None)
        since = {other for other, _ in touches[(before or 0) : at] if other % sets == line % sets}
        if before is None or len(since - {line}) >= ways:
            loads += 1
            of_line[line] = len(written)
            written.append(False)
        written[of_line[line]] |= writes
    return loads, sum(written)


### END HIDDEN TESTS

# %% check="cached-loads" points=1
# Loads: lines that share a set push each other out.
SETS = "which lines can push this one out, and which of them does?"
READ = [(line, False) for line in (0, 4, 1, 0, 8, 4, 0)]
expect_each(cached, [(READ, 4, 2), (READ, 1, 8)], [(6, 0), (4, 0)], "sets", SETS)
print("the visible checks pass")
### BEGIN HIDDEN TESTS
cases = [
    (drawn_touches(60, draw.integer(8, 16), False), draw.integer(2, 4), draw.integer(1, 3))
    for _ in range(8)
]
cases += [
    ([(8 * i, False) for i in range(6)] * 3, 8, 2),
    ([(i, False) for i in range(6)] * 3, 2, 3),
]
expect_each(cached, cases, [by_distance(*case) for case in cases], "sets", SETS)
### END HIDDEN TESTS

# %% check="cached-stores" points=1
# Stores: a line that was written goes back once.
BACK = "when does a written line go back, and what of those that never leave?"
WRITE = [(0, True), (0, True), (1, False), (2, True), (3, False), (0, False)]
expect_each(cached, [(WRITE, 1, 2), (WRITE, 1, 9)], [(5, 2), (4, 2)], "stores", BACK)
print("the visible checks pass")
### BEGIN HIDDEN TESTS
cases = [
    (drawn_touches(60, draw.integer(6, 12), True), draw.integer(1, 3), draw.integer(1, 4))
    for _ in range(10)
]
expect_each(cached, cases, [by_distance(*case) for case in cases], "stores", BACK)
### END HIDDEN TESTS

# %% [markdown]
# ## 2. The tile that moves least (2 points)
#
# C `[m, n]` is A `[m, k]` times B `[k, n]`. A program makes a block of C of a rows and b columns: for each step of `depth` along k it loads a block of A
# and one of B; at the end it stores its block of C. Fast memory of `fast` numbers must hold `buffers` blocks of A (a · depth each), as many of B
# (depth · b), and the a · b sums. At the edges only what is there is loaded and stored.
#
# a is 16, 32, 48, .. up to the first that is m or more, b likewise with n. Return the choice with the least numbers loaded and stored by all programs
# together; of equals the smaller a, then the smaller b.
#
# > **API** `best_tile(m, n, k, depth, buffers, fast)` gets whole numbers above 0. It returns (moved, a, b); None if no tile fits.


# %% answer="best_tile"
def best_tile(m, n, k, depth, buffers, fast):
    """-> (numbers loaded and stored, rows, columns of the tile) or None."""
    ### BEGIN SOLUTION
    found = []
    for a, b in product(range(16, m + 16, 16), range(16, n + 16, 16)):
        if buffers * depth * (a + b) + a * b <= fast:
            across, down = -(-n // b), -(-m // a)
            found.append((k * (m * across + n * down) + m * n, a, b))
    return min(found, default=None)
    ### END SOLUTION


# %% judge="best_tile_right"
def drawn_product(buffers, ragged):
    m, n, k = (16 * draw.integer(4, 16) - (draw.integer(1, 15) if ragged else 0) for _ in range(3))
    side = draw.integer(24, 100)
    depth = draw.choice((8, 16, 32))
    return m, n, k, depth, buffers, side * side + 2 * buffers * depth * side


### BEGIN HIDDEN TESTS
def tile_by_programs(m, n, k, depth, buffers, fast):
    """Each program's rows and columns, added up."""
    best = None
    for a in range(16, 16 * -(-m // 16) + 1, 16):
        for b in range(16, 16 * -(-n // 16) + 1, 16):
            if a * b + (a * depth + depth * b) * buffers > fast:
                continue
            corners = product(range(0, m, a), range(0, n, b))
            sizes = [(min(a, m - i), min(b, n - j)) for i, j in corners]
            moved = sum(k * (rows + columns) + rows * columns for rows, columns in sizes)
            if best is None or moved < best[0]:
                best = moved, a, b
    return best


### END HIDDEN TESTS

# %% check="best_tile-one" points=1
# One buffer, sizes that divide by 16.
MOVED = "how often does each block of A come, and of B, and what must fit?"
expect_each(
    best_tile,
    [(64, 64, 32, 16, 1, 10**6), (64, 64, 32, 16, 1, 3000), (64, 64, 32, 16, 1, 700)],
    [(8192, 64, 64), (12288, 32, 32), None],
    "what moves",
    MOVED,
)
print("the visible checks pass")
### BEGIN HIDDEN TESTS
cases = [drawn_product(1, False) for _ in range(10)]
expect_each(best_tile, cases, [tile_by_programs(*case) for case in cases], "what moves", MOVED)
### END HIDDEN TESTS

# %% check="best_tile-edges" points=1
# Several buffers, and tiles that hang over the edge.
EDGES = "what of a tile is loaded at the edge, and how many blocks are in fast memory at once?"
expect_each(best_tile, [(40, 20, 10, 8, 2, 1800)], [(1800, 16, 32)], "edges and buffers", EDGES)
print("the visible checks pass")
### BEGIN HIDDEN TESTS
cases = [drawn_product(draw.integer(2, 4), True) for _ in range(12)]
wanted = [tile_by_programs(*case) for case in cases]
expect_each(best_tile, cases, wanted, "edges and buffers", EDGES)
### END HIDDEN TESTS

# %% [markdown]
# ## 3. Attention through a window (2 points)
#
# FlashAttention-2, forward, one head: for each block of `rows` queries, its Q is loaded; then blocks of `columns` keys and values come one after the
# other; at the end its output is stored, and one number per query, the logarithm of its sum. The last block of either kind may be shorter.
#
# Query i sees the keys from i - window + 1 to i, as far as they are there; with window = 0 there is no mask, and it sees all. A block of keys and
# values that no query of the block sees is skipped; of all others the whole block is loaded.
#
# > **API** `attention_moved(tokens, head, rows, columns, window)` gets whole numbers; Q, K, V and the output are `[tokens, head]`. It returns how many
# > numbers are loaded and stored. Up to a million tokens, so go through blocks of queries, not through queries and keys.


# %% answer="attention_moved"
def attention_moved(tokens, head, rows, columns, window):
    """-> numbers loaded and stored."""
    ### BEGIN SOLUTION
    moved = 2 * tokens * head + tokens
    for start in range(0, tokens, rows):
        first, end = 0, tokens
        if window:
            first = max(0, start - window + 1) // columns * columns
            end = min(-(-min(start + rows, tokens) // columns) * columns, tokens)
        moved += 2 * head * (end - first)
    return moved
    ### END SOLUTION


# %% judge="attention_right"
def drawn_attention(window):
    tokens = draw.integer(20, 90)
    return tokens, draw.integer(1, 9), draw.integer(2, 20), draw.integer(2, 20), window(tokens)


### BEGIN HIDDEN TESTS
def moved_by_pairs(tokens, head, rows, columns, window):
    """From every pair of a query and a key that it sees."""
    pairs = product(range(tokens), repeat=2)
    seen = {
        (i // rows, j // columns)
        for i, j in pairs
        if not window or max(0, i - window + 1) <= j <= i
    }
    size = {block: min(columns, tokens - block * columns) for _, block in seen}
    return tokens * (2 * head + 1) + sum(2 * head * size[block] for _, block in seen)


### END HIDDEN TESTS

# %% check="attention-full" points=1
# Without a mask.
EVERY = "how often do K and V come, and what else moves?"
expect_each(attention_moved, [(8, 2, 4, 4, 0), (10, 1, 4, 3, 0)], [104, 90], "all blocks", EVERY)
print("the visible checks pass")
### BEGIN HIDDEN TESTS
cases = [drawn_attention(lambda tokens: 0) for _ in range(8)]
expect_each(attention_moved, cases, [moved_by_pairs(*case) for case in cases], "all blocks", EVERY)
many = ask_each(attention_moved, [(10**6, 1, 1000, 100, 0)])
expect(many == [2003 * 10**6], "all blocks", f"{EVERY} (seen with a million tokens)")
### END HIDDEN TESTS

# %% check="attention-window" points=1
# With a window: blocks that nobody sees are skipped.
SKIPPED = "which is the first key that a query of the block sees, which is the last?"
expect_each(
    attention_moved,
    [(8, 1, 4, 4, 1), (8, 1, 4, 4, 2), (8, 1, 2, 4, 8), (9, 1, 4, 4, 9)],
    [40, 48, 72, 69],
    "blocks skipped",
    SKIPPED,
)
print("the visible checks pass")
### BEGIN HIDDEN TESTS
cases = [drawn_attention(lambda tokens: draw.integer(1, tokens + 9)) for _ in range(16)]
cases += [(*(24, 3, 4, 4), window) for window in (1, 4, 5, 8, 9, 24)]
expect_each(
    attention_moved, cases, [moved_by_pairs(*case) for case in cases], "blocks skipped", SKIPPED
)
### END HIDDEN TESTS

# %% [markdown]
# ## 4. Compute it again (2 points)
#
# The chapter's rule stores a tensor that two operators read. TorchInductor computes pointwise operators again, in each kernel that needs them:
#
# - A product or a reduction is a kernel of its own, and so is a pointwise step whose output is a result. A kernel stores its output.
# - Any other pointwise step is computed inside of each kernel that needs it, directly or through further such steps, once per kernel.
# - So a kernel loads what is stored or given and read by its step, or by a step inside of it. What is stored is loaded, and not computed again.
#
# > **API** `kernels(steps, results)` gets a list of (output, kind, inputs), each after what it reads, kind "pointwise", "product" or
# > "reduction", and a list of outputs. It returns (found, computed): for each kernel, in the order of its steps, (output, sorted list of what it loads);
# > and how many steps all kernels compute together, their own included.


# %% answer="kernels"
def kernels(steps, results):
    """-> ([(output, [loaded])], steps computed)."""
    ### BEGIN SOLUTION
    reads = {output: inputs for output, _, inputs in steps}
    stored = [output for output, kind, _ in steps if kind != "pointwise" or output in results]
    found, computed = [], len(stored)
    for output in stored:
        loads, inside, open_ = set(), set(), list(reads[output])
        while open_:
            name = open_.pop()
            if name in stored or name not in reads:
                loads.add(name)
            elif name not in inside:
                inside.add(name)
                open_ += reads[name]
        found.append((output, sorted(loads)))
        computed += len(inside)
    return found, computed
    ### END SOLUTION


# %% judge="kernels_right"
def drawn_steps(count, chain):
    """A chain, or a graph in which a tensor may be read more than once."""
    names, steps = ["x", "y"], []
    for number in range(count):
        kind = draw.choice(("pointwise", "pointwise", "pointwise", "product", "reduction"))
        inputs = [names[-1], "y"] if chain else draw.several(names[-5:], draw.integer(1, 2))
        names.append(f"t{number:02}")
        steps.append((names[-1], kind, inputs))
    return steps, [names[-1]] if chain else [names[-1], draw.choice(names[2:-1])]


### BEGIN HIDDEN TESTS
def kernels_forward(steps, results):
    """Of every step what it would load and compute, from those before it."""
    known, found, computed = {}, [], 0
    for output, kind, inputs in steps:
        parts = [known.get(name, ({name}, set())) for name in inputs]
        loads = set().union(*(part[0] for part in parts))
        inside = set().union(*(part[1] for part in parts)) | {output}
        if kind == "pointwise" and output not in results:
            known[output] = loads, inside
        else:
            found.append((output, sorted(loads)))
            computed += len(inside)
    return found, computed


### END HIDDEN TESTS

# %% check="kernels-chain" points=1
# Chains: each tensor is read once.
CHAIN = "which steps begin a kernel, and what stays inside of one?"
MLP = [
    ("a", "product", ["x", "w"]),
    ("b", "pointwise", ["a", "bias"]),
    ("c", "pointwise", ["b"]),
    ("d", "reduction", ["c"]),
    ("e", "pointwise", ["d"]),
]
FOUND = [("a", ["w", "x"]), ("d", ["a", "bias"]), ("e", ["d"])]
expect_each(
    kernels,
    [(MLP, ["e"]), (MLP[:3], ["c"])],
    [(FOUND, 5), (FOUND[:1] + [("c", ["a", "bias"])], 3)],
    "chains",
    CHAIN,
)
print("the visible checks pass")
### BEGIN HIDDEN TESTS
cases = [drawn_steps(draw.integer(3, 12), True) for _ in range(10)]
expect_each(kernels, cases, [kernels_forward(*case) for case in cases], "chains", CHAIN)
### END HIDDEN TESTS

# %% check="kernels-again" points=1
# Tensors that several steps read: computed again, but not what is stored.
AGAIN = "how often is each step computed, and what is there to be loaded?"
FAN = [
    ("a", "pointwise", ["x"]),
    ("b", "pointwise", ["a"]),
    ("c", "pointwise", ["a", "b"]),
    ("d", "reduction", ["c", "a"]),
    ("e", "pointwise", ["b", "d"]),
]
expect_each(
    kernels,
    [(FAN, ["e"]), (FAN, ["b", "e"])],
    [
        ([("d", ["x"]), ("e", ["d", "x"])], 7),
        ([("b", ["x"]), ("d", ["b", "x"]), ("e", ["b", "d"])], 6),
    ],
    "computed again",
    AGAIN,
)
print("the visible checks pass")
### BEGIN HIDDEN TESTS
cases = [drawn_steps(draw.integer(5, 14), False) for _ in range(16)]
expect_each(kernels, cases, [kernels_forward(*case) for case in cases], "computed again", AGAIN)
### END HIDDEN TESTS

# %% [markdown]
# ## 5. What crosses a break (2 points)
#
# A function is a list of statements. An "op" makes a tensor from tensors. A "look" is Python that needs a *number* of a tensor: `if x.sum() > 0`,
# `print`, `item()`. At a look the graph ends: the ops since the last one (or since the beginning) are one graph, if there are any. Return all graphs, each as
#
# - its inputs: tensors that its ops read and that it does not make,
# - its ops, in order,
# - its outputs: of what it makes, what a look or an op of a later graph reads, or what is a result.
#
# > **API** `graphs(statements, results)` gets a list of (kind, name, reads): ("op", the tensor it makes, list of tensors) or ("look", "", list of one
# > tensor), and the list of tensors that the function returns. It returns a list of tuples of three lists; inputs and outputs are sorted.


# %% answer="graphs"
def graphs(statements, results):
    """-> [(inputs, ops, outputs)]."""
    ### BEGIN SOLUTION
    pieces, looked = [[]], set(results)
    for kind, name, reads in statements:
        if kind == "look":
            looked.update(reads)
            pieces.append([])
        else:
            pieces[-1].append((name, reads))
    found, needed = [], looked
    for piece in reversed([piece for piece in pieces if piece]):
        made = [name for name, _ in piece]
        inputs = {name for _, reads in piece for name in reads} - set(made)
        found.append((sorted(inputs), made, sorted(needed & set(made))))
        needed = needed | inputs
    return found[::-1]
    ### END SOLUTION


# %% judge="graphs_right"
OPS = [
    ("op", "a", ["x"]),
    ("op", "b", ["a", "w"]),
    ("look", "", ["a"]),
    ("look", "", ["b"]),
    ("op", "c", ["a"]),
]
TWO = [(["w", "x"], ["a", "b"], ["a", "b"]), (["a"], ["c"], ["c"])]


def drawn_function(count, looks):
    names, statements = ["x"], []
    for number in range(count):
        if looks and draw.random() < 0.3:
            statements.append(("look", "", [draw.choice(names[-4:])]))
            continue
        reads = draw.several(names[-6:], draw.integer(1, min(2, len(names[-6:]))))
        names.append(f"t{number:02}")
        statements.append(("op", names[-1], reads))
    return [*statements, ("op", "z", names[-1:])], ["z", *draw.several(names[1:], 1)] if names[
        1:
    ] else ["z"]


### BEGIN HIDDEN TESTS
def graphs_by_tensor(statements, results):
    """Where each tensor is made, and where it is read: -1 outside of all graphs."""
    number, made, read = 0, {}, {}
    for kind, name, reads in statements:
        for tensor in reads:
            read.setdefault(tensor, set()).add(number if kind == "op" else -1)
        if kind == "op":
            made[name] = number
        number += kind == "look"
    for tensor in results:
        read.setdefault(tensor, set()).add(-1)
    found = []
    for graph in sorted(set(made.values())):
        ops = [name for name in made if made[name] == graph]
        inputs = [name for name in read if graph in read[name] and made.get(name) != graph]
        outputs = [name for name in ops if read.get(name, set()) - {graph}]
        found.append((sorted(inputs), ops, sorted(outputs)))
    return found


### END HIDDEN TESTS


def expect_graphs(cases, wanted, crossing):
    for said, case, right in zip(ask_each(graphs, list(cases)), cases, wanted):
        where = f"(seen with {case})"
        kind = isinstance(said, list) and all(isinstance(one, (tuple, list)) for one in said)
        expect(
            kind and all(len(one) == 3 for one in said), "kind of result", f"see the API {where}"
        )
        ops = [one[1] for one in said] == [one[1] for one in right]
        expect(ops, "where it breaks", f"which ops stand between two looks? {where}")
        if crossing:
            same = [[*map(list, one)] for one in said] == [[*map(list, one)] for one in right]
            expect(same, "what crosses", f"who reads it, and in which graph? {where}")


# %% check="graphs-breaks" points=1
# Where the function breaks.
expect_graphs([(OPS, ["c"]), (OPS[:2], ["b"])], [TWO, [(["w", "x"], ["a", "b"], ["b"])]], False)
print("the visible checks pass")
### BEGIN HIDDEN TESTS
cases = [drawn_function(draw.integer(3, 14), True) for _ in range(10)]
cases.append(([("look", "", ["x"]), ("op", "a", ["x"]), ("look", "", ["a"])], ["a"]))
expect_graphs(cases, [graphs_by_tensor(*case) for case in cases], False)
### END HIDDEN TESTS

# %% check="graphs-cross" points=1
# And what goes into each graph and comes out of it.
expect_graphs([(OPS, ["c"]), (OPS[:2], ["b"])], [TWO, [(["w", "x"], ["a", "b"], ["b"])]], True)
print("the visible checks pass")
### BEGIN HIDDEN TESTS
cases = [drawn_function(draw.integer(4, 16), True) for _ in range(14)]
cases.append(
    ([*OPS[:3], ("op", "c", ["x"]), ("look", "", ["c"]), ("op", "d", ["b", "c"])], ["a", "d"])
)
expect_graphs(cases, [graphs_by_tensor(*case) for case in cases], True)
### END HIDDEN TESTS
