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
# - Between ranks there is a network and nothing else: `collectives.send` and `collectives.receive`, and here `all_reduce`, `all_gather`
#   and `reduce_scatter`.
#
# t is the number of ranks in the group. An activation is X [B, T, D]: batch, tokens, width. In tasks 2 and 3 weights are kept as GPT-2's
# checkpoints keep them, W [in, out], so a layer is Y = X·W + b; `nn.Linear`, which the chapter cuts, keeps the transpose. Tasks 2, 3 and 5
# are Shoeybi et al. 2019 (Megatron-LM, arXiv:1909.08053, section 3), tasks 1 and 6 the sequence parallelism of Korthikanti et al. 2022
# (arXiv:2205.05198, section 4.2.2), task 4 is Ainslie et al. 2023 (GQA, arXiv:2305.13245), the z-loss of task 5 is Chowdhery et al. 2022
# (PaLM, arXiv:2204.02311, section 5).
#
# How can a check know which pass sent what? The gradient that a backward begins with is on no rank at first: a rank fetches it when its
# forward is done, and the moment is written down among its messages. What it sent before belongs to the forward, the rest to the backward.

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

draw = Draw()  # hidden checks draw sizes, numbers of ranks and values


def run(on_a_rank, inputs, secrets, **rules):
    return run_on_ranks(
        on_a_rank,
        inputs,
        collectives="all_reduce all_gather reduce_scatter",
        secrets=secrets,
        **rules,
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
# ## 1. The pair f and g, for slices of the sequence (2 points)
#
# All communication of a tensor-parallel layer is in two functions: f is before a matrix cut by columns, g after a matrix cut by rows.
# With sequence parallelism a rank has T/t of the tokens outside of the two, and all T tokens between them:
#
#     f   forward: all ranks' tokens, in rank order     backward: this rank's tokens of the sum of the ranks' gradients
#     g   forward: this rank's tokens of the sum of x   backward: all ranks' gradients, in rank order
#
# Write both as functions that autograd can differentiate: a `torch.autograd.Function` whose `forward` and `backward` you write, and a call
# of its `apply`. x stays as it was. Each pass sends what one all-gather or one reduce-scatter of [B, T, D] sends, (t-1)/t of it.
# (`gather_to` and `reduce_scatter_to` of the package are this pair ready-made; they are not here.)
#
# Two ranks, B = 1, D = 1. f: x is `[[[1]]]` and `[[[2]]]`, so both get `[[[1], [2]]]`. If dy is `[[[10], [20]]]` on both, x.grad is `[[[20]]]`
# and `[[[40]]]`. g: x is `[[[1], [2]]]` on both, so rank 0 gets `[[[2]]]` and rank 1 `[[[4]]]`.
#
# > **API** `collectives.all_gather(x, group)`: [n, ..] -> [t·n, ..], and `reduce_scatter(x, group)`: [t·n, ..] -> [n, ..], both along
# > **dim 0** only, in rank order. They return new tensors and work outside autograd. `ctx.save_for_backward` is not needed here.


# %% answer="f_and_g"
def f(x, group):
    """x [B, T/t, D], this rank's tokens -> [B, T, D], everyone's; backward: [B, T, D] -> [B, T/t, D], this rank's part of the sum."""

    ### BEGIN SOLUTION
    class Gather(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return collectives.all_gather(x.transpose(0, 1), group).transpose(0, 1)

        @staticmethod
        def backward(ctx, dy):
            return collectives.reduce_scatter(dy.transpose(0, 1), group).transpose(0, 1)

    return Gather.apply(x)
    ### END SOLUTION


def g(x, group):
    """x [B, T, D], a term on each rank -> [B, T/t, D], this rank's tokens of the sum; backward: [B, T/t, D] -> [B, T, D]."""

    ### BEGIN SOLUTION
    class Scatter(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return collectives.reduce_scatter(x.transpose(0, 1), group).transpose(0, 1)

        @staticmethod
        def backward(ctx, dy):
            return collectives.all_gather(dy.transpose(0, 1), group).transpose(0, 1)

    return Scatter.apply(x)
    ### END SOLUTION


# %% driver="there_and_back"
def there_and_back(which, x, like, group):
    """x through f or g, and a gradient back: what came out, x as it is afterwards, and x.grad if there is one."""
    leaf = x.clone().requires_grad_()
    y = {"f": f, "g": g}[which](leaf, group)
    came = {"y": y.detach().clone(), "x": leaf.detach().clone()}
    dy = group.fetch("dy", like)
    if y.requires_grad and y.shape == dy.shape:
        y.backward(dy)
    return {**came, **({} if leaf.grad is None else {"dx": leaf.grad})}


# %% judge="expect_pair"
def expect_pair(which, ranks, batch, own_tokens, width):
    """Run f or g on ranks, and look at both passes."""
    slices, wholes = (
        [draw.exact(batch, tokens, width) for _ in range(ranks)]
        for tokens in (own_tokens, ranks * own_tokens)
    )
    xs, dys = (slices, wholes) if which == "f" else (wholes, slices)
    gathered, summed = [torch.cat(slices, 1)] * ranks, list(sum(wholes).chunk(ranks, 1))
    ys, dxs = (gathered, summed) if which == "f" else (summed, gathered)
    inputs = [(which, x, torch.empty_like(dy)) for x, dy in zip(xs, dys)]
    outcome = run(there_and_back, inputs, [{"dy": dy} for dy in dys])
    shape_of_y = ys[0].shape
    gathers = "the tokens of all ranks, in rank order along dim 1; the batch stays dim 0"
    scatters = "this rank's tokens of the sum over the ranks; a sum, no mean, cut along dim 1"
    expect(
        all(came["y"].shape == shape_of_y for came in outcome.results),
        f"forward of {which}",
        gathers if which == "f" else scatters,
    )
    expect_equal(
        [came["y"] for came in outcome.results],
        ys,
        f"forward of {which}",
        gathers if which == "f" else scatters,
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
        "each rank knows what its own work asks of all tokens; the gradient of x is what all ranks ask of this rank's tokens"
        if which == "f"
        else "a term of a sum has the gradient of the sum, and of that each rank has its own tokens",
    )
    half = (ranks - 1) * slices[0].nbytes
    forward, backward = sent_in_each_pass(outcome)
    expect(
        forward <= half,
        f"bytes of forward of {which}",
        "one all-gather of the slices is enough"
        if which == "f"
        else "one reduce-scatter is enough",
    )
    expect(
        backward <= half,
        f"bytes of backward of {which}",
        "one reduce-scatter is enough"
        if which == "f"
        else "one all-gather of the slices is enough",
    )


# %% check="f_and_g-f" points=1
# f: an all-gather forward, a reduce-scatter backward.
expect_pair("f", 2, 2, 3, 1)
print("the visible checks pass")
### BEGIN HIDDEN TESTS
for ranks in (3, 4):
    expect_pair("f", ranks, draw.integer(2, 3), draw.integer(1, 4), draw.integer(1, 4))
### END HIDDEN TESTS

# %% check="f_and_g-g" points=1
# g: a reduce-scatter forward, an all-gather backward.
expect_pair("g", 2, 2, 3, 1)
print("the visible checks pass")
### BEGIN HIDDEN TESTS
for ranks in (3, 4):
    expect_pair("g", ranks, draw.integer(2, 3), draw.integer(1, 4), draw.integer(1, 4))
### END HIDDEN TESTS

# %% [markdown]
# ## 2. Column-parallel matrices that share an input (2 points)
#
# Q, K and V of an attention, or up and gate of an MLP, have one input X and several matrices. Each matrix is cut by output features: W [D, F]
# becomes W_r [D, F/t] on rank r, and its bias b_r [F/t]. F may differ from matrix to matrix. All ranks have the same X; rank r computes
#
#     forward     Y_r = X·W_r + b_r                                                        for each matrix
#     backward    dW_r, db_r for each matrix, and dX: all ranks and all matrices have a share in it
#
# Write both passes by hand, without autograd. The forward sends nothing; the backward sends one all-reduce of a tensor as large as X, however
# many matrices there are. dW_r [D, F/t] and db_r [F/t] have no B and T: they are sums over all tokens.
#
# One token X = `[[[2]]]`, two ranks, one matrix W = `[[3, 5]]`, b = `[1, 0]`. Rank 0 has Y = `[[[7]]]`, rank 1 `[[[10]]]`. With
# dY = 1 on both, dX = 3 + 5 = 8 on both ranks, dW = `[[2]]` and db = `[1]` on each.
#
# > **API** `collectives.all_reduce(x, group)` returns the sum over the ranks as a new tensor, on every rank. There is no autograd on the
# > ranks here (no `requires_grad`, `backward`, `torch.autograd`). `weights`, `biases`, `dys` are lists of float64 tensors; return lists.


# %% answer="column"
def column_forward(x, weights, biases, group):
    """x [B, T, D], this rank's weights[i] [D, F_i/t] and biases[i] [F_i/t] -> list of this rank's outputs [B, T, F_i/t]."""
    ### BEGIN SOLUTION
    return [x @ weight + bias for weight, bias in zip(weights, biases)]
    ### END SOLUTION


def column_backward(dys, x, weights, group):
    """dys[i] [B, T, F_i/t] -> (dx [B, T, D] of the whole layer, list of dweights [D, F_i/t], list of dbiases [F_i/t])."""
    ### BEGIN SOLUTION
    dx = collectives.all_reduce(sum(dy @ weight.T for dy, weight in zip(dys, weights)), group)
    rows = x.flatten(0, 1)
    return dx, [rows.T @ dy.flatten(0, 1) for dy in dys], [dy.sum((0, 1)) for dy in dys]
    ### END SOLUTION


# %% driver="columns"
def column_on_a_rank(x, weights, biases, group):
    ys = column_forward(x, list(weights), list(biases), group)
    dys = [
        group.fetch(f"dy {i}", x.new_empty(*x.shape[:2], weight.shape[1]))
        for i, weight in enumerate(weights)
    ]
    dx, dweights, dbiases = column_backward(dys, x, list(weights), group)
    return {"ys": list(ys), "dx": dx, "dweights": list(dweights), "dbiases": list(dbiases)}


# %% judge="expect_columns"
def expect_columns(ranks, x_shape, widths, once=True):
    """Both passes on ranks, each with widths[i] output features, equal one process, and a sum like X travels: `once`, or for each matrix."""
    x, *rest = draw.real(*x_shape), *[[], [], []]
    for width in widths:
        shapes = [x_shape[-1], width], [width], [*x_shape[:2], width]
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
    dx = sum(torch.einsum("btf,df->btd", *pair) for pair in pairs)
    for name, wanted, property, hint in (
        (
            "ys",
            [
                [torch.einsum("btd,df->btf", x, weight) + bias for weight, bias in zip(*own)]
                for own in zip(weights, biases)
            ],
            "the product",
            "X·W_r + b_r, for each of this rank's matrices",
        ),
        (
            "dx",
            [dx] * ranks,
            "gradient of x",
            "X goes into every matrix on every rank: what has to come together, and is anything missing or counted twice?",
        ),
        (
            "dweights",
            [[torch.einsum("btd,btf->df", x, dy) for dy in own] for own in dys],
            "gradient of each weight",
            "no other rank has these columns of W: their gradient is Xᵀ·dY_r over all tokens",
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
# The next matrix takes the slices as they are. W [F, D] is cut by input features: rank r has X_r [B, T, F/t] and W_r [F/t, D], and its product
# X_r·W_r [B, T, D] is one term of a sum. The bias b [D] is whole on every rank.
#
#     forward     Y = Σ_r X_r·W_r + b, the same on all ranks
#     backward    dX_r, dW_r and db, from dY, the same on all ranks
#
# The bias is added once, not once per rank. The forward sends one all-reduce of a tensor as large as Y, the backward sends nothing.
#
# Two ranks, one token: X = `[[[1]]]` and `[[[2]]]`, W = `[[3]]` and `[[4]]`, b = `[100]`. Y is 3 + 8 + 100 = 111 on both. With dY = 1 the
# gradients dX are 3 and 4, dW 1 and 2, and db is 1 on both ranks.
#
# > **API** `collectives.all_reduce(x, group)` returns the sum over the ranks as a new tensor, on every rank. Tensors are float64; dY is the
# > same on all ranks when `row_backward` is called.


# %% answer="row"
def row_forward(x, weight, bias, group):
    """this rank's x [B, T, F/t] and weight [F/t, D], the whole bias [D] -> y [B, T, D], the same on all ranks."""
    ### BEGIN SOLUTION
    return collectives.all_reduce(x @ weight, group) + bias
    ### END SOLUTION


def row_backward(dy, x, weight, group):
    """dy [B, T, D], the same on all ranks -> (dx [B, T, F/t], dweight [F/t, D], dbias [D])."""
    ### BEGIN SOLUTION
    return dy @ weight.T, x.flatten(0, 1).T @ dy.flatten(0, 1), dy.sum((0, 1))
    ### END SOLUTION


# %% driver="rows"
def row_on_a_rank(x, weight, bias, group):
    y = row_forward(x, weight, bias, group)
    dy = group.fetch("dy", x.new_empty(*x.shape[:2], weight.shape[1]))
    dx, dweight, dbias = row_backward(dy, x, weight, group)
    return {"y": y, "dx": dx, "dweight": dweight, "dbias": dbias}


# %% judge="expect_rows"
def expect_rows(ranks, batch, tokens, own_width, out):
    """Both passes, first without a bias, then with one."""
    xs, weights = (
        [draw.real(*shape) for _ in range(ranks)]
        for shape in ([batch, tokens, own_width], [own_width, out])
    )
    dy, bias = draw.real(batch, tokens, out), draw.real(out) + 9
    total = sum(torch.einsum("btf,fd->btd", *pair) for pair in zip(xs, weights))
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
            [torch.einsum("btd,fd->btf", dy, weight) for weight in weights],
            "gradient of x",
            "each term of a sum has the gradient of the sum, and all ranks have it",
            atol=1e-11,
        )
        expect_equal(
            said["dweight"],
            [torch.einsum("btf,btd->fd", x, dy) for x in xs],
            "gradient of the weight",
            "no other rank has these rows of W: their gradient is X_rᵀ·dY over all tokens",
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
# ## 4. Which heads belong to which rank (1 point)
#
# Attention is cut by whole heads. There are `heads` query heads and `kv_heads` heads of keys and values, which divide `heads`: query head i
# uses K/V head i // (heads / kv_heads). Here as `nn.Linear` keeps them, W_q has heads·head_dim rows, head after head, W_k and W_v have
# kv_heads·head_dim rows each.
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
#
# > **API** A pure function of five ints. Return two pairs (start, stop) of ints; stop is the first row that the rank does not have. Raise
# > `ValueError("...")` with a text of one line for what cannot be cut.


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
# ## 5. A loss with z-loss that never sees all logits (3 points)
#
# The last matrix is column-parallel too: rank r has the logits of words r·V/t to (r+1)·V/t - 1, [B, T, V/t]. Targets are words of the whole
# vocabulary, the same on all ranks; a target of -100 is masked, its token does not count. The loss is a sum, not a mean:
#
#     loss = Σ over tokens that count of  log Z - l_target + z·(log Z)²        Z = Σ_v exp(l_v), over all V words
#
# and every rank returns it. The last term, the z-loss of PaLM, keeps Z near 1; z is a small number that all ranks know. exp(1000) is inf, and exp(-1000) is 0, whose log is -inf: subtract what makes both harmless, and think of it where Z itself is asked for. Of each token the ranks
# tell one another at most three numbers: the largest logit, the sum of the exponentials, the target's logit. A rank may send what all-reduces
# of 3·B·T elements send, and nothing that grows with V.
#
# Backward: the derivative of all three terms, times `dloss`, for this rank's words; zero for masked tokens. It sends nothing: `kept`
# is whatever you return beside the loss, and comes back to you. (What is the derivative of log Z by a logit?)
#
# Two ranks, one token, logits `[[[0, 0]]]` and `[[[0, 0]]]`, target 3. With z = 0 the loss is log 4 = 1.386, and with dloss = 1 the
# gradients are `[[[0.25, 0.25]]]` and `[[[0.25, -0.75]]]`. With z = 0.5 the loss is 1.386 + 0.5·1.386² = 2.347.
#
# > **API** `collectives.all_reduce(x, group)` and `all_reduce(x, group, op="max")` return new tensors, on every rank. logits are float64,
# > targets int64 with -100 for masked tokens, z a Python float, dloss a tensor without dims. `torch.gather` and `scatter_add_` want
# > indices inside their dim, also for tokens that are not this rank's.


# %% answer="cross_entropy"
def cross_entropy_forward(logits, targets, z, group):
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
    log_z = largest + total.log()
    loss = ((total.log() - at_target + z * log_z.square()) * counts).sum()
    return loss, (shifted.exp() / total.unsqueeze(-1), 1 + 2 * z * log_z, place, own, counts)
    ### END SOLUTION


def cross_entropy_backward(dloss, kept, group):
    """dloss, a tensor without dims, and what the forward kept -> dlogits [B, T, V/t] of this rank's words."""
    ### BEGIN SOLUTION
    softmax, of_log_z, place, own, counts = kept
    onehot = torch.zeros_like(softmax).scatter_(-1, place, own.unsqueeze(-1).to(softmax.dtype))
    return (softmax * of_log_z.unsqueeze(-1) - onehot) * counts.unsqueeze(-1) * dloss
    ### END SOLUTION


# %% driver="losses"
def loss_on_a_rank(logits, targets, z, group):
    loss, kept = cross_entropy_forward(logits, targets, z, group)
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


def losses_of(slices, targets, z):
    """Run both passes on these slices [B, T, V/t]. Returns (the outcome, loss and gradient of one process, how near an answer must be).

    Rounding, in units of 2**-53, with M the largest logit, V words and n tokens: of a token, shifting and what follows costs some 6M,
    adding the exponentials V, the rest 10; adding n tokens of at most 2M + V each costs n·(2M + V) a token. Both sides round, which makes
    n·(16 + 4n)·(M + V + 10) more than enough. The z-loss squares what is at most M + V: an error of it grows by 2z·(M + V) at
    most, and sums by as much again, so 1 + 4z·(M + V + 10) times that is enough for both. No element of the gradient is less exact.
    """
    dloss = draw.exact().abs() + 1
    inputs = [(logits, targets, z) for logits in slices]
    outcome = run(loss_on_a_rank, inputs, [{"dloss": dloss}] * len(slices))
    whole = torch.cat(slices, -1).requires_grad_()
    loss = torch.nn.functional.cross_entropy(
        whole.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum"
    )
    log_z = whole.logsumexp(-1)
    loss = loss + z * log_z[targets != -100].square().sum()
    loss.backward(dloss)
    most = whole.abs().max().item() + whole.size(-1) + 10
    near = targets.numel() * (16 + 4 * targets.numel()) * most * (1 + 4 * z * most) * 2.0**-53
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


def expect_loss(property, hint, ranks, batch, tokens, words, masked=False, large=0.0, z=0.0):
    """The loss equals one process, and no logits travel; returns the outcome, the true gradient, and how near it must be."""
    slices = slices_of(ranks, batch, tokens, words, large)
    targets = targets_of(ranks, batch, tokens, words, masked)
    outcome, loss, dlogits, near, near_gradient = losses_of(slices, targets, z)
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

Z_LOSS = (
    "the z-loss",
    "without its z-loss the loss is right; is that the Z of the logits as they came, over all words, and only of tokens that count?",
)


def expect_losses(ranks, batch, tokens, words, z, large):
    """The plain loss, then with masks, with large logits, with a z-loss, and with all three."""
    sizes = ranks, batch, tokens, words
    expect_loss(*PLAIN, *sizes)
    expect_loss(*MASKED, *sizes, masked=True)
    expect_loss(*LARGE, *sizes, masked=True, large=large)
    expect_loss(*Z_LOSS, *sizes, z=z)
    expect_loss(*Z_LOSS, *sizes, masked=True, large=large, z=z)


# %% check="cross_entropy-loss" points=1
# The loss of one process, with masked targets, with large logits and with a z-loss.
expect_losses(2, 2, 3, 8, 0.5, 1000.0)
print("the visible checks pass")
### BEGIN HIDDEN TESTS
for ranks in (3, 4):
    sizes = draw.integer(2, 3), draw.integer(3, 4), draw.integer(8, 12)
    expect_losses(ranks, *sizes, draw.uniform(0.1, 1), float(draw.integer(1000, 9000)))
### END HIDDEN TESTS


# %% check="cross_entropy-bytes" points=1
# At most three numbers of each token travel, however many words there are.
def expect_bytes_of_loss(ranks, batch, tokens, words):
    outcome, *_ = expect_loss(*Z_LOSS, ranks, batch, tokens, words, z=0.25)
    forward, backward = sent_in_each_pass(outcome)
    expect(
        forward <= 3 * all_reduce_bytes(batch * tokens, ranks),
        "bytes of forward",
        "more is sent than all-reduces of three numbers per token send, on each rank; do logits travel, or is a sum made from everyone's terms?",
    )
    expect(
        backward == 0,
        "backward sends nothing",
        "the softmax of this rank's words needs two numbers per token that the forward knew already",
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
    for masked, z, property, hint in (
        (
            False,
            0.0,
            "the gradient",
            "softmax over all words, minus one at the target if it is here, times dloss",
        ),
        (
            False,
            0.25,
            "gradient of the z-loss",
            "without its z-loss the gradient is right; the derivative of (log Z)² by a logit is what times its softmax?",
        ),
        (
            True,
            0.25,
            "gradient of masked tokens",
            "without masks the gradient is right; what does a token that does not count ask of its logits?",
        ),
    ):
        outcome, dlogits, near = expect_loss(
            *(
                "the loss",
                "first let the loss be right",
                ranks,
                batch,
                tokens,
                words,
                masked,
                large,
            ),
            z,
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
#     "whole"        tasks 2 and 3: activations between pairs are whole on all ranks, sums are all-reduces
#     "sequence"     task 1: activations between pairs are cut along s, all-gather before a pair, reduce-scatter behind it; each has the
#                    other as its backward, and the gathered X is kept for dW
#     "regathered"   the same, but only the slice of X is kept, and each pair gathers X once more in the backward
#
# The loss is the same in all three. Whole numbers, exact for any size; b·s is a multiple of t.
#
# b = 1, s = 4, h = 8, two ranks, "whole": 64 elements forward and as many backward, and 12 for the loss.
#
# > **API** A pure function of four ints and one of the three words. Return a dict of three ints; use `//`, since floats round large numbers.


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
