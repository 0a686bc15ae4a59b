# %% [markdown]
# # Exercises 06: tensor parallelism
#
# Six tasks, 10 points, about two hours. Read chapter 06 first. No GPU, nothing to download.
#
# Write where a cell says `YOUR CODE HERE`, run the cell, then run the check below it. A check tells which property of your
# answer is broken, never the result it wants. When the visible checks pass, grade yourself in a terminal:
#
#     minitrain grade 06
#
# The grader runs the same checks and hidden ones with other sizes, other numbers of ranks and other values. Three rules:
#
# - An answer cell stands alone. It may use read-only cells, but for those that say they are for checks, and not your other cells.
# - A function that runs on ranks gets its `group`: `group.rank()` says who you are, `group.size()` how many you are.
# - Between ranks there is a network and nothing else: `collectives.send` and `collectives.receive`, and here `all_reduce` and `all_gather`.
#
# t is the number of ranks in the group. An activation is X [B, T, D]: batch, tokens, width. Weights are kept as torch keeps them, [out, in],
# and a layer is Y = X·Wᵀ + b. Tasks 1 to 3 and 5 are Shoeybi et al. 2019 (Megatron-LM, arXiv:1909.08053, section 3), task 4 is Ainslie
# et al. 2023 (GQA, arXiv:2305.13245), task 6 adds the sequence parallelism of Korthikanti et al. 2022 (arXiv:2205.05198, section 4.2.2).
#
# How can a check know which pass sent what? The gradient that a backward begins with is on no rank at first: a rank fetches it when its
# forward is done, and the moment is written down among its messages. What it sent before belongs to the forward, the rest to the backward.

# %% given="setup"
import torch

from minitrain import collectives

# %% judge="tools"
import math

from minitrain.course.grading.checks import Draw, ask_each, expect, expect_equal, run_on_ranks

draw = Draw()  # hidden checks draw sizes, numbers of ranks and values


def run(on_a_rank, inputs, secrets, **rules):
    return run_on_ranks(
        on_a_rank, inputs, collectives="all_reduce all_gather", secrets=secrets, **rules
    )


def sent_in_each_pass(outcome):
    """The most bytes that a rank sent in the forward, and the most in the backward, which begins when the gradient is fetched."""
    ranks = len(outcome.results)
    sent, in_backward = [[0] * ranks, [0] * ranks], [False] * ranks
    for event in outcome.events:
        if event.kind == "fetch":
            in_backward[event.rank] = True
        elif event.kind == "send":
            sent[in_backward[event.rank]][event.rank] += event.bytes
    return max(sent[0]), max(sent[1])


def all_reduce_bytes(numel, ranks):
    """What a rank sends at most in one all-reduce of so many float64: 2(t-1)/t of them, pieces rounded up."""
    return 2 * (ranks - 1) * math.ceil(numel / ranks) * 8


# %% [markdown]
# ## 1. The pair f and g (2 points)
#
# All communication of a tensor-parallel layer is in two functions. One stands where an activation that all ranks have enters work that
# differs by rank, the other where the ranks' terms become one activation again:
#
#     f   forward: x as it is         backward: the sum of the ranks' gradients
#     g   forward: the sum of x       backward: the gradient as it is
#
# Write both as functions that autograd can differentiate: a `torch.autograd.Function` whose `forward` and `backward` you write, and a call
# of its `apply`. x stays as it was, and a pass without a sum sends nothing; a pass with one sends what one all-reduce does.
# (`copy_to` and `reduce_from` of the package are this pair ready-made; they are not here.)
#
# Two ranks have x = `[1]` and `[2]`, and get dy = `[10]` and `[20]`. f returns `[1]` and `[2]`, and x.grad is `[30]` on both; g returns `[3]` on
# both, and x.grad is `[10]` and `[20]`.


# %% answer="f_and_g"
def f(x, group):
    """x of any shape -> x; in backward the gradients of all ranks are added up."""

    ### BEGIN SOLUTION
    class CopyTo(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.view_as(x)

        @staticmethod
        def backward(ctx, dy):
            return collectives.all_reduce(dy, group)

    return CopyTo.apply(x)
    ### END SOLUTION


def g(x, group):
    """x of any shape, on each rank -> their sum, on every rank; in backward the gradient passes through."""

    ### BEGIN SOLUTION
    class ReduceFrom(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return collectives.all_reduce(x, group)

        @staticmethod
        def backward(ctx, dy):
            return dy

    return ReduceFrom.apply(x)
    ### END SOLUTION


# %% driver="there_and_back"
def there_and_back(which, x, group):
    """x through f or g, and a gradient back: what came out, x as it is afterwards, and x.grad if there is one."""
    leaf = x.clone().requires_grad_()
    y = {"f": f, "g": g}[which](leaf, group)
    came = {"y": y.detach().clone(), "x": leaf.detach().clone()}
    dy = group.fetch("dy", torch.empty_like(x))
    if y.requires_grad:
        y.backward(dy)
    return {**came, **({} if leaf.grad is None else {"dx": leaf.grad})}


# %% judge="expect_pair"
def expect_pair(which, xs, dys):
    """Run f or g on ranks with these x and dy, and look at both passes."""
    outcome = run(there_and_back, [(which, x) for x in xs], [{"dy": dy} for dy in dys])
    ranks, one = len(xs), all_reduce_bytes(xs[0].numel(), len(xs))
    ys, dxs = (xs, [sum(dys)] * ranks) if which == "f" else ([sum(xs)] * ranks, dys)
    forward, backward = sent_in_each_pass(outcome)
    expect_equal(
        [came["y"] for came in outcome.results],
        ys,
        f"forward of {which}",
        "f returns what it got"
        if which == "f"
        else "the sum of the ranks' x, on every rank; a sum, no mean",
    )
    expect_equal(
        [came["x"] for came in outcome.results],
        xs,
        "x stays as it was",
        "somebody else may need x, the backward of a layer, say",
    )
    expect(
        all("dx" in came for came in outcome.results),
        "autograd goes on",
        "no gradient came to x: collectives work outside autograd, so who tells it that there is a way back?",
    )
    expect_equal(
        [came["dx"] for came in outcome.results],
        dxs,
        f"backward of {which}",
        "each rank knows what its own work asks of x; the gradient of x is what all of them ask"
        if which == "f"
        else "every rank has the whole gradient of the sum already, and each term of a sum has the gradient of the sum",
    )
    expect(
        forward <= (0 if which == "f" else one),
        f"bytes of forward of {which}",
        "all ranks have x: nobody needs anything" if which == "f" else "one all-reduce is enough",
    )
    expect(
        backward <= (one if which == "f" else 0),
        f"bytes of backward of {which}",
        "one all-reduce is enough" if which == "f" else "all ranks have dy: nobody needs anything",
    )


# %% check="f_and_g-f" points=1
# f: nothing forward, one all-reduce backward.
expect_pair(
    "f",
    [torch.tensor([1.0, 5.0]).double(), torch.tensor([2.0, 6.0]).double()],
    [torch.tensor([10.0, 50.0]).double(), torch.tensor([20.0, 60.0]).double()],
)
print("the visible checks pass")
### BEGIN HIDDEN TESTS
for ranks in (3, 4):
    shape = [draw.integer(3, 6), *(draw.integer(1, 3) for _ in range(draw.integer(0, 2)))]
    expect_pair(
        "f", [draw.exact(*shape) for _ in range(ranks)], [draw.exact(*shape) for _ in range(ranks)]
    )
### END HIDDEN TESTS

# %% check="f_and_g-g" points=1
# g: one all-reduce forward, nothing backward.
expect_pair(
    "g",
    [torch.tensor([1.0, 5.0]).double(), torch.tensor([2.0, 6.0]).double()],
    [torch.tensor([10.0, 50.0]).double(), torch.tensor([20.0, 60.0]).double()],
)
print("the visible checks pass")
### BEGIN HIDDEN TESTS
for ranks in (3, 4):
    shape = [draw.integer(3, 6), *(draw.integer(1, 3) for _ in range(draw.integer(0, 2)))]
    expect_pair(
        "g", [draw.exact(*shape) for _ in range(ranks)], [draw.exact(*shape) for _ in range(ranks)]
    )
### END HIDDEN TESTS

# %% [markdown]
# ## 2. Column-parallel matrices that share an input (2 points)
#
# Q, K and V of an attention, or up and gate of an MLP, have one input X and several matrices. Each matrix is cut by output features: W [F, D]
# becomes W_r [F/t, D] on rank r, and its bias b_r [F/t]. F may differ from matrix to matrix. All ranks have the same X; rank r computes
#
#     forward     Y_r = X·W_rᵀ + b_r                                                       for each matrix
#     backward    dW_r, db_r for each matrix, and dX: all ranks and all matrices have a share in it
#
# Write both passes by hand, without autograd. The forward sends nothing; the backward sends one all-reduce of a tensor as large as X, however
# many matrices there are. dW_r [F/t, D] and db_r [F/t] have no B and T: they are sums over all tokens.
#
# One token X = `[[[2]]]`, two ranks, one matrix W = `[[3], [5]]`, b = `[1, 0]`. Rank 0 has Y = `[[[7]]]`, rank 1 `[[[10]]]`. With
# dY = 1 on both, dX = 3 + 5 = 8 on both ranks, dW = `[[2]]` and db = `[1]` on each.


# %% answer="column"
def column_forward(x, weights, biases, group):
    """x [B, T, D], this rank's weights[i] [F_i/t, D] and biases[i] [F_i/t] -> list of this rank's outputs [B, T, F_i/t]."""
    ### BEGIN SOLUTION
    return [x @ weight.T + bias for weight, bias in zip(weights, biases)]
    ### END SOLUTION


def column_backward(dys, x, weights, group):
    """dys[i] [B, T, F_i/t] -> (dx [B, T, D] of the whole layer, list of dweights [F_i/t, D], list of dbiases [F_i/t])."""
    ### BEGIN SOLUTION
    dx = collectives.all_reduce(sum(dy @ weight for dy, weight in zip(dys, weights)), group)
    rows = x.flatten(0, 1)
    return dx, [dy.flatten(0, 1).T @ rows for dy in dys], [dy.sum((0, 1)) for dy in dys]
    ### END SOLUTION


# %% driver="columns"
def column_on_a_rank(x, weights, biases, group):
    ys = column_forward(x, list(weights), list(biases), group)
    dys = [
        group.fetch(f"dy {i}", x.new_empty(*x.shape[:2], len(weight)))
        for i, weight in enumerate(weights)
    ]
    dx, dweights, dbiases = column_backward(dys, x, list(weights), group)
    return {"ys": list(ys), "dx": dx, "dweights": list(dweights), "dbiases": list(dbiases)}


# %% judge="expect_columns"
def expect_columns(ranks, x_shape, widths, once=True):
    """Both passes on ranks, each with widths[i] output features, equal one process, and a sum like X travels: `once`, or for each matrix."""
    x, *rest = draw.real(*x_shape), *[[], [], []]
    for width in widths:
        shapes = [width, x_shape[-1]], [width], [*x_shape[:2], width]
        for parts, shape in zip(rest, shapes):
            parts.append([draw.real(*shape) for _ in range(ranks)])
    weights, biases, dys = ([list(of_rank) for of_rank in zip(*parts)] for parts in rest)
    outcome = run(
        column_on_a_rank,
        [(x, *own) for own in zip(weights, biases)],
        [{f"dy {i}": dy for i, dy in enumerate(own)} for own in dys],
        autograd=False,
    )
    pairs = [pair for own in zip(dys, weights) for pair in zip(*own)]
    dx = sum(torch.einsum("btf,fd->btd", *pair) for pair in pairs)
    for name, wanted, property, hint in (
        (
            "ys",
            [
                [torch.einsum("btd,fd->btf", x, weight) + bias for weight, bias in zip(*own)]
                for own in zip(weights, biases)
            ],
            "the product",
            "X·W_rᵀ + b_r, for each of this rank's matrices",
        ),
        (
            "dx",
            [dx] * ranks,
            "gradient of x",
            "X goes into every matrix on every rank: what has to come together, and is anything missing or counted twice?",
        ),
        (
            "dweights",
            [[torch.einsum("btf,btd->fd", dy, x) for dy in own] for own in dys],
            "gradient of each weight",
            "no other rank has these rows of W: their gradient is dY_rᵀ·X over all tokens",
        ),
        (
            "dbiases",
            [[dy.sum((0, 1)) for dy in own] for own in dys],
            "gradient of each bias",
            "b_r was added to every token, and on this rank only",
        ),
    ):
        said = [result[name] for result in outcome.results]
        expect_equal(said, wanted, property, f"{hint} ({ranks} ranks)", atol=1e-11)
    forward, backward = sent_in_each_pass(outcome)
    expect(
        forward == 0,
        "forward sends nothing",
        "all ranks have X, and the output stays in slices: who needs anything of another rank?",
    )
    expect(
        backward <= all_reduce_bytes(x.numel(), ranks) * (1 if once else len(widths)),
        "summed once",
        "more is sent than one tensor like X summed over the ranks; can the matrices' shares be added before they travel?",
    )


# %% check="column-equal" points=1
# Outputs and all gradients equal one process, and nothing but sums like X travels.
expect_columns(2, [1, 2, 3], [7], once=False)
expect_columns(2, [2, 3, 4], [7, 6, 6], once=False)
print("the visible checks pass")
### BEGIN HIDDEN TESTS
# so wide that weights are more bytes than the sum; one matrix, so that gathered shares are, too
for ranks, width in ((2, 4), (3, 5), (4, 9)):
    x_shape = [draw.integer(2, 3), draw.integer(2, 3), width]
    matrices = 1 if ranks == 4 else draw.integer(2, 4)
    expect_columns(ranks, x_shape, [draw.integer(9, 12) for _ in range(matrices)], once=False)
### END HIDDEN TESTS

# %% check="column-bytes" points=1
# Nothing forward, and one all-reduce backward for all matrices together.
expect_columns(2, [2, 3, 4], [7, 6, 6])
print("the visible checks pass")
### BEGIN HIDDEN TESTS
expect_columns(3, [draw.integer(2, 3), 3, draw.integer(2, 5)], draw.several(range(7, 13), 3))
expect_columns(4, [draw.integer(2, 3), 3, draw.integer(7, 9)], draw.several(range(7, 13), 2))
### END HIDDEN TESTS


# %% [markdown]
# ## 3. The row-parallel matrix and its bias (1 point)
#
# The next matrix takes the slices as they are. W [D, F] is cut by input features: rank r has X_r [B, T, F/t] and W_r [D, F/t], and its product
# X_r·W_rᵀ [B, T, D] is one term of a sum. The bias b [D] is whole on every rank.
#
#     forward     Y = Σ_r X_r·W_rᵀ + b, the same on all ranks
#     backward    dX_r, dW_r and db, from dY, the same on all ranks
#
# The bias is added once, not once a rank. The forward sends one all-reduce of a tensor as large as Y, the backward sends nothing.
#
# Two ranks, one token: X = `[[[1]]]` and `[[[2]]]`, W = `[[3]]` and `[[4]]`, b = `[100]`. Y is 3 + 8 + 100 = 111 on both. With dY = 1 the
# gradients dX are 3 and 4, dW 1 and 2, and db is 1 on both ranks.


# %% answer="row"
def row_forward(x, weight, bias, group):
    """this rank's x [B, T, F/t] and weight [D, F/t], the whole bias [D] -> y [B, T, D], the same on all ranks."""
    ### BEGIN SOLUTION
    return collectives.all_reduce(x @ weight.T, group) + bias
    ### END SOLUTION


def row_backward(dy, x, weight, group):
    """dy [B, T, D], the same on all ranks -> (dx [B, T, F/t], dweight [D, F/t], dbias [D])."""
    ### BEGIN SOLUTION
    return dy @ weight, dy.flatten(0, 1).T @ x.flatten(0, 1), dy.sum((0, 1))
    ### END SOLUTION


# %% driver="rows"
def row_on_a_rank(x, weight, bias, group):
    y = row_forward(x, weight, bias, group)
    dy = group.fetch("dy", x.new_empty(*x.shape[:2], len(weight)))
    dx, dweight, dbias = row_backward(dy, x, weight, group)
    return {"y": y, "dx": dx, "dweight": dweight, "dbias": dbias}


# %% judge="expect_rows"
def expect_rows(ranks, batch, tokens, own_width, out):
    """Both passes, first without a bias, then with one."""
    xs, weights = (
        [draw.real(*shape) for _ in range(ranks)]
        for shape in ([batch, tokens, own_width], [out, own_width])
    )
    dy, bias = draw.real(batch, tokens, out), draw.real(out) + 9
    total = sum(torch.einsum("btf,df->btd", *pair) for pair in zip(xs, weights))
    for b in (torch.zeros_like(bias), bias):
        inputs = [(x, weight, b) for x, weight in zip(xs, weights)]
        outcome = run(row_on_a_rank, inputs, [{"dy": dy}] * ranks)
        said = {
            name: [result[name] for result in outcome.results]
            for name in ("y", "dx", "dweight", "dbias")
        }
        forward, backward = sent_in_each_pass(outcome)
        expect_equal(
            said["y"],
            [total + b] * ranks,
            "bias once" if b.any() else "the sum",
            "without its bias the sum is right; how often "
            "is b in it, and is it there on every rank?"
            if b.any()
            else "the terms of all ranks, added up, on every rank",
            atol=1e-11,
        )
        expect_equal(
            said["dx"],
            [torch.einsum("btd,df->btf", dy, weight) for weight in weights],
            "gradient of x",
            "each term of a sum has the gradient of the sum, and all ranks have it",
            atol=1e-11,
        )
        expect_equal(
            said["dweight"],
            [torch.einsum("btd,btf->df", dy, x) for x in xs],
            "gradient of the weight",
            "no other rank has these columns of W: their gradient is dYᵀ·X_r over all tokens",
            atol=1e-11,
        )
        expect_equal(
            said["dbias"],
            [dy.sum((0, 1))] * ranks,
            "gradient of the bias",
            "one bias, added once to each token: what do all ranks know without asking?",
            atol=1e-11,
        )
        expect(
            forward <= all_reduce_bytes(total.numel(), ranks),
            "bytes of forward",
            "one all-reduce of the terms is enough",
        )
        expect(
            backward == 0,
            "backward sends nothing",
            "dY is whole on every rank, and dX_r and dW_r are needed here only",
        )


# %% check="row-equal" points=1
# The sum, its bias once, and all gradients, for one all-reduce.
expect_rows(2, 2, 3, 5, 3)
print("the visible checks pass")
### BEGIN HIDDEN TESTS
expect_rows(3, draw.integer(2, 3), draw.integer(2, 4), draw.integer(5, 7), draw.integer(2, 4))
expect_rows(4, draw.integer(2, 3), draw.integer(2, 4), draw.integer(5, 7), draw.integer(2, 5))
### END HIDDEN TESTS

# %% [markdown]
# ## 4. Which heads belong to whom (1 point)
#
# Attention is cut by whole heads. There are `heads` query heads and `kv_heads` heads of keys and values, which divide `heads`: query head i
# uses K/V head i // (heads / kv_heads). W_q has heads·head_dim rows, head after head; W_k and W_v have kv_heads·head_dim rows each.
#
# Rank r has the r-th part of the query heads, and of keys and values what these use and no more:
#
#     ranks divide kv_heads    K/V heads are cut like query heads
#     kv_heads divide ranks    fewer K/V heads than ranks: several ranks have a copy of the same one
#     neither                  ValueError, in one line
#
# It is a ValueError as well when the ranks do not divide the query heads. Heads are never cut.
#
# 8 query heads, 2 K/V heads, head_dim 16, 4 ranks: ranks 0 and 1 have rows 0 to 15 of W_k, ranks 2 and 3 rows 16 to 31. Rank 2 returns
# `((64, 96), (16, 32))`.


# %% answer="head_rows"
def head_rows(rank, ranks, heads, kv_heads, head_dim):
    """((start, stop) of this rank's rows of W_q, (start, stop) of its rows of W_k, which are those of W_v too)."""
    ### BEGIN SOLUTION
    if heads % ranks or (kv_heads % ranks and ranks % kv_heads):
        raise ValueError(
            f"{heads} query heads and {kv_heads} K/V heads do not divide over {ranks} ranks"
        )
    own, own_kv = heads // ranks, max(1, kv_heads // ranks)
    first_kv = rank * kv_heads // ranks
    return (
        (rank * own * head_dim, (rank + 1) * own * head_dim),
        (first_kv * head_dim, (first_kv + own_kv) * head_dim),
    )
    ### END SOLUTION


# %% driver="rows_or_refusal"
def rows_or_refusal(*case):
    """What head_rows returns, or the text of its ValueError."""
    try:
        return head_rows(*case)
    except ValueError as error:
        return str(error)


# %% judge="expect_heads"
def rows_of_all_ranks(ranks, *heads):
    return ask_each(rows_or_refusal, [(rank, ranks, *heads) for rank in range(ranks)])


def expect_refused_heads(ranks, heads, kv_heads, head_dim):
    for said in rows_of_all_ranks(ranks, heads, kv_heads, head_dim):
        expect(
            isinstance(said, str),
            "a refusal",
            "these heads do not divide over these ranks, and no head may be cut: raise a ValueError",
        )
        one_line = said.strip() and "\n" not in said
        expect(one_line, "a refusal", "say in one line what does not divide")


def expect_heads(ranks, heads, kv_heads, head_dim):
    """Ask for the rows of all ranks, and look at them property by property."""
    for rank, rows in enumerate(rows_of_all_ranks(ranks, heads, kv_heads, head_dim)):
        expect(
            not isinstance(rows, str),
            "no refusal without need",
            "a ValueError, but these heads do divide, perhaps with copies of K/V heads",
        )
        expect(
            isinstance(rows, (list, tuple))
            and len(rows) == 2
            and all(
                isinstance(pair, (list, tuple))
                and len(pair) == 2
                and all(type(end) is int for end in pair)
                for pair in rows
            ),
            "two pairs",
            "return ((start, stop), (start, stop)), whole numbers",
        )
        (start, stop), (kv_start, kv_stop) = rows
        expect(
            all(end % head_dim == 0 for end in (start, stop, kv_start, kv_stop)),
            "whole heads",
            "start and stop are rows, stop is the first row that is not yours, and a head has head_dim of them",
        )
        expect(
            (stop - start) * ranks == heads * head_dim,
            "query heads",
            "each rank has as many query heads as the others",
        )
        expect(
            start == rank * (stop - start),
            "query heads",
            "rank after rank, the query heads from the first to the last",
        )
        needed = [query * kv_heads // heads for query in (start // head_dim, stop // head_dim - 1)]
        expect(
            kv_start <= needed[0] * head_dim and kv_stop >= (needed[1] + 1) * head_dim,
            "the heads that queries use",
            f"a query head on rank {rank} of {ranks} uses a K/V head that is not there; who uses which?",
        )
        expect(
            kv_stop - kv_start <= (needed[1] + 1 - needed[0]) * head_dim,
            "no more than queries use",
            f"no query head on rank {rank} of {ranks} uses all these rows of W_k",
        )


# %% check="head_rows-all" points=1
# Whole heads, those that the rank's queries use, and a refusal when they do not divide.
expect_heads(2, 8, 8, 4)
expect_heads(2, 8, 4, 4)
expect_heads(4, 8, 2, 16)
expect_refused_heads(4, 12, 6, 8)
print("the visible checks pass")
### BEGIN HIDDEN TESTS
head_dim = draw.integer(2, 9)
expect_heads(3, 3 * draw.integer(2, 4), 3, head_dim)
expect_heads(4, 16, 8, head_dim)
expect_heads(draw.integer(2, 5), 60, 1, head_dim)
expect_heads(6, 12 * draw.integer(1, 3), draw.choice([2, 3]), head_dim)
expect_heads(8, 16, 2, head_dim)
expect_heads(1, 6, draw.choice([1, 2, 3]), head_dim)
expect_refused_heads(6, 12 * draw.integer(1, 3), 4, head_dim)
expect_refused_heads(4, 6, 2, 4 * head_dim)
expect_refused_heads(3, 8, draw.choice([1, 4]), 3 * head_dim)
### END HIDDEN TESTS

# %% [markdown]
# ## 5. A loss that never sees all logits (3 points)
#
# The last matrix is column-parallel too: rank r has the logits of words r·V/t to (r+1)·V/t - 1, [B, T, V/t]. Targets are words of the whole
# vocabulary, the same on all ranks; a target of -100 is masked, its token does not count. The loss is a sum, not a mean:
#
#     loss = Σ over tokens that count of  log Σ_v exp(l_v) - l_target
#
# and every rank returns it. exp(1000) is inf, and exp(-1000) is 0, whose log is -inf: subtract what makes both harmless. Of each token the ranks
# tell one another at most three numbers: the largest logit, the sum of the exponentials, the target's logit. A rank may send what all-reduces
# of 3·B·T elements send, and nothing that grows with V. (`all_reduce` takes `op="max"`.)
#
# Backward: softmax(l) minus one at the target, times `dloss`, for this rank's words; zero for masked tokens. It sends nothing: `kept`
# is whatever you return beside the loss, and comes back to you.
#
# Two ranks, one token, logits `[[[0, 0]]]` and `[[[0, 0]]]`, target 3: the loss is log 4, and with dloss = 1 the gradients are `[[[0.25, 0.25]]]` and
# `[[[0.25, -0.75]]]`.


# %% answer="cross_entropy"
def cross_entropy_forward(logits, targets, group):
    """logits [B, T, V/t] of this rank's words, targets [B, T] -> (loss, a tensor without dims, the same on all ranks; kept)."""
    ### BEGIN SOLUTION
    words, counts = logits.size(-1), targets != -100
    place = targets - group.rank() * words
    own = counts & (place >= 0) & (place < words)
    place = place.masked_fill(~own, 0).unsqueeze(-1)
    largest = collectives.all_reduce(logits.amax(-1), group, op="max")
    shifted = logits - largest.unsqueeze(-1)
    at_target = shifted.gather(-1, place).squeeze(-1).masked_fill(~own, 0.0)
    total, at_target = collectives.all_reduce(
        torch.stack((shifted.exp().sum(-1), at_target)), group
    )
    loss = ((total.log() - at_target) * counts).sum()
    return loss, (shifted.exp() / total.unsqueeze(-1), place, own, counts)
    ### END SOLUTION


def cross_entropy_backward(dloss, kept, group):
    """dloss, a tensor without dims, and what the forward kept -> dlogits [B, T, V/t] of this rank's words."""
    ### BEGIN SOLUTION
    softmax, place, own, counts = kept
    onehot = torch.zeros_like(softmax).scatter_(-1, place, own.unsqueeze(-1).to(softmax.dtype))
    return (softmax - onehot) * counts.unsqueeze(-1) * dloss
    ### END SOLUTION


# %% driver="losses"
def loss_on_a_rank(logits, targets, group):
    loss, kept = cross_entropy_forward(logits, targets, group)
    loss = loss.clone()
    dloss = group.fetch("dloss", logits.new_empty(()))
    return {"loss": loss, "dlogits": cross_entropy_backward(dloss, kept, group)}


# %% judge="expect_loss"
def targets_of(ranks, batch, tokens, words, masked):
    """Targets [B, T]: first and last words of ranks, as many as there is room for, then any; some are masked, if asked, but never all."""
    edges = [word for rank in range(ranks) for word in (rank * words, (rank + 1) * words - 1)]
    targets = draw.several(edges, min(len(edges), batch * tokens))
    targets = torch.tensor(
        targets + [draw.integer(0, ranks * words - 1) for _ in range(batch * tokens - len(targets))]
    )
    if masked:
        targets[draw.several(range(len(targets)), draw.integer(1, len(targets) - 1))] = -100
    return targets.view(batch, tokens)


def losses_of(slices, targets):
    """Run both passes on these slices [B, T, V/t]. Returns (the outcome, loss and gradient of one process, how near an answer must be).

    Rounding, in units of 2**-53, with M the largest logit, V words and n tokens: of a token, shifting and what follows costs some 6M,
    adding the exponentials V, the rest 10; adding n tokens of at most 2M + V each costs n·(2M + V) a token. Both sides round, which makes
    n·(16 + 4n)·(M + V + 10) more than enough. No element of the gradient is less exact than one token.
    """
    dloss = draw.exact().abs() + 1
    inputs = [(logits, targets) for logits in slices]
    outcome = run(loss_on_a_rank, inputs, [{"dloss": dloss}] * len(slices))
    whole = torch.cat(slices, -1).requires_grad_()
    loss = torch.nn.functional.cross_entropy(
        whole.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum"
    )
    loss.backward(dloss)
    near = (
        targets.numel()
        * (16 + 4 * targets.numel())
        * (whole.abs().max().item() + whole.size(-1) + 10)
        * 2.0**-53
    )
    return (
        outcome,
        loss.detach(),
        list(whole.grad.chunk(len(slices), -1)),
        near,
        near * dloss.item(),
    )


def slices_of(ranks, batch, tokens, words, large=0.0):
    """Logits [B, T, words] of each rank; with `large` tokens are far up and far down in turn, and one rank's part still higher."""
    slices = [draw.real(batch, tokens, words) for _ in range(ranks)]
    for i in range(batch * tokens if large else 0):
        for rank, logits in enumerate(slices):
            logits.view(-1, words)[i] += (-1) ** i * 2 * large + (
                large if i % ranks == rank else 0.0
            )
    return slices


def expect_loss(property, hint, ranks, batch, tokens, words, masked=False, large=0.0):
    """The loss equals one process, and no logits travel; returns the outcome, the true gradient, and how near it must be."""
    slices = slices_of(ranks, batch, tokens, words, large)
    targets = targets_of(ranks, batch, tokens, words, masked)
    outcome, loss, dlogits, near, near_gradient = losses_of(slices, targets)
    expect_equal(
        [said["loss"] for said in outcome.results], [loss] * ranks, property, hint, atol=near
    )
    expect(
        sum(sent_in_each_pass(outcome)) <= 2 * 3 * all_reduce_bytes(batch * tokens, ranks),
        "bytes on the wire",
        "far more travels than three numbers of each token; who needs another rank's logits?",
    )
    return outcome, dlogits, near_gradient


PLAIN = (
    "the loss",
    "which words are this rank's, and what of a token do only the others know? A sum, the same on every rank",
)
MASKED = (
    "masked targets",
    "without masks the loss is right; a masked token adds nothing to it, and is no word either",
)
LARGE = (
    "large logits",
    "small logits are right; which number may be subtracted from all logits of a token, so that no exp overflows and no sum is 0?",
)

# %% check="cross_entropy-loss" points=1
# The loss of one process, with masked targets and with large logits.
expect_loss(*PLAIN, 2, 2, 3, 8)
expect_loss(*MASKED, 2, 2, 3, 8, masked=True)
expect_loss(*LARGE, 2, 2, 3, 8, large=1000.0)
print("the visible checks pass")
### BEGIN HIDDEN TESTS
for ranks in (3, 4):
    sizes = draw.integer(2, 3), draw.integer(3, 4), draw.integer(8, 12)
    expect_loss(*PLAIN, ranks, *sizes)
    expect_loss(*MASKED, ranks, *sizes, masked=True)
    expect_loss(*LARGE, ranks, *sizes, masked=True, large=float(draw.integer(1000, 9000)))
### END HIDDEN TESTS


# %% check="cross_entropy-bytes" points=1
# At most three numbers of each token travel, however many words there are.
def expect_bytes_of_loss(ranks, batch, tokens, words):
    outcome, *_ = expect_loss(*PLAIN, ranks, batch, tokens, words)
    forward, backward = sent_in_each_pass(outcome)
    expect(
        forward <= 3 * all_reduce_bytes(batch * tokens, ranks),
        "bytes of forward",
        "more is sent than all-reduces of three numbers a token send, on each rank; do logits travel, or is a sum made from everyone's terms?",
    )
    expect(
        backward == 0,
        "backward sends nothing",
        "the softmax of this rank's words needs two numbers a token that the forward knew already",
    )


expect_bytes_of_loss(2, 2, 3, 16)
print("the visible checks pass")
### BEGIN HIDDEN TESTS
for ranks in (3, 4):
    expect_bytes_of_loss(ranks, draw.integer(2, 3), draw.integer(3, 5), draw.integer(8, 40))
### END HIDDEN TESTS


# %% check="cross_entropy-gradient" points=1
# Each rank has the gradient of its own words, zero for masked tokens.
def expect_gradient(ranks, batch, tokens, words, large=0.0):
    for masked, property, hint in (
        (
            False,
            "the gradient",
            "softmax over all words, minus one at the target if it is here, times dloss",
        ),
        (
            True,
            "gradient of masked tokens",
            "without masks the gradient is right; what does a token that does not count ask of its logits?",
        ),
    ):
        outcome, dlogits, near = expect_loss(
            "the loss", "first let the loss be right", ranks, batch, tokens, words, masked, large
        )
        expect_equal(
            [said["dlogits"] for said in outcome.results], dlogits, property, hint, atol=near
        )


expect_gradient(2, 2, 3, 8)
print("the visible checks pass")
### BEGIN HIDDEN TESTS
for ranks in (3, 4):
    expect_gradient(
        ranks,
        draw.integer(2, 3),
        draw.integer(3, 4),
        draw.integer(8, 12),
        draw.choice([0.0, 2000.0]),
    )
### END HIDDEN TESTS

# %% [markdown]
# ## 6. What a layer sends (1 point)
#
# On a ring an all-reduce of n elements sends 2(t-1)/t·n elements from each rank; an all-gather into n elements, and a reduce-scatter out of n,
# send (t-1)/t·n each. A layer of a Transformer has two column-row pairs, the attention and the MLP; activations are [b, s, h]. Say what one layer
# sends in its forward and in its backward, and what the loss of task 5 (all three numbers of each token) sends in both passes together:
#
#     "whole"        tasks 1 to 3: f before each pair and g behind it, activations between pairs are whole on all ranks
#     "sequence"     activations between pairs are cut along s: all-gather before a pair, reduce-scatter behind it; each has the other as
#                    its backward, and the gathered X is kept for dW
#     "regathered"   the same, but only the slice of X is kept, and each pair gathers X once more in the backward
#
# The loss is the same in all three. Whole numbers, exact for any size; b·s is a multiple of t.
#
# b = 1, s = 4, h = 8, two ranks, "whole": 64 elements forward and as many backward, and 12 for the loss.


# %% answer="elements_sent"
def elements_sent(b, s, h, t, activations):
    """{"forward": ..., "backward": ..., "loss": ...}: elements each rank sends, as ints; activations is one of the three words."""
    ### BEGIN SOLUTION
    half = (
        b * s * h * (t - 1) // t
    )  # an all-gather or a reduce-scatter; an all-reduce is two of them
    return {
        "forward": 4 * half,
        "backward": (6 if activations == "regathered" else 4) * half,
        "loss": 3 * 2 * b * s * (t - 1) // t,
    }
    ### END SOLUTION


# %% judge="expect_elements"
def expect_elements(sizes, wanted):
    """Ask for the elements with each way to keep activations, where `wanted` has (forward, backward, loss)."""
    cases = [(*sizes, activations) for activations in wanted]
    for (*_, activations), said in zip(cases, ask_each(elements_sent, cases)):
        expect(
            isinstance(said, dict)
            and set(said) == {"forward", "backward", "loss"}
            and all(type(n) is int for n in said.values()),
            "whole numbers",
            'return {"forward": ..., "backward": ..., "loss": ...}, three ints, also where they are large',
        )
        forward, backward, loss = wanted[activations]
        expect(
            said["forward"] == forward,
            f"forward, {activations}",
            "how many pairs has a layer, and which calls stand before and behind each?",
        )
        expect(
            said["backward"] == backward,
            f"backward, {activations}",
            "what is the backward of each call of the forward, and what must be there for dW?",
        )
        expect(said["loss"] == loss, "the loss", "three numbers of each token, in which pass?")


# %% check="elements_sent-all" points=1
# Forward, backward and loss, for each way to keep activations.
expect_elements(
    (1, 4, 8, 2), {"whole": (64, 64, 12), "sequence": (64, 64, 12), "regathered": (64, 96, 12)}
)
print("the visible checks pass")
### BEGIN HIDDEN TESTS
for t, b, s, h in (
    (3, draw.integer(1, 8), 3 * draw.integer(1, 99), draw.integer(3, 999)),
    (1, 2, draw.integer(1, 99), draw.integer(3, 999)),
    (4, draw.integer(1, 8), 4 * draw.integer(1, 99), draw.integer(3, 999)),
    (8, 4, 2 * draw.integer(1, 99), 7),
    (7, 3**20, 7 * draw.integer(10**6, 10**7), 5 * 10**6 + 1),
):
    piece, loss = b * s // t * h * (t - 1), 6 * (b * s // t) * (t - 1)
    expect_elements(
        (b, s, h, t),
        {
            "whole": (4 * piece, 4 * piece, loss),
            "sequence": (4 * piece, 4 * piece, loss),
            "regathered": (4 * piece, 6 * piece, loss),
        },
    )
### END HIDDEN TESTS
